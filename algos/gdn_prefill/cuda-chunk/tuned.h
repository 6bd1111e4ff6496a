// Written by `gdn tune`: which constants for which size (num_seqs * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int recurrent, segments; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 19, 640, 64},
    {"NVIDIA H200", 132, 27, 768, 40},
    {"NVIDIA H200", 132, 35, 288, 0},
    {"NVIDIA H200", 132, 50, 0, 40},
    {"NVIDIA H200", 132, 87, 1024, 0},
    {"NVIDIA H200", 132, 123, 640, 0},
    {"NVIDIA H200", 132, 143, 1024, 0},
    {"NVIDIA H200", 132, 202, 1024, 40},
    {"NVIDIA H200", 132, 341, 640, 0},
    {"NVIDIA H200", 132, 9223372036854775807, 96, 0},
};
