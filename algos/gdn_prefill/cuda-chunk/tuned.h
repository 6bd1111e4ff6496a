// Written by `gdn tune`: which constants for which size (num_seqs * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int recurrent, segments; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 11, 512, 8},
    {"NVIDIA H200", 132, 22, 512, 4},
    {"NVIDIA H200", 132, 90, 640, 0},
    {"NVIDIA H200", 132, 143, 256, 0},
    {"NVIDIA H200", 132, 341, 32, 0},
    {"NVIDIA H200", 132, 483, 96, 0},
    {"NVIDIA H200", 132, 9223372036854775807, 32, 0},
};
