// The intra-chunk kernel for sm_90a: K comes by TMA, K K^T by wgmma, and TMA stores T - I and the gates, 8 KB per chunk
// and value head. M is computed in inter_chunk_sm90.cuh. Steps: intra_chunk_steps.cuh; letters: chunk.cuh.
//
// With more chunks than CTAs can be resident, a CTA goes through several: during the inverse of a chunk, the next chunk's K
// replaces this one's, which has been multiplied, and its raw gates are loaded to registers.
#pragma once

#include "intra_chunk_steps.cuh"
#include "row_products.cuh"

namespace gdn {

// Warps 0 to 3 compute K K^T; of the others one is the producer of K, and two compute the gates of a value head each.
constexpr int K_PRODUCER = 5, GATES = 6;

#if FLASHCORE_WGMMA

// 16 x 16 numbers of 16 bits to shared memory: `in` gives the address of a row's piece.
struct StoreMatrix {
  template <typename In>
  static __device__ __forceinline__ void words(char* to, const Words& w, const In& in, int lane) {
    store_matrices(shared_address(to + in(lane % 16, lane / 16)), w);
  }
};

// Step 1: one lane issues the TMA load of a chunk's K.
__device__ __forceinline__ void load_k(const char* to, const CUtensorMap& keys, const ChunkTile& tile, const uint64_t& barrier) {
  const uint32_t full = shared_address(&barrier);
  mbarrier_arrive_expect_tx(full, QK_TILE);
  tma_load_box(shared_address(to), keys, tile.begin, 0, tile.h, full);
}

// Step 1: zeros in K from the end of the sequence on, since rows of the next one may be NaN. Called by all threads.
__device__ __forceinline__ void clear_k(IntraShared& s, int count, int thread) {
  const int pieces = (CHUNK - count) * 8;
  for (int i = thread; i < 2 * pieces; i += INTRA_THREADS)
    *reinterpret_cast<uint4*>(s.k + i / pieces * (QK_TILE / 2) + count * 128 + i % pieces * 16) = {0, 0, 0, 0};
  fence_proxy_async();
  __syncthreads();
}

// Step 3: K K^T of normalised keys, by the four warps that have it; the squares of their norms are its diagonal.
template <typename Norms>
__device__ __forceinline__ void normalise(Norms& s, const Prefill& p, float (&d)[8][4], int row, int lane) {
  const int g = lane / 4;
  float squares[2] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (j == row) squares[0] = g % 2 ? d[2 * j][1] : d[2 * j][0], squares[1] = g % 2 ? d[2 * j + 1][3] : d[2 * j + 1][2];
  if (lane % 4 == g / 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float key = p.inverse_norm(squares[h]);
      s.key[row * SIDE + g + 8 * h] = key, s.query[row * SIDE + g + 8 * h] = -__log2f(key);
    }
  }
  named_barrier_sync<128>(3);
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (j <= row) scale_both(reinterpret_cast<Block&>(d[2 * j]), s.key + row * SIDE, s.key + j * SIDE, lane);
}

#endif  // FLASHCORE_WGMMA

// `keys`: a map of k for tma_load_box. SORTS: one more CTA, the first in x, sorts the sequences by length (tile_scheduler.cuh).
template <bool SORTS>
__global__ void __launch_bounds__(INTRA_THREADS, INTRA_CTAS)
gdn_prefill_intra_chunk_sm90(const __grid_constant__ Prefill p, const __grid_constant__ CUtensorMap keys,
                             const __grid_constant__ IntraSchedule schedule) {
#if FLASHCORE_WGMMA
  IntraShared& s = *reinterpret_cast<IntraShared*>(tile_memory());
  const int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  if (SORTS && blockIdx.x == 0) {
    static_assert(BINS == INTRA_THREADS && sizeof(SortShared) <= sizeof(IntraShared));
    if (blockIdx.y == 0 && blockIdx.z == 0) sort_tiles<false>(p, reinterpret_cast<SortShared&>(s));
    return;
  }
  const ValueHeads heads(p);
  const int gated = warp - GATES;  // which of two heads' gates this warp computes; less than 0: none
  const bool gating = gated >= 0 && heads.exists(gated);
  if (gating && schedule.each == 0) {
    const int hv = blockIdx.y * heads.group + heads.in_group(gated);
    prefetch(p.A_log + hv), prefetch(p.bias_at(hv));
  }
  // 1. Find the chunk, load K
  const ChunkTile own = first_chunk(p, schedule, static_cast<int>(blockIdx.x) - SORTS, lane);
  if (own.numbers == 0) return;
  if (warp == K_PRODUCER && elect_one()) {
    mbarrier_init(shared_address(&s.full), 1);
    mbarrier_init_fence();
    load_k(s.k, keys, own, s.full);
    s.tiles[0] = own;
  }
  RawGates raw;
  if (gating) raw.load_tokens(p, own, heads.head(own, gated), lane);
#pragma unroll 1
  for (uint32_t turn = 0;; turn ^= 1) {
    const int thread = thread_again(), warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
    const int half = warp / 4;                            // warpgroup
    const int row = half ? 7 - warp : warp;               // of blocks of T
    const int gated = warp - GATES;
    const bool gating = gated >= 0 && heads.exists(gated);
    const ChunkTile &tile = s.tiles[turn], &next = s.tiles[turn ^ 1];
    __syncthreads();  // the tile is ready, and no thread uses the previous one
    const int count = tile.count();
    // 2. Gates
    if (gating) {
      raw.load_head(p, heads.head(tile, gated));  // not earlier, to save registers
      compute_gates(p, s.gates[gated], raw, count, lane);
    }
    // 1. Find the next chunk
    if (warp == K_PRODUCER) {
      const ChunkTile found = next_chunk(tile, p, schedule, lane);
      if (elect_one()) s.tiles[turn ^ 1] = found;
    }
    if (half == 0 || count < CHUNK) mbarrier_wait(shared_address(&s.full), turn);
    if (count < CHUNK) clear_k(s, count, thread);
    // 3. K K^T by the first warpgroup; each warp stores its row of blocks up to the diagonal
    if (half == 0) {
      float d[8][4];
      const KMajor k(shared_address(s.k));
      begin_row_products(d, k, k);
      warpgroup_wait<0>();
      warpgroup_fence_operand(d);
      if constexpr (POOL) normalise(s, p, d, row, lane);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j <= row) store_products(s, reinterpret_cast<const Block&>(d[2 * j]), true, row, j, lane);
    }

#pragma unroll 1
    for (int first = 0; heads.exists(first); first += PAIR) {
      // 2. Gates of the next two value heads
      if (first > 0) {
        __syncthreads();
        if (gated >= 0 && heads.exists(first + gated)) {
          raw.load_head(p, heads.head(tile, first + gated)), raw.load_tokens(p, tile, heads.head(tile, first + gated), lane);
          compute_gates(p, s.gates[gated], raw, tile.count(), lane);
        }
      }
      if (thread_again() % 128 == 0) bulk_stores_read();
      __syncthreads();  // the products and the gates are ready, and no thread reads the tiles or T any more
      // Once more for compute-sanitizer, whose racecheck else reports what this barrier orders (docs/profiling.md).
      if constexpr (ARRIVALS > 1) __syncthreads();
      // 1. Load the next chunk's K and gates, during 4 and 5
      if (next.numbers > 0) {
        if (warp == K_PRODUCER && first == 0 && elect_one()) load_k(s.next_k, keys, next, s.full);
        if (gating && !heads.exists(first + PAIR)) raw.load_tokens(p, next, heads.head(next, gated), lane);
      }
      const bool both = heads.exists(first + 1), makes_T = both || half == 0;
      const int m = both ? half : 0, barrier = 1 + half, lane = thread_again() % 32;
      char* const T = s.T[m];
      // 4. Inverse
      if (makes_T) {
        invert_row<StoreMatrix>(T, s.operands[m], SharedRow{s}, s.gates[m], row, barrier, lane);
        if (row == 0) {  // it has no other work there
          store_gates(T, s.gates[m], s, thread_again() % 32, false);
          if (p.bounds) store_bound(heads.bound(tile, first + m), s.gates[m], s, thread_again() % 32);
        }
      }
      // 5. Store T - I and the gates
      if (makes_T) {
        fence_proxy_async();
        named_barrier_sync<128>(barrier);
        if (thread_again() % 128 == 0) bulk_store(heads.result(tile, first + m, MATRIX), shared_address(T), MATRIX);
      }
    }
    if (next.numbers == 0) break;
  }
  if (thread_again() % 128 == 0) bulk_stores_read();
#endif
}

}  // namespace gdn
