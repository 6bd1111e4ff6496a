// Written by `gdn tune`: which constants for which size (num_seqs * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int recurrent, segments; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 11, 640, 64},
    {"NVIDIA H200", 132, 22, 1024, 64},
    {"NVIDIA H200", 132, 45, 640, 64},
    {"NVIDIA H200", 132, 90, 1920, 0},
    {"NVIDIA H200", 132, 143, 768, 0},
    {"NVIDIA H200", 132, 341, 96, 0},
    {"NVIDIA H200", 132, 483, 288, 0},
    {"NVIDIA H200", 132, 9223372036854775807, 96, 0},
};
