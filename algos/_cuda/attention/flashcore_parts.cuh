// Merges partial results of rows of attention, (m, l, o), each complete for its keys, and writes the output.
// A warp has 16 rows of a part, as fragments (mma_f16.cuh): row g in [0], row g + 8 in [1] of m and l.
#pragma once

#include "cluster.cuh"
#include "mma_f16.cuh"
#include "online_softmax.cuh"
#include "problem.cuh"

namespace flashcore {

constexpr int ROW = D * 2;  // bytes of a row of f16

#ifdef __CUDACC__

// Writes a warp's 16 rows that are not split to rows of 128 bytes at `to`, of which `left` exist, by way of 16 rows of
// shared memory that only this warp uses now.
__device__ __forceinline__ void write_out(char* mine, const float (&o)[D / 8][4], const float (&l)[2], __half* to,
                                          int left) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float inverse = __fdividef(1.f, l[h]);
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<__half2*>(mine + (h * 8 + g) * ROW + ((n ^ g) << 4) + t * 4) =
          to_half2(o[n][2 * h] * inverse, o[n][2 * h + 1] * inverse);
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * 8; i += 32) {
    const int y = i / 8, x = i % 8;
    if (y < left)
      *reinterpret_cast<uint4*>(to + y * D + x * 8) = *reinterpret_cast<const uint4*>(mine + y * ROW + ((x ^ y % 8) << 4));
  }
}

// PARTS parts of OWN rows in shared memory: their o, with a row's pieces of 32 bytes swizzled like tiles, then their (m, l).
template <int PARTS, int OWN>
struct Parts {
  float* o;    // [PARTS][OWN][D]
  float2* ml;  // [PARTS][OWN]

  __device__ __forceinline__ explicit Parts(char* memory)
      : o(reinterpret_cast<float*>(memory)), ml(reinterpret_cast<float2*>(o + PARTS * OWN * D)) {}

  // Writes a warp's 16 rows, from `row` of the cluster's rows on, to the CTA that owns them.
  template <int SPLITS>
  __device__ __forceinline__ void hand_over(int part, int row, const float (&from)[D / 8][4], const float (&m)[2],
                                            const float (&l)[2]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int owner = row / OWN, at = part * OWN + row % OWN + g;
    float* o_to = o + at * D + t * 2;
    float2* ml_to = ml + at;
    if constexpr (SPLITS > 1) o_to = peer(o_to, owner), ml_to = peer(ml_to, owner);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<float2*>(o_to + h * 8 * D + ((n ^ g) << 3)) = make_float2(from[n][2 * h], from[n][2 * h + 1]);
      if (t == 0) ml_to[h * 8] = make_float2(m[h], l[h]);
    }
  }

  // Called by all THREADS, after a barrier: writes the owned rows, of which `left` exist, to `to`.
  template <int THREADS>
  __device__ __forceinline__ void write_out(__half* to, int left) const {
#pragma unroll
    for (int i = threadIdx.x; i < OWN * 16; i += THREADS) {            // four elements of a row
      const int y = i / 16, x = i % 16;
      float most = -INFINITY, sum = 0.f;
#pragma unroll
      for (int n = 0; n < PARTS; ++n) most = fmaxf(most, ml[n * OWN + y].x);
      float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int n = 0; n < PARTS; ++n) {
        const float2 of = ml[n * OWN + y];
        const float w = weight(of.x, most);                           // finite: every row sees a key
        const float4 f = *reinterpret_cast<const float4*>(o + (n * OWN + y) * D + ((x / 2 ^ y % 8) << 3) + x % 2 * 4);
        sum = fmaf(w, of.y, sum);
        total.x = fmaf(w, f.x, total.x), total.y = fmaf(w, f.y, total.y);
        total.z = fmaf(w, f.z, total.z), total.w = fmaf(w, f.w, total.w);
      }
      const float inverse = __fdividef(1.f, sum);                     // the fast division is safe: sum >= 1
      if (y < left) {
        __half2* output = reinterpret_cast<__half2*>(to + y * D + x * 4);
        output[0] = to_half2(total.x * inverse, total.y * inverse);
        output[1] = to_half2(total.z * inverse, total.w * inverse);
      }
    }
  }
};

#endif  // __CUDACC__

}  // namespace flashcore
