// Attention forward, flashcore-v4 for short sequences: all of a block's keys and values are loaded at once, by TMA.
//
// flashcore.cuh issues 33 copies of 16 bytes in each thread, and has barriers of the whole CTA between its steps. Here a
// thread issues a whole tile at a time, and every tile has its own shared memory and a barrier that is used once:
// nothing is overwritten, no barrier is needed to free a tile, and a warp waits only for its own tiles.
//
// The products are those of flashcore.cuh, by mma.sync: TMA's swizzle is the one that ldmatrix reads. The warps
// are ROWS / 16 groups of rows x GROUPS of keys; group g has tiles g, g + GROUPS, ... of KEYS keys. So a CTA serves up to
// KEYS * GROUPS * STAGES keys; for more, the host takes another kernel.
//
// CAUSAL: a CTA loads the keys that its rows see; a warp skips tiles that none of its rows see.
//
// Steps as in flashcore.cuh: 1 load, 2 scores, 3 online softmax, 4 product with V, 5 merge, 6 store.
//
// Grid as in flashcore.cuh, without splits. Needs sm_90, not sm_90a. Written here.
#pragma once

#include "flashcore_parts.cuh"
#include "warpgroup.cuh"

namespace flashcore {

// The configuration (see algo.toml) of Path AT_ONCE (flashcore_launch.cuh).
template <int ROWS_, int WARPS_, int KEYS_, int STAGES_>
struct OnceCut {
  static constexpr int ROWS = ROWS_, WARPS = WARPS_, KEYS = KEYS_, STAGES = STAGES_, SPLITS = 1;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int ROW_GROUPS = ROWS / 16, GROUPS = WARPS / ROW_GROUPS, TILES = GROUPS * STAGES;
  static constexpr int MOST_KEYS = TILES * KEYS;
  static_assert(ROW_GROUPS * 16 == ROWS && ROW_GROUPS * GROUPS == WARPS && GROUPS > 1, "warps tile rows and keys");
  static_assert(KEYS % 16 == 0 && KEYS <= 256, "whole matrices, and what TMA takes at a time");

  // Bytes of shared memory: queries, keys and values, the parts to merge, barriers for the queries and for each tile.
  static constexpr int QUERIES = ROWS * ROW, TILE = KEYS * ROW;
  static constexpr int PARTS_AT = QUERIES + 2 * TILES * TILE;
  static constexpr int BARRIERS_AT = PARTS_AT + GROUPS * ROWS * (D + 2) * int(sizeof(float));
  static constexpr int SHARED = BARRIERS_AT + (1 + 2 * TILES) * 8;
  static_assert(TILE % 1024 == 0, "tiles begin where the swizzle begins anew");
};

#ifdef __CUDACC__

template <typename C, bool CAUSAL>
__global__ void __launch_bounds__(C::THREADS, 1)
flashcore_v4_once(const __grid_constant__ Maps maps, const __grid_constant__ Problem p) {
#if FLASHCORE_COPY_ENGINE
  constexpr int KEYS = C::KEYS, GROUPS = C::GROUPS;
  const int block = CAUSAL ? gridDim.z - 1 - blockIdx.z : blockIdx.y, head = CAUSAL ? blockIdx.y : blockIdx.z;
  const int first = block * C::ROWS;
  const int seen = CAUSAL ? min(p.S, first + C::ROWS) : p.S, tiles = (seen + KEYS - 1) / KEYS;

  char* const memory = tile_memory();
  const uint32_t q_tile = shared_address(memory), k_tiles = q_tile + C::QUERIES, v_tiles = k_tiles + C::TILES * C::TILE;
  const uint32_t q_there = q_tile + C::BARRIERS_AT, k_there = q_there + 8, v_there = k_there + C::TILES * 8;
  const int lane = threadIdx.x % 32, warp = of_warp(threadIdx.x / 32);

  // --- 1. Load: all of Q, K and V that the block needs ---
  // Each warp issues its share of the tiles, the last one the queries.
  if (lane == 0) {
    const auto load = [&](uint32_t to, const TensorMap& map, int row, int bytes, uint32_t there) {
      mbarrier_arrive_expect_tx(there, bytes);
      tma_load_tile(to, map, row, head, there);
    };
    if (warp == C::WARPS - 1) prefetch_tensor_map(maps.q), mbarrier_init(q_there, 1);
    if (warp < tiles) prefetch_tensor_map(maps.k), prefetch_tensor_map(maps.v);
    for (int i = warp; i < tiles; i += C::WARPS) mbarrier_init(k_there + i * 8, 1), mbarrier_init(v_there + i * 8, 1);
    mbarrier_init_fence();
    if (warp == C::WARPS - 1) load(q_tile, maps.q, first, C::QUERIES, q_there);
    for (int i = warp; i < tiles; i += C::WARPS) {
      load(k_tiles + i * C::TILE, maps.k, i * KEYS, C::TILE, k_there + i * 8);
      load(v_tiles + i * C::TILE, maps.v, i * KEYS, C::TILE, v_there + i * 8);
    }
  }
  __syncthreads();                                                    // the barriers are initialised

  const int my_rows = warp % C::ROW_GROUPS * 16, group = warp / C::ROW_GROUPS, g = lane / 4, t = lane % 4;
  const int row = first + my_rows, limit = CAUSAL ? min(p.S, row + 16) : p.S;  // the warp's first row; keys that any of its rows sees
  // A lane's address for 16 x 16 elements, as in flashcore.cuh.
  const int r = lane % 8, half = lane / 8 % 2, other = lane / 16;
  const uint32_t down = (half * 8 + r) * ROW + ((other ^ r) << 4);
  const uint32_t across = (other * 8 + r) * ROW + ((half ^ r) << 4);

  uint32_t q[D / 16][4];
  float o[D / 8][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f};  // l: this lane's part of a row's sum
  clear(o);
  mbarrier_wait(q_there, 0);
#pragma unroll
  for (int c = 0; c < D / 16; ++c) load_matrices(q[c], (q_tile + my_rows * ROW + down) ^ (c << 5));

#pragma unroll
  for (int i = 0; i < C::STAGES; ++i) {
    const int tile = i * GROUPS + group, key = tile * KEYS;
    if (key >= limit) break;
    const uint32_t k_tile = k_tiles + tile * C::TILE + across, v_tile = v_tiles + tile * C::TILE + down;

    // --- 2. Scores: S = Q K^T ---
    float s[KEYS / 8][4];
    clear(s);
    mbarrier_wait(k_there + tile * 8, 0);
#pragma unroll
    for (int c = 0; c < D / 16; ++c)
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        uint32_t k[4];
        load_matrices(k, (k_tile ^ (c << 5)) + n * 16 * ROW);
        multiply_add(s[2 * n], q[c], k[0], k[1]);
        multiply_add(s[2 * n + 1], q[c], k[2], k[3]);
      }

    if (key + KEYS > p.S || (CAUSAL && key + KEYS > row + 1)) {       // some of the warp's rows do not see all of these
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int x = key + n * 8 + 2 * t + e % 2, y = row + e / 2 * 8 + g;
          if (x >= p.S || (CAUSAL && x > y)) s[n][e] = -INFINITY;
        }
    }

    // --- 3. Online softmax ---
    online_softmax(s, m, l, o);

    // --- 4. Product: O += P V ---
    mbarrier_wait(v_there + tile * 8, 0);
#pragma unroll
    for (int c = 0; c < KEYS / 16; ++c) {
      uint32_t e[4];                                                  // the probabilities, as left operand
      to_left_side(e, s, c);
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t v[4];
        load_transposed(v, (v_tile ^ (n << 5)) + c * 16 * ROW);
        multiply_add(o[2 * n], e, v[0], v[1]);
        multiply_add(o[2 * n + 1], e, v[2], v[3]);
      }
    }
  }

  // --- 5. Merge: a row's sum over its four lanes, then the parts of GROUPS warps; 6. store ---
#pragma unroll
  for (int h = 0; h < 2; ++h) l[h] = quad_sum(l[h]);

  const Parts<GROUPS, C::ROWS> parts(memory + C::PARTS_AT);
  parts.template hand_over<1>(group, my_rows, o, m, l);
  __syncthreads();
  parts.template write_out<C::THREADS>(p.output + (static_cast<int64_t>(head) * p.S + first) * D, p.S - first);
#endif  // FLASHCORE_COPY_ENGINE
}

#endif  // __CUDACC__

}  // namespace flashcore
