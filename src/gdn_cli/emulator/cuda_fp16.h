// float16 of the CUDA that runs on a CPU (cuda_runtime.h).
#pragma once

#include <algorithm>

#include "cuda_runtime.h"

struct __half { uint16_t x; };
struct alignas(4) __half2 { __half x, y; };

namespace emulated {

inline float widened(uint32_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  const float size = exponent ? std::ldexp(1024.f + fraction, static_cast<int>(exponent) - 25) : std::ldexp(fraction, -24);
  return sign ? -size : size;
}

}  // namespace emulated

inline float __half2float(__half h) {
  static const auto table = [] {
    std::vector<float> all(65536);
    for (uint32_t i = 0; i < 65536; ++i) all[i] = emulated::widened(i);
    return all;
  }();
  return table[h.x];
}

// To nearest, ties to even, infinite from 65520 on.
inline __half __float2half_rn(float f) {
  const uint16_t sign = static_cast<uint16_t>(__float_as_uint(f) >> 16 & 0x8000);
  const float size = std::fabs(f);
  if (std::isnan(f)) return {0x7fff};
  if (size >= 65520.f) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent = 0;
  std::frexp(size, &exponent);
  const int unit = std::max(exponent - 11, -24);  // the weight of the last bit, as a power of two
  const int digits = static_cast<int>(std::nearbyint(std::ldexp(size, -unit)));  // 0 .. 2048
  if (digits == 0) return {sign};
  const int biased = unit == -24 ? 0 : unit + 24;  // a subnormal's last bit is that of the smallest normal
  return {static_cast<uint16_t>(sign | (biased * 1024 + digits))};
}

inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half __float2half(float f) { return __float2half_rn(f); }
inline __half2 __float22half2_rn(float2 f) { return __floats2half2_rn(f.x, f.y); }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline float __low2float(__half2 h) { return __half2float(h.x); }
inline float __high2float(__half2 h) { return __half2float(h.y); }
inline uint16_t __half_as_ushort(__half h) { return h.x; }
inline __half __ushort_as_half(uint16_t x) { return {x}; }
