"""Written by `gdn tune`: which constants for which size (batch_size * num_v_heads), by GPU. The evidence is in tuning.json."""
TUNED = [
    {"gpu": "NVIDIA H200", "sms": 132, "up_to": 22, "rows": 8, "stages": 3, "per_sm": 2, "num_warps": 2},
    {"gpu": "NVIDIA H200", "sms": 132, "up_to": 90, "rows": 8, "stages": 3, "per_sm": 8, "num_warps": 2},
    {"gpu": "NVIDIA H200", "sms": 132, "up_to": 9223372036854775807, "rows": 16, "stages": 3, "per_sm": 8, "num_warps": 2},
]
