// The tile scheduler for sequences of different lengths: longest first, so that no long one is left for the end. One more CTA of
// the intra-chunk launch sorts the sequences while the others work; the host does not read cu_seqlens. The CTAs of
// inter_chunk_sm90_tiles.cuh then take work tiles in this order from a counter (dynamic), or by their own number if lengths
// hardly differ (static).
#pragma once

#include "chunk.cuh"

namespace gdn {

enum Schedule : uint32_t {
  STATIC,         // whole tiles in the sequences' order: CTA i has tiles i, i + CTAs, i + 2 CTAs, ...
  LONGEST_FIRST,  // whole tiles, longest first: a CTA that is free takes the next one
  HALVES,         // the same with tiles of half of V
  QUARTERS,       // of a quarter: only with mma.sync
};

// The amount of work, and the schedule that ends first. An SM needs FULL for a chunk of a whole tile and HALF for one of a half
// tile (us / 10 on an H200: 2.0 and 1.3 us, the ladder's "Longest first"; only the ratios count): half tiles cost more in all,
// but the longest sequence ends sooner. TAKING, 1 us, is the assumed cost of taking a tile from the order instead of by the CTA's
// number; not measured alone (a first version that always took the order lost 3.6 us at 16x256, now it is 1.0).
struct Load {
  uint32_t longest, shortest, chunks;  // chunks: of the longest sequence, of the shortest, of all
  static constexpr float FULL = 20, HALF = 13, TAKING = 10;
  // The same with mma.sync (inter_chunk_tma.cuh), for a half and a quarter: 33.7 us for 16 chunks at 8x1024, 92.5 for 60 (ladder,
  // "Half of V or a quarter", H200). Always longest first.
  static constexpr float MMA_HALF = 20, MMA_QUARTER = 15;

  // A lower bound for the chunks of the CTA that ends last, the largest of: the longest tile; the mean per CTA; the mean number of
  // tiles per CTA, rounded up, times the shortest. Longest first comes near this. `each`: tiles per sequence.
  __host__ __device__ float least(uint32_t tiles, uint32_t each, uint32_t ctas) const {
    const float mean = static_cast<float>(chunks) * each / ctas, rounds = (tiles + ctas - 1) / ctas;
    return fmaxf(fmaxf(longest, rounds * shortest), mean);
  }
  __host__ __device__ Schedule schedule(uint32_t N, uint32_t HV, uint32_t ctas) const {
    const float rounds = (N * HV + ctas - 1) / ctas;
    const float in_turn = FULL * longest * rounds;  // at most
    const float first = FULL * least(N * HV, HV, ctas) + TAKING, halves = HALF * least(2 * N * HV, 2 * HV, ctas) + TAKING;
    return in_turn <= fminf(first, halves) ? STATIC : halves < first ? HALVES : LONGEST_FIRST;
  }
  __host__ __device__ Schedule mma_schedule(uint32_t N, uint32_t HV, uint32_t ctas) const {
    const float halves = MMA_HALF * least(2 * N * HV, 2 * HV, ctas), quarters = MMA_QUARTER * least(4 * N * HV, 4 * HV, ctas);
    return halves <= quarters ? HALVES : QUARTERS;
  }
};

// A work tile, read in one load. In the plan one entry represents all tiles of a sequence, and `what` is the sequence; see
// inter_chunk_sm90_tiles.cuh.
struct alignas(16) ScheduledTile {
  uint32_t what;
  int first, tokens;  // its first token, how many
  StateOf state;      // of a pool; else unused
};

struct alignas(16) Plan {
  uint32_t taken;  // number of tiles taken, not counting the first one of each CTA
  Schedule schedule;
  // [N], in the order in which they are taken. Sequences with equally many chunks, or with BINS - 1 or more, come in any order.
  __device__ __forceinline__ ScheduledTile* tiles() { return reinterpret_cast<ScheduledTile*>(this + 1); }
};

constexpr int BINS = 256;  // by chunks, and as many threads
struct SortShared {
  uint32_t bins[BINS];     // number of sequences, then the position of the next one
  uint32_t before[BINS / 32];
  Load load;
};

// A counting sort by all threads of a CTA, for inter_chunk_sm90_tiles.cuh or (MMA) for inter_chunk_tma.cuh.
template <bool MMA>
__device__ __forceinline__ void sort_tiles(const Prefill& p, SortShared& s) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const auto tokens_of = [&](int n) { return max(p.border(n + 1) - p.border(n), 0); };
  const auto bin_of = [](int tokens) { return BINS - 1 - min((tokens + CHUNK - 1) / CHUNK, BINS - 1); };
  s.bins[thread] = 0;
  Load own = {0, 0x7fffffffu, 0};
  if (thread == 0) s.load = own;
  __syncthreads();
#pragma unroll 1
  for (int n = thread; n < p.N; n += BINS) {
    const int tokens = tokens_of(n);
    const uint32_t chunks = (tokens + CHUNK - 1) / CHUNK;
    atomicAdd(&s.bins[bin_of(tokens)], 1u);
    own = {max(own.longest, chunks), min(own.shortest, chunks), own.chunks + chunks};
  }
  if (thread < p.N) {
    atomicMax(&s.load.longest, own.longest), atomicMin(&s.load.shortest, own.shortest), atomicAdd(&s.load.chunks, own.chunks);
  }
  __syncthreads();
  int to = static_cast<int>(s.bins[thread]);  // of this bin and those before it
  const int here = to;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int more = __shfl_sync(0xffffffffu, to, lane - (lane < d ? 0 : d));
    if (lane >= d) to += more;
  }
  if (lane == 31) s.before[warp] = to;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < BINS / 32 - 1; ++w)
    if (w < warp) to += s.before[w];
  s.bins[thread] = to - here;
  const Schedule schedule = MMA ? s.load.mma_schedule(p.N, p.HV, p.ctas) : s.load.schedule(p.N, p.HV, p.ctas);
  __syncthreads();
#pragma unroll 1
  for (int n = thread; n < p.N; n += BINS) {
    const int tokens = tokens_of(n), place = schedule == STATIC ? n : static_cast<int>(atomicAdd(&s.bins[bin_of(tokens)], 1u));
    p.plan->tiles()[place] = {static_cast<uint32_t>(n), p.border(n), tokens, POOL ? p.state_of(n) : 0};
  }
  if (thread == 0) p.plan->taken = 0, p.plan->schedule = schedule;
}

}  // namespace gdn
