// bfloat16 of the CUDA that runs on a CPU (cuda_runtime.h): the upper half of a float, rounded to nearest even.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 { uint16_t x; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __bfloat162float(__nv_bfloat16 h) { return __uint_as_float(static_cast<uint32_t>(h.x) << 16); }
inline __nv_bfloat16 __float2bfloat16(float f) {
  const uint32_t u = __float_as_uint(f);
  if (std::isnan(f)) return {static_cast<uint16_t>(u >> 16 | 0x40)};
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16(a), __float2bfloat16(b)}; }
