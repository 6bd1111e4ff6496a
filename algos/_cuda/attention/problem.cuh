// The arguments of every flashcore kernel. Row s of head h is at (h * S + s) * D in each of the four tensors.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flashcore {

constexpr int D = 64;             // of a head: q, k, v and output are [B, heads, S, D]
constexpr float SCALE = 0.125f;   // 1 / sqrt(D)

struct Problem {
  const __half* q;
  const __half* k;
  const __half* v;
  __half* output;
  int S;
};

#ifdef __CUDACC__

// float -> f16, to nearest. An output is a mean of values of v, which are all finite; but p was rounded after its sum was
// taken, so the quotient may slightly exceed the largest f16. It is clamped, so never infinite.
__device__ __forceinline__ __half2 to_half2(float x, float y) {
  constexpr float MOST = 65504.f;
  return __floats2half2_rn(fminf(fmaxf(x, -MOST), MOST), fminf(fmaxf(y, -MOST), MOST));
}

#endif  // __CUDACC__

}  // namespace flashcore
