// Written by `gdn tune`: which constants for which size (batch_size * num_v_heads), by GPU. The evidence is in tuning.json.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int lanes, rows, warps, load, store; };
constexpr Tuned TUNED[] = {
    {"untuned", 0, 128, 8, 1, 4, 2, 0},
    {"untuned", 0, 9223372036854775807, 16, 4, 4, 0, 0},
};
