// Written by `gdn tune`: which constants for which size (num_seqs * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int recurrent, segments; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 19, 600, 64},
    {"NVIDIA H200", 132, 27, 600, 40},
    {"NVIDIA H200", 132, 35, 600, 40},
    {"NVIDIA H200", 132, 50, 600, 40},
    {"NVIDIA H200", 132, 87, 768, 0},
    {"NVIDIA H200", 132, 9223372036854775807, 600, 0},
};
