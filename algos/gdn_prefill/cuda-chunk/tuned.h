// Written by `gdn tune`: which constants for which size (num_seqs * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int recurrent, segments; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 19, 768, 64},
    {"NVIDIA H200", 132, 27, 768, 40},
    {"NVIDIA H200", 132, 50, 384, 40},
    {"NVIDIA H200", 132, 111, 768, 0},
    {"NVIDIA H200", 132, 143, 600, 40},
    {"NVIDIA H200", 132, 178, 600, 0},
    {"NVIDIA H200", 132, 226, 768, 40},
    {"NVIDIA H200", 132, 282, 384, 40},
    {"NVIDIA H200", 132, 377, 768, 64},
    {"NVIDIA H200", 132, 9223372036854775807, 600, 0},
};
