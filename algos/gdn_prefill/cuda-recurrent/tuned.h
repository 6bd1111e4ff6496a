// Written by `gdn tune`: which constants for which size (num_seqs * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int warps, ahead, chains, load, resident; };   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {
    {"untuned", 0, 16, 1, 2, 2, 2, 1},
    {"untuned", 0, 66, 2, 2, 2, 2, 1},
    {"untuned", 0, 9223372036854775807, 4, 1, 1, 2, 16},
};
