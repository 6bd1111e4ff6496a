// Written by `gdn tune`: which constants for which size (batch_size * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int lanes, rows, passes, warps, load, store, resident; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 78, 16, 1, 1, 8, 2, 0, 1},
    {"NVIDIA H200", 132, 150, 32, 8, 1, 4, 1, 0, 28},
    {"NVIDIA H200", 132, 271, 32, 8, 1, 4, 0, 0, 32},
    {"NVIDIA H200", 132, 470, 16, 4, 2, 4, 2, 0, 28},
    {"NVIDIA H200", 132, 2896, 32, 8, 4, 4, 2, 0, 32},
    {"NVIDIA H200", 132, 9223372036854775807, 16, 4, 4, 2, 2, 0, 28},
};
