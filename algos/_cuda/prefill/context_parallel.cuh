// Context parallelism for long sequences of few heads, exact: a sequence is split into segments of `segment` chunks that run
// in parallel.
//
// A segment maps the state before it to S' = S Phi + L. Two launches between the intra-chunk and the inter-chunk kernel
// compute Phi and L. gdn_prefill_transfer_sm80 (or _sm90) goes through all segments except a sequence's last: the first from the
// sequence's state, which gives the state after it, the others from S = 0 with their values, which gives L, and from S = I
// without values, which gives Phi. gdn_prefill_scan then goes from segment to segment and replaces each L by the state after
// the segment, for the inter-chunk kernel to start from. Products use Phi as two parts of bf16; it is stored like that, in
// the order in which scan's lanes read it. A sequence of one segment is not touched.
#pragma once

#include "inter_chunk_sm80_split.cuh"
#include "inter_chunk_sm80.cuh"

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
  if (at.opens) return load_state(S, at.original(), row, 0, lane);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) S[j][c] = !values && row + lane / 4 + c / 2 * 8 == 8 * j + 2 * (lane % 4) + c % 2 ? 1.f : 0.f;
  }
}

// grid (2 * 8 / WARPS, HV, numbers of segments): the first half makes L, the second Phi.
template <int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32) gdn_prefill_transfer_sm80(const __grid_constant__ Prefill p) {
  constexpr int HALF = HEAD_DIM / 16 / WARPS;
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
    store_state(p.ends + at, S, row, 0, lane);
  } else {
    store_transfer(reinterpret_cast<uint4*>(p.transfers + at), S, row / 16, lane);
  }
}

}  // namespace gdn
