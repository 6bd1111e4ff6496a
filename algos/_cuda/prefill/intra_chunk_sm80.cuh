// The intra-chunk kernel for GPUs without wgmma: K and Q come by cp.async, products by mma.sync, and M is computed here: 16
// KB per chunk and value head. A CTA has one chunk. Steps: intra_chunk_steps.cuh; letters: chunk.cuh.
#pragma once

#include "intra_chunk_steps.cuh"

namespace gdn {

// 16 x 16 numbers of 16 bits to shared memory: `in` gives the address of a row's piece.
struct StoreByLane {
  template <typename In>
  static __device__ __forceinline__ void words(char* to, const Words& w, const In& in, int lane) {
#pragma unroll
    for (int c = 0; c < 4; ++c)
      *reinterpret_cast<uint32_t*>(to + in(lane / 4 + c % 2 * 8, c / 2) + lane % 4 * 4) = w[c];
  }
};

// Step 1: K and Q of the chunk, zeros from the end of the sequence on.
__device__ __forceinline__ void load_k_and_q(const Prefill& p, const IntraShared& s, const ChunkTile& tile, int thread) {
  const int count = tile.count(), token = thread / QK_PIECES, piece = thread % QK_PIECES;
  const int64_t stride = p.qk_stride();
  const int64_t at = (int64_t{tile.begin} + token) * stride + tile.h * HEAD_DIM + piece * 8;
  const int64_t step = INTRA_THREADS / QK_PIECES * stride;
  const uint32_t k_tile = shared_address(s.k), to = k_tile + in_tile<QK_PIECES>(token, piece);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool inside = token + i * (INTRA_THREADS / QK_PIECES) < count;
    copy16(to + i * INTRA_THREADS * 16, p.k + at + i * step, inside);
    copy16(to + QK_TILE + i * INTRA_THREADS * 16, p.q + at + i * step, inside);
  }
  commit_copies();
}

// Step 3. d = X K^T: X 16 rows of a tile from `left` on, K the first BLOCKS blocks of 16 rows of the other.
template <int BLOCKS>
__device__ __forceinline__ void products(float (&d)[4][2][4], uint32_t left, uint32_t right, int lane) {
  left += in_tile<QK_PIECES>(lane % 16, lane / 16), right += in_tile<QK_PIECES>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll 4
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    uint32_t x[4];
    load_matrices(x, left ^ step * 32);
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      uint32_t y[4];  // both n-tiles of 8 tokens
      load_matrices(y, (right ^ step * 32) + j * SIDE * HEAD_DIM * 2);
      multiply_tokens<Token>(d[j][0], x, y[0], y[1]);
      multiply_tokens<Token>(d[j][1], x, y[2], y[3]);
    }
  }
}
// Step 3: row ROW of K K^T (`keys`) or Q K^T by a warp, up to the diagonal.
template <int ROW>
__device__ __forceinline__ void compute_products(IntraShared& s, bool keys, uint32_t left, uint32_t right, int lane) {
  float d[4][2][4] = {};
  products<ROW + 1>(d, left, right, lane);
#pragma unroll
  for (int j = 0; j <= ROW; ++j) {
    if constexpr (POOL) scale_both(d[j], (keys ? s.key : s.query) + ROW * SIDE, s.key + j * SIDE, lane);
    store_products(s, d[j], keys, ROW, j, lane);
  }
}
// Step 3: 1 / |x| of all rows of K and Q, two threads for each.
__device__ __forceinline__ void compute_norms(IntraShared& s, const Prefill& p, int thread) {
  const int row = thread / 2 % CHUNK, queries = thread / 128;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < QK_PIECES / 2; ++i)
    sum = add_squares(sum, *reinterpret_cast<const uint4*>(s.k + queries * QK_TILE + in_tile<QK_PIECES>(row, i * 2 + thread % 2)));
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (thread % 2 == 0) (queries ? s.query : s.key)[row] = p.inverse_norm(sum);
}

// Step 7: row i of M.
__device__ __forceinline__ void compute_M_row(char* M, const IntraShared& s, const Gates& gates, float scale, int i, int lane) {
  const int row = i * SIDE + lane / 4;
  float by[2] = {scale, scale};
  Block x;
  load_products(x, s.q_products[up_to(i, i)], lane);
  weigh_diagonal(x, gates, by, i, 0, lane);
  store_block<StoreByLane>(M, x, i, i, lane);
  by[0] *= gates.left[row], by[1] *= gates.left[row + 8];
#pragma unroll
  for (int j = 0; j < 3; ++j)
    if (j < i) {
      load_products(x, s.q_products[up_to(i, j)], lane);
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int c = 0; c < 4; ++c) x[e][c] *= by[c / 2];
      scale_columns(x, gates.right[i - 1] + j * SIDE, lane);
      store_block<StoreByLane>(M, x, i, j, lane);
    }
#pragma unroll
  for (int j = 1; j < 4; ++j)
    if (j > i) store_zeros(M, i, j, lane);
}

// Step 5: T, M or both from shared to global memory, when the four warps of a group have computed them.
__device__ __forceinline__ void store_results(char* to, const Prepared& results, bool T, bool M, int barrier, int thread) {
  named_barrier_sync<128>(barrier);
  uint4* const all = reinterpret_cast<uint4*>(to);
  const uint4* const from = reinterpret_cast<const uint4*>(&results);
#pragma unroll
  for (int i = thread; i < MATRIX / 16; i += 128) {
    if (T) all[i] = from[i];
    if (M) all[i + MATRIX / 16] = from[i + MATRIX / 16];
  }
}

// The tensor map is unused: both kernels have the same arguments. SORTS: as in intra_chunk_sm90.cuh.
template <bool SORTS>
__global__ void __launch_bounds__(INTRA_THREADS, INTRA_CTAS)
gdn_prefill_intra_chunk_sm80(const __grid_constant__ Prefill p, const __grid_constant__ CUtensorMap,
                             const __grid_constant__ IntraSchedule schedule) {
  IntraShared& s = *reinterpret_cast<IntraShared*>(shared_memory());
  const int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  if (SORTS && blockIdx.x == 0) {
    if (blockIdx.y == 0 && blockIdx.z == 0) sort_tiles<true>(p, reinterpret_cast<SortShared&>(s));
    return;
  }
  const ValueHeads heads(p);
  // Which of two heads' gates a warp computes; less than 0: none.
  const auto gates_of_warp = [](int warp) { return warp == 0 ? 0 : warp == 7 ? 1 : -1; };
  const int gated = gates_of_warp(warp);
  const bool gating = gated >= 0 && heads.exists(gated);
  if (gating && schedule.each == 0) {
    const int hv = blockIdx.y * heads.group + heads.in_group(gated);
    prefetch(p.A_log + hv), prefetch(p.bias_at(hv));
  }
  // 1. Find the chunk, load K and Q
  const ChunkTile tile = first_chunk(p, schedule, static_cast<int>(blockIdx.x) - SORTS, lane);
  if (tile.numbers == 0) return;
  RawGates raw;
  if (gating) raw.load_tokens(p, tile, heads.head(tile, gated), lane);
  if (gating) raw.load_head(p, heads.head(tile, gated));
  {
    // computed again, to keep them out of registers before
    const int thread = thread_again(), warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
    const int half = warp / 4;                            // group of warps
    const int row = half ? 7 - warp : warp;               // of blocks of T
    const int gated = gates_of_warp(warp);
    const bool gating = gated >= 0 && heads.exists(gated);
    load_k_and_q(p, s, tile, thread);
    // 2. Gates
    if (gating) compute_gates(p, s.gates[gated], raw, tile.count(), lane);
    wait_for_copies<0>();
    __syncthreads();
    if constexpr (POOL) {
      compute_norms(s, p, thread);
      __syncthreads();
    }
    // 3. K K^T by the first four warps, Q K^T by the others
    const uint32_t k_tile = shared_address(s.k), rows = k_tile + half * QK_TILE + row * SIDE * HEAD_DIM * 2;
    if (row == 0) compute_products<0>(s, half == 0, rows, k_tile, lane);
    if (row == 1) compute_products<1>(s, half == 0, rows, k_tile, lane);
    if (row == 2) compute_products<2>(s, half == 0, rows, k_tile, lane);
    if (row == 3) compute_products<3>(s, half == 0, rows, k_tile, lane);

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
      __syncthreads();  // the products and the gates are ready, and no thread reads the tiles or T any more
      const bool both = heads.exists(first + 1), makes_T = both || half == 0, makes_M = both || half == 1;
      const int m = both ? half : 0, barrier = 1 + half, lane = thread_again() % 32;
      char* const T = s.results[m].T;
      // 4. Inverse
      if (makes_T) {
        invert_row<StoreByLane>(T, s.results[both ? m : 1].M, SharedRow{s}, s.gates[m], row, barrier, lane);
        if (row == 0) store_gates(T, s.gates[m], s, thread_again() % 32, true);  // it has no other work there
      }
      // 7. M
      if (both) named_barrier_sync<128>(barrier);  // M overwrites the operands
      if (makes_M) compute_M_row(s.results[m].M, s, s.gates[m], p.scale, 3 - row, lane);
      // 5. Store
      store_results(heads.result(tile, first + m, sizeof(Prepared)), s.results[m], makes_T, makes_M, barrier, thread % 128);
    }
  }
}

}  // namespace gdn
