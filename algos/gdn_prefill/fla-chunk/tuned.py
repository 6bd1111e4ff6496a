"""Written by `gdn tune`: which constants for which size (num_seqs * num_v_heads), by GPU. The evidence is in tuning.json."""
TUNED = [
    {"gpu": "interpreter", "sms": -1000, "up_to": 9223372036854775807, "chunk": 64, "rows": 128, "num_warps": 8, "stages": 1, "prepare_warps": 2},
    {"gpu": "NVIDIA H200", "sms": 132, "up_to": 16, "chunk": 32, "rows": 16, "num_warps": 1, "stages": 2, "prepare_warps": 4},
    {"gpu": "NVIDIA H200", "sms": 132, "up_to": 9223372036854775807, "chunk": 32, "rows": 64, "num_warps": 4, "stages": 2, "prepare_warps": 2},
]
