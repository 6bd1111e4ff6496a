// Written by `gdn tune`: which constants for which size (batch_size * num_v_heads), by GPU. Not tuned yet: rows of gdn_mtp_packed/cuda-v1.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int rows, split, groups, load, store, resident; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"untuned", 132, 16, 8, 4, 1, 2, 0, 1},
    {"untuned", 132, 64, 8, 2, 1, 2, 0, 1},
    {"untuned", 132, 256, 16, 2, 1, 2, 0, 1},
    {"untuned", 132, 9223372036854775807, 8, 2, 1, 2, 0, 1},
};
