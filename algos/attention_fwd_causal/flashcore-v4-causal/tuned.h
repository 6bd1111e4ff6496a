// The best of one run of all cuts on an H200, until `gdn tune` writes this file.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int rows, warps, tiles, keys, stages, splits, wgmma; };
constexpr Tuned TUNED[] = {
    {"untuned", 0, 5792, 32, 8, 1, 64, 2, 1, 3},
    {"untuned", 0, 11585, 64, 8, 1, 128, 2, 1, 1},
    {"untuned", 0, 23170, 64, 8, 1, 64, 2, 1, 2},
    {"untuned", 0, 9223372036854775807, 64, 4, 1, 128, 2, 1, 1},
};
