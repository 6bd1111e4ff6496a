// _cuda/ptx/mma_tf32.cuh without PTX, for the CPU of cuda_runtime.h.
#pragma once

#include "cuda_runtime.h"

namespace gdn {

inline void multiply_add_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static const char tag = 0;
  emulated::Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  for (int i = 0; i < 4; ++i) mine.in[i] = a[i], mine.in[6 + i] = __float_as_uint(d[i]);
  mine.in[4] = b0, mine.in[5] = b1;
  emulated::together(&tag, [](emulated::Lane* lanes) {
    const auto tf32 = [](uint32_t w) { return __uint_as_float(w & 0xffffe000u); };
    float A[16][8], B[8][8];  // B by columns
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, c = i % 4;
      for (int e = 0; e < 4; ++e) A[g + e % 2 * 8][c + e / 2 * 4] = tf32(lanes[i].in[e]);
      for (int e = 0; e < 2; ++e) B[g][c + e * 4] = tf32(lanes[i].in[4 + e]);
    }
    for (int i = 0; i < 32; ++i)
      for (int e = 0; e < 4; ++e) {
        float sum = 0.f;
        for (int k = 0; k < 8; ++k) sum += A[i / 4 + e / 2 * 8][k] * B[i % 4 * 2 + e % 2][k];
        lanes[i].out[e] = __float_as_uint(__uint_as_float(lanes[i].in[6 + e]) + sum);
      }
  });
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(mine.out[i]);
}

}  // namespace gdn
