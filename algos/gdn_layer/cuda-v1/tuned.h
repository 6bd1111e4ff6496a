// Written by `gdn tune`: which constants for which size (batch_size * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int lanes, rows, passes, warps, load, store, resident; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"NVIDIA H200", 132, 181, 16, 4, 1, 4, 2, 0, 1},
    {"NVIDIA H200", 132, 4096, 16, 4, 2, 4, 2, 0, 24},
    {"NVIDIA H200", 132, 9223372036854775807, 16, 2, 4, 2, 2, 0, 1},
};
