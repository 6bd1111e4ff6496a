"""Estimated, until `gdn tune` writes this file: small blocks of rows fill 132 SMs, large ones share loads."""

# fmt: off
TUNED = [
    {"gpu": "untuned", "sms": 0, "up_to": 4096, "rows": 32, "keys": 64, "stages": 3, "num_warps": 2},
    {"gpu": "untuned", "sms": 0, "up_to": 16384, "rows": 64, "keys": 64, "stages": 3, "num_warps": 4},
    {"gpu": "untuned", "sms": 0, "up_to": 9223372036854775807, "rows": 128, "keys": 64, "stages": 3, "num_warps": 4},
]
