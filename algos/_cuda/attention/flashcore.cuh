// Attention forward, flashcore-v4: flashcore-v3's arithmetic, divided so that a small problem reaches all SMs.
//
// At (1, 8, 512, 64) 64 rows per CTA are 64 CTAs for 132 SMs, and each goes through 512 keys: the limit is not the work, a
// microsecond if it were spread evenly, but the longest chain of waits. So rows, keys and warps are divided separately:
//
//   - The keys of a block of rows are split over SPLITS CTAs, a thread block cluster. Within a CTA the warps are
//     ROW_GROUPS x KEY_GROUPS: each has 16 * TILES rows and KEYS keys of every step. So a block of rows has
//     SPLITS * KEY_GROUPS partial results (m, l, o), each complete for its keys.
//   - They are merged in the same launch. Each CTA of the cluster owns ROWS / SPLITS of the rows; every warp writes its
//     part of them into the owner's shared memory, and after one barrier the owner merges them:
//         M = max m_i,   w_i = exp2((m_i - M) c),   output = sum w_i o_i / sum w_i l_i
//     Nothing goes through global memory. The barrier's first half is at the start of the kernel: a CTA's shared memory
//     may be written once it runs, and at the end all have long been running.
//   - The loads of all STAGES of keys and of values are issued before any wait, each as its own group: with enough
//     stages a CTA needs a single round trip to memory, and the first product starts when the first keys arrive.
//   - p = exp2((s - m) c), c = log2(e) / sqrt(D): one multiplication for scale and base. Not fma(s, c, -m c):
//     with s beyond 2^26 the rounding of m c alone would change the exponent by several units, and at the ends of f16
//     (scores up to 2^38) give infinity. s - m is exactly 0 at the maximum, whatever its size. The additional
//     multiplication is hidden by ex2, of which an SM does 16 per cycle.
//   - A warp with TILES = 2 uses each matrix of keys or values twice: half the traffic from shared memory, which with
//     one row tile takes as long as the products.
//
// At (1, 8, 512, 64) on an H200, L2 cold: est. 4.0 to 4.8 us, causal est. 3.8 to 4.6; 5.86 and 5.92 measured (flashcore_once.cuh: 4.91, 5.15).
//
// CAUSAL: row i sees keys 0 .. i. Only the keys that a block's rows see are split, a warp skips tiles that none of its
// rows see, and the blocks with most keys start first.
//
// Steps, as in docs/kernels/flashcore.md: 1 load, 2 scores, 3 online softmax, 4 product with V, 5 merge, 6 store.
//
// Grid: x = split (the cluster's dimension), y = block of rows, z = head; CAUSAL: y = head, z = block, the last first.
// Before sm_90 there are no clusters: the same code with SPLITS = 1.
// Provenance: FlashAttention-2 (arXiv 2307.08691); split keys as in Flash-Decoding (Dao et al., 2023), here merged
// through distributed shared memory. Written here.
#pragma once

#include "flashcore_parts.cuh"

namespace flashcore {

// The configuration (see algo.toml) of Path MMA_SYNC (flashcore_launch.cuh).
template <int ROWS_, int WARPS_, int TILES_, int KEYS_, int STAGES_, int SPLITS_>
struct Cut {
  static constexpr int ROWS = ROWS_, WARPS = WARPS_, TILES = TILES_, KEYS = KEYS_, STAGES = STAGES_, SPLITS = SPLITS_;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int ROW_GROUPS = ROWS / (16 * TILES), KEY_GROUPS = WARPS / ROW_GROUPS;
  static constexpr int STEP = KEYS * KEY_GROUPS;  // keys of a stage
  static_assert(ROW_GROUPS * 16 * TILES == ROWS && KEY_GROUPS * ROW_GROUPS == WARPS, "warps tile rows and keys");
  static_assert(ROWS / SPLITS % 16 == 0 && ROWS % SPLITS == 0, "16 rows have one owner");
  static_assert(KEYS % 16 == 0 && STAGES >= 1 && WARPS >= 2, "whole matrices");

  // Bytes of shared memory: queries, keys and values, and the parts of the ROWS / splits rows that the CTA owns.
  static constexpr int QUERIES = ROWS * ROW, TILE = STEP * ROW;
  static constexpr int shared(int splits) {
    const int part = ROWS / splits * (D + 2) * int(sizeof(float));
    return QUERIES + 2 * STAGES * TILE + (KEY_GROUPS * splits > 1 ? KEY_GROUPS * splits * part : 0);
  }

  // CTAs that should fit on an SM. Unsplit keys mean many rows: then two CTAs, if 128 registers per thread and
  // the shared memory (228 KiB, of which the driver takes one per CTA) allow it. On sm_100 ptxas would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr int RESIDENT = 1;
#else
  static constexpr int RESIDENT = SPLITS == 1 && THREADS * TILES <= 256 && 2 * (shared(1) + 1024) <= 228 * 1024 ? 2 : 1;
#endif
};

#ifdef __CUDACC__

// N rows into a tile, swizzled: piece c of row r is stored as piece c ^ (r % 8). `from` and `to` are this thread's first ones,
// row threadIdx.x / 8 and piece threadIdx.x % 8; rows from `left` on do not exist and become zeros.
template <int N, int THREADS>
__device__ __forceinline__ void load_tile(uint32_t to, const __half* from, int left) {
  static_assert(THREADS % 64 == 0, "a thread's rows differ by multiples of 8: it swizzles once");
#pragma unroll
  for (int i = 0; i < N; i += THREADS / 8)
    if (N % (THREADS / 8) == 0 || i + int(threadIdx.x) / 8 < N) copy16(to + i * ROW, from + i * D, i < left);
}

template <typename C, bool CAUSAL>
__global__ void __launch_bounds__(C::THREADS, C::RESIDENT) flashcore_v4(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr int SPLITS = 1;
#else
  constexpr int SPLITS = C::SPLITS;
#endif
  constexpr int TILES = C::TILES, KEYS = C::KEYS, STAGES = C::STAGES, STEP = C::STEP;
  constexpr int PARTS = SPLITS * C::KEY_GROUPS, OWN = C::ROWS / SPLITS;
  if constexpr (SPLITS > 1) cluster_arrive_only();

  const int block = CAUSAL ? gridDim.z - 1 - blockIdx.z : blockIdx.y;
  const int64_t head = static_cast<int64_t>(CAUSAL ? blockIdx.y : blockIdx.z) * p.S * D;
  const int first = block * C::ROWS, rank = SPLITS > 1 ? blockIdx.x : 0;
  const int seen = CAUSAL ? min(p.S, first + C::ROWS) : p.S;          // keys of this block of rows, and their steps
  const int steps = (seen + STEP - 1) / STEP, each = (steps + SPLITS - 1) / SPLITS;
  const int begin = rank * each, count = min(each, steps - begin);    // of this CTA; count may be 0 or less

  // --- 1. Load: Q, and the first STAGES tiles of K and V ---
  // From here on 32-bit offsets from three pointers: this code runs before the first load is issued.
  const int my_row = threadIdx.x / 8, my_piece = threadIdx.x % 8;
  const int64_t start = head + my_row * D + my_piece * 8;
  char* const memory = shared_memory();
  const uint32_t q_tile = shared_address(memory), k_tiles = q_tile + C::QUERIES, v_tiles = k_tiles + STAGES * C::TILE;
  const uint32_t to = my_row * ROW + ((my_piece ^ my_row % 8) << 4);
  const __half* const k_from = p.k + start + begin * STEP * D;
  const __half* const v_from = p.v + start + begin * STEP * D;
  const int left = p.S - begin * STEP - my_row;
  const auto load = [&](uint32_t tiles, const __half* from, int i) {  // a group of copies for each, an empty one too
    if (i < count)
      load_tile<STEP, C::THREADS>(tiles + i % STAGES * C::TILE + to, from + i * STEP * D, left - i * STEP);
    commit_copies();
  };
  if (count > 0) load_tile<C::ROWS, C::THREADS>(q_tile + to, p.q + start + first * D, p.S - first - my_row);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) load(k_tiles, k_from, i), load(v_tiles, v_from, i);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int my_rows = warp % C::ROW_GROUPS * 16 * TILES, my_keys = warp / C::ROW_GROUPS * KEYS;
  // A lane's address for 16 x 16 elements: matrices 0, 1 one above the other, or side by side (flashcore-v3).
  const int r = lane % 8, half = lane / 8 % 2, other = lane / 16;
  const uint32_t down = (half * 8 + r) * ROW + ((other ^ r) << 4);
  const uint32_t across = (other * 8 + r) * ROW + ((half ^ r) << 4);

  uint32_t q[TILES][D / 16][4];
  float o[TILES][D / 8][4], m[TILES][2], l[TILES][2];                 // l: this lane's part of a row's sum
#pragma unroll
  for (int a = 0; a < TILES; ++a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) m[a][h] = -INFINITY, l[a][h] = 0.f;
    clear(o[a]);
  }

#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int key = (begin + i) * STEP + my_keys, row = first + my_rows;  // the warp's first ones
    const bool any = key < p.S && (!CAUSAL || key < row + 16 * TILES);
    const uint32_t k_tile = k_tiles + i % STAGES * C::TILE + my_keys * ROW + across;
    const uint32_t v_tile = v_tiles + i % STAGES * C::TILE + my_keys * ROW + down;

    // --- 2. Scores: S = Q K^T, of the warp's rows and KEYS keys ---
    // Groups end in the order k0 v0 k1 v1 ...; the groups after k_i are those of STAGES - 1 stages, and at first v0.
    if (i == 0) {
      wait_for_copies<2 * STAGES - 1>();
    } else {
      wait_for_copies<2 * STAGES - 2>();
    }
    __syncthreads();                                                  // k_i has arrived; all are done with v_(i-1)
    if (i > 0) load(v_tiles, v_from, i - 1 + STAGES);
    if (i == 0) {
#pragma unroll
      for (int a = 0; a < TILES; ++a)
#pragma unroll
        for (int c = 0; c < D / 16; ++c)
          load_matrices(q[a][c], (q_tile + (my_rows + a * 16) * ROW + down) ^ (c << 5));
    }

    float s[TILES][KEYS / 8][4];
    if (any) {
#pragma unroll
      for (int a = 0; a < TILES; ++a) clear(s[a]);
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
          uint32_t k[4];
          load_matrices(k, (k_tile ^ (c << 5)) + n * 16 * ROW);
#pragma unroll
          for (int a = 0; a < TILES; ++a) {
            multiply_add(s[a][2 * n], q[a][c], k[0], k[1]);
            multiply_add(s[a][2 * n + 1], q[a][c], k[2], k[3]);
          }
        }
      }

      if (key + KEYS > p.S || (CAUSAL && key + KEYS > row + 1)) {     // some of the warp's rows do not see all of these
#pragma unroll
        for (int a = 0; a < TILES; ++a)
#pragma unroll
          for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int x = key + n * 8 + 2 * t + e % 2, y = row + a * 16 + e / 2 * 8 + g;
              if (x >= p.S || (CAUSAL && x > y)) s[a][n][e] = -INFINITY;
            }
      }

      // --- 3. Online softmax: scores become probabilities; m, l and o are updated ---
#pragma unroll
      for (int a = 0; a < TILES; ++a) online_softmax(s[a], m[a], l[a], o[a]);
    }

    // --- 4. Product: O += P V, and the load of K for step i + STAGES ---
    wait_for_copies<2 * STAGES - 2>();
    __syncthreads();                                                  // v_i has arrived; all are done with k_i
    load(k_tiles, k_from, i + STAGES);

    if (any) {
#pragma unroll
      for (int c = 0; c < KEYS / 16; ++c) {
        uint32_t e[TILES][4];                                         // the probabilities, as left operand
#pragma unroll
        for (int a = 0; a < TILES; ++a) to_left_side(e[a], s[a], c);
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
          uint32_t v[4];
          load_transposed(v, (v_tile ^ (n << 5)) + c * 16 * ROW);
#pragma unroll
          for (int a = 0; a < TILES; ++a) {
            multiply_add(o[a][2 * n], e[a], v[0], v[1]);
            multiply_add(o[a][2 * n + 1], e[a], v[2], v[3]);
          }
        }
      }
    }
  }

  // --- 5. Merge: a row's sum over its four lanes, then the parts of PARTS warps, in the owner's shared memory ---
#pragma unroll
  for (int a = 0; a < TILES; ++a)
#pragma unroll
    for (int h = 0; h < 2; ++h) l[a][h] = quad_sum(l[a][h]);

  __half* const to_row = p.output + head + first * D;
  if constexpr (PARTS == 1) {
    // --- 6. Store: rows are not shared between warps; by way of Q's shared memory, which only this warp has read ---
#pragma unroll
    for (int a = 0; a < TILES; ++a)
      write_out(memory + (my_rows + a * 16) * ROW, o[a], l[a], to_row + (my_rows + a * 16) * D,
                p.S - first - my_rows - a * 16);
  } else {
    const Parts<PARTS, OWN> parts(memory + C::QUERIES + 2 * STAGES * C::TILE);
    if constexpr (SPLITS > 1) cluster_wait();                         // all are running
#pragma unroll
    for (int a = 0; a < TILES; ++a)
      parts.template hand_over<SPLITS>(rank * C::KEY_GROUPS + warp / C::ROW_GROUPS, my_rows + a * 16, o[a], m[a], l[a]);
    if constexpr (SPLITS > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
    // --- 6. Store: the owner merges the parts and writes its rows ---
    parts.template write_out<C::THREADS>(to_row + rank * OWN * D, p.S - first - rank * OWN);
  }
}

#endif  // __CUDACC__

}  // namespace flashcore
