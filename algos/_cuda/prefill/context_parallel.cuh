// Context parallelism for long sequences of few heads, exact: a sequence is split into segments of `segment` chunks that run
// in parallel.
//
// A segment maps the state before it to S' = S Phi + L. Two launches between the intra-chunk and the inter-chunk kernel
// compute Phi and L. gdn_prefill_transfer_sm80 (or _sm90) goes through all segments except a sequence's last: the first from the
// sequence's state, which gives the state after it, the others from S = 0 with their values, which gives L, and from S = I
// without values, which gives Phi. gdn_prefill_scan then goes from segment to segment and replaces each L by the state after
// the segment, for the inter-chunk kernel to start from. Products use Phi as two parts of bf16; it is stored like that, in
// the order in which scan's lanes read it. A sequence of one segment is not touched.
//
// Gates forget, and what is forgotten need not be carried on. The intra-chunk kernel of sm_90a writes a bound of each chunk's Phi:
// Phi is the product of g_t (I - beta_t k_t k_t^T), whose norm is max(1, |1 - beta_t |k_t|^2|), whatever the keys are; so
//
//   log2 ||Phi|| <= G_C + sum of log2 max(1, |1 - beta_t |k_t|^2|),
//
// and the bounds of chunks add up. If they are below FORGOTTEN for the last m chunks before a segment's end, the state after it is
// that of those m chunks from S = 0: no Phi, no step of the scan. This is decided for each segment and value head, on the device, in
// the same way by every CTA. A segment that does not forget is treated as above.
//
// FORGOTTEN: less than 2^-40 of the state m chunks earlier is left out. 24 of the 40 bits are float's own: what is left out is below
// the rounding of the state unless the state has become 2^16 times smaller meanwhile, by more than the values that came in; 2^9 times
// more of it would only be as large as bf16's rounding of an operand. A decay of more than 2^-64 in a token is not told from 2^-64
// either (LEAST_LOG2). NaN or infinity in a chunk before those m does not reach the segment's end.
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

constexpr float FORGOTTEN = -40.f;  // log2

// On how many of the chunks up to a segment's end the state after it depends: see above. As many as the sequence has up to there: it
// begins with the sequence's state. 0: on more than p.window. By all lanes of a warp.
__device__ __forceinline__ int memory_of(const Prefill& p, const Segment& at, int hv, int lane) {
  const int all = at.chunks_before + at.count, most = min(p.window, all);
  const float* const last = p.bounds + hv * p.chunk_numbers() + at.number + at.count - 1;
  float before = 0.f;
#pragma unroll 1
  for (int base = 0; base < most; base += 32) {
    const int i = base + lane;
    float sum = i < most ? last[-i] : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float other = __shfl_sync(0xffffffffu, sum, lane - (lane < d ? 0 : d));
      if (lane >= d) sum += other;
    }
    sum += before;
    const uint32_t below = __ballot_sync(0xffffffffu, i < most && sum < FORGOTTEN);
    if (below) return base + __ffs(below);
    before = __shfl_sync(0xffffffffu, sum, 31);
  }
  return most == all || at.opens ? all : 0;
}

// Copies 16 rows of the state before a sequence to the place of its last segment, which is unused, for the first segment to start
// from: new_state may be state, and the inter-chunk CTA that writes it could be done before the one that reads it begins.
template <bool K_FIRST>
__device__ __forceinline__ void keep_original(const Segment& at, int row, int lane) {
  float S[16][4];
  load_state<K_FIRST>(S, at.original(), row, 0, lane);
  store_state(at.p.ends + at.state_at(at.before), S, row, 0, lane);
}

// The 16 rows of S that a warp begins with: the sequence's, or see above.
template <bool K_FIRST>
__device__ __forceinline__ void begin_transfer(float (&S)[16][4], const Segment& at, bool from_state, bool values, int row, int lane) {
  if (from_state) return load_state<K_FIRST>(S, at.original(), row, 0, lane);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) S[j][c] = !values && row + lane / 4 + c / 2 * 8 == 8 * j + 2 * (lane % 4) + c % 2 ? 1.f : 0.f;
  }
}

// grid (2 * 8 / WARPS, HV, numbers of segments): the first half makes L, the second Phi.
template <int WARPS, int STAGES, bool K_FIRST = false>
__global__ void __launch_bounds__(WARPS * 32) gdn_prefill_transfer_sm80(const __grid_constant__ Prefill p) {
  constexpr int HALF = HEAD_DIM / 16 / WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hv = blockIdx.y;
  const bool values = blockIdx.x < HALF;
  const int v0 = static_cast<int>(blockIdx.x) % HALF * WARPS * 16;
  Chunks<WARPS, STAGES, WARPS * 32, false> chunks(shared_memory(), p, hv, v0);
  if (!chunks.there() || chunks.last) return;
  const int row = v0 + warp * 16;
  if (chunks.opens && !values) return keep_original<K_FIRST>(chunks, row, lane);
  chunks.begin();

  float S[16][4];
  begin_transfer<K_FIRST>(S, chunks, chunks.opens, values, row, lane);

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
