// Q K^T and K K^T of a chunk by a warpgroup: for M (step 7) and T (step 3), in the kernels for sm_90a.
#pragma once

#include "chunk.cuh"
#include "wgmma_tokens.cuh"

namespace gdn {

#if FLASHCORE_WGMMA

// d = A B^T, of tiles as TMA writes them: 64 rows, two halves of 64 columns each. Under way until warpgroup_wait.
__device__ __forceinline__ void begin_row_products(float (&d)[8][4], const KMajor& a, const KMajor& b) {
  warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t bytes = step / 4 * (QK_TILE / 2) + step % 4 * 32;
    product(d, advance(a, bytes), advance(b, bytes), step > 0);
  }
  warpgroup_commit();
}

#endif  // FLASHCORE_WGMMA

}  // namespace gdn
