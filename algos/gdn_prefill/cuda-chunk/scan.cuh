// From segment to segment (segments.cuh): the state behind each of them, where L was.
#pragma once

#include "segments.cuh"

namespace gdn {

constexpr int SCAN_THREADS = 128;
struct ScanShared {
  uint4 high[2][8][32], low[2][8][32];  // S as left operands
};

// grid (8, HV, N): 16 rows of S; a warp has 32 columns. Of Phi it alone takes those, so they go straight to registers, a
// quarter of a step's right after the same quarter of the step before has been used: shared memory's bandwidth is what bounds this.
__global__ void __launch_bounds__(SCAN_THREADS) gdn_prefill_scan(const __grid_constant__ Prefill p) {
  ScanShared& s = *reinterpret_cast<ScanShared*>(shared_memory());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.x * 16, hv = blockIdx.y, n = blockIdx.z;
  const int unit = p.segment * CHUNK, begin = p.border(n);
  const int first = begin / unit + n, steps = (p.border(n + 1) - begin + unit - 1) / unit - 1;
  if (steps < 1) return;
  const int64_t stride = static_cast<int64_t>(p.HV) * D * D, at = first * stride + hv * D * D;
  const uint4* transfer = reinterpret_cast<const uint4*>(p.transfers + at + stride) + warp * 4 * 32 + lane;
  float* end = p.ends + at;  // the state behind the first; of the others L, and then the state
  uint4 phi[8][4];
  const auto ask = [&](int quarter) {
#pragma unroll
    for (int k = 2 * quarter; k < 2 * quarter + 2; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) phi[k][j] = transfer[(k * 16 + j) * 32];
  };
  if (steps > 1) ask(0), ask(1), ask(2), ask(3);
  float S[4][4], L[4][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    load_state(S[j], p.state + (static_cast<int64_t>(n) * p.HV + hv) * D * D, row, warp * 4 + j, lane);
    // for the first segment, in the place of the last, which nothing stands behind: new_state may be state, and the walk's
    // CTA that writes it could be done before the one that reads it begins
    store_state(end + steps * stride, S[j], row, warp * 4 + j, lane);
    load_state(S[j], end, row, warp * 4 + j, lane);
    if (steps > 1) load_state(L[j], end + stride, row, warp * 4 + j, lane);
  }
  end += stride;

#pragma unroll 1
  for (int step = 1; step < steps; ++step) {
    uint4(&highs)[8][32] = s.high[step % 2], (&lows)[8][32] = s.low[step % 2];
    const bool more = step + 1 < steps;
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float block[2][4] = {{S[2 * i][0], S[2 * i][1], S[2 * i][2], S[2 * i][3]},
                                 {S[2 * i + 1][0], S[2 * i + 1][1], S[2 * i + 1][2], S[2 * i + 1][3]}};
      left_parts(high, low, block);
      give(highs[warp * 2 + i][lane], high), give(lows[warp * 2 + i][lane], low);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] = L[j][c];
    if (more) {
#pragma unroll
      for (int j = 0; j < 4; ++j) load_state(L[j], end + stride, row, warp * 4 + j, lane);
    }
    transfer += more ? stride / 4 : 0;  // the last is asked for once too often
    __syncthreads();
    float rest[2][4][4] = {};
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
      for (int k = 2 * quarter; k < 2 * quarter + 2; ++k) {
        take(high, highs[k][lane]), take(low, lows[k][lane]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint4 b = phi[k][j];
          multiply_add(S[j], high, b.x, b.y);
          multiply_add(rest[0][j], high, b.z, b.w);
          multiply_add(rest[1][j], low, b.x, b.y);
        }
      }
      ask(quarter);
      __syncwarp();  // else the compiler puts all of them last
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] += rest[0][j][c] + rest[1][j][c];
      store_state(end, S[j], row, warp * 4 + j, lane);
    }
    end += stride;
  }
}

}  // namespace gdn
