// Floats of eight bits, 1 + 4 + 3 (arXiv 2209.05433), as float8_e4m3fn has them: no infinity, 448 is the largest.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ptx {

// To nearest, ties to even; what is larger becomes 448. From compute capability 8.9 on.
__device__ __forceinline__ uint8_t to_e4m3(float x) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.f), "f"(x));
  return static_cast<uint8_t>(both);
}

}  // namespace ptx
