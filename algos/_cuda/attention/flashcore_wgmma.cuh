// Attention forward, flashcore-v4 with wgmma: divided as in flashcore.cuh, for sizes that products limit, on sm_90a.
//
// wgmma multiplies 64 rows by a whole tile of keys, which it reads directly from shared memory: a tile is read once for 64
// rows, while mma.sync reads it once for 16 or 32, and no thread spends an instruction on that. So:
//
//   - ROWS / 64 warpgroups side by side, KEY_GROUPS times: each has 64 rows, and KEYS keys of every step. The keys are
//     also split over SPLITS CTAs, and all parts are merged as in flashcore.cuh (flashcore_parts.cuh).
//   - One thread of each group of keys issues its TMA loads, swizzled for wgmma, STAGES tiles ahead; barriers in shared
//     memory signal when a tile is full and when it is empty. Warpgroups only wait for each other there: while one
//     computes exps, another computes products. (A warp that only loads would be simpler, but
//     ptxas counts it as a whole warpgroup, and leaves the others 96 registers of 128.)
//   - d = 64: as many cycles of products as of exps (an SM: 4096 products and additions per cycle, 256 per score, against
//     16 exps), so both have to run at the same time: 4 warpgroups per SM, in one CTA or in several.
//     AHEAD: a warpgroup also issues the next scores before its own values' product, and computes its exps during that.
//   - One instruction for scale, base and maximum: exp2(fma(s, c, -m c)), with m c rounded once per row: all terms of the
//     sums have the same relative error. If that is large (m c beyond 256), exp2((s - m) c), as in flashcore.cuh.
//   - Every other instruction adds to the time, so: the sum of a row's probabilities is one more column of the
//     values' product, with values that are 1; maxima are taken three at a time, as integers; and there is no branch for
//     a maximum that did not rise: of a warp's 16 nearly always one does.
//   - The scores' registers become probabilities, and these the left operand of the values' product: both fragments have
//     the same layout. Values stay in the order of keys: wgmma reads them transposed.
//
// CAUSAL: a warpgroup computes the tiles that its rows see, and skips the others.
//
// Steps as in flashcore.cuh: 1 load, 2 scores, 3 online softmax, 4 product with V, 5 merge, 6 store. 1 to 4 are lambdas
// here, since AHEAD runs them in another order: 2 of step i before 4 of step i - 1.
//
// Grid, splits and owners as in flashcore.cuh. Provenance: FlashAttention-3 (arXiv 2407.08608) for products ahead of the
// exps. Written here.
#pragma once

#include "flashcore_parts.cuh"
#include "warpgroup.cuh"

namespace flashcore {

// The configuration (see algo.toml) of Path WGMMA, or with AHEAD WGMMA_AHEAD (flashcore_launch.cuh).
template <int ROWS_, int WARPS_, int KEYS_, int STAGES_, int SPLITS_, bool AHEAD_>
struct WideCut {
  static constexpr int ROWS = ROWS_, WARPS = WARPS_, KEYS = KEYS_, STAGES = STAGES_, SPLITS = SPLITS_;
  static constexpr bool AHEAD = AHEAD_;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int ROW_GROUPS = ROWS / 64, KEY_GROUPS = WARPS / 4 / ROW_GROUPS;
  static constexpr int STEP = KEYS * KEY_GROUPS;  // keys of a stage
  static_assert(ROW_GROUPS * 64 == ROWS && ROW_GROUPS * KEY_GROUPS * 4 == WARPS, "warpgroups tile rows and keys");
  static_assert(ROWS / SPLITS % 16 == 0 && ROWS % SPLITS == 0, "16 rows have one owner");
  static_assert(STAGES >= 2, "a tile is asked for while the one before it is in use");
  static_assert(KEYS == 64 || KEYS == 128, "the products of warpgroup.cuh");

  // Bytes of shared memory: queries, keys and values, ones, the parts of the ROWS / SPLITS rows that the CTA owns, barriers:
  // one for the queries, and for each tile of keys or values one for full and one for empty.
  static constexpr int QUERIES = ROWS * ROW, TILE = KEYS * ROW, TILES = STAGES * KEY_GROUPS;  // TILES of each
  static constexpr int PARTS = KEY_GROUPS * SPLITS, OWN = ROWS / SPLITS;
  static constexpr int ONES = 16 * ROW, ONES_AT = QUERIES + 2 * TILES * TILE, PARTS_AT = ONES_AT + ONES;
  static constexpr int BARRIERS_AT = PARTS_AT + (PARTS > 1 ? PARTS * OWN * (D + 2) * int(sizeof(float)) : 0);
  static constexpr int SHARED = BARRIERS_AT + (1 + 4 * TILES) * 8;

  // CTAs that should fit on an SM: four warpgroups of 128 registers, or three of 168.
  static constexpr int REGISTERS = KEYS / 2 + (AHEAD ? KEYS / 4 : 0) + D / 2 + 28;  // of a thread
  static constexpr int WARPS_OF_SM = REGISTERS <= 128 ? 16 : 12;
  static constexpr int most(int x, int y) { return x > y ? x : y; }
  static constexpr int least(int x, int y) { return x < y ? x : y; }
  static constexpr int RESIDENT = most(1, least(WARPS_OF_SM / WARPS, 228 * 1024 / (SHARED + 1024)));
};

#ifdef __CUDACC__

#if FLASHCORE_WGMMA

// wgmma's descriptor of a matrix in a swizzled tile: the address, 1024 bytes from eight rows to the next eight, the swizzle.
// By rows ("K-major", q and k) the next 16 columns are 32 bytes further; transposed ("MN-major", v) the next 16 rows are 2048.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address) {
  constexpr uint64_t EIGHT_ROWS = 1024 >> 4, SWIZZLE_128 = 1;
  return (address & 0x3ffff) >> 4 | EIGHT_ROWS << 16 | EIGHT_ROWS << 32 | SWIZZLE_128 << 62;
}
// Transposed, with columns from 64 on at `more`, after it.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address, uint32_t more) {
  return (matrix_at(address) & ~(uint64_t{0x3fff} << 16)) | static_cast<uint64_t>((more - address) >> 4) << 16;
}
// To add to a result of matrix_at; the second does not move `more`.
constexpr uint64_t NEXT_COLUMNS = 32 >> 4, NEXT_ROWS = (2048 >> 4) - (uint64_t{2048 >> 4} << 16);

// The greatest score of a row over all lanes that share it.
template <int N>
__device__ __forceinline__ float greatest(const float (&s)[N][4], int h) {
  float most[4];                                                      // chains of a quarter of the length
#pragma unroll
  for (int n = 0; n < 4; ++n) most[n] = fmaxf(s[n][2 * h], s[n][2 * h + 1]);
#pragma unroll
  for (int n = 4; n < N; ++n) most[n % 4] = fmaxf(most[n % 4], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
  return quad_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
}

// The same as integers, three at a time: half the instructions. The bits of floats compare like the floats unless both are
// negative: so the result is right if it is not negative, and it is negative if all scores are.
template <int N>
__device__ __forceinline__ int greatest_bits(const float (&s)[N][4], int h) {
  int most[2] = {__float_as_int(s[0][2 * h]), __float_as_int(s[0][2 * h + 1])};
#pragma unroll
  for (int n = 1; n < N; ++n)
    most[n % 2] = __vimax3_s32(most[n % 2], __float_as_int(s[n][2 * h]), __float_as_int(s[n][2 * h + 1]));
  int x = max(most[0], most[1]);
  x = max(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return max(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Scores -> probabilities, for the two rows that a lane has a part of. m: the greatest score of each so far; w: the factor for
// the sums before these scores.
template <int N>
__device__ __forceinline__ void to_probabilities(float (&s)[N][4], float (&m)[2], float (&w)[2]) {
  constexpr float LARGE = 256.f / EXPONENT;
  const int bits[2] = {greatest_bits(s, 0), greatest_bits(s, 1)};
  float top[2] = {__int_as_float(bits[0]), __int_as_float(bits[1])};
  if (any_lane(bits[0] < 0 || bits[1] < 0)) top[0] = greatest(s, 0), top[1] = greatest(s, 1);

  float from[2];
  bool large = false;                                                 // m c is so large that its rounding shows
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float most = fmaxf(m[h], top[h]);
    from[h] = raise_maximum(m[h], most, w[h]);
    large |= fabsf(from[h]) > LARGE;
  }
  large = any_lane(large);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float exponent = from[h] * -EXPONENT;                       // rounded once, for all of the row
    if (large) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) s[n][e] = weight(s[n][e], from[h]);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) s[n][e] = exp2_approx(fmaf(s[n][e], EXPONENT, exponent));
    }
  }
}

template <int N>
__device__ __forceinline__ void to_left_side(uint32_t (&p)[N / 2][4], const float (&s)[N][4]) {
#pragma unroll
  for (int c = 0; c < N / 2; ++c) to_left_side(p[c], s, c);
}

__device__ __forceinline__ void scale(float (&o)[D / 8][4], float (&sums)[4], const float (&w)[2]) {
  scale_row(o, 0, w[0]), scale_row(o, 1, w[1]);
  sums[0] *= w[0], sums[2] *= w[1];
}

#endif  // FLASHCORE_WGMMA

template <typename C, bool CAUSAL>
__global__ void __launch_bounds__(FLASHCORE_WGMMA ? C::THREADS : 32, FLASHCORE_WGMMA ? C::RESIDENT : 1)
flashcore_v4_wide(const __grid_constant__ Maps maps, const __grid_constant__ Problem p) {
#if FLASHCORE_WGMMA
  constexpr int SPLITS = C::SPLITS, KEYS = C::KEYS, STAGES = C::STAGES, GROUPS = C::KEY_GROUPS;
  if constexpr (SPLITS > 1) cluster_arrive_only();

  const int block = CAUSAL ? gridDim.z - 1 - blockIdx.z : blockIdx.y, head = CAUSAL ? blockIdx.y : blockIdx.z;
  const int first = block * C::ROWS, rank = SPLITS > 1 ? blockIdx.x : 0;
  const int seen = CAUSAL ? min(p.S, first + C::ROWS) : p.S;          // keys of this block of rows, and their steps
  const int steps = (seen + C::STEP - 1) / C::STEP, each = (steps + SPLITS - 1) / SPLITS;
  const int begin = rank * each, count = min(each, steps - begin);    // of this CTA; count may be 0 or less

  char* const memory = tile_memory();
  const uint32_t q_tile = shared_address(memory), k_tiles = q_tile + C::QUERIES, v_tiles = k_tiles + C::TILES * C::TILE;
  const uint32_t q_there = q_tile + C::BARRIERS_AT, k_there = q_there + 8, v_there = k_there + C::TILES * 8;
  const uint32_t k_free = v_there + C::TILES * 8, v_free = k_free + C::TILES * 8;
  const int lane = threadIdx.x % 32, warp = of_warp(threadIdx.x / 32);

  const int group = warp / (4 * C::ROW_GROUPS), my_rows = warp % (4 * C::ROW_GROUPS) * 16, g = lane / 4, t = lane % 4;
  const bool loads = my_rows == C::ROWS - 64 && lane == 0;            // in a warpgroup that sees all keys that the CTA sees

  // --- 1. Load: Q, and the first STAGES tiles of K and V of each group of keys ---
  const auto tile = [&](int i) { return i % STAGES * GROUPS + group; };
  // Loads the group's tile of keys or values for step i, if there is one; called by the thread that loads.
  const auto load = [&](const TensorMap& map, int i, uint32_t tiles, uint32_t there, uint32_t free) {
    if (loads && i < count) {
      const int at = tile(i);
      if (i >= STAGES) mbarrier_wait(free + at * 8, (i / STAGES - 1) & 1);
      mbarrier_arrive_expect_tx(there + at * 8, C::TILE);
      tma_load_tile(tiles + at * C::TILE, map, (begin + i) * C::STEP + group * KEYS, head, there + at * 8);
    }
  };
  const auto load_k = [&](int i) { load(maps.k, i, k_tiles, k_there, k_free); };
  const auto load_v = [&](int i) { load(maps.v, i, v_tiles, v_there, v_free); };
  if (loads) {
    if (group == 0) prefetch_tensor_map(maps.q);
    prefetch_tensor_map(maps.k), prefetch_tensor_map(maps.v);
    if (group == 0) mbarrier_init(q_there, 1);
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(k_there + tile(i) * 8, 1), mbarrier_init(k_free + tile(i) * 8, 4 * C::ROW_GROUPS);
      mbarrier_init(v_there + tile(i) * 8, 1), mbarrier_init(v_free + tile(i) * 8, 4 * C::ROW_GROUPS);
    }
    mbarrier_init_fence();
    if (group == 0 && count > 0) {
      mbarrier_arrive_expect_tx(q_there, C::QUERIES);
      tma_load_tile(q_tile, maps.q, first, head, q_there);
    }
#pragma unroll
    for (int i = 0; i < STAGES; ++i) load_k(i), load_v(i);
  }
  if (threadIdx.x < C::ONES / 16) {
    constexpr uint32_t TWO = 0x3c003c00;                              // 1 and 1
    reinterpret_cast<uint4*>(memory + C::ONES_AT)[threadIdx.x] = {TWO, TWO, TWO, TWO};
    fence_proxy_async();
  }
  __syncthreads();                                                    // the barriers and the ones are initialised

  const int start = begin * C::STEP + group * KEYS, row = first + my_rows;    // the first key, the warp's first row
  const int limit = CAUSAL ? min(p.S, first + my_rows / 64 * 64 + 64) : p.S;  // keys that the warpgroup's rows see
  const int mine = min(count, (limit - start + C::STEP - 1) / C::STEP);       // steps of it; 0 or less: none
  const auto wait_tile = [&](uint32_t there, int i) { mbarrier_wait(there + tile(i) * 8, i / STAGES & 1); };
  const auto free_tile = [&](uint32_t free, int i) {
    if (lane == 0) mbarrier_arrive(free + tile(i) * 8);
  };

  float s[KEYS / 8][4];
  uint32_t e[KEYS / 16][4];                                           // the probabilities, as left operand
  float o[D / 8][4], sums[4] = {0.f, 0.f, 0.f, 0.f};                  // of a row in [0] and in [1], of the other in [2], [3]
  float m[2] = {-INFINITY, -INFINITY}, w[2];
  clear(o);

  // --- 2. Scores: issue S = Q K^T; `hide`, once they are computed, masks keys that a row does not see ---
  const auto scores = [&](int i) {
    const uint64_t q = matrix_at(q_tile + my_rows / 64 * 64 * ROW), k = matrix_at(k_tiles + tile(i) * C::TILE);
    warpgroup_arrive();
#pragma unroll
    for (int c = 0; c < D / 16; ++c) multiply(s, q + c * NEXT_COLUMNS, k + c * NEXT_COLUMNS, c > 0);
    warpgroup_commit();
  };
  const auto hide = [&](int i) {
    const int key = start + i * C::STEP;
    if (key + KEYS <= p.S && !(CAUSAL && key + KEYS > row + 1)) return;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int column = key + n * 8 + 2 * t + x % 2;
        if (column >= p.S || (CAUSAL && column > row + x / 2 * 8 + g)) s[n][x] = -INFINITY;
      }
  };
  // --- 4. Product: issue O += P V, and the sums of P ---
  const auto output = [&](int i) {
    const uint64_t v = matrix_at(v_tiles + tile(i) * C::TILE, q_tile + C::ONES_AT);
    warpgroup_fence_operand(o), warpgroup_fence_operand(sums), warpgroup_fence_operand(e);
    warpgroup_arrive();
#pragma unroll
    for (int c = 0; c < KEYS / 16; ++c) multiply_add(o, sums, e[c], v + c * NEXT_ROWS);
    warpgroup_commit();
  };

  // --- The steps in order; 3 is to_probabilities, scale and to_left_side ---
  // The tile that replaces that of step i - 1 is loaded during step i: other warpgroups may be one step behind.
  if (count > 0) mbarrier_wait(q_there, 0);
  if constexpr (C::AHEAD) {
    if (mine > 0) {
      wait_tile(k_there, 0);
      scores(0);
      warpgroup_wait<0>();
      warpgroup_fence_operand(s);
      free_tile(k_free, 0);
      hide(0);
      to_probabilities(s, m, w);
      to_left_side(e, s);
#pragma unroll 1
      for (int i = 1; i < mine; ++i) {
        wait_tile(k_there, i);
        wait_tile(v_there, i - 1);
        scores(i);
        output(i - 1);
        load_k(i - 1 + STAGES);
        if (i > 1) load_v(i - 2 + STAGES);
        warpgroup_wait<1>();
        warpgroup_fence_operand(s);
        free_tile(k_free, i);
        hide(i);
        to_probabilities(s, m, w);
        warpgroup_wait<0>();
        warpgroup_fence_operand(o), warpgroup_fence_operand(sums), warpgroup_fence_operand(e);
        free_tile(v_free, i - 1);
        scale(o, sums, w);
        to_left_side(e, s);
      }
      wait_tile(v_there, mine - 1);
      output(mine - 1);
      if (mine > 1) load_v(mine - 2 + STAGES);
      warpgroup_wait<0>();
      warpgroup_fence_operand(o), warpgroup_fence_operand(sums);
      free_tile(v_free, mine - 1);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < mine; ++i) {
      wait_tile(k_there, i);
      scores(i);
      if (i > 0) load_k(i - 1 + STAGES);
      warpgroup_wait<0>();
      warpgroup_fence_operand(s);
      free_tile(k_free, i);
      hide(i);
      to_probabilities(s, m, w);
      scale(o, sums, w);
      to_left_side(e, s);
      wait_tile(v_there, i);
      output(i);
      if (i > 0) load_v(i - 1 + STAGES);
      warpgroup_wait<0>();
      warpgroup_fence_operand(o), warpgroup_fence_operand(sums);
      free_tile(v_free, i);
    }
  }
#pragma unroll 1
  for (int i = max(mine, 0); i < count; ++i) {                        // tiles that only other warpgroups see
    if (i > 0) load_k(i - 1 + STAGES), load_v(i - 1 + STAGES);
    wait_tile(k_there, i);
    free_tile(k_free, i);
    wait_tile(v_there, i);
    free_tile(v_free, i);
  }

  // --- 5. Merge, 6. store ---
  const float l[2] = {sums[0], sums[2]};                              // [1] and [3] were not scaled

  __half* const to = p.output + (static_cast<int64_t>(head) * p.S + first) * D;
  if constexpr (C::PARTS == 1) {
    warpgroup_sync(1 + warp / 4);                                     // all its products have read the queries
    write_out(memory + my_rows * ROW, o, l, to + my_rows * D, p.S - first - my_rows);
  } else {
    const Parts<C::PARTS, C::OWN> parts(memory + C::PARTS_AT);
    if constexpr (SPLITS > 1) cluster_wait();                         // all are running
    parts.template hand_over<SPLITS>(rank * GROUPS + group, my_rows, o, m, l);
    if constexpr (SPLITS > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
    parts.template write_out<C::THREADS>(to + rank * C::OWN * D, p.S - first - rank * C::OWN);
  }
#endif  // FLASHCORE_WGMMA
}

#endif  // __CUDACC__

}  // namespace flashcore
