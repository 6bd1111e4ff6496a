// The online softmax of the flashcore-v4 kernels. A row of the output is sum p_j v_j / sum p_j over the keys j that it
// sees, with p_j = exp(SCALE (s_j - m)) and m the greatest of its scores s_j. Keys come a tile at a time, so a row keeps
//
//     m   the greatest score so far
//     l   the sum of p so far
//     o   the sum of p v so far
//
// and each tile of scores s updates them:
//
//     m' = max(m, max s)      w = exp(SCALE (m - m'))      p = exp(SCALE (s - m'))
//     l' = w l + sum p        o' = w o + p v
//
// The last product is computed by tensor cores; the rest is here. A warp has 16 rows, as fragments (mma_f16.cuh): a lane has parts
// of row g in h = 0 and of row g + 8 in h = 1, elements 2h and 2h + 1 of each fragment; four lanes share a row.
//
// flashcore.cuh and flashcore_once.cuh call online_softmax. flashcore_wgmma.cuh uses parts of it, but computes the maximum
// and the exponentials differently (to_probabilities): its sum l is a column of the product p v.
#pragma once

#include "mma_f16.cuh"
#include "problem.cuh"

namespace flashcore {

#ifdef __CUDACC__

// The greatest, or the sum, over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

constexpr float EXPONENT = 1.4426950408889634f * SCALE;  // log2(e) / sqrt(D)

// exp(SCALE * (m - most)), 0 for a part without visible keys; `most` must be finite.
__device__ __forceinline__ float weight(float m, float most) { return exp2_approx((m - most) * EXPONENT); }

// An empty sum, in N fragments.
template <int N>
__device__ __forceinline__ void clear(float (&x)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = 0.f;
}

// The maximum of a row becomes `most`; w is the factor for the previous sums. Returns the value to subtract from a score.
__device__ __forceinline__ float raise_maximum(float& m, float most, float& w) {
  const float from = most == -INFINITY ? 0.f : most;                  // no key yet: -inf - 0 stays -inf, -inf + inf is NaN
  w = weight(m, from), m = most;
  return from;
}

__device__ __forceinline__ void scale_row(float (&o)[D / 8][4], int h, float w) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n) o[n][2 * h] *= w, o[n][2 * h + 1] *= w;
}

// A tile's scores become probabilities, and m, l and o of a lane's two rows are updated, except for adding p v.
// l is this lane's part of the sum; quad_sum at the end adds the parts.
template <int N>
__device__ __forceinline__ void online_softmax(float (&s)[N][4], float (&m)[2], float (&l)[2], float (&o)[D / 8][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = m[h], w;
#pragma unroll
    for (int n = 0; n < N; ++n) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    const float from = raise_maximum(m[h], quad_max(most), w);
    l[h] *= w;
    scale_row(o, h, w);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; ++e) {
        s[n][e] = weight(s[n][e], from);
        l[h] += s[n][e];
      }
  }
}

// Probabilities of keys 16 c to 16 c + 15 of a tile, two accumulator fragments, as the left operand of the product p v, which
// has the same layout.
template <int N>
__device__ __forceinline__ void to_left_side(uint32_t (&p)[4], const float (&s)[N][4], int c) {
#pragma unroll
  for (int x = 0; x < 4; ++x) p[x] = pack(s[2 * c + x / 2][x % 2 * 2], s[2 * c + x / 2][x % 2 * 2 + 1]);
}

#endif  // __CUDACC__

}  // namespace flashcore
