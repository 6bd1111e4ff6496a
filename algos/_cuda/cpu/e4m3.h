// Floats of eight bits, 1 + 4 + 3 (arXiv 2209.05433), as float8_e4m3fn has them: no infinity, 448 is
// the largest.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace gdn {

constexpr float LARGEST_E4M3 = 448.f;

// To nearest, ties to even; of at most 448.5.
inline uint8_t to_e4m3(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint32_t sign = u >> 24 & 0x80, size = u & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7f);
  if (size < 0x3c800000u) {  // below 2^-6: in steps of 2^-9
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(std::lrint(std::fabs(x) * 512.f)));
  }
  const uint32_t rounded = (size + 0x7ffff + (size >> 20 & 1)) >> 20;
  return static_cast<uint8_t>(sign | (rounded - (120u << 3)));
}

}  // namespace gdn
