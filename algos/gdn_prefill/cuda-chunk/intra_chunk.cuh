// All chunks at once: gates, their sums, (I + A)^-1 - I and, where the walk does not make it by itself, the masked q k^T of the
// value heads. A CTA of two groups of four warps has a chunk, a query/key head and gridDim.z-th parts of its value heads, two
// at a time: all of them where there are chunks enough, one where there are few. k k^T and q k^T are made once and left in
// shared memory; then each group has a value head, or where there is one only, the first has T and the second M. A warp has a
// row of 16 x 16 blocks of T, and of M the opposite one, the second group the other way round: each warp and each quarter of
// the SM has the same to do.
//
// With wgmma and more chunks than CTAs fit, a CTA goes through several: where K has been multiplied, the next chunk's comes,
// and its raw gates to registers, while the inverse of this one is made.
//
// (I + A)^-1 with D the blocks on its diagonal is (I + X) D: X_ij = n_ij + X_i,j+1 n_j+1,j + ... + X_i,i-1 n_i-1,j, n = -D A
// below them. A warp makes its row of n, and of X from the rows above its own, with one meeting in between. D: 4 x 4 by
// substitution in float, row by row in accumulators, then twice y + y x y. Products are of f16, which has as many digits as
// tf32 in half of the instructions; larger than 65504 are numbers only where the state explodes. An accumulator is the next
// product's left operand.
//
// Steps, as in docs/kernels/prefill-chunk.md: 1 find the chunk and load K, 2 gates, 3 K K^T, 4 inverse, 5 store.
#pragma once

#include "chunk.cuh"
#include "gates.cuh"
#include "tile_scheduler.cuh"
#include "wgmma_bf16.cuh"

namespace gdn {

constexpr int PREPARE_THREADS = 256;
constexpr int PREPARE_CTAS = 4;           // an SM
constexpr int K_ASKER = 5;                // the warp that asks TMA, of those that have no part in k k^T and no gates
constexpr int PAIR = 2;                   // value heads at a time
// Blocks up to the diagonal, row by row, and below it.
constexpr int UP_TO = 10, BELOW = 6;
__device__ __forceinline__ int up_to(int i, int j) { return i * (i + 1) / 2 + j; }
__device__ __forceinline__ int below(int i, int j) { return i * (i - 1) / 2 + j; }

// e^(G_t - G_s), of t in a block of 16 and s before it, is e^(G_t - G_u) e^(G_u - G_s) with u the last token before the
// block: both at most 1, and a token has few of each.
struct Gates {
  float G[CHUNK];                         // sums of log2 g
  float beta[CHUNK];
  float left[CHUNK];                      // e^(G_t - G_u)
  float weight[CHUNK];                    // of row t of k k^T: -beta e^(G_t - G_u)
  float right[3][CHUNK - SIDE];           // e^(G_u - G_s), u before block 1, 2, 3
};

// A chunk of a query/key head, and what the CTA has to do from here on.
struct Task {
  int number, h;
  int begin, left;                        // its first token, how many there are to its sequence's end
  int numbers;                            // left to go through, this one among them; 0: there is no task
  __device__ __forceinline__ int count() const { return left < CHUNK ? left : CHUNK; }
};

// Which CTA has which chunks and heads. each = 0: CTA (x, y) has chunk x of head y. Else CTA x has a row of `each` numbers or,
// of the first `more` CTAs, one more, where those of head 0 are followed by head 1's: among numbers that are not there, which
// come at regular distances where sequences are equally long, each CTA has its part.
struct Share {
  int numbers;                            // of chunks, for each head
  int each, more;
};
// A CTA for each chunk and head where `room` CTAs, so many fit at once, are enough for the chunks that there are at the least;
// else as many CTAs as fit.
inline Share share_of(int64_t num_tokens, int64_t N, int64_t H, int64_t room) {
  const int64_t numbers = num_tokens / CHUNK + N, all = numbers * H;
  if ((num_tokens + CHUNK - 1) / CHUNK * H <= room) return {static_cast<int>(numbers), 0, 0};
  return {static_cast<int>(numbers), static_cast<int>(all / room), static_cast<int>(all % room)};
}

constexpr int OPERAND = SIDE * SIDE * 2;  // bytes; see put_operand
struct PrepareShared {
  union {
    struct { char k[QK_TILE], q[QK_TILE]; };
    Prepared made[PAIR];                  // when these have been read
    struct { char next_k[QK_TILE], T[PAIR][MATRIX]; };  // WIDE: the next chunk's K comes while T is made
  };
  // k k^T: accumulators, as each lane has them, and f16, as it takes them on the right of products; q k^T: accumulators
  float4 k_diagonal[4][2][32];
  uint4 k_below[BELOW][32];
  union {
    float4 q_products[UP_TO][2][32];
    char operands[PAIR][6 * OPERAND];     // WIDE
  };
  Gates gates[PAIR];
  Task tasks[2];                          // the one that is made, and the next, in turns
  uint64_t full;                          // the tiles are there
};
static_assert(PREPARE_CTAS * (sizeof(PrepareShared) + 1024) <= 228 * 1024);

// Not below -64: what is left then is nothing beside any other number, and differences of sums of 64 such keep an error
// below 2e-4, a 20th of what bf16 costs.
constexpr float LEAST = -64.f;

// The raw gates of tokens 2 lane and 2 lane + 1 of a value head.
struct Raw {
  float A_log = 0.f, dt_bias = 0.f;
  __nv_bfloat16 a[2] = {}, b[2] = {};
  __device__ __forceinline__ void ask_head(const Prefill& p, int hv) { A_log = p.A_log[hv], dt_bias = p.dt_bias[hv]; }
  __device__ __forceinline__ void ask_tokens(const Prefill& p, const Task& task, int hv, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (2 * lane + i < task.left) {
        const int64_t at = (task.begin + 2 * lane + i) * static_cast<int64_t>(p.HV) + hv;
        a[i] = p.a[at], b[i] = p.b[at];
      }
  }
};

__device__ __forceinline__ void put_pair(void* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }

// A warp makes the gates of a value head: of tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void make_gates(Gates& to, const Raw& raw, int count, int lane) {
  float G[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = 2 * lane + i < count;
    G[i] = there ? fmaxf(log2_decay(raw.A_log, __bfloat162float(raw.a[i]) + raw.dt_bias), LEAST) : 0.f;
    beta[i] = there ? sigmoid(__bfloat162float(raw.b[i])) : 0.f;
  }
  G[1] += G[0];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float before = __shfl_sync(0xffffffffu, G[1], lane - (lane < d ? 0 : d));
    if (lane >= d) G[0] += before, G[1] += before;
  }
  put_pair(to.G + 2 * lane, G[0], G[1]), put_pair(to.beta + 2 * lane, beta[0], beta[1]);
  float own = 0.f;
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    const float u = __shfl_sync(0xffffffffu, G[1], i * 8 - 1);
    if (lane / 8 == i) own = u;
    if (lane / 8 < i) put_pair(to.right[i - 1] + 2 * lane, exp2_approx(u - G[0]), exp2_approx(u - G[1]));
  }
  const float left[2] = {exp2_approx(G[0] - own), exp2_approx(G[1] - own)};
  put_pair(to.left + 2 * lane, left[0], left[1]), put_pair(to.weight + 2 * lane, -beta[0] * left[0], -beta[1] * left[1]);
}

// What the walk takes of the gates, tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void put_gates(char* T, const Gates& gates, int lane) {
  const float2 G = *reinterpret_cast<const float2*>(gates.G + 2 * lane);
  const float end = gates.G[CHUNK - 1];
  put_pair(T + gate_at(IN, 2 * lane), exp2_approx(G.x), exp2_approx(G.y));
  put_pair(T + gate_at(OUT, 2 * lane), exp2_approx(end - G.x), exp2_approx(end - G.y));
  put_pair(T + gate_at(BETA, 2 * lane), gates.beta[2 * lane], gates.beta[2 * lane + 1]);
  put_pair(T + gate_at(SUM, 2 * lane), G.x, G.y);
}

// d = X K^T: X 16 rows of a tile from `left` on, K the first N blocks of 16 rows of the other.
template <int N>
__device__ __forceinline__ void products(float (&d)[4][2][4], uint32_t left, uint32_t right, int lane) {
  left += in_tile<QK_PIECES>(lane % 16, lane / 16), right += in_tile<QK_PIECES>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll 4
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    uint32_t x[4];
    load_matrices(x, left ^ step * 32);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      uint32_t y[4];  // both n-tiles of 8 tokens
      load_matrices(y, (right ^ step * 32) + j * SIDE * HEAD_DIM * 2);
      multiply_add(d[j][0], x, y[0], y[1]);
      multiply_add(d[j][1], x, y[2], y[3]);
    }
  }
}

// A block as accumulators, and 16-bit numbers of it as a product takes it on its left.
using Block = float[2][4];
using Words = uint32_t[4];

__device__ __forceinline__ void f16_words(Words& w, const Block& x) {
  w[0] = flashcore::pack(x[0][0], x[0][1]), w[1] = flashcore::pack(x[0][2], x[0][3]);
  w[2] = flashcore::pack(x[1][0], x[1][1]), w[3] = flashcore::pack(x[1][2], x[1][3]);
}
// d += a b of f16; b is what load_transposed has of rows of b.
__device__ __forceinline__ void add_product(Block& d, const Words& a, const Words& b) {
  flashcore::multiply_add(d[0], a, b[0], b[1]);
  flashcore::multiply_add(d[1], a, b[2], b[3]);
}

// 16 x 16 of 16-bit numbers to shared memory: `row` is where row lane % 16, piece lane / 16 goes.
template <bool WIDE, typename In>
__device__ __forceinline__ void put_words(char* to, const Words& w, const In& in, int lane) {
#if FLASHCORE_WGMMA
  if constexpr (WIDE) store_matrices(shared_address(to + in(lane % 16, lane / 16)), w);
#endif
  if constexpr (!WIDE) {
#pragma unroll
    for (int c = 0; c < 4; ++c)
      *reinterpret_cast<uint32_t*>(to + in(lane / 4 + c % 2 * 8, c / 2) + lane % 4 * 4) = w[c];
  }
}
// Block (i, j) of T or M.
template <bool WIDE>
__device__ __forceinline__ void put_block(char* matrix, const Block& x, int i, int j, int lane) {
  Words w;
  as_left(w, x[0], x[1]);
  put_words<WIDE>(matrix + i * SIDE * 128, w, [&](int row, int piece) { return in_matrix(row, 2 * j + piece); }, lane);
}
__device__ __forceinline__ void put_zeros(char* matrix, int i, int j, int lane) {
  *reinterpret_cast<uint4*>(matrix + in_matrix(i * SIDE + lane / 2, 2 * j + lane % 2)) = {0, 0, 0, 0};
}
// What other warps take on the right of products, f16: T_00, T_11, T_22, n_10, n_20, n_21.
template <bool WIDE>
__device__ __forceinline__ void put_operand(char* operands, int number, const Words& w, int lane) {
  put_words<WIDE>(operands + number * OPERAND, w, [](int row, int piece) { return in_tile<2>(row, piece); }, lane);
}
__device__ __forceinline__ void get_operand(Words& w, const char* operands, int number, int lane) {
  load_transposed(w, shared_address(operands) + number * OPERAND + in_tile<2>(lane % 16, lane / 16));
}

using Accumulators = float4[2][32];
__device__ __forceinline__ void put_products(Accumulators& to, const Block& d, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) to[e][lane] = {d[e][0], d[e][1], d[e][2], d[e][3]};
}
__device__ __forceinline__ void get_products(Block& d, const Accumulators& from, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float4 x = from[e][lane];
    d[e][0] = x.x, d[e][1] = x.y, d[e][2] = x.z, d[e][3] = x.w;
  }
}
// Block (i, j) of k k^T or q k^T, j <= i.
__device__ __forceinline__ void put_products(PrepareShared& s, const Block& d, bool keys, int i, int j, int lane) {
  if (!keys) {
    put_products(s.q_products[up_to(i, j)], d, lane);
  } else if (i == j) {
    put_products(s.k_diagonal[i], d, lane);
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
// x *= e^(G_t - G_s) by[t], of block (i, i), for s up to t - `strict`; zeros behind.
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
  for (int r = 0; r < 3; ++r) {  // row r of each four, which is done, times column r of x
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

// A block on the diagonal of T without its ones, as it is stored.
template <bool WIDE>
__device__ __forceinline__ void put_diagonal(char* T, const Block& x, int i, int lane) {
  Block rest;
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) rest[e][c] = e == c / 2 && lane / 4 == lane % 4 * 2 + c % 2 ? 0.f : x[e][c];
  put_block<WIDE>(T, rest, i, i, lane);
}

// Row i of T by one of four warps.
template <bool WIDE>
__device__ __forceinline__ void make_T(char* T, char* operands, const PrepareShared& s, const Gates& gates, int i, int barrier,
                                       int lane) {
  // 4. Inverse: the block on the diagonal, and n
  Block n[3] = {};
  {
    Block x, own;
    Words left;
    const float by[2] = {-gates.beta[i * SIDE + lane / 4], -gates.beta[i * SIDE + lane / 4 + 8]};
    get_products(x, s.k_diagonal[i], lane);
    weigh_diagonal(x, gates, by, i, 1, lane);
    invert_block(own, x, lane);
    if (i < 3) {
      f16_words(left, own);
      put_operand<WIDE>(operands, i, left, lane);
    }
    put_diagonal<WIDE>(T, own, i, lane);
    if (i % 2 == 0) put_zeros(T, i, i + 1, lane);
    scale_columns(own, gates.weight + i * SIDE, lane);
    f16_words(left, own);
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (j < i) {
        const uint4 k = s.k_below[below(i, j)][lane];
        const Words right = {k.x, k.y, k.z, k.w};
        add_product(n[j], left, right);
        scale_columns(n[j], gates.right[i - 1] + j * SIDE, lane);
        if (i < 3) {
          Words w;
          f16_words(w, n[j]);
          put_operand<WIDE>(operands, 3 + below(i, j), w, lane);
        }
      }
  }
  named_barrier_sync<128>(barrier);
  lane = thread_again() % 32;  // so that no address waits in a register
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
          get_operand(right, operands, 3 + below(m, j), lane);
          add_product(n[j], X[m], right);
        }
      f16_words(X[j], n[j]);
      get_operand(right, operands, j, lane);
      add_product(result, X[j], right);
      put_block<WIDE>(T, result, i, j, lane);
    }
}

// Row i of M.
__device__ __forceinline__ void make_M(char* M, const PrepareShared& s, const Gates& gates, float scale, int i, int lane) {
  const int row = i * SIDE + lane / 4;
  float by[2] = {scale, scale};
  Block x;
  get_products(x, s.q_products[up_to(i, i)], lane);
  weigh_diagonal(x, gates, by, i, 0, lane);
  put_block<false>(M, x, i, i, lane);
  by[0] *= gates.left[row], by[1] *= gates.left[row + 8];
#pragma unroll
  for (int j = 0; j < 3; ++j)
    if (j < i) {
      get_products(x, s.q_products[up_to(i, j)], lane);
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int c = 0; c < 4; ++c) x[e][c] *= by[c / 2];
      scale_columns(x, gates.right[i - 1] + j * SIDE, lane);
      put_block<false>(M, x, i, j, lane);
    }
#pragma unroll
  for (int j = 1; j < 4; ++j)
    if (j > i) put_zeros(M, i, j, lane);
}

// T, M or both from shared to global memory, when the four warps of a group have made them.
__device__ __forceinline__ void put_made(char* to, const Prepared& made, bool T, bool M, int barrier, int thread) {
  named_barrier_sync<128>(barrier);
  uint4* const all = reinterpret_cast<uint4*>(to);
  const uint4* const from = reinterpret_cast<const uint4*>(&made);
#pragma unroll
  for (int i = thread; i < MATRIX / 16; i += 128) {
    if (T) all[i] = from[i];
    if (M) all[i + MATRIX / 16] = from[i + MATRIX / 16];
  }
}

// Row i of k k^T or q k^T by a warp, for GPUs without wgmma; up to the diagonal.
template <int I>
__device__ __forceinline__ void make_products(PrepareShared& s, bool keys, uint32_t left, uint32_t right, int lane) {
  float d[4][2][4] = {};
  products<I + 1>(d, left, right, lane);
#pragma unroll
  for (int j = 0; j <= I; ++j) put_products(s, d[j], keys, I, j, lane);
}

// The task itself, if its number is there, or the first behind it that is. Asked by all lanes of a warp.
__device__ __forceinline__ void find(Task& task, const Prefill& p, const Share& share, int lane) {
#pragma unroll 1
  for (; task.numbers > 0; --task.numbers) {
    const int n = sequence_of(p, task.number, CHUNK, lane);
    const int first = p.border(n), index = task.number - first / CHUNK - n;
    task.begin = first + index * CHUNK, task.left = p.border(n + 1) - task.begin;
    if (index >= 0 && task.left > 0) return;
    if (++task.number == share.numbers) task.number = 0, ++task.h;
  }
}
__device__ __forceinline__ Task first_task(const Prefill& p, const Share& share, int cta, int lane) {
  Task task = {cta, static_cast<int>(blockIdx.y), 0, 0, 1};
  if (share.each > 0) {
    const int first = cta * share.each + min(cta, share.more);
    task.h = first / share.numbers, task.number = first - task.h * share.numbers;
    task.numbers = share.each + (cta < share.more);
  }
  find(task, p, share, lane);
  return task;
}
// The one behind it: of its own sequence, without a look at cu_seqlens, or where there is one.
__device__ __forceinline__ Task next_task(Task task, const Prefill& p, const Share& share, int lane) {
  --task.numbers, task.begin += CHUNK, task.left -= CHUNK;
  if (++task.number == share.numbers) task.number = 0, ++task.h, task.left = 0;
  if (task.left <= 0) find(task, p, share, lane);
  return task;
}

// WIDE: by wgmma and TMA, of a tile as tma_load_box lays it; T and the gates only, 8 KB for a chunk and value head.
// Else by mma.sync, and M, too: 16 KB; share.each = 0. ORDERED: one more in x, in front, for the order of sequences (tile_scheduler.cuh).
template <bool WIDE, bool ORDERED = false>
__global__ void __launch_bounds__(PREPARE_THREADS, PREPARE_CTAS)
gdn_prefill_prepare(const __grid_constant__ Prefill p, const __grid_constant__ CUtensorMap keys,
                    const __grid_constant__ Share share) {
#if FLASHCORE_WGMMA
  PrepareShared& s = *reinterpret_cast<PrepareShared*>(tile_memory());
#else
  PrepareShared& s = *reinterpret_cast<PrepareShared*>(shared_memory());
#endif
  const int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  if (ORDERED && blockIdx.x == 0) {
    static_assert(BINS == PREPARE_THREADS && sizeof(SortShared) <= sizeof(PrepareShared));
    if (blockIdx.y == 0 && blockIdx.z == 0) sort_tiles(p, reinterpret_cast<SortShared&>(s));
    return;
  }
  const int group = p.HV / p.H;
  // Members of the group of value heads from blockIdx.z on, in steps of gridDim.z.
  const auto member_head = [&](int member) { return static_cast<int>(blockIdx.z) + member * static_cast<int>(gridDim.z); };
  const auto there = [&](int member) { return member_head(member) < group; };
  const auto head = [&](const Task& task, int member) { return task.h * group + member_head(member); };
  const auto result = [&](const Task& task, int member) {
    return p.prepared + (static_cast<int64_t>(task.number) * p.HV + head(task, member)) * (WIDE ? MATRIX : 2 * MATRIX);
  };
  // Of which of two heads a warp makes the gates; less than 0: of none. WIDE: those that have no part in k k^T.
  const auto gated_by = [](int warp) { return WIDE ? warp - 6 : warp == 0 ? 0 : warp == 7 ? 1 : -1; };
  const int gated = gated_by(warp);
  const bool gating = gated >= 0 && there(gated);
  if (gating && share.each == 0) {
    const int hv = blockIdx.y * group + member_head(gated);
    prefetch(p.A_log + hv), prefetch(p.dt_bias + hv);
  }

  // 1. Find the chunk, load K
  const Task own = first_task(p, share, static_cast<int>(blockIdx.x) - ORDERED, lane);
  if (own.numbers == 0) return;
#if FLASHCORE_WGMMA
  if (WIDE && warp == K_ASKER && elect_one()) {
    const uint32_t full = shared_address(&s.full);
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(full, QK_TILE);
    tma_load_box(shared_address(s.k), keys, own.begin, 0, own.h, full);
    s.tasks[0] = own;
  }
#endif
  Raw raw;
  if (gating) raw.ask_tokens(p, own, head(own, gated), lane);
  if (!WIDE && gating) raw.ask_head(p, head(own, gated));
#pragma unroll 1
  for (uint32_t turn = 0;; turn ^= 1) {
    const int thread = thread_again(), warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
    const int half = warp / 4;                            // group of warps
    const int row = half ? 7 - warp : warp;               // of blocks of T
    const int gated = gated_by(warp);
    const bool gating = gated >= 0 && there(gated);
    const Task &task = WIDE ? s.tasks[turn] : own, &next = s.tasks[turn ^ 1];
    if constexpr (WIDE) {
#if FLASHCORE_WGMMA
      __syncthreads();  // the task is there, and nobody is at the one before it
      const int count = task.count();
      // 2. Gates
      if (gating) {
        raw.ask_head(p, head(task, gated));  // not before: it would wait in registers
        make_gates(s.gates[gated], raw, count, lane);
      }
      if (warp == K_ASKER) {
        const Task found = next_task(task, p, share, lane);
        if (elect_one()) s.tasks[turn ^ 1] = found;
      }
      if (half == 0 || count < CHUNK) mbarrier_wait(shared_address(&s.full), turn);
      if (count < CHUNK) {  // rows of the next sequence: they may be NaN
        const int pieces = (CHUNK - count) * 8;
        for (int i = thread; i < 2 * pieces; i += PREPARE_THREADS)
          *reinterpret_cast<uint4*>(s.k + i / pieces * (QK_TILE / 2) + count * 128 + i % pieces * 16) = {0, 0, 0, 0};
        fence_proxy_async();
        __syncthreads();
      }
      // 3. K K^T
      if (half == 0) {
        float d[8][4];
        const KMajor k(shared_address(s.k));
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < 8; ++step) {
          const uint64_t columns = advance(k, step / 4 * (QK_TILE / 2) + step % 4 * 32);
          product(d, columns, columns, step > 0);
        }
        warpgroup_commit();
        warpgroup_wait<0>();
        warpgroup_fence_operand(d);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (j <= row) put_products(s, reinterpret_cast<const Block&>(d[2 * j]), true, row, j, lane);
      }
#endif
    } else {
      // 1 to 3 without TMA and wgmma, and Q K^T
      const int count = task.count(), token = thread / QK_PIECES, piece = thread % QK_PIECES;
      const int64_t stride = static_cast<int64_t>(p.H) * HEAD_DIM, at = (int64_t{task.begin} + token) * stride + task.h * HEAD_DIM + piece * 8;
      const int64_t step = PREPARE_THREADS / QK_PIECES * stride;
      const uint32_t k_tile = shared_address(s.k), to = k_tile + in_tile<QK_PIECES>(token, piece);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool inside = token + i * (PREPARE_THREADS / QK_PIECES) < count;
        copy16(to + i * PREPARE_THREADS * 16, p.k + at + i * step, inside);
        copy16(to + QK_TILE + i * PREPARE_THREADS * 16, p.q + at + i * step, inside);
      }
      commit_copies();
      if (gating) make_gates(s.gates[gated], raw, count, lane);
      wait_for_copies<0>();
      __syncthreads();
      const uint32_t rows = k_tile + half * QK_TILE + row * SIDE * HEAD_DIM * 2;
      if (row == 0) make_products<0>(s, half == 0, rows, k_tile, lane);
      if (row == 1) make_products<1>(s, half == 0, rows, k_tile, lane);
      if (row == 2) make_products<2>(s, half == 0, rows, k_tile, lane);
      if (row == 3) make_products<3>(s, half == 0, rows, k_tile, lane);
    }

#pragma unroll 1
    for (int first = 0; there(first); first += PAIR) {
      if (first > 0) {
        __syncthreads();
        if (gated >= 0 && there(first + gated)) {
          raw.ask_head(p, head(task, first + gated)), raw.ask_tokens(p, task, head(task, first + gated), lane);
          make_gates(s.gates[gated], raw, task.count(), lane);
        }
      }
#if FLASHCORE_WGMMA
      if (WIDE && thread_again() % 128 == 0) bulk_stores_read();
#endif
      __syncthreads();  // the products and the gates are there, and nobody reads the tiles or T any more
#if FLASHCORE_WGMMA
      if (WIDE && next.numbers > 0) {
        // 1. of the next chunk, under 4 and 5
        if (warp == K_ASKER && first == 0 && elect_one()) {
          const uint32_t full = shared_address(&s.full);
          mbarrier_arrive_expect_tx(full, QK_TILE);
          tma_load_box(shared_address(s.next_k), keys, next.begin, 0, next.h, full);
        }
        if (gating && !there(first + PAIR)) raw.ask_tokens(p, next, head(next, gated), lane);
      }
#endif
      const bool both = there(first + 1), makes_T = both || half == 0, makes_M = !WIDE && (both || half == 1);
      const int m = both ? half : 0, barrier = 1 + half, lane = thread_again() % 32;
      char* const T = WIDE ? s.T[m] : s.made[m].T;
      // 4. Inverse
      if (makes_T) {
        make_T<WIDE>(T, WIDE ? s.operands[m] : s.made[both ? m : 1].M, s, s.gates[m], row, barrier, lane);
        if (row == 0) put_gates(T, s.gates[m], thread_again() % 32);  // it has nothing else to do there
      }
      // 5. Store T - I and the gates
      if constexpr (WIDE) {
#if FLASHCORE_WGMMA
        if (makes_T) {
          fence_proxy_async();
          named_barrier_sync<128>(barrier);
          if (thread_again() % 128 == 0) bulk_store(result(task, first + m), shared_address(T), MATRIX);
        }
#endif
      } else {
        if (both) named_barrier_sync<128>(barrier);  // M comes where the operands were
        if (makes_M) make_M(s.made[m].M, s, s.gates[m], p.scale, 3 - row, lane);
        put_made(result(task, first + m), s.made[m], makes_T, makes_M, barrier, thread % 128);
      }
    }
    if (!WIDE || next.numbers == 0) break;
  }
#if FLASHCORE_WGMMA
  if (WIDE && thread_again() % 128 == 0) bulk_stores_read();
#endif
}

}  // namespace gdn
