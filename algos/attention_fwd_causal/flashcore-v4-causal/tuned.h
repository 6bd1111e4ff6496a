// Written by `gdn tune`: which constants for which size (batch_size * num_heads * seq_len), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int rows, warps, tiles, keys, stages, splits, wgmma; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 2896, 32, 8, 1, 64, 1, 1, 3},
    {"NVIDIA H200", 132, 5792, 32, 8, 1, 64, 2, 1, 3},
    {"NVIDIA H200", 132, 11585, 64, 16, 1, 64, 2, 1, 2},
    {"NVIDIA H200", 132, 23170, 64, 8, 1, 64, 2, 1, 2},
    {"NVIDIA H200", 132, 9223372036854775807, 128, 16, 1, 128, 2, 1, 1},
};
