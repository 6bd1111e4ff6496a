// Estimated, until `gdn tune` writes this file: enough CTAs for 132 SMs first, few passes through shared memory later.
#pragma once
#include <cstdint>
struct Tuned { const char* gpu; int sms; int64_t up_to; int rows, warps, tiles, keys, stages, splits; };
constexpr Tuned TUNED[] = {
    {"untuned", 0, 1024, 32, 8, 1, 32, 1, 1},
    {"untuned", 0, 2048, 32, 8, 1, 32, 1, 2},
    {"untuned", 0, 4096, 64, 8, 1, 64, 2, 2},
    {"untuned", 0, 8192, 64, 8, 1, 64, 2, 1},
    {"untuned", 0, 16384, 128, 8, 2, 64, 2, 1},
    {"untuned", 0, 9223372036854775807, 128, 4, 2, 64, 2, 1},
};
