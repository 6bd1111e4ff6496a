// _cuda/ptx/mma_f16.cuh without PTX, for the CPU of cuda_runtime.h: written from the PTX ISA's tables of fragments.
#pragma once

#include "cuda_fp16.h"
#include "async_copy.cuh"

namespace flashcore {

inline char* shared_memory() { return emulated::me->cta->base; }
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - emulated::me->cta->base) + emulated::FIRST_ADDRESS;
}

using ptx::at;

inline float half_at(const uint32_t* words, int i) {
  return __half2float({static_cast<uint16_t>(words[i / 2] >> i % 2 * 16)});
}

template <bool TRANSPOSED>
void matrices(uint32_t (&r)[4], uint32_t row) {
  static const char tag = 0;
  at(row);
  emulated::me->warp->lanes[emulated::me->lane].in[0] = row;
  const emulated::Lane& mine = emulated::together(&tag, [](emulated::Lane* lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t x[8][8];
      for (int i = 0; i < 8; ++i) {
        const int lane = matrix * 8 + i;
        const char* const from = at(lanes[lane].in[0]);
        emulated::races::access(from, 16, false, emulated::first_lane() + lane);
        std::memcpy(x[i], from, 16);
      }
      for (int i = 0; i < 32; ++i) {
        const int g = i / 4, t = i % 4;
        const uint16_t low = TRANSPOSED ? x[2 * t][g] : x[g][2 * t], high = TRANSPOSED ? x[2 * t + 1][g] : x[g][2 * t + 1];
        lanes[i].out[matrix] = low | static_cast<uint32_t>(high) << 16;
      }
    }
  });
  for (int i = 0; i < 4; ++i) r[i] = mine.out[i];
}
inline void load_matrices(uint32_t (&r)[4], uint32_t row) { matrices<false>(r, row); }
inline void load_transposed(uint32_t (&r)[4], uint32_t row) { matrices<true>(r, row); }

using Four = float __attribute__((vector_size(16)));

// Each number of d [rows][4 * N] is a sum of 16 products of a [rows][16] and b [16][4 * N], from the first to the last.
inline void sums(int rows, int N, const float (*a)[16], const Four* b, Four* d) {
  for (int y = 0; y < rows; ++y)
    for (int x = 0; x < N; ++x) {
      Four sum = {};
      for (int k = 0; k < 16; ++k) sum += a[y][k] * b[k * N + x];
      d[y * N + x] = sum;
    }
}

// `element` reads number i of words of two: float16 here, bfloat16 in mma_bf16.cuh.
template <float (*element)(const uint32_t*, int)>
void product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static const char tag = 0;
  emulated::Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  for (int i = 0; i < 4; ++i) mine.in[i] = a[i], mine.in[6 + i] = __float_as_uint(d[i]);
  mine.in[4] = b0, mine.in[5] = b1;
  emulated::together(&tag, [](emulated::Lane* lanes) {
    float A[16][16];
    Four B[16 * 2], D[16 * 2];
    const auto number = [](Four* x, int row, int column) -> float& {
      return reinterpret_cast<float*>(x)[row * 8 + column];
    };
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = i % 4;
      for (int e = 0; e < 8; ++e)  // a0 .. a7 of the PTX ISA's table
        A[g + (e / 2 % 2) * 8][2 * t + e % 2 + (e / 4) * 8] = element(lanes[i].in, e);
      for (int e = 0; e < 4; ++e) number(B, 2 * t + e % 2 + (e / 2) * 8, g) = element(lanes[i].in + 4, e);
    }
    sums(16, 2, A, B, D);
    for (int i = 0; i < 32; ++i)
      for (int e = 0; e < 4; ++e) {
        const float sum = number(D, i / 4 + e / 2 * 8, i % 4 * 2 + e % 2);
        lanes[i].out[e] = __float_as_uint(__uint_as_float(lanes[i].in[6 + e]) + sum);
      }
  });
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(mine.out[i]);
}

inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  product<half_at>(d, a, b0, b1);
}

using ptx::commit_copies;
using ptx::copy16;
using ptx::wait_for_copies;

inline float exp2_approx(float x) { return exp2f(x); }

inline uint32_t pack(float x, float y) {
  return __float2half_rn(x).x | static_cast<uint32_t>(__float2half_rn(y).x) << 16;
}

}  // namespace flashcore
