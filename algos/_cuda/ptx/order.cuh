// Loads that stay where they are written. ptxas moves others behind later branches and waits, next to their first use; with L2
// cold each of these then costs a trip to DRAM of its own. Strong loads before a branch stay.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ptx {

// BYTES (2, 4, 8 or 16) bytes, through L1. Two bytes: in the lower half of w[0].
template <int BYTES>
__device__ __forceinline__ void load_now(uint32_t* w, const void* p) {
  if constexpr (BYTES == 2) {
    uint16_t half;
    asm volatile("ld.relaxed.cta.global.b16 %0, [%1];" : "=h"(half) : "l"(p));
    w[0] = half;
  }
  if constexpr (BYTES == 4) asm volatile("ld.relaxed.cta.global.b32 %0, [%1];" : "=r"(w[0]) : "l"(p));
  if constexpr (BYTES == 8)
    asm volatile("ld.relaxed.cta.global.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
  if constexpr (BYTES == 16)
    asm volatile("ld.relaxed.cta.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
}

// Four bytes where `there`, else 0: with a predicate, not a branch.
__device__ __forceinline__ uint32_t load_now_if(bool there, const void* p) {
  uint32_t w;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@there ld.relaxed.cta.global.b32 %0, [%1];\n"
      "}"
      : "=r"(w)
      : "l"(p), "r"(static_cast<int>(there)));
  return w;
}

// An address that is computed before this line. No instruction.
__device__ __forceinline__ void pin(const char*& x) { asm volatile("" : "+l"(x)); }

}  // namespace ptx
