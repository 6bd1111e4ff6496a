// Written by `gdn tune`: which constants for which length (seq_len) and size (batch_size * num_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t length_up_to, up_to; int rows, warps, tiles, keys, stages, splits, wgmma; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 181, 64, 32, 8, 1, 64, 1, 1, 3},
    {"NVIDIA H200", 132, 181, 9223372036854775807, 64, 4, 1, 128, 2, 1, 2},
    {"NVIDIA H200", 132, 362, 45, 32, 8, 1, 64, 1, 1, 3},
    {"NVIDIA H200", 132, 362, 90, 64, 4, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 362, 9223372036854775807, 128, 8, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 724, 11, 32, 8, 1, 128, 1, 1, 3},
    {"NVIDIA H200", 132, 724, 22, 64, 8, 1, 128, 2, 1, 2},
    {"NVIDIA H200", 132, 724, 45, 64, 4, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 724, 9223372036854775807, 128, 8, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 1448, 11, 64, 16, 1, 64, 2, 1, 2},
    {"NVIDIA H200", 132, 1448, 22, 64, 8, 1, 64, 2, 1, 2},
    {"NVIDIA H200", 132, 1448, 45, 64, 4, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 1448, 9223372036854775807, 128, 8, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 2896, 11, 64, 16, 1, 64, 2, 1, 2},
    {"NVIDIA H200", 132, 2896, 22, 128, 16, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 2896, 45, 256, 16, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 2896, 9223372036854775807, 128, 8, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 5792, 11, 128, 16, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 5792, 9223372036854775807, 256, 16, 1, 128, 2, 1, 1},
    {"NVIDIA H200", 132, 9223372036854775807, 9223372036854775807, 256, 16, 1, 128, 2, 1, 1},
};
