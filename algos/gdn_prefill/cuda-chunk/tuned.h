// Written by `gdn tune`: which constants for which size (num_seqs * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int recurrent, segments; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"untuned", 0, 12, 640, 8},
    {"untuned", 0, 24, 448, 4},
    {"untuned", 0, 48, 320, 0},
    {"untuned", 0, 192, 192, 0},
    {"untuned", 0, 9223372036854775807, 48, 0},
};
