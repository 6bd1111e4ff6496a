// Attention forward, flashcore-v1: one thread for one row of queries, without optimisations.
//
//   s_j = q . k_j / sqrt(D),   m = max_j s_j,   o = sum_j exp(s_j - m) v_j / sum_j exp(s_j - m)
//
// A thread goes through the keys twice: once for the maximum, once for the sums, so every s_j is computed twice and none is
// kept. Both passes read k and v directly from memory; the 32 rows of a warp read the same key at the same time,
// which is one request, and all other sharing is left to L1 and L2.
//
// At (1, 8, 512, 64) on an H200, L2 cold: est. 230 us; 743 measured.
//
// Grid: x = block of 32 rows, y = head (batch * H + head). CTA: one warp.
// Provenance: Attention Is All You Need (arXiv 1706.03762). Written here.
#pragma once

#include "problem.cuh"

#ifdef __CUDACC__

namespace flashcore {

constexpr int V1_ROWS = 32;

// A row of D f16, as floats.
__device__ __forceinline__ void load_row(float (&x)[D], const __half* row) {
#pragma unroll
  for (int i = 0; i < D; i += 8) {
    const uint4 u = __ldg(reinterpret_cast<const uint4*>(row + i));
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w[j]));
      x[i + 2 * j] = f.x, x[i + 2 * j + 1] = f.y;
    }
  }
}

__device__ __forceinline__ float dot(const float (&x)[D], const float (&y)[D]) {
  float s = 0.f;
#pragma unroll
  for (int i = 0; i < D; ++i) s = fmaf(x[i], y[i], s);
  return s;
}

__global__ void __launch_bounds__(V1_ROWS) flashcore_v1(const __grid_constant__ Problem p) {
  const int row = blockIdx.x * V1_ROWS + threadIdx.x;
  if (row >= p.S) return;
  const int64_t head = static_cast<int64_t>(blockIdx.y) * p.S * D;
  const __half* k = p.k + head;
  const __half* v = p.v + head;

  float q[D], x[D], o[D];
  load_row(q, p.q + head + row * D);

  float m = -INFINITY;
  for (int j = 0; j < p.S; ++j) {
    load_row(x, k + j * D);
    m = fmaxf(m, dot(q, x) * SCALE);
  }

  float l = 0.f;
#pragma unroll
  for (int i = 0; i < D; ++i) o[i] = 0.f;
  for (int j = 0; j < p.S; ++j) {
    load_row(x, k + j * D);
    const float e = expf(dot(q, x) * SCALE - m);
    l += e;
    load_row(x, v + j * D);
#pragma unroll
    for (int i = 0; i < D; ++i) o[i] = fmaf(e, x[i], o[i]);
  }

  __half2* output = reinterpret_cast<__half2*>(p.output + head + row * D);
  const float inverse = 1.f / l;  // l >= 1: the greatest score's own exp is 1
#pragma unroll
  for (int i = 0; i < D / 2; ++i) output[i] = to_half2(o[2 * i] * inverse, o[2 * i + 1] * inverse);
}

}  // namespace flashcore

#endif  // __CUDACC__
