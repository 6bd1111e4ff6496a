// The kernel of cuda-recurrent: the state in registers from the first token of a sequence to its last, 16 tokens a step.
//
// With g_t, beta_t of a token as in decode, G_t the product of the block's decays up to t and G_ts = G_t / G_s, the 16
// tokens of a block are one step of the recurrence (exact: the WY form of the delta rule):
//
//   x_t = S k_t,  y_t = S q_t                                            on the state S [V, K] before the block
//   d_t = beta_t (v_t - G_t x_t - sum over s < t of G_ts (k_t.k_s) d_s)  so d = T (v - G x), T from k, g, beta alone
//   o_t = scale (G_t y_t + sum over s <= t of G_ts (q_t.k_s) d_s)
//   S'  = G_15 S + sum over s of G_15,s d_s k_s^T
//
// A warp has 16 rows of S as the f32 accumulators of m16n8k16 products, which are, pair by pair, the left operand of the
// next product: S to x and y, x to d, d to S', with no shuffle and no shared memory between. k and q are bf16 by
// definition and enter as they are; all else enters as the sum of two bf16 (16 bits), and the state itself is never
// rounded. Only y, which o alone needs, is of S as one bf16: an error like that of rounding o, for a sixth fewer products. WARPS warps of a CTA have 16 rows each of one head of one sequence. AHEAD warps more prepare the
// blocks that come next, a block each, from what does not depend on the state: copies, gates, k.k, q.k and T.
//
// The CTA goes round after round, a round being AHEAD blocks: while the rows' warps are at round r, the others have the
// copies of round r + 2 under way and prepare round r + 1. One barrier a round; three rounds of tiles, two of T.
//
// What is not the textbook, and why:
//   - Arithmetic. Without tensor cores a token costs 3 FMA and more an element of S: 64 sequences of 64 tokens take
//     52 us of FMA on all 132 SMs of an H200 at 1.98 GHz. Here it is 92 products of 16 x 8 x 16 a warp and step.
//   - T = (1 + A)^-1 by substitution, in f32: squaring A instead overflows what bf16 can hold when keys repeat.
//   - Decays within a block are exp2 of differences of sums of log2 g, each g at least 2^-150 (a float has no such
//     number): never a division by a decay, and no infinity to subtract from another.
//   - With L2 cold, cu_seqlens is one access to DRAM and what it points at another. While the first is under way, L2 is
//     told to fetch what the first blocks would be if all sequences were of one length: right for a single sequence
//     and an even batch, and a wrong guess costs some KB of traffic.
//   - The state's loads stand in front of all else that its warps do, as in cuda-v5, behind them a branch never taken.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464), its WY form DeltaNet's (arXiv 2406.06484); operands
// handed on in registers as FlashAttention-2 does (arXiv 2307.08691). Written here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "access.cuh"

namespace gdn {

constexpr int K = 128, V = 128;
constexpr int BLOCK = 16;  // tokens of a step
constexpr int ROWS = 16;   // of the state, in a warp

struct Arguments {
  const float* state;          // [N, HV, V, K]
  const int64_t* cu_seqlens;   // [N + 1]
  const __nv_bfloat16* k;      // [T, H, K]
  const __nv_bfloat16* q;      // [T, H, K]
  const __nv_bfloat16* v;      // [T, HV, V]
  const __nv_bfloat16* a;      // [T, HV]
  const __nv_bfloat16* b;      // [T, HV]
  const float* A_log;          // [HV]
  const float* dt_bias;        // [HV]
  float* new_state;            // like state, and may be state itself: a lane reads what it later writes, no more
  __nv_bfloat16* output;       // [T, HV, V]
  float scale;
  uint32_t H, HV;
  int64_t T, average;          // tokens in all, and of a sequence, rounded down
  Divisor by_HV, by_group;     // group: value heads of one query/key head

  // Sequence n has the tokens from its border to the next. Whatever cu_seqlens holds, no memory but the tensors' is touched.
  __device__ __forceinline__ int64_t border(uint32_t n) const {
    const int64_t x = __ldg(cu_seqlens + n);
    return x < 0 ? 0 : x < T ? x : T;
  }
};

// Shared memory, in bytes. Rows are padded so that the 8 rows of a matrix lie in different banks.
template <int WARPS, int AHEAD>
struct Layout {
  static constexpr int THREADS = (WARPS + AHEAD) * 32;
  static constexpr int ROW = K * 2 + 16, V_ROW = WARPS * ROWS * 2 + 16;
  // a tile: k, q and v of a block, and later its output in the place of v
  static constexpr int Q_AT = BLOCK * ROW, V_AT = 2 * BLOCK * ROW, TILE = V_AT + BLOCK * V_ROW;
  // what is made of it: T and M[t][s] = scale G_ts (q_t.k_s), each as two bf16; G_t, G_15,s
  static constexpr int SMALL_ROW = BLOCK * 2 + 16, SMALL = BLOCK * SMALL_ROW;
  static constexpr int T_HIGH = 0, T_LOW = SMALL, M_HIGH = 2 * SMALL, M_LOW = 3 * SMALL, DECAYS = 4 * SMALL;
  static constexpr int MADE = DECAYS + 2 * BLOCK * 4;
  // a preparing warp's own: A, beta
  static constexpr int A_ROW = BLOCK + 4, OWN = (BLOCK * A_ROW + BLOCK) * 4;

  static constexpr int MADE_AT = 3 * AHEAD * TILE, OWN_AT = MADE_AT + 2 * AHEAD * MADE, BYTES = OWN_AT + AHEAD * OWN;
};

}  // namespace gdn

#ifdef __CUDACC__

#include "gates.cuh"
#include "matrix.cuh"

namespace gdn {

// x and y as bf16 in one register, x in the lower half; with what that leaves over as two more.
__device__ __forceinline__ uint32_t rounded(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ void split(uint32_t& high_part, uint32_t& low_part, float x, float y) {
  high_part = rounded(x, y);
  low_part = rounded(x - low(high_part), y - high(high_part));
}

// Two neighbouring 16 x 8 accumulators as one 16 x 16 left operand in two parts.
__device__ __forceinline__ void split(uint32_t (&high_part)[4], uint32_t (&low_part)[4], const float (&left)[4],
                                      const float (&right)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    split(high_part[i], low_part[i], left[2 * i], left[2 * i + 1]);
    split(high_part[2 + i], low_part[2 + i], right[2 * i], right[2 * i + 1]);
  }
}

// d[0] and d[1] += a b for the 16 columns of b that one load of four matrices brings.
__device__ __forceinline__ void multiply_add(float (&d)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  multiply_add(d[0], a, b[0], b[1]);
  multiply_add(d[1], a, b[2], b[3]);
}

// Of this CTA: its sequence, its heads, its rows of the head.
template <int WARPS>
struct Place {
  int64_t first;              // token
  int length, blocks;         // tokens, blocks of them
  uint32_t head, value_head;  // of H, of HV
  uint32_t row;               // of V

  __device__ __forceinline__ explicit Place(const Arguments& p) {
    constexpr uint32_t TILES = V / (WARPS * ROWS);
    const uint32_t both = blockIdx.x / TILES, n = p.by_HV.divide(both);
    const int64_t begin = p.border(n), end = p.border(n + 1);
    value_head = both - n * p.HV, head = p.by_group.divide(value_head), row = blockIdx.x % TILES * (WARPS * ROWS);
    first = begin, length = end > begin ? static_cast<int>(end - begin) : 0;
    blocks = (length + BLOCK - 1) / BLOCK;
  }
};

// A block for 16 rows: s in and out; the output goes over v in the tile.
template <typename L, int CHAINS>
__device__ __forceinline__ void step(float (&s)[K / 8][4], char* tile, const char* made, uint32_t warp, uint32_t lane,
                                     float scale) {
  const uint32_t g = lane / 4, t = lane % 4;
  // the lane's row of the four matrices that make 16 x 16: those below each other first, or those beside each other
  const uint32_t row = lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 16;
  const uint32_t row_t = lane / 8 % 2 * 8 + lane % 8, column_t = lane / 16 * 16;
  const uint32_t tile_at = shared_address(tile), made_at = shared_address(made) + row * L::SMALL_ROW + column;
  const uint32_t v_at = L::V_AT + warp * (ROWS * 2);

  float x[2][2][4] = {}, y[2][4] = {};  // CHAINS = 2: x of the high and of the low part of s; 1: one sum of both
#pragma unroll
  for (int j = 0; j < K / 16; ++j) {
    uint32_t high_part[4], low_part[4], b[4];
    split(high_part, low_part, s[2 * j], s[2 * j + 1]);
    load_matrices(b, tile_at + row * L::ROW + column + j * 32);
    multiply_add(x[0], high_part, b), multiply_add(x[CHAINS - 1], low_part, b);
    load_matrices(b, tile_at + L::Q_AT + row * L::ROW + column + j * 32);
    multiply_add(y, high_part, b);
  }

  // d = T (v - G x); of a lane's columns, which are tokens, 2t and 2t + 1 of either half
  uint32_t v[4], b[4], high_part[4], low_part[4];
  load_transposed(v, tile_at + v_at + row * L::V_ROW + column);
  const float* decays = reinterpret_cast<const float*>(made + L::DECAYS) + 2 * t;
  float d[2][4], G[2][2], to_end[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 here = *reinterpret_cast<const float2*>(decays + 8 * n);
    const float2 rest = *reinterpret_cast<const float2*>(decays + BLOCK + 8 * n);
    G[n][0] = here.x, G[n][1] = here.y, to_end[n][0] = rest.x, to_end[n][1] = rest.y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float v_i = i % 2 ? high(v[2 * n + i / 2]) : low(v[2 * n + i / 2]);
      d[n][i] = fmaf(-G[n][i % 2], x[0][n][i] + x[1][n][i], v_i);
    }
  }
  split(high_part, low_part, d[0], d[1]);
  {
    float parts[3][2][4] = {};  // sums that do not wait for each other
    load_matrices(b, made_at + L::T_HIGH);
    multiply_add(parts[0], high_part, b), multiply_add(parts[1], low_part, b);
    load_matrices(b, made_at + L::T_LOW);
    multiply_add(parts[2], high_part, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = parts[0][i / 4][i % 4] + (parts[1][i / 4][i % 4] + parts[2][i / 4][i % 4]);
  }

  // S' before o: the next block waits for it
  const float G_end = reinterpret_cast<const float*>(made + L::DECAYS)[BLOCK - 1];
  float to_go[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) to_go[i / 4][i % 4] = d[i / 4][i % 4] * to_end[i / 4][i % 2];
  split(high_part, low_part, to_go[0], to_go[1]);
#pragma unroll
  for (int j = 0; j < K / 16; ++j) {
    load_transposed(b, tile_at + row_t * L::ROW + column_t + j * 32);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float(&into)[4] = s[2 * j + n];
#pragma unroll
      for (int i = 0; i < 4; ++i) into[i] *= G_end;
      multiply_add(into, high_part, b[2 * n], b[2 * n + 1]);
      multiply_add(into, low_part, b[2 * n], b[2 * n + 1]);
    }
  }

#pragma unroll
  for (int i = 0; i < 8; ++i) y[i / 4][i % 4] *= scale * G[i / 4][i % 2];
  split(high_part, low_part, d[0], d[1]);
  load_matrices(b, made_at + L::M_HIGH);
  multiply_add(y, high_part, b), multiply_add(y, low_part, b);
  load_matrices(b, made_at + L::M_LOW);
  multiply_add(y, high_part, b);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t token = i / 4 * 8 + 2 * t + i % 2, of_warp = g + i % 4 / 2 * 8;
    *reinterpret_cast<__nv_bfloat16*>(tile + v_at + token * L::V_ROW + of_warp * 2) = __float2bfloat16(y[i / 4][i % 4]);
  }
}

// The warps of the rows.
template <int WARPS, int AHEAD, int CHAINS, int LOAD>
__device__ __forceinline__ void advance(const Arguments& p, uint32_t warp) {
  using L = Layout<WARPS, AHEAD>;
  const uint32_t lane = threadIdx.x % 32;
  const auto state_at = [](uint32_t thread) {  // its first element: row g, column 2t of its warp's rows
    const uint32_t in_cta = thread / 32 * ROWS * K + thread % 32 / 4 * K + thread % 4 * 2;
    return static_cast<uint64_t>(blockIdx.x) * (WARPS * ROWS * K) + in_cta;
  };
  const float* const from = p.state + state_at(threadIdx.x);
  float s[K / 8][4];
#pragma unroll
  for (int i = 0; i < K / 4; ++i) {
    uint32_t w[2];
    load<8, LOAD>(w, from + i % 2 * 8 * K + i / 2 * 8);
    s[i / 2][i % 2 * 2] = __uint_as_float(w[0]), s[i / 2][i % 2 * 2 + 1] = __uint_as_float(w[1]);
  }
  if constexpr (LOAD == LOAD_FIRST)
    if (static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.state)) < 0) return;  // never: see above

  const Place<WARPS> place(p);
  char* const memory = shared_memory();
  // its 16 bytes of a token's output: a token has two lanes
  const uint32_t token = lane / 2, half = lane % 2;
  __nv_bfloat16* output = p.output + ((place.first + token) * p.HV + place.value_head) * V + place.row + warp * ROWS + half * 8;
  int block = 0;
#pragma unroll 1
  for (int tiles = 0, made = 0; block < place.blocks; tiles = tiles == 2 ? 0 : tiles + 1, made ^= 1) {
    meet<L::THREADS>();
#pragma unroll 1
    for (int i = 0; i < AHEAD && block < place.blocks; ++i, ++block) {
      char* tile = memory + (tiles * AHEAD + i) * L::TILE;
      step<L, CHAINS>(s, tile, memory + L::MADE_AT + (made * AHEAD + i) * L::MADE, warp, lane, p.scale);
      __syncwarp();
      const uint4 o = *reinterpret_cast<const uint4*>(tile + L::V_AT + token * L::V_ROW + (warp * ROWS + half * 8) * 2);
      if (block * BLOCK + static_cast<int>(token) < place.length) *reinterpret_cast<uint4*>(output) = o;
      output += static_cast<int64_t>(BLOCK) * p.HV * V;
    }
  }
  float* const to = p.new_state + state_at(thread_again());
#pragma unroll
  for (int i = 0; i < K / 4; ++i) {
    const uint32_t w[2] = {__float_as_uint(s[i / 2][i % 2 * 2]), __float_as_uint(s[i / 2][i % 2 * 2 + 1])};
    store<8, STORE_PLAIN>(to + i % 2 * 8 * K + i / 2 * 8, w);
  }
}

// k, q and v of a block on their way to a tile; zeros behind the sequence's end.
template <int WARPS, typename L>
__device__ __forceinline__ void fetch(const Arguments& p, const Place<WARPS>& place, int block, uint32_t tile, uint32_t lane) {
  const int left = place.length - block * BLOCK;
  const int64_t token = place.first + static_cast<int64_t>(block) * BLOCK;
#pragma unroll
  for (int i = 0; i < BLOCK * K * 2 / 512; ++i) {
    const uint32_t row = (i * 32 + lane) / 16, column = lane % 16;
    const int64_t from = ((token + row) * p.H + place.head) * K + column * 8;
    const bool there = static_cast<int>(row) < left;
    copy16(tile + row * L::ROW + column * 16, p.k + from, there);
    copy16(tile + L::Q_AT + row * L::ROW + column * 16, p.q + from, there);
  }
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    const uint32_t row = (i * 32 + lane) / (2 * WARPS), column = (i * 32 + lane) % (2 * WARPS);
    const int64_t from = ((token + row) * p.HV + place.value_head) * V + place.row + column * 8;
    copy16(tile + L::V_AT + row * L::V_ROW + column * 16, p.v + from, static_cast<int>(row) < left);
  }
}

// Tells L2 to fetch what a block needs if all sequences are of one length.
template <int WARPS>
__device__ __forceinline__ void guess(const Arguments& p, int block, uint32_t lane) {
  constexpr uint32_t TILES = V / (WARPS * ROWS);
  const uint32_t both = blockIdx.x / TILES, n = p.by_HV.divide(both), value_head = both - n * p.HV;
  const int64_t token = n * p.average + block * BLOCK + lane / 2;
  if (token >= p.T || block * BLOCK >= p.average) return;
  const int64_t of_k = (token * p.H + p.by_group.divide(value_head)) * K + lane % 2 * (K / 2);
  const int64_t of_a = token * p.HV + value_head;
  prefetch(p.k + of_k), prefetch(p.q + of_k);
  prefetch(p.v + of_a * V + blockIdx.x % TILES * (WARPS * ROWS) + lane % 2 * (WARPS * ROWS / 2));
  prefetch(lane % 2 ? p.a + of_a : p.b + of_a);
}

// From a block's k and q, and log2 g and beta of token lane % 16 in each lane: T, M, G_t and G_15,s.
template <typename L>
__device__ __forceinline__ void make(const char* tile, char* made, float* A, uint32_t lane, float log2_g, float beta,
                                     float scale) {
  const uint32_t g = lane / 4, t = lane % 4, token = lane % 16;
  float sum = log2_g;  // log2 of G_t
#pragma unroll
  for (uint32_t m = 1; m < BLOCK; m *= 2) {
    const float before = __shfl_sync(0xffffffffu, sum, (token - m) % 16, 16);
    if (token >= m) sum += before;
  }
  const float end = __shfl_sync(0xffffffffu, sum, 15, 16);
  float* const betas = A + BLOCK * L::A_ROW;
  if (lane < 16) {
    float* const decays = reinterpret_cast<float*>(made + L::DECAYS);
    decays[token] = exp2_approx(sum), decays[BLOCK + token] = exp2_approx(end - sum), betas[token] = beta;
  }

  // k.k and q.k of all pairs, in two sums each: even and odd steps do not wait for each other
  const uint32_t at = shared_address(tile) + (lane / 16 * 8 + lane % 8) * L::ROW + lane / 8 % 2 * 16;
  float kk[2][2][4] = {}, qk[2][2][4] = {};
#pragma unroll
  for (int j = 0; j < K / 16; ++j) {
    uint32_t keys[4], queries[4];
    load_matrices(keys, at + j * 32), load_matrices(queries, at + L::Q_AT + j * 32);
    const uint32_t k[4] = {keys[0], keys[2], keys[1], keys[3]};  // the same four matrices as a left operand
    const uint32_t q[4] = {queries[0], queries[2], queries[1], queries[3]};
    multiply_add(kk[j % 2], k, keys), multiply_add(qk[j % 2], q, keys);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {  // rows g and g + 8
    const uint32_t row = g + 8 * h;
    const float sum_t = __shfl_sync(0xffffffffu, sum, row), beta_t = __shfl_sync(0xffffffffu, beta, row);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float of_T[2], of_M[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t column = 8 * n + 2 * t + i;
        const float G_ts = exp2_approx(sum_t - __shfl_sync(0xffffffffu, sum, column));
        const int e = 2 * h + i;
        of_T[i] = column < row ? beta_t * G_ts * (kk[0][n][e] + kk[1][n][e]) : 0.f;
        of_M[i] = column <= row ? scale * G_ts * (qk[0][n][e] + qk[1][n][e]) : 0.f;
      }
      *reinterpret_cast<float2*>(A + row * L::A_ROW + 8 * n + 2 * t) = make_float2(of_T[0], of_T[1]);
      uint32_t high_part, low_part;
      split(high_part, low_part, of_M[0], of_M[1]);
      const uint32_t to = row * L::SMALL_ROW + (8 * n + 2 * t) * 2;
      *reinterpret_cast<uint32_t*>(made + L::M_HIGH + to) = high_part;
      *reinterpret_cast<uint32_t*>(made + L::M_LOW + to) = low_part;
    }
  }
  __syncwarp();

  // T (1 + A) = 1 from the last column to the first, row t of T in lane t and in lane 16 + t; then T diag(beta)
  float row[BLOCK];
#pragma unroll
  for (uint32_t s = 0; s < BLOCK; ++s) row[s] = s == token ? 1.f : 0.f;
#pragma unroll
  for (int u = BLOCK - 1; u > 0; --u) {
#pragma unroll
    for (int s = 0; s < u; s += 4) {
      const float4 of_A = *reinterpret_cast<const float4*>(A + u * L::A_ROW + s);  // zeros from column u on
      row[s] = fmaf(-row[u], of_A.x, row[s]);
      if (s + 1 < u) row[s + 1] = fmaf(-row[u], of_A.y, row[s + 1]);
      if (s + 2 < u) row[s + 2] = fmaf(-row[u], of_A.z, row[s + 2]);
      if (s + 3 < u) row[s + 3] = fmaf(-row[u], of_A.w, row[s + 3]);
    }
  }
  uint32_t high_part[BLOCK / 2], low_part[BLOCK / 2];
#pragma unroll
  for (int s = 0; s < BLOCK; s += 2) {
    const float2 beta_s = *reinterpret_cast<const float2*>(betas + s);
    split(high_part[s / 2], low_part[s / 2], row[s] * beta_s.x, row[s + 1] * beta_s.y);
  }
  uint4* const to = reinterpret_cast<uint4*>(made + (lane < 16 ? L::T_HIGH : L::T_LOW) + token * L::SMALL_ROW);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 high_four = {high_part[4 * i], high_part[4 * i + 1], high_part[4 * i + 2], high_part[4 * i + 3]};
    const uint4 low_four = {low_part[4 * i], low_part[4 * i + 1], low_part[4 * i + 2], low_part[4 * i + 3]};
    to[i] = lane < 16 ? high_four : low_four;
  }
  __syncwarp();  // before A is written again
}

// The warps that work ahead: warp i has block i of every round.
template <int WARPS, int AHEAD>
__device__ __forceinline__ void prepare(const Arguments& p, uint32_t warp) {
  using L = Layout<WARPS, AHEAD>;
  constexpr float LEAST = -150.f;  // log2 of what is no float any more
  const uint32_t lane = threadIdx.x % 32;
  guess<WARPS>(p, static_cast<int>(warp), lane);
  const Place<WARPS> place(p);
  char* const memory = shared_memory();
  float* const A = reinterpret_cast<float*>(memory + L::OWN_AT + warp * L::OWN);
  const auto tile = [&](int at) { return memory + (at * AHEAD + warp) * L::TILE; };

  __nv_bfloat16 a, b;  // of token lane % 16
  const auto begin = [&](int block, int at) {
    if (block < place.blocks) {
      fetch<WARPS, L>(p, place, block, shared_address(tile(at)), lane);
      const int token = block * BLOCK + static_cast<int>(lane % 16);
      const int64_t from = (place.first + (token < place.length ? token : 0)) * p.HV + place.value_head;
      a = p.a[from], b = p.b[from];
    }
    commit_copies();
  };
  if (place.blocks > 0) begin(warp, 0);
  const float A_log = p.A_log[place.value_head], dt_bias = p.dt_bias[place.value_head];
#pragma unroll 1
  for (int first = 0, tiles = 0, made = 0; first < place.blocks; first += AHEAD, made ^= 1) {
    const int block = first + static_cast<int>(warp), next = tiles == 2 ? 0 : tiles + 1;
    const bool there = block * BLOCK + static_cast<int>(lane % 16) < place.length;
    const float log2_g = there ? fmaxf(log2_decay(A_log, __bfloat162float(a) + dt_bias), LEAST) : 0.f;
    const float beta = there ? sigmoid(__bfloat162float(b)) : 0.f;
    begin(block + AHEAD, next);
    wait_for_copies<1>();
    __syncwarp();
    if (block < place.blocks)
      make<L>(tile(tiles), memory + L::MADE_AT + (made * AHEAD + warp) * L::MADE, A, lane, log2_g, beta, p.scale);
    meet<L::THREADS>();
    tiles = next;
  }
}

template <int WARPS, int AHEAD, int CHAINS, int LOAD, int RESIDENT>
__global__ void __launch_bounds__((WARPS + AHEAD) * 32, RESIDENT > WARPS + AHEAD ? RESIDENT / (WARPS + AHEAD) : 1)
gdn_prefill_recurrent(const __grid_constant__ Arguments p) {
  const uint32_t warp = threadIdx.x / 32;
  if (warp < WARPS) advance<WARPS, AHEAD, CHAINS, LOAD>(p, warp);
  else prepare<WARPS, AHEAD>(p, warp - WARPS);
}

}  // namespace gdn

#endif  // __CUDACC__
