// Written by `gdn tune`: which constants for which size (batch_size * num_v_heads), by GPU. Not tuned yet: chosen by hand.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int rows, split, groups, load, store, resident; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"untuned", 132, 22, 8, 4, 1, 2, 0, 1},
    {"untuned", 132, 90, 16, 4, 1, 2, 0, 1},
    {"untuned", 132, 256, 16, 2, 2, 2, 0, 24},
    {"untuned", 132, 9223372036854775807, 16, 1, 4, 1, 0, 16},
};
