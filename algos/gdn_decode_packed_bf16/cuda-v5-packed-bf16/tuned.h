// Written by `gdn tune`: which constants for which size (batch_size * num_v_heads), by GPU. Not tuned yet: rows of cuda-v5-bf16.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int lanes, rows, passes, warps, load, store, resident; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"untuned", 132, 11, 16, 1, 1, 8, 2, 0, 1},
    {"untuned", 132, 45, 8, 1, 1, 8, 2, 0, 1},
    {"untuned", 132, 181, 16, 2, 1, 4, 2, 0, 1},
    {"untuned", 132, 313, 32, 4, 2, 2, 2, 0, 24},
    {"untuned", 132, 443, 32, 8, 2, 1, 2, 0, 20},
    {"untuned", 132, 1448, 32, 4, 4, 1, 2, 0, 24},
    {"untuned", 132, 9223372036854775807, 32, 8, 2, 2, 2, 0, 20},
};
