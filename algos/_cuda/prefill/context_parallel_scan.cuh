// From segment to segment (context_parallel.cuh): replaces each L by the state after the segment.
#pragma once

#include "context_parallel.cuh"

namespace gdn {

// 16 rows of S per CTA, 32 columns of those per warp. A warp reads the part of Phi for its columns, two of the eight k-steps (a
// quarter) at a time. It begins with the two of its own columns, whose S it has in registers; the rest of S comes through
// shared memory. Phi does not depend on S: each lane has a circular buffer of its own reads, so no barrier is needed. Registers
// would not do: ptxas tracks all loads under way at a loop's back edge as one, so the first product would wait for the last.
constexpr int SCAN_THREADS = 128;
constexpr int SCAN_AHEAD = 2;  // steps that Phi and L are loaded ahead, 72 KB each: L2 needs 64 KB in flight
struct ScanShared {
  uint4 phi[SCAN_AHEAD][4][2][4][SCAN_THREADS];  // [quarter][k-step][n-tile]
  float L[SCAN_AHEAD][4][16][32];                // a warp's
  uint4 high[2][8][32], low[2][8][32];           // S as left operands
  // Where a row's piece of 16 bytes of L begins: the two pieces of four rows that half a warp reads are in different banks.
  static __device__ __forceinline__ int piece_of(int row, int piece) { return (piece ^ row % 4 * 2) * 4; }
};
static_assert(sizeof(ScanShared) <= 163 * 1024, "what sm_80 has");

// Steps 1 to `steps` - 1 of 16 rows from `row` on; `begin` and `transfers` are of the segment before the first step.
__device__ __forceinline__ void scan_steps(const Prefill& p, ScanShared& s, float* begin, const float* transfers, int row, int steps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t stride = static_cast<int64_t>(p.HV) * HEAD_DIM * HEAD_DIM;
  float* end = begin + stride;
  float S[4][4];
  load_state(S, StateRows(begin), row, warp * 4, lane);

  const uint4* transfer = reinterpret_cast<const uint4*>(transfers + stride) + warp * 4 * 32 + lane;
  const float* addend = end + (row + lane / 8) * HEAD_DIM + warp * 32 + lane % 8 * 4;
  // Loads one k-step of a quarter of Phi for step `step`, from `transfer`; with the last one also L, from `addend`.
  const auto load = [&](int step, int quarter, int k) {
    if (step < steps) {
      const uint32_t to = shared_address(&s.phi[step % SCAN_AHEAD][quarter][k][0][threadIdx.x]);
      const uint4* const from = transfer + ((warp + quarter) % 4 * 2 + k) * 16 * 32;
#pragma unroll
      for (int j = 0; j < 4; ++j) copy16(to + j * SCAN_THREADS * 16, from + j * 32, true);
      if (quarter == 3 && k == 1) {
        const uint32_t L = shared_address(&s.L[step % SCAN_AHEAD][warp][lane / 8][s.piece_of(lane / 8, lane % 8)]);
#pragma unroll
        for (int i = 0; i < 4; ++i) copy16(L + i * 4 * 32 * 4, addend + i * 4 * HEAD_DIM, true);
        transfer += stride / 4, addend += stride;
      }
    }
    if (k == 1) commit_copies();
  };
#pragma unroll
  for (int step = 1; step <= SCAN_AHEAD; ++step)
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) load(step, quarter, 0), load(step, quarter, 1);

  uint4 phi[2][2][4];  // of this quarter and the next
  const auto take_phi = [&](int step, int quarter) {
    wait_for_copies<4 * SCAN_AHEAD - 2>();  // this lane's: the oldest of the 7 quarters under way, 8 at first
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) phi[quarter % 2][k][j] = s.phi[step % SCAN_AHEAD][quarter][k][j][threadIdx.x];
  };
  take_phi(1, 0);

#pragma unroll 1
  for (int step = 1; step < steps; ++step) {
    uint4(&highs)[8][32] = s.high[step % 2], (&lows)[8][32] = s.low[step % 2];
    uint32_t high[2][2][4], low[2][2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float block[2][4] = {{S[2 * k][0], S[2 * k][1], S[2 * k][2], S[2 * k][3]},
                                 {S[2 * k + 1][0], S[2 * k + 1][1], S[2 * k + 1][2], S[2 * k + 1][3]}};
      left_parts(high[0][k], low[0][k], block);
      give(highs[warp * 2 + k][lane], high[0][k]), give(lows[warp * 2 + k][lane], low[0][k]);
    }
    float sum[3][4][4] = {}, L[4][4];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      take_phi(step + quarter / 3, (quarter + 1) % 4);  // after the last step it loads nothing; keeps the code straight-line
      if (quarter == 3) {
        __syncwarp();  // other lanes loaded L with this quarter
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            L[j][c] = s.L[step % SCAN_AHEAD][warp][g + c / 2 * 8][s.piece_of(g, 2 * j + t / 2) + t % 2 * 2 + c % 2];
        __syncwarp();  // L has been read before the next one is loaded
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint4 b = phi[quarter % 2][k][j];
          multiply_add(sum[0][j], high[quarter % 2][k], b.x, b.y);
          multiply_add(sum[1][j], high[quarter % 2][k], b.z, b.w);
          multiply_add(sum[2][j], low[quarter % 2][k], b.x, b.y);
        }
        load(step + SCAN_AHEAD, quarter, k);
        if (quarter < 3 && k == 0) {  // S of the next quarter, after half of the products that do not need it
          if (quarter == 0) __syncthreads();
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int from = (warp + quarter + 1) % 4 * 2 + i;
            take(high[(quarter + 1) % 2][i], highs[from][lane]), take(low[(quarter + 1) % 2][i], lows[from][lane]);
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] = sum[0][j][c] + (sum[1][j][c] + sum[2][j][c]) + L[j][c];
    }
    store_state(end, S, row, warp * 4, lane);
    end += stride;
  }
}

// The first segment from `step` on that has Phi or, if not `linked`, has none; else `steps`. By all lanes of a warp.
__device__ __forceinline__ int next_segment(const Prefill& p, int first, int hv, int step, int steps, bool linked) {
  if (!p.linked) return linked ? step : steps;
#pragma unroll 1
  for (; step < steps; step += 32) {
    const int i = step + threadIdx.x % 32;
    const bool found = i < steps && (p.linked[static_cast<int64_t>(first + i) * p.HV + hv] != 0) == linked;
    const uint32_t where = __ballot_sync(0xffffffffu, found);
    if (where) return step + __ffs(where) - 1;
  }
  return steps;
}

// A CTA takes 16 rows of a sequence and value head, then those `gridDim.x` further. With a CTA for each, 4x2048 had 256 of them, two
// waves, although no sequence was split.
__global__ void __launch_bounds__(SCAN_THREADS, 1) gdn_prefill_scan(const __grid_constant__ Prefill p) {
  constexpr int SLICES = HEAD_DIM / 16;
  ScanShared& s = *reinterpret_cast<ScanShared*>(shared_memory());
  const int unit = p.segment * CHUNK, items = p.N * p.HV * SLICES;
  wait_for_kernel_before();
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int row = item % SLICES * 16, hv = item / SLICES % p.HV, n = item / SLICES / p.HV;
    const int begin = p.border(n), tokens = p.border(n + 1) - begin;
    if (tokens <= 2 * unit) continue;  // at most the first and the last segment
    const int first = begin / unit + n, steps = (tokens + unit - 1) / unit - 1;
    const int64_t at = (static_cast<int64_t>(first) * p.HV + hv) * HEAD_DIM * HEAD_DIM;
#pragma unroll 1
    for (int step = 1; (step = next_segment(p, first, hv, step, steps, true)) < steps;) {
      const int to = next_segment(p, first, hv, step, steps, false);
      const int64_t before = at + (step - 1) * static_cast<int64_t>(p.HV) * HEAD_DIM * HEAD_DIM;
      __syncthreads();  // S in shared memory has been read
      scan_steps(p, s, p.ends + before, p.transfers + before, row, to - step + 1);
      step = to;
    }
  }
}

}  // namespace gdn
