"""Estimated, until `gdn tune` writes this file: few rows where programs are few, then 96 KB of loads under way in an SM."""

TUNED = [
    {"gpu": "untuned", "sms": 0, "up_to": 128, "rows": 8, "stages": 4, "per_sm": 8, "num_warps": 2},
    {"gpu": "untuned", "sms": 0, "up_to": 9223372036854775807, "rows": 16, "stages": 4, "per_sm": 4, "num_warps": 4},
]
