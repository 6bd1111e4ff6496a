// Long sequences of few heads, exactly: a sequence is cut into segments of `segment` chunks that are walked side by side.
//
// What a segment does to the state before it is S' = S Phi + L. Two launches between preparation and outputs make that known:
// gdn_prefill_transfer walks all segments but a sequence's last: the first from the sequence's state, which gives the state
// behind it, the others from S = 0 with their values, which gives L, and from S = I without them, which gives Phi.
// gdn_prefill_scan then goes from segment to segment and leaves the state behind each of them where L was, for the walk that
// makes the outputs to start from. Products of Phi are of bf16 in two parts; it is left behind as such, in the order in which
// scan's lanes take it. A sequence of one segment has no part in this.
#pragma once

#include "split.cuh"
#include "state.cuh"

namespace gdn {

// Phi as right operands: [k-step of 16 rows][n-tile of 8 columns][lane] of {b0, b1 high; b0, b1 low}, 64 KB.
constexpr int TRANSFER = 8 * 16 * 32;  // uint4
// 16 rows of it, of which a warp has the accumulators of 16 n-tiles.
__device__ __forceinline__ void store_transfer(uint4* to, const float (&S)[16][4], int k_step, int lane) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const Parts low = parts(S[j][0], S[j][1]), high = parts(S[j][2], S[j][3]);  // rows g, rows g + 8
    to[(k_step * 16 + j) * 32 + lane] = {transposed(low.high), transposed(high.high), transposed(low.low), transposed(high.low)};
  }
}

// The 16 rows of S that a warp begins with: see above.
__device__ __forceinline__ void begin_transfer(float (&S)[16][4], const Segment& at, bool values, int row, int lane) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (at.opens) load_state(S[j], at.original(), row, j, lane);
    else
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] = !values && row + lane / 4 + c / 2 * 8 == 8 * j + 2 * (lane % 4) + c % 2 ? 1.f : 0.f;
  }
}

// grid (2 * 8 / WARPS, HV, numbers of segments): the first half makes L, the second Phi.
template <int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32) gdn_prefill_transfer(const __grid_constant__ Prefill p) {
  constexpr int HALF = D / 16 / WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hv = blockIdx.y;
  const bool values = blockIdx.x < HALF;
  const int v0 = static_cast<int>(blockIdx.x) % HALF * WARPS * 16;
  Chunks<WARPS, STAGES, WARPS * 32, false> chunks(shared_memory(), p, hv, v0);
  if (!chunks.there() || chunks.last || (chunks.opens && !values)) return;
  chunks.begin();

  const int row = v0 + warp * 16;
  float S[16][4];
  begin_transfer(S, chunks, values, row, lane);

#pragma unroll 1
  for (int chunk = 0; chunk < chunks.count; ++chunk) {
    Stage<WARPS>& stage = chunks.next(chunk);
    uint32_t before[8][4], R[4][4], none[4][4];
    const float kept = *stage.prepared.gate(IN, CHUNK - 1);
#pragma unroll
    for (int step = 0; step < 8; ++step) as_left(before[step], S[2 * step], S[2 * step + 1]);
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] *= kept;
    tokens<WARPS, 0, false>(stage, before, S, R, none, 0.f, warp, lane, values);
    tokens<WARPS, 1, false>(stage, before, S, R, none, 0.f, warp, lane, values);
    tokens<WARPS, 2, false>(stage, before, S, R, none, 0.f, warp, lane, values);
    tokens<WARPS, 3, false>(stage, before, S, R, none, 0.f, warp, lane, values);
  }
  const int64_t at = chunks.state_at(chunks.slot);
  if (values) {
#pragma unroll
    for (int j = 0; j < 16; ++j) store_state(p.ends + at, S[j], row, j, lane);
  } else {
    store_transfer(reinterpret_cast<uint4*>(p.transfers + at), S, row / 16, lane);
  }
}

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
