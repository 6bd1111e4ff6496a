// What cuda-chunk/chunk.cuh says in PTX, on the CPU of cuda_runtime.h: written from the PTX ISA's tables of fragments.
#pragma once

#include "cuda_bf16.h"
#include "ptx.cuh"

namespace gdn {

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static const char tag = 0;
  emulated::Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  for (int i = 0; i < 4; ++i) mine.in[i] = a[i], mine.in[6 + i] = __float_as_uint(d[i]);
  mine.in[4] = b0, mine.in[5] = b1;
  emulated::together(&tag, [](emulated::Lane* lanes) {
    const auto value = [](const uint32_t* words, int i) { return __uint_as_float(words[i / 2] >> i % 2 * 16 << 16); };
    float A[16][16], B[8][16];  // B by columns
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = i % 4;
      for (int e = 0; e < 8; ++e) A[g + (e / 2 % 2) * 8][2 * t + e % 2 + (e / 4) * 8] = value(lanes[i].in, e);
      for (int e = 0; e < 4; ++e) B[g][2 * t + e % 2 + (e / 2) * 8] = value(lanes[i].in + 4, e);
    }
    for (int i = 0; i < 32; ++i)
      for (int e = 0; e < 4; ++e) {
        float sum = __uint_as_float(lanes[i].in[6 + e]);
        for (int k = 0; k < 16; ++k) sum += A[i / 4 + e / 2 * 8][k] * B[i % 4 * 2 + e % 2][k];
        lanes[i].out[e] = __float_as_uint(sum);
      }
  });
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(mine.out[i]);
}

inline uint32_t transposed(uint32_t x) {
  static const char tag = 0;
  emulated::Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  mine.in[0] = x;
  emulated::together(&tag, [](emulated::Lane* lanes) {
    for (int i = 0; i < 32; ++i) {
      const auto element = [&](int row, int column) {
        return lanes[row * 4 + column / 2].in[0] >> column % 2 * 16 & 0xffff;
      };
      lanes[i].out[0] = element(i % 4 * 2, i / 4) | element(i % 4 * 2 + 1, i / 4) << 16;
    }
  });
  return mine.out[0];
}

}  // namespace gdn
