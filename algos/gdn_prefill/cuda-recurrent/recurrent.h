// Written by `gdn tune`: which constants for which size (num_seqs * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int warps, split, ahead; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 19, 1, 2, 2},
    {"NVIDIA H200", 132, 35, 2, 1, 2},
    {"NVIDIA H200", 132, 78, 4, 1, 2},
    {"NVIDIA H200", 132, 443, 8, 1, 2},
    {"NVIDIA H200", 132, 9223372036854775807, 4, 1, 1},
};
