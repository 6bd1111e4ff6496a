// Long sequences of few heads, exactly: a sequence is cut into segments of `segment` chunks that are walked side by side.
//
// What a segment does to the state before it is S' = S Phi + L. Two launches between preparation and outputs make that known:
// gdn_prefill_transfer walks all segments but a sequence's last, from S = 0 with its values, which gives L, and from S = I
// without them, which gives Phi; gdn_prefill_scan then goes from segment to segment and leaves the state behind each of them
// where L was, for the walk that makes the outputs to start from. Products of Phi are of bf16 in two parts. A sequence of one
// segment has no part in this.
#pragma once

#include "split.cuh"
#include "state.cuh"

namespace gdn {

// grid (2 * 8 / WARPS, HV, numbers of segments): the first half makes L, the second Phi.
template <int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32) gdn_prefill_transfer(const __grid_constant__ Prefill p) {
  constexpr int HALF = D / 16 / WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hv = blockIdx.y;
  const bool values = blockIdx.x < HALF;
  const int v0 = static_cast<int>(blockIdx.x) % HALF * WARPS * 16;
  Chunks<WARPS, STAGES, WARPS * 32, false> chunks(shared_memory(), p, hv, v0);
  if (!chunks.there() || chunks.last) return;
  chunks.begin();

  const int row = v0 + warp * 16;
  float S[16][4];
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) S[j][c] = !values && row + lane / 4 + c / 2 * 8 == 8 * j + 2 * (lane % 4) + c % 2 ? 1.f : 0.f;

#pragma unroll 1
  for (int chunk = 0; chunk < chunks.count; ++chunk) {
    Stage<WARPS>& stage = chunks.next(chunk);
    uint32_t before[8][4], R[4][4], none[4][4];
    const float kept = stage.prepared.in[CHUNK - 1];
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
  float* const to = (values ? p.ends : p.transfers) + (chunks.slot * p.HV + hv) * D * D;
#pragma unroll
  for (int j = 0; j < 16; ++j) store_state(to, S[j], row, j, lane);
}

constexpr int SCAN_THREADS = 128, SCAN_ROW = D + 4;  // floats: two rows a lane of eight columns lie in different banks
struct ScanShared {
  float transfer[2][D][SCAN_ROW];
  uint4 high[8][32], low[8][32];  // S as left operands
};

// grid (8, HV, N): 16 rows of S; a warp makes 32 columns.
__global__ void __launch_bounds__(SCAN_THREADS) gdn_prefill_scan(const __grid_constant__ Prefill p) {
  ScanShared& s = *reinterpret_cast<ScanShared*>(shared_memory());
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int row = blockIdx.x * 16, hv = blockIdx.y, n = blockIdx.z;
  const int64_t unit = static_cast<int64_t>(p.segment) * CHUNK, begin = p.border(n);
  const int64_t first = begin / unit + n, steps = (p.border(n + 1) - begin + unit - 1) / unit - 1;
  if (steps < 1) return;
  const auto ask = [&](int64_t step) {
    if (step < steps) {
      const float* from = p.transfers + ((first + step) * p.HV + hv) * D * D;
      const uint32_t to = shared_address(s.transfer[step % 2]);
#pragma unroll 1
      for (int i = thread; i < D * D / 4; i += SCAN_THREADS)
        copy16(to + (i / (D / 4) * SCAN_ROW + i % (D / 4) * 4) * 4, from + i * 4, true);
    }
    commit_copies();
  };
  ask(0);

  float S[4][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) load_state(S[j], p.state + (static_cast<int64_t>(n) * p.HV + hv) * D * D, row, warp * 4 + j, lane);
#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t high[4], low[4];
      const float block[2][4] = {{S[2 * i][0], S[2 * i][1], S[2 * i][2], S[2 * i][3]},
                                 {S[2 * i + 1][0], S[2 * i + 1][1], S[2 * i + 1][2], S[2 * i + 1][3]}};
      left_parts(high, low, block);
      give(s.high[warp * 2 + i][lane], high), give(s.low[warp * 2 + i][lane], low);
    }
    float* const end = p.ends + ((first + step) * p.HV + hv) * D * D;  // L, and then the state
#pragma unroll
    for (int j = 0; j < 4; ++j) load_state(S[j], end, row, warp * 4 + j, lane);
    wait_for_copies<0>();
    __syncthreads();
    ask(step + 1);
    const auto& transfer = s.transfer[step % 2];
    float more[4][4] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      uint32_t high[4], low[4];
      take(high, s.high[k][lane]), take(low, s.low[k][lane]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = warp * 32 + j * 8 + g, at = k * 16 + 2 * t;
        const Parts b0 = parts(transfer[at][column], transfer[at + 1][column]);
        const Parts b1 = parts(transfer[at + 8][column], transfer[at + 9][column]);
        multiply_add(S[j], high, b0.high, b1.high);
        multiply_add(more[j], high, b0.low, b1.low);
        multiply_add(more[j], low, b0.high, b1.high);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] += more[j][c];
      store_state(end, S[j], row, warp * 4 + j, lane);
    }
    __syncthreads();  // S and the transfer have been read
  }
}

}  // namespace gdn
