// _cuda/ptx/e4m3.cuh for the CPU of cuda_runtime.h.
#pragma once

#include <algorithm>

#include "cuda_runtime.h"

namespace ptx {

inline uint8_t to_e4m3(float x) {
  const int sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return static_cast<uint8_t>(sign | 0x7f);
  const float size = std::min(std::fabs(x), 448.f);
  const int exponent = std::max(size > 0 ? std::ilogb(size) : -6, -6);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // of 2^(exponent - 3): 8 to 16, or a subnormal
  return static_cast<uint8_t>(sign | (exponent + 6) * 8 + steps);
}

}  // namespace ptx
