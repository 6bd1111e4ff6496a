// What every flashcore kernel is given. Row s of head h is at (h * S + s) * D in each of the four.
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

// float -> f16, to nearest. An output is a mean of v's values, which all fit; but p was rounded after its sum was taken,
// so that at the very end of f16 the quotient may come out beyond it. It is held there: never infinite.
__device__ __forceinline__ __half2 to_half2(float x, float y) {
  constexpr float MOST = 65504.f;
  return __floats2half2_rn(fminf(fmaxf(x, -MOST), MOST), fminf(fmaxf(y, -MOST), MOST));
}

#endif  // __CUDACC__

}  // namespace flashcore
