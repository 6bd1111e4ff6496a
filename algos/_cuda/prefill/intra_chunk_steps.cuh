// The steps of the intra-chunk kernel, which computes the part that does not depend on the state, for all chunks at once: the gates,
// T = (I + A)^-1 and, without wgmma, M. Used by intra_chunk_sm90.cuh (TMA, wgmma) and intra_chunk_sm80.cuh (cp.async, mma.sync).
// Letters: chunk.cuh.
//
// Steps, numbered as in the kernels' bodies and in docs/kernels/prefill-chunk.md:
//
//   1. Find the chunk, load K.
//   2. Gates: G, beta, and the factors of e^(G_t - G_s).
//   3. K K^T, left in shared memory in blocks of 16 x 16. Without wgmma Q K^T, too.
//   4. Inverse: T, a row of blocks for each of four warps.
//   5. Store T - I and the gates.
//   7. M, without wgmma. With wgmma, the inter-chunk kernel computes M.
//
// A CTA of two groups of four warps has a chunk, a query/key head and every gridDim.z-th of its value heads, two at a time: all of
// them if there are enough chunks, one if there are few. K K^T is computed once for all of them; then each group has a value
// head, or if there is only one, the first group computes T and the second M. A warp has a row of 16 x 16 blocks of T, and the
// opposite row of M, the second group the other way round: so each warp and each quarter of the SM has the same amount of work.
//
// The inverse by blocks: with E the diagonal blocks of T, T = (I + X) E, where n = -E A below the diagonal blocks and
// X_ij = n_ij + X_i,j+1 n_j+1,j + ... + X_i,i-1 n_i-1,j. A warp computes its row of n, then its row of X from the rows above, with
// one barrier in between. E: 4 x 4 by substitution in float, row by row in accumulators, then doubled twice by y + y x y. Products
// are in f16, which has the precision of tf32 in half of the instructions; numbers above 65504 only occur if the
// state diverges. An accumulator is the next product's left operand.
#pragma once

#include "chunk.cuh"
#include "gates.cuh"
#include "tile_scheduler.cuh"
#include "wgmma_tokens.cuh"

namespace gdn {

constexpr int INTRA_THREADS = 256;
// Per SM. Two, each going through several chunks, lost: 8x1024 38.4 us instead of 37.1, 32x256 43.7 instead of 42.3; registers for
// three gained 0.1 us or less at 8192 tokens (ladder, H200).
constexpr int INTRA_CTAS = 4;
constexpr int PAIR = 2;                   // value heads at a time
// The number of 4 x 4 blocks of a matrix on and below the diagonal, and below it; their indices, row by row.
constexpr int UP_TO = 10, BELOW = 6;
__device__ __forceinline__ int up_to(int i, int j) { return i * (i + 1) / 2 + j; }
__device__ __forceinline__ int below(int i, int j) { return i * (i - 1) / 2 + j; }

// e^(G_t - G_s), for t in a block of 16 and s before it, is e^(G_t - G_u) e^(G_u - G_s) with u the last token before the
// block: both factors are at most 1, and there are few of them per token.
struct Gates {
  float G[CHUNK];                         // of log2
  float beta[CHUNK];
  float left[CHUNK];                      // e^(G_t - G_u)
  float weight[CHUNK];                    // -beta e^(G_t - G_u), of row t of K K^T
  float right[3][CHUNK - SIDE];           // e^(G_u - G_s), u before block 1, 2, 3
};

// A CTA's work tile: a chunk of a query/key head; and the number of chunks left for the CTA.
struct ChunkTile {
  int number, h;
  int begin, left;                        // its first token, number of tokens up to its sequence's end
  int numbers;                            // of chunks to go through, including this one; 0: none
  __device__ __forceinline__ int count() const { return left < CHUNK ? left : CHUNK; }
};

// Assigns chunks and heads to CTAs. each = 0: CTA (x, y) has chunk x of head y. Else CTA x has `each` consecutive numbers, the
// first `more` CTAs one more; the numbers of head 0 are followed by those of head 1. Consecutive and not in steps of the grid:
// with equally long sequences, unused numbers come at regular distances, and so they are spread over all CTAs.
struct IntraSchedule {
  int numbers;                            // of chunks, for each head
  int each, more;
};
// One CTA per chunk and head if all can be resident at once (`resident`: how many CTAs can), counted with the smallest possible
// number of chunks; else `resident` CTAs.
inline IntraSchedule intra_schedule(int64_t num_tokens, int64_t N, int64_t H, int64_t resident) {
  const int64_t numbers = num_tokens / CHUNK + N, all = numbers * H;
  if ((num_tokens + CHUNK - 1) / CHUNK * H <= resident) return {static_cast<int>(numbers), 0, 0};
  return {static_cast<int>(numbers), static_cast<int>(all / resident), static_cast<int>(all % resident)};
}

constexpr int OPERAND = SIDE * SIDE * 2;  // bytes; see store_operand
struct IntraShared {
  union {
    struct { char k[QK_TILE], q[QK_TILE]; };
    Prepared results[PAIR];                             // sm80, after these have been read
    struct { char next_k[QK_TILE], T[PAIR][MATRIX]; };  // sm90: the next chunk's K arrives while T is computed
  };
  // K K^T: accumulators, in each lane's order, and f16 right operands of products; Q K^T: accumulators
  float4 k_diagonal[4][2][32];
  uint4 k_below[BELOW][32];
  union {
    float4 q_products[UP_TO][2][32];      // sm80
    char operands[PAIR][6 * OPERAND];     // sm90
  };
  Gates gates[PAIR];
  ChunkTile tiles[2];                     // sm90: this one and the next, alternating
  uint64_t full;                          // sm90: K has arrived
  float key[POOL ? CHUNK : 1], query[POOL ? CHUNK : 1];  // 1 / |k_t|; sm80: 1 / |q_t|, sm90: log2 |k_t|
};
static_assert(INTRA_CTAS * (sizeof(IntraShared) + 1024) <= 228 * 1024);

// Not below -64: e^-64 is negligible, and differences of sums of 64 such numbers keep an error below 2e-4, a 20th of the error of
// bf16.
constexpr float LEAST_LOG2 = -64.f;

// The raw gates of tokens 2 lane and 2 lane + 1 of a value head; a and b as their bits.
struct RawGates {
  float A_log = 0.f, dt_bias = 0.f;
  uint32_t a[2] = {}, b[2] = {};
  __device__ __forceinline__ void load_head(const Prefill& p, int hv) { A_log = p.A_log[hv], dt_bias = p.bias(hv); }
  __device__ __forceinline__ void load_tokens(const Prefill& p, const ChunkTile& tile, int hv, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (2 * lane + i < tile.left) {
        const int64_t token = tile.begin + 2 * lane + i;
        a[i] = p.a_of(token, hv), b[i] = p.b_of(token, hv);
      }
  }
};

__device__ __forceinline__ void store_pair(void* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }

// Step 2. A warp computes the gates of a value head: a lane those of tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void compute_gates(const Prefill& p, Gates& to, const RawGates& raw, int count, int lane) {
  float G[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool inside = 2 * lane + i < count;
    G[i] = inside ? at_least(p.log2_g(raw.a[i], raw.A_log, raw.dt_bias), LEAST_LOG2) : 0.f;
    beta[i] = inside ? p.beta(raw.b[i]) : 0.f;
  }
  G[1] += G[0];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float before = __shfl_sync(0xffffffffu, G[1], lane - (lane < d ? 0 : d));
    if (lane >= d) G[0] += before, G[1] += before;
  }
  store_pair(to.G + 2 * lane, G[0], G[1]), store_pair(to.beta + 2 * lane, beta[0], beta[1]);
  float own = 0.f;
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    const float u = __shfl_sync(0xffffffffu, G[1], i * 8 - 1);
    if (lane / 8 == i) own = u;
    if (lane / 8 < i) store_pair(to.right[i - 1] + 2 * lane, exp2_approx(u - G[0]), exp2_approx(u - G[1]));
  }
  const float left[2] = {exp2_approx(G[0] - own), exp2_approx(G[1] - own)};
  store_pair(to.left + 2 * lane, left[0], left[1]), store_pair(to.weight + 2 * lane, -beta[0] * left[0], -beta[1] * left[1]);
}

// Step 5, the gates for the inter-chunk kernel, of tokens 2 lane and 2 lane + 1: to the upper right quarter of T.
// `s` has the keys' norms, and the queries'.
template <typename Norms>
__device__ __forceinline__ void store_gates(char* T, const Gates& gates, const Norms& s, int lane, bool queries) {
  const float2 G = *reinterpret_cast<const float2*>(gates.G + 2 * lane);
  const float end = gates.G[CHUNK - 1];
  const float in[2] = {exp2_approx(G.x), exp2_approx(G.y)};
  float2 key{1.f, 1.f};
  store_pair(T + gate_at(IN, 2 * lane), in[0], in[1]);
  if constexpr (POOL) {
    key = *reinterpret_cast<const float2*>(s.key + 2 * lane);
    store_pair(T + gate_at(IN_K, 2 * lane), in[0] * key.x, in[1] * key.y);
    if (queries) store_pair(T + gate_at(IN_Q, 2 * lane), in[0] * s.query[2 * lane], in[1] * s.query[2 * lane + 1]);
    else store_pair(T + gate_at(SUM_KEY, 2 * lane), G.x + s.query[2 * lane], G.y + s.query[2 * lane + 1]);
  }
  store_pair(T + gate_at(OUT, 2 * lane), key.x * exp2_approx(end - G.x), key.y * exp2_approx(end - G.y));
  store_pair(T + gate_at(BETA, 2 * lane), gates.beta[2 * lane], gates.beta[2 * lane + 1]);
  store_pair(T + gate_at(SUM, 2 * lane), G.x, G.y);
}

// Step 5, for segments: log2 of a bound of ||Phi|| of the chunk (context_parallel.cuh), by a warp. K K^T has |k_t|^2 on its diagonal.
__device__ __forceinline__ void store_bound(float* to, const Gates& gates, const IntraShared& s, int lane) {
  float grows = 0.f;  // above 0 only if beta |k_t|^2 is above 2
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i, half = token % SIDE / 8, g = token % 8;
    const float square = reinterpret_cast<const float*>(&s.k_diagonal[token / SIDE][half][g * 4 + g / 2])[2 * half + i];
    const float factor = fabsf(1.f - gates.beta[token] * square);
    if (!(factor <= 1.f)) grows += log2f(factor);  // NaN as well: then nothing counts as forgotten
  }
  if (__ballot_sync(0xffffffffu, grows != 0.f)) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) grows += __shfl_xor_sync(0xffffffffu, grows, d);
  }
  if (lane == 0) *to = gates.G[CHUNK - 1] + grows;
}

// A block as accumulators, and as a left operand of 16-bit numbers.
using Block = float[2][4];
using Words = uint32_t[4];

__device__ __forceinline__ void f16_words(Words& w, const Block& x) {
  w[0] = flashcore::pack(x[0][0], x[0][1]), w[1] = flashcore::pack(x[0][2], x[0][3]);
  w[2] = flashcore::pack(x[1][0], x[1][1]), w[3] = flashcore::pack(x[1][2], x[1][3]);
}
// d += a b in f16; b is in the layout of load_transposed.
__device__ __forceinline__ void add_product(Block& d, const Words& a, const Words& b) {
  flashcore::multiply_add(d[0], a, b[0], b[1]);
  flashcore::multiply_add(d[1], a, b[2], b[3]);
}

// Stores block (i, j) of T or M. Store: how a warp stores 16 x 16 numbers of 16 bits, StoreByLane or StoreMatrix.
template <typename Store>
__device__ __forceinline__ void store_block(char* matrix, const Block& x, int i, int j, int lane) {
  Words w;
  as_left(w, x[0], x[1]);
  Store::words(matrix + i * SIDE * 128, w, [&](int row, int piece) { return in_matrix(row, 2 * j + piece); }, lane);
}
__device__ __forceinline__ void store_zeros(char* matrix, int i, int j, int lane) {
  *reinterpret_cast<uint4*>(matrix + in_matrix(i * SIDE + lane / 2, 2 * j + lane % 2)) = {0, 0, 0, 0};
}
// Right operands for other warps' products, f16: T_00, T_11, T_22, n_10, n_20, n_21.
template <typename Store>
__device__ __forceinline__ void store_operand(char* operands, int number, const Words& w, int lane) {
  Store::words(operands + number * OPERAND, w, [](int row, int piece) { return in_tile<2>(row, piece); }, lane);
}
__device__ __forceinline__ void load_operand(Words& w, const char* operands, int number, int lane) {
  load_transposed(w, shared_address(operands) + number * OPERAND + in_tile<2>(lane % 16, lane / 16));
}

using Accumulators = float4[2][32];
__device__ __forceinline__ void store_products(Accumulators& to, const Block& d, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) to[e][lane] = {d[e][0], d[e][1], d[e][2], d[e][3]};
}
__device__ __forceinline__ void load_products(Block& d, const Accumulators& from, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float4 x = from[e][lane];
    d[e][0] = x.x, d[e][1] = x.y, d[e][2] = x.z, d[e][3] = x.w;
  }
}
// x times one number for each of the lane's rows and columns of a block: rows from `rows` on, columns from `columns` on.
__device__ __forceinline__ void scale_both(float (&x)[2][4], const float* rows, const float* columns, int lane) {
  const float by[2] = {rows[lane / 4], rows[lane / 4 + 8]};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float2 pair = *reinterpret_cast<const float2*>(columns + e * 8 + lane % 4 * 2);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[e][c] *= by[c / 2] * (c % 2 ? pair.y : pair.x);
  }
}

// Step 3: block (i, j) of K K^T (`keys`) or Q K^T, j <= i.
__device__ __forceinline__ void store_products(IntraShared& s, const Block& d, bool keys, int i, int j, int lane) {
  if (!keys) {
    store_products(s.q_products[up_to(i, j)], d, lane);
  } else if (i == j) {
    store_products(s.k_diagonal[i], d, lane);
  } else {
    Words w;
    f16_words(w, d);
    s.k_below[below(i, j)][lane] = {transposed(w[0]), transposed(w[1]), transposed(w[2]), transposed(w[3])};
  }
}

// x *= a number for each column.
__device__ __forceinline__ void scale_columns(Block& x, const float* by, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float2 pair = *reinterpret_cast<const float2*>(by + e * 8 + lane % 4 * 2);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[e][c] *= c % 2 ? pair.y : pair.x;
  }
}
// x *= e^(G_t - G_s) by[t], for block (i, i), for s up to t - `strict`; zeros after that.
__device__ __forceinline__ void weigh_diagonal(Block& x, const Gates& gates, const float (&by)[2], int i, int strict,
                                               int lane) {
  const int g = lane / 4, t = lane % 4;
  const float G[2] = {gates.G[i * SIDE + g], gates.G[i * SIDE + g + 8]};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float2 before = *reinterpret_cast<const float2*>(gates.G + i * SIDE + e * 8 + 2 * t);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = g + c / 2 * 8, column = e * 8 + 2 * t + c % 2;
      if (e == 1 && c < 2) x[e][c] = 0.f;  // above the diagonal
      else if (e == 0 && c >= 2) x[e][c] *= by[1] * exp2_approx(G[1] - (c % 2 ? before.y : before.x));
      else x[e][c] = column + strict <= row ? by[c / 2] * exp2_approx(G[c / 2] - (c % 2 ? before.y : before.x)) * x[e][c] : 0.f;
    }
  }
}

// The two 8 x 8 blocks on the diagonal of x.
__device__ __forceinline__ uint32_t upper(const Block& x) { return flashcore::pack(x[0][0], x[0][1]); }
__device__ __forceinline__ uint32_t lower(const Block& x) { return flashcore::pack(x[1][2], x[1][3]); }

// y = (I - x)^-1, x zero on the diagonal and above it: 4 x 4 by substitution, twice as many by y + y x y.
__device__ __forceinline__ void invert_block(Block& y, const Block& x, int lane) {
  const int g = lane / 4, t = lane % 4, four = lane / 16;
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) y[e][c] = e == c / 2 && g == 2 * t + c % 2 ? 1.f : 0.f;
#pragma unroll
  for (int r = 0; r < 3; ++r) {  // row r of each four, which is complete, times column r of x
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float column = __shfl_sync(0xffffffffu, x[e][2 * e + r % 2], lane / 4 * 4 + four * 2 + r / 2);
#pragma unroll
      for (int c = 2 * e; c < 2 * e + 2; ++c)
        y[e][c] = fmaf(column, __shfl_sync(0xffffffffu, y[e][c], (four * 4 + r) * 4 + t), y[e][c]);
    }
  }
  const bool below = four == 1 && t < 2;
  float d[4] = {}, done[4] = {y[0][0], y[0][1], y[1][2], y[1][3]};
  const Words once = {upper(y), 0, 0, lower(y)};
  flashcore::multiply_add(d, once, transposed(below ? upper(x) : 0), transposed(below ? lower(x) : 0));
  const Words twice = {flashcore::pack(d[0], d[1]), 0, 0, flashcore::pack(d[2], d[3])};
  flashcore::multiply_add(done, twice, transposed(once[0]), transposed(once[3]));
  y[0][0] = done[0], y[0][1] = done[1], y[1][2] = done[2], y[1][3] = done[3];
  // And 16 x 16: y_11 x_10 y_00 below.
  float last[4] = {};
  const Words right = {0, 0, 0, lower(y)};
  flashcore::multiply_add(last, right, 0, transposed(flashcore::pack(x[0][2], x[0][3])));
  const Words left = {0, flashcore::pack(last[2], last[3]), 0, 0};
  flashcore::multiply_add(y[0], left, transposed(upper(y)), 0);
}

// A block on the diagonal of T as it is stored, without its ones.
template <typename Store>
__device__ __forceinline__ void store_diagonal(char* T, const Block& x, int i, int lane) {
  Block rest;
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) rest[e][c] = e == c / 2 && lane / 4 == lane % 4 * 2 + c % 2 ? 0.f : x[e][c];
  store_block<Store>(T, rest, i, i, lane);
}

// Row i of K K^T, up to the diagonal: in shared memory, from step 3. In registers: inter_chunk_sm90_fused.cuh.
struct SharedRow {
  const IntraShared& s;
  __device__ __forceinline__ void diagonal(Block& x, int i, int lane) const { load_products(x, s.k_diagonal[i], lane); }
  __device__ __forceinline__ void below_diagonal(Words& w, int i, int j, int lane) const {
    const uint4 k = s.k_below[below(i, j)][lane];
    w[0] = k.x, w[1] = k.y, w[2] = k.z, w[3] = k.w;
  }
};
// Step 4: row i of T by one of four warps, from its row of K K^T.
template <typename Store, typename Row>
__device__ __forceinline__ void invert_row(char* T, char* operands, const Row& k, const Gates& gates, int i, int barrier,
                                           int lane) {
  // 4. Inverse: E, the block on the diagonal, and n
  Block n[3] = {};
  {
    Block x, own;
    Words left;
    const float by[2] = {-gates.beta[i * SIDE + lane / 4], -gates.beta[i * SIDE + lane / 4 + 8]};
    k.diagonal(x, i, lane);
    weigh_diagonal(x, gates, by, i, 1, lane);
    invert_block(own, x, lane);
    if (i < 3) {
      f16_words(left, own);
      store_operand<Store>(operands, i, left, lane);
    }
    store_diagonal<Store>(T, own, i, lane);
    if (i % 2 == 0) store_zeros(T, i, i + 1, lane);
    scale_columns(own, gates.weight + i * SIDE, lane);
    f16_words(left, own);
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (j < i) {
        Words right;
        k.below_diagonal(right, i, j, lane);
        add_product(n[j], left, right);
        scale_columns(n[j], gates.right[i - 1] + j * SIDE, lane);
        if (i < 3) {
          Words w;
          f16_words(w, n[j]);
          store_operand<Store>(operands, 3 + below(i, j), w, lane);
        }
      }
  }
  named_barrier_sync<128>(barrier);
  lane = thread_again() % 32;  // keeps addresses out of registers until here
  // 4. Inverse: X, and the blocks of T below the diagonal
  Words X[3];
#pragma unroll
  for (int j = 2; j >= 0; --j)
    if (j < i) {
      Words right;
      Block result = {};
#pragma unroll
      for (int m = 2; m > j; --m)
        if (m < i) {
          load_operand(right, operands, 3 + below(m, j), lane);
          add_product(n[j], X[m], right);
        }
      f16_words(X[j], n[j]);
      load_operand(right, operands, j, lane);
      add_product(result, X[j], right);
      store_block<Store>(T, result, i, j, lane);
    }
}

// Step 1: the tile itself, if there is a chunk with its number, else the first one after it. Called by all lanes of a warp.
__device__ __forceinline__ void find_chunk(ChunkTile& tile, const Prefill& p, const IntraSchedule& schedule, int lane) {
#pragma unroll 1
  for (; tile.numbers > 0; --tile.numbers) {
    const int n = sequence_of(p, tile.number, CHUNK, lane);
    const int first = p.border(n), index = tile.number - first / CHUNK - n;
    tile.begin = first + index * CHUNK, tile.left = p.border(n + 1) - tile.begin;
    if (index >= 0 && tile.left > 0) return;
    if (++tile.number == schedule.numbers) tile.number = 0, ++tile.h;
  }
}
__device__ __forceinline__ ChunkTile first_chunk(const Prefill& p, const IntraSchedule& schedule, int cta, int lane) {
  ChunkTile tile = {cta, static_cast<int>(blockIdx.y), 0, 0, 1};
  if (schedule.each > 0) {
    const int first = cta * schedule.each + min(cta, schedule.more);
    tile.h = first / schedule.numbers, tile.number = first - tile.h * schedule.numbers;
    tile.numbers = schedule.each + (cta < schedule.more);
  }
  find_chunk(tile, p, schedule, lane);
  return tile;
}
// The next chunk: of the same sequence, without reading cu_seqlens, or else the next that exists.
__device__ __forceinline__ ChunkTile next_chunk(ChunkTile tile, const Prefill& p, const IntraSchedule& schedule, int lane) {
  --tile.numbers, tile.begin += CHUNK, tile.left -= CHUNK;
  if (++tile.number == schedule.numbers) tile.number = 0, ++tile.h, tile.left = 0;
  if (tile.left <= 0) find_chunk(tile, p, schedule, lane);
  return tile;
}

// The value heads of a CTA: of those that share the tile's query/key head, from blockIdx.z on in steps of gridDim.z.
struct ValueHeads {
  const Prefill& p;
  int group;                              // value heads of a query/key head
  __device__ __forceinline__ explicit ValueHeads(const Prefill& p_) : p(p_), group(p_.HV / p_.H) {}
  __device__ __forceinline__ int in_group(int i) const { return static_cast<int>(blockIdx.z) + i * static_cast<int>(gridDim.z); }
  __device__ __forceinline__ bool exists(int i) const { return in_group(i) < group; }
  __device__ __forceinline__ int head(const ChunkTile& tile, int i) const { return tile.h * group + in_group(i); }
  // Where the `bytes` of a chunk and value head go.
  __device__ __forceinline__ char* result(const ChunkTile& tile, int i, int bytes) const {
    return p.prepared + (static_cast<int64_t>(tile.number) * p.HV + head(tile, i)) * bytes;
  }
  __device__ __forceinline__ float* bound(const ChunkTile& tile, int i) const {
    return p.bounds + head(tile, i) * p.chunk_numbers() + tile.number;
  }
};

}  // namespace gdn
