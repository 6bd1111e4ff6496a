"""Written by `gdn tune`: which constants for which size (batch_size * num_v_heads), by GPU. The evidence is in tuning.json."""
TUNED = [
    {"gpu": "NVIDIA H200", "sms": 132, "up_to": 22, "lanes": 8, "rows": 1, "steps": 1, "num_warps": 1, "load": 0, "store": 0},
    {"gpu": "NVIDIA H200", "sms": 132, "up_to": 181, "lanes": 16, "rows": 2, "steps": 1, "num_warps": 4, "load": 0, "store": 0},
    {"gpu": "NVIDIA H200", "sms": 132, "up_to": 9223372036854775807, "lanes": 16, "rows": 4, "steps": 1, "num_warps": 4, "load": 0, "store": 0},
]
