"""Estimated from fla-recurrent's tiles on an H200 (4 rows per warp, then 16), until `gdn tune` writes this file."""

# fmt: off
TUNED = [
    {"gpu": "untuned", "sms": 0, "up_to": 128, "lanes": 8, "rows": 1, "steps": 1, "num_warps": 1, "load": 0, "store": 0},
    {"gpu": "untuned", "sms": 0, "up_to": 9223372036854775807, "lanes": 8, "rows": 4, "steps": 1, "num_warps": 1, "load": 0, "store": 0},
]
