// Verify: up to 8 tokens of Gated Delta Net for each sequence in one launch, from states in the slots of a pool.
//
// Token t has g_t = exp(-exp(A_log) softplus(a_t + dt_bias)), beta_t = sigmoid(b_t). All products with the state use the
// old one, S [V, K] (k-last, K = V = 128):
//
//   x_t = S k_t,  y_t = S q_t,  D_ts = g_(s+1) ... g_t,  G_t = D_t(-1)
//   r_t = beta_t (v_t - G_t x_t)
//   d_t = r_t - sum_(s<t) beta_t D_ts (k_t.k_s) d_s,  o_t = scale (G_t y_t + sum_(s<=t) D_ts (q_t.k_s) d_s)
//   S_t = g_t S_(t-1) + d_t k_t^T
//
// With A_ts = beta_t D_ts (k_t.k_s) below the diagonal, P_ts = D_ts (q_t.k_s) up to it: d = M r, o = scale (G y + W r),
// M = (I + A)^-1, W = P M. M and W are the same for all rows of a head, and are made while S is on its way; after it
// has arrived, a row needs x, y and two short sums.
//
// Steps, as in docs/kernels/mtp.md: 1 load slots, 2 load S, 3 M and W, 4 x and y, 5 sums and outputs, 6 states.
//
// Why so:
//   - x and y are one product of matrices, S times [k_0 q_0 k_1 q_1 ...]^T, on the tensor cores (mma.sync, 8 columns for 4
//     tokens). Multiply-adds and shuffles would be 8 and more instructions for each element of S with 4 tokens. k and q are
//     bf16, so nothing is lost: S in bf16 is multiplied as it is; S in f32 as two parts of 11 bits each (tf32), which
//     leaves an error of 2^-21; S in f16 fits one part. With tokens of f16, which tf32 holds too, S in bf16 is such a part as well.
//   - S comes first. A warp that loads it has nothing else to do before: the slot, the address, the loads, and then v. One
//     more warp of the CTA loads k, q and the gates, makes M and W, and leaves these and k and q in shared memory.
//   - The order of K in a product is free: lane c of the four of a row takes 16 bytes side by side.
//   - A warp stores 512 bytes side by side. For that S is loaded by rows where states are written, and gets to the products
//     through shared memory.
//   - Dots of k and q with each other are such a product too, of the same registers with themselves: k_t.k_s, q_t.k_s and
//     the norms. The norms are factors of M, W, x and y, so k and q stay as they are.
//   - D is a product of gates, never G_t / G_s: with strong decay G is 0.
//   - Sums over s skip s > t: what is in a later token, a NaN or nothing, does no harm.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464); its form with an inverse of unit triangular matrices is
// the WY form of DeltaNet (arXiv 2406.06484), here for one short chunk. Written here.
#pragma once

#include <cstddef>
#include <type_traits>

#include "decode.cuh"
#include "mma_bf16.cuh"
#include "mma_f16.cuh"
#include "mma_tf32.cuh"
#include "order.cuh"

namespace gdn {

constexpr int MOST_TOKENS = 8;

enum Mode { OUTPUTS, LAST, SLOTS, BUFFER };  // which states are written, and where: see mtp_verify

// Strides are of elements, and have 32 bits: their products with an index have 64. With cu_seqlens, those of the batch
// are 0. Indices are int32 or int64 as their shifts say (log2 of their bytes); a pool has less than 2^31 slots. The order
// is that of use, for the constant cache is cold: the state's address needs the first two lines, which end before `k`.
struct MtpArguments {
  const void* slots;           // [B] or [B, columns]
  const void* pool;            // [slots, HV, V, K] of T, the state of each head dense
  const void* accepted;        // [B]: the state is read from column accepted - 1; null: from column 0
  Divisor by_HV{1};
  uint32_t HV, head_bytes;     // head_bytes: from a head's state to the next, in `states` too; a slot has less than 4 GiB
  uint32_t slots_step;         // bytes from a sequence's slots to the next one's
  uint32_t slot_shift : 4, accepted_shift : 4, rows_shift : 4, columns : 4;  // not bytes, which are loads of their own; shift 0: no tensor

  const int32_t* cu_seqlens;   // [B + 1]; null: each sequence has `tokens` tokens
  int32_t tokens, slot_stride, first_slot, slots_end, v_batch, v_token;  // slots below first_slot or from slots_end on: padding
  const __nv_bfloat16* v;      // [.., HV, V]; this and all others with 16 bits: of Token, which the kernel knows
  __nv_bfloat16* output;       // [.., HV, V], dense
  float scale;
  Divisor by_group{1};         // value heads of one query/key head
  uint8_t mode, dt_bias_half;  // dt_bias has 16 bits

  const __nv_bfloat16* k;      // [B, tokens, H, K], or [all tokens, H, K] with cu_seqlens; the others likewise
  const __nv_bfloat16* q;
  int32_t k_batch, k_token, q_batch, q_token;
  const void* a;               // [.., HV] bfloat16
  const void* b;
  int32_t a_batch, a_token, b_batch, b_token;
  const float* A_log;          // [HV]; null if the gates are given: a is log g, in float, and b beta, in float if wide_beta
  const void* dt_bias;         // [HV] float, or as tokens
  float epsilon;               // of the norm, under the root; below 0: q and k are taken as they are
  void* states;                // where states go: the pool, or [N, >= tokens, HV, V, K] of T
  const void* states_rows;     // [B], the row of `states`; null: the sequence's number
  int32_t states_stride, state_stride;  // of a row of `states` (0 for the pool), and of a state in it (or a slot)
  bool wide_beta;
};
static_assert(offsetof(MtpArguments, k) == 112);  // parameters begin 16 bytes into a line of 64

#ifdef __CUDACC__

// What the rows of a head need of token t: its rows of W (with scale) and of M (with the norm of k_t), and factors of v_t,
// x_t and y_t. Written by one warp.
template <int TOKENS>
struct alignas(16) Coefficients {
  float W[TOKENS][TOKENS], M[TOKENS][TOKENS];
  float4 factors[TOKENS];  // beta, beta G |k|^-1, scale G |q|^-1, g
};

// One warp's work while S is on its way. `dots` has k_s.x and q_s.x for the vectors x = g and g + 8 of the lane, in the
// layout of a product's d: vector 2 s + 1 is q_s, 2 s is k_s (s = 0..3; the next column tile: 4..7). g and beta: of token
// g / 2, and of that + 4.
template <int TOKENS>
__device__ __forceinline__ void make_coefficients(Coefficients<TOKENS>& to, const float (&dots)[TOKENS / 4][4],
                                                  const float (&gate)[TOKENS / 4], const float (&beta)[TOKENS / 4],
                                                  float scale, float epsilon, uint32_t lane) {
  constexpr int N = TOKENS / 4;
  constexpr uint32_t ALL = 0xffffffffu;
  const uint32_t quad = lane & ~3u;
  const int own = lane / 8;               // token of the lane's vector, + 4 h
  const bool is_q = lane & 4;
  float norm[N], all_norms[TOKENS], all_gates[TOKENS], e[N][TOKENS], G[N];
#pragma unroll
  for (int h = 0; h < N; ++h) {
    const float square = __shfl_sync(ALL, is_q ? dots[h][2 * h + 1] : dots[h][2 * h], quad + own);
    norm[h] = epsilon < 0.f ? 1.f : rsqrtf(square + epsilon);
  }
#pragma unroll
  for (int s = 0; s < TOKENS; ++s) {
    all_norms[s] = __shfl_sync(ALL, norm[s / 4], 8 * (s % 4));
    all_gates[s] = __shfl_sync(ALL, gate[s / 4], 8 * (s % 4));
#pragma unroll
    for (int h = 0; h < N; ++h) e[h][s] = __shfl_sync(ALL, dots[s / 4][2 * h], quad + s % 4);
  }
  // e: A's row for a vector k, P's for a vector q
#pragma unroll
  for (int h = 0; h < N; ++h) {
    const int t = own + 4 * h;
    const float factor = is_q ? norm[h] : norm[h] * beta[h];
    float D = 1.f;
#pragma unroll
    for (int s = TOKENS - 1; s >= 0; --s) {
      if (s + 1 < TOKENS && s < t) D *= all_gates[s + 1];
      e[h][s] *= D * factor * all_norms[s];
    }
    G[h] = D * all_gates[0];
  }
  // M (I + A) = I and W (I + A) = P, by columns from the last: each vector has its row
  float A[TOKENS][TOKENS], row[N][TOKENS];
#pragma unroll
  for (int t = 1; t < TOKENS; ++t)
#pragma unroll
    for (int s = 0; s < t; ++s) A[t][s] = __shfl_sync(ALL, e[t / 4][s], 8 * (t % 4));
#pragma unroll
  for (int h = 0; h < N; ++h) {
    const int t = own + 4 * h;
#pragma unroll
    for (int s = TOKENS - 1; s >= 0; --s) {
      float sum = is_q ? (s <= t ? e[h][s] : 0.f) : (s == t ? 1.f : 0.f);
#pragma unroll
      for (int u = TOKENS - 1; u > s; --u)
        if (u <= t) sum = fmaf(-row[h][u], A[u][s], sum);
      row[h][s] = sum;
    }
    if (lane % 4 == 0) {
      const float f = is_q ? scale : norm[h];
      float4* at = reinterpret_cast<float4*>(is_q ? to.W[t] : to.M[t]);
#pragma unroll
      for (int s = 0; s < TOKENS; s += 4)
        at[s / 4] = {f * row[h][s], f * row[h][s + 1], f * row[h][s + 2], f * row[h][s + 3]};
      if (is_q) {
        to.factors[t].z = scale * G[h] * norm[h];
      } else {
        to.factors[t].x = beta[h], to.factors[t].y = beta[h] * G[h] * norm[h], to.factors[t].w = gate[h];
      }
    }
  }
}

// d += S b for 16 bytes a lane of rows g (w[0]) and, with 16 ROWS, g + 8 (w[1]); b: the same elements of vector g.
template <typename Token, int ROWS, typename T>
__device__ __forceinline__ void multiply_block(float (&d)[2][4], const uint32_t (&w)[ROWS / 8][4], const uint32_t* b,
                                               const T*) {
  constexpr int LAST = ROWS / 8 - 1;
  const auto second = [](uint32_t x) { return LAST ? x : 0u; };
  if constexpr (std::is_same_v<T, __nv_bfloat16> && std::is_same_v<Token, T>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t a[4] = {w[0][2 * i], second(w[LAST][2 * i]), w[0][2 * i + 1], second(w[LAST][2 * i + 1])};
      multiply_add(d[i], a, b[2 * i], b[2 * i + 1]);
    }
  } else {
    constexpr int EACH = 16 / sizeof(T);
    float s[2][EACH];
    unpack<EACH>(s[0], w[0], static_cast<const T*>(nullptr)), unpack<EACH>(s[1], w[LAST], static_cast<const T*>(nullptr));
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
      uint32_t upper[4], lower[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float x = n % 2 && !LAST ? 0.f : s[n % 2][i + n / 2];
        upper[n] = __float_as_uint(x) & 0xffffe000u;
        lower[n] = __float_as_uint(x - __uint_as_float(upper[n]));
      }
      float pair[2];
      unpack<2>(pair, b + i / 2, static_cast<const Token*>(nullptr));
      const uint32_t b0 = __float_as_uint(pair[0]), b1 = __float_as_uint(pair[1]);
      multiply_add_tf32(d[sizeof(T) == 4 ? 0 : i / 2 % 2], upper, b0, b1);
      if constexpr (sizeof(T) == 4) multiply_add_tf32(d[1], lower, b0, b1);
    }
  }
}

// Element `i` of token `t` (of all) of sequence i_b, with 64 bits.
template <typename E>
__device__ __forceinline__ const E* of_token(const E* from, uint32_t i_b, int32_t batch, int32_t token, int t, uint32_t i) {
  return from + (static_cast<int64_t>(static_cast<int32_t>(i_b)) * batch + static_cast<int64_t>(t) * token + i);
}

// The same of a or b: its bits, of float if `wide`, else of 16 bits.
__device__ __forceinline__ void load_gate(uint32_t* bits, const void* from, bool wide, uint32_t i_b, int32_t batch, int32_t token, int t,
                                          uint32_t i) {
  if (wide) ptx::load_now<4>(bits, of_token(static_cast<const uint32_t*>(from), i_b, batch, token, t, i));
  else ptx::load_now<2>(bits, of_token(static_cast<const uint16_t*>(from), i_b, batch, token, t, i));
}

__device__ __forceinline__ int32_t load_int(const int32_t* from) {
  uint32_t word;
  ptx::load_now<4>(&word, from);
  return static_cast<int32_t>(word);
}
// The low word of number i of `of`, fewer than 2^29: all of it, unless it has 64 bits and is below 0 or beyond all that is counted.
__device__ __forceinline__ const int32_t* index_at(const void* of, uint32_t i, uint32_t shift) {
  return reinterpret_cast<const int32_t*>(static_cast<const char*>(of) + (i << shift));  // little-endian
}
// Whether it is so.
__device__ __forceinline__ bool is_beyond(const void* of, uint32_t i, uint32_t shift) {
  return shift == 3 && load_int(index_at(of, i, shift) + 1) != 0;
}
// -1 for such a number. There is none without a tensor: `otherwise`.
__device__ __forceinline__ int32_t load_index(const void* of, uint32_t i, uint32_t shift, int32_t otherwise) {
  const int32_t* const at = index_at(of, i, shift);
  const bool there = of != nullptr;
  const uint32_t low = ptx::load_now_if(there, at), high = ptx::load_now_if(there && shift == 3, at + 1);
  return high != 0 ? -1 : there ? static_cast<int32_t>(low) : otherwise;
}

// What a CTA's last warp makes for the others, while S is on its way: first the vectors, then M and W.
template <int TOKENS, int PAD>
struct OfHead {
  Coefficients<TOKENS> coefficients;
  alignas(16) char vectors[2 * TOKENS][K * 2 + PAD];  // k_0 q_0 k_1 .. as tokens are
};

// The work of that warp; `vectors_ready` is called once they are. Vector lane / 4 (and + 8): k or q of token lane / 8 (and
// + 4), columns 8 (lane % 4) + 32 n and the next 7.
template <bool GIVEN, typename Token, int TOKENS, int PAD, typename Ready>
__device__ __forceinline__ void make_head(OfHead<TOKENS, PAD>& to, const MtpArguments& p, uint32_t i_b, uint32_t i_hv,
                                          uint32_t lane, Ready vectors_ready) {
  constexpr int N = TOKENS / 4;
  const uint32_t i_h = p.by_group.divide(i_hv), c = lane % 4;
  const bool is_q = lane & 4;
  int32_t begin = 0, count = p.tokens;
  if (p.cu_seqlens != nullptr) {
    begin = load_int(p.cu_seqlens + i_b);
    count = min(load_int(p.cu_seqlens + i_b + 1) - begin, count);
  }
  uint32_t words[N][4][4], a[N], b[N], A_log = 0, bias = 0, bias_low = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    // A token that is not there is the last one again, or any: nothing reads its results.
    const int t = max(begin + min(int(4 * j + lane / 8), count - 1), 0);
    const __nv_bfloat16* from =
        of_token(is_q ? p.q : p.k, i_b, is_q ? p.q_batch : p.k_batch, is_q ? p.q_token : p.k_token, t, i_h * K);
#pragma unroll
    for (int n = 0; n < 4; ++n) ptx::load_now<16>(words[j][n], from + c * 8 + n * 32);
    load_gate(&a[j], p.a, GIVEN, i_b, p.a_batch, p.a_token, t, i_hv);
    load_gate(&b[j], p.b, GIVEN && p.wide_beta, i_b, p.b_batch, p.b_token, t, i_hv);
  }
  if constexpr (!GIVEN) {
    ptx::load_now<4>(&A_log, p.A_log + i_hv);
    const char* bias_at = static_cast<const char*>(p.dt_bias) + (i_hv << (p.dt_bias_half ? 1 : 2));
    ptx::load_now<2>(&bias, bias_at + (p.dt_bias_half ? 0 : 2));  // a bfloat16 is the upper half of a float
    ptx::load_now<2>(&bias_low, bias_at);
  }
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int n = 0; n < 4; ++n)
      *reinterpret_cast<uint4*>(&to.vectors[8 * j + lane / 4][c * 16 + n * 64]) = {words[j][n][0], words[j][n][1],
                                                                                  words[j][n][2], words[j][n][3]};
  vectors_ready();
  float dots[4][N][4] = {};  // four sums, for a quarter of the latency
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const uint32_t *first = &words[0][n / 2][n % 2 * 2], *second = &words[N - 1][n / 2][n % 2 * 2];
    const uint32_t x[4] = {first[0], N == 2 ? second[0] : 0, first[1], N == 2 ? second[1] : 0};
    multiply_tokens<Token>(dots[n % 4][0], x, first[0], first[1]);
    if constexpr (N == 2) multiply_tokens<Token>(dots[n % 4][1], x, second[0], second[1]);
  }
  float gate[N], beta[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
      dots[0][j][n] = (dots[0][j][n] + dots[1][j][n]) + (dots[2][j][n] + dots[3][j][n]);
    float dt_bias = __uint_as_float(bias << 16 | (p.dt_bias_half ? 0 : bias_low));
    if constexpr (std::is_same_v<Token, __half>) dt_bias = p.dt_bias_half ? token_value<Token>(bias) : dt_bias;
    gate[j] = exp2_approx(log2_gate<Token>(a[j], GIVEN, __uint_as_float(A_log), dt_bias));
    beta[j] = beta_gate<Token>(b[j], GIVEN, GIVEN && p.wide_beta);
  }
  make_coefficients<TOKENS>(to.coefficients, dots[0], gate, beta, p.scale, p.epsilon, lane);
}

// The warps of a CTA: GROUPS groups of SPLIT, all of one head, and one more for M and W. A group has ROWS rows (8 or 16) of S; each
// of its warps multiplies a part of their columns. Four lanes have a row of the product, and lane c of them tokens c and
// c + 4. TOKENS: room for 4 or 8.
template <typename T, int TOKENS, bool WRITES, int ROWS, int SPLIT, int GROUPS>
struct Shape {
  static constexpr int EACH = 16 / sizeof(T), ROW = K * sizeof(T), CHUNKS = ROW / 16;  // elements and bytes; accesses of a row
  static constexpr int HALVES = ROWS / 8, N = TOKENS / 4, WARPS = SPLIT * GROUPS, THREADS = (WARPS + 1) * 32;
  static constexpr int TILE = ROWS * GROUPS, TILES = V / TILE;
  static constexpr int PAD = WRITES ? 64 : 8 * EACH;  // spreads a product's operands over the banks
  // Named barriers: 0 for the vectors; one of each group for M and W, and for x and y in parts; one of each for its tile. There are
  // 16, so many groups share the one for M and W.
  static constexpr bool SHARED = 2 * GROUPS >= 16 && SPLIT > 1;
  static constexpr int READY_THREADS = SHARED ? THREADS : SPLIT * 32 + 32, TILE_BARRIER = SHARED ? 2 : 1 + GROUPS;
  static_assert((ROWS == 8 || ROWS == 16) && (TOKENS == 4 || TOKENS == 8) && V % TILE == 0 && K / SPLIT >= 32);

  struct Memory {  // shared
    OfHead<TOKENS, PAD> head;
    float2 partial[SPLIT > 1 ? GROUPS : 1][SPLIT][N][HALVES][32];
    alignas(WRITES ? 128 : 16) char tiles[WRITES ? GROUPS : 1][WRITES ? ROWS * ROW : 16];
    alignas(16) float deltas[WRITES ? WARPS : 1][TOKENS][ROWS];
  };
};

// Outputs as they are, written as soon as they are there. A lane has `o` of rows lane / 4 + 8 h and tokens lane % 4 + 4 j.
// layer_post_conv.cuh has others.
struct PlainOutputs {
  __device__ __forceinline__ void begin(uint32_t) {}
  __device__ __forceinline__ void join() {}
  __device__ __forceinline__ void ask(const MtpArguments&, uint32_t, uint32_t, int, int, uint32_t, uint32_t) {}
  template <int HALVES, typename Token>
  __device__ __forceinline__ void take(int j, const float (&o)[HALVES], Token* output, int64_t token, int count, uint32_t lane) {
    const int t = 4 * j + lane % 4;
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      if (t < count) output[t * token + lane / 4 + 8 * h] = to_token<Token>(o[h]);
  }
  __device__ __forceinline__ void send(uint32_t, uint32_t) {}
  __device__ __forceinline__ void end(const MtpArguments&, void*, int64_t, int, uint32_t) {}
};

// The work of a thread; `outputs` is the group's, of its first warp.
template <typename S, typename T, int TOKENS, bool WRITES, int ROWS, int SPLIT, int GROUPS, int LOAD, int STORE, bool GIVEN,
          typename Token, bool K_FIRST = false, typename Call, typename Outputs>
__device__ __forceinline__ void verify_rows(const Call& p, typename S::Memory& memory, Outputs& outputs) {
  constexpr int EACH = S::EACH, ROW = S::ROW, CHUNKS = S::CHUNKS, HALVES = S::HALVES, N = S::N, WARPS = S::WARPS;
  constexpr int TILE = S::TILE, TILES = S::TILES;
  // Without writes a lane has rows lane / 4 and + 8, and 16 bytes of each BLOCK columns of the warp's part, as the product
  // takes them. With writes it has 16 bytes of each row of the warp's share (of each second row, if 16 lanes have one), so
  // that a store is of 512 bytes side by side; the product takes them from shared memory.
  constexpr int BLOCK = 4 * EACH, BLOCKS = K / SPLIT / BLOCK, SHARE = ROWS / SPLIT;
  constexpr int LOADS = WRITES ? SHARE * CHUNKS / 32 : BLOCKS * HALVES;
  // K_FIRST: PIECES lanes have the tile's columns of a row of K, 16 bytes each, and the next ones the next row's; a warp has LINES rows at a
  // time, and all of its part. The tile in shared memory is the same.
  constexpr int PIECES = ROWS * int(sizeof(T)) / 16, LINES = 32 / PIECES, LINE = V * int(sizeof(T));
  constexpr uint32_t ALL = 0xffffffffu;
  static_assert(LOADS > 0 && (!K_FIRST || WRITES));
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % 4;
  const uint32_t part = SPLIT == 1 ? 0 : GROUPS == 1 ? warp : warp % SPLIT, group = GROUPS == 1 ? 0 : warp / SPLIT;
  auto& [head, partial, tiles, deltas] = memory;
  const uint32_t i_bh = blockIdx.x / TILES, i_b = p.by_HV.divide(i_bh), i_hv = i_bh - i_b * p.HV;
  if (warp == WARPS) {  // 3. M and W
    outputs.begin(lane);
    make_head<GIVEN, Token>(head, p, i_b, i_hv, lane, [] { named_barrier_arrive<S::THREADS>(0); });
#pragma unroll
    for (int i = 0; i < (S::SHARED ? 1 : GROUPS); ++i) named_barrier_arrive<S::READY_THREADS>(1 + i);
    return;
  }

  // 1. Load slots
  int32_t begin = 0, count = p.tokens;
  const char* const slots = static_cast<const char*>(p.slots) + static_cast<uint64_t>(i_b) * p.slots_step;
  // High words: before the state is asked for where states are written; else afterwards, since it is the low word's slot that is
  // read, and its address need not wait. Either is slower where the other is used (T = 8: 8 %, H100).
  const uint32_t own_column = min(lane, uint32_t{p.columns} - 1);
  int32_t slot, accepted;
  if constexpr (WRITES) {
    slot = load_index(slots, own_column, p.slot_shift, 0), accepted = load_index(p.accepted, i_b, p.accepted_shift, 1);
  } else {
    slot = load_int(index_at(slots, own_column, p.slot_shift)), accepted = 1;
    if (p.accepted != nullptr) accepted = load_int(index_at(p.accepted, i_b, p.accepted_shift));
  }
  if (p.cu_seqlens != nullptr) {
    begin = load_int(p.cu_seqlens + i_b);
    count = min(load_int(p.cu_seqlens + i_b + 1) - begin, count);
  }
  const uint32_t tile = blockIdx.x % TILES * TILE + group * ROWS;       // its first row, of the head
  const uint32_t column = part * (K / SPLIT) + c * EACH;                // the lane's first, without writes
  [[maybe_unused]] const uint32_t line = part * (K / SPLIT) + lane / PIECES, piece = lane % PIECES;  // K_FIRST: the lane's first
  const uint32_t in_head = K_FIRST  ? line * LINE + tile * sizeof(T) + piece * 16
                           : WRITES ? (tile + part * SHARE) * K * sizeof(T) + lane * 16
                                    : ((tile + lane / 4) * K + column) * sizeof(T);
  constexpr int STEP = K_FIRST ? LINES * LINE : 512;  // from an access to the next
  const uint32_t in_slot = i_hv * p.head_bytes + in_head;  // bytes; with writes, of the warp's share
  const char* from = static_cast<const char*>(p.pool) + in_slot;
  ptx::pin(from);

  // 2. Load S
  const int start_column = p.columns > 1 ? accepted - 1 & 31 : 0;
  const int32_t start = __shfl_sync(ALL, slot, start_column);
  bool padding = accepted < 1 || accepted > p.tokens || start < p.first_slot || start >= p.slots_end || count < 1;
  uint32_t w[LOADS][4];
  from += static_cast<int64_t>(start) * p.slot_stride * int64_t(sizeof(T));
  if (!padding) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      load<16, LOAD>(w[i], from + (WRITES ? i * STEP : (i % HALVES * 8 * K + i / HALVES * BLOCK) * int(sizeof(T))));
  }
  uint32_t v[HALVES][N];  // of token c (and + 4)
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      ptx::load_now<2>(&v[h][j], of_token(p.v, i_b, p.v_batch, p.v_token, max(begin + min(int(4 * j + c), count - 1), 0),
                                          i_hv * V + tile + lane / 4 + 8 * h));
  if (SPLIT == 1 || part == 0) outputs.ask(p, i_b, i_hv, begin, count, tile, lane);
  outputs.join();
  if constexpr (!WRITES) {
    if (p.slot_shift == 3) {
      if (is_beyond(slots, own_column, 3)) slot = -1;
      const int32_t exact = __shfl_sync(ALL, slot, start_column);
      padding |= exact < 0;
    }
    padding |= is_beyond(p.accepted, i_b, p.accepted_shift);
  }
  int32_t states_row = i_b;
  if (WRITES && p.states_rows != nullptr) {
    states_row = load_index(p.states_rows, i_b, p.rows_shift, 0);
  }
  Token* output =
      reinterpret_cast<Token*>(p.output) + ((static_cast<int64_t>(p.cu_seqlens ? 0 : i_b * p.tokens) + begin) * p.HV + i_hv) * V + tile;

  if (padding) {  // zeros, and no state
    if (part == 0)
#pragma unroll 1
      for (int i = lane; i < count * ROWS; i += 32)
        output[static_cast<int64_t>(i / ROWS) * p.HV * V + i % ROWS] = to_token<Token>(0.f);
    return;
  }

  // 4. x and y
  named_barrier_sync<S::THREADS>(0);
  float d[N][2][2][4] = {};
  [[maybe_unused]] char* const at = tiles[group];
  // Access i of the lane's share. Chunks of odd rows are in another order, so that two rows are in different banks.
  [[maybe_unused]] const auto own = [&](int i) {
    const uint32_t row = part * SHARE + (CHUNKS == 32 ? i : 2 * i + lane / 16);
    return at + row * ROW + (lane % CHUNKS ^ (CHUNKS == 32 ? row & 1 : (row & 1) * 4)) * 16;
  };
  if constexpr (WRITES) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if constexpr (K_FIRST) {
        const uint32_t k = (line + i * LINES) * sizeof(T), inside = k % 16;
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
          const uint32_t row = piece * EACH + n, chunk = k / 16 ^ (CHUNKS == 32 ? row & 1 : (row & 1) * 4);
          char* const to = at + row * ROW + chunk * 16 + inside;
          if constexpr (sizeof(T) == 4) *reinterpret_cast<uint32_t*>(to) = w[i][n];
          else *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(w[i][n / 2] >> n % 2 * 16);
        }
      } else {
        *reinterpret_cast<uint4*>(own(i)) = {w[i][0], w[i][1], w[i][2], w[i][3]};
      }
    }
    if constexpr (SPLIT == 1) __syncwarp();
    else named_barrier_sync<SPLIT * 32>(S::TILE_BARRIER + group);
#pragma unroll
    for (int i = 0; i < K / SPLIT / 32; ++i) {
      const uint32_t block = part * (K / SPLIT / 32) + i, g = lane / 4;
      uint32_t of_vectors[N][4];
#pragma unroll
      for (int j = 0; j < N; ++j) read<16>(of_vectors[j], &head.vectors[8 * j + g][c * 16 + block * 64]);
#pragma unroll
      for (int n = 0; n < int(sizeof(T)) / 2; ++n) {
        const uint32_t chunk = sizeof(T) == 4 ? (block * 8 + c * 2 + n) ^ (g & 1) : (block * 4 + c) ^ (g & 1) * 4;
        uint32_t s[HALVES][4];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) read<16>(s[h], at + (g + 8 * h) * ROW + chunk * 16);
#pragma unroll
        for (int j = 0; j < N; ++j)
          multiply_block<Token, ROWS>(d[j][sizeof(T) == 4 ? n : i % 2], s, of_vectors[j] + n * 2, static_cast<const T*>(nullptr));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      uint32_t s[HALVES][4];
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int n = 0; n < 4; ++n) s[h][n] = w[i * HALVES + h][n];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        uint32_t of_vectors[EACH / 2];
        read<EACH * 2>(of_vectors, &head.vectors[8 * j + lane / 4][(column + i * BLOCK) * 2]);
        multiply_block<Token, ROWS>(d[j][i % 2], s, of_vectors, static_cast<const T*>(nullptr));
      }
    }
  }
  float2 xy[N][HALVES];
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const auto sum = [&](int n) { return (d[j][0][0][n] + d[j][0][1][n]) + (d[j][1][0][n] + d[j][1][1][n]); };
      xy[j][h] = {sum(2 * h), sum(2 * h + 1)};
      if constexpr (SPLIT > 1) partial[group][part][j][h][lane] = xy[j][h];
    }
  named_barrier_sync<S::READY_THREADS>(S::SHARED ? 1 : 1 + group);
  if constexpr (SPLIT > 1) {
    if (!WRITES && part != 0) return;
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        xy[j][h] = partial[group][0][j][h][lane];
#pragma unroll
        for (int n = 1; n < SPLIT; ++n) {
          const float2 more = partial[group][n][j][h][lane];
          xy[j][h].x += more.x, xy[j][h].y += more.y;
        }
      }
  }

  // 5. Sums and outputs
  const auto& coefficients = head.coefficients;
  const int64_t token = static_cast<int64_t>(p.HV * V);
  float r[N][HALVES];
  float4 factors[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    factors[j] = coefficients.factors[4 * j + c];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) r[j][h] = factors[j].x * token_value<Token>(v[h][j]) - factors[j].y * xy[j][h].x;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int t = 4 * j + c;
    float o[HALVES], delta[HALVES] = {};
#pragma unroll
    for (int h = 0; h < HALVES; ++h) o[h] = factors[j].z * xy[j][h].y;
#pragma unroll
    for (int s = 0; s < 4 * j + 4; ++s) {
      const float W = coefficients.W[t][s], M = WRITES ? coefficients.M[t][s] : 0.f;
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const float r_s = __shfl_sync(ALL, r[s / 4][h], (lane & ~3u) + s % 4);
        if (s <= t) {
          o[h] = fmaf(W, r_s, o[h]);
          if constexpr (WRITES) delta[h] = fmaf(M, r_s, delta[h]);
        }
      }
    }
    if (SPLIT == 1 || part == 0) outputs.take(j, o, output, token, count, lane);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const uint32_t row = lane / 4 + 8 * h;
      // In the order of step 6: rows of the warp's share; of each pair the first ones before the others
      const uint32_t pairs = row / SHARE * SHARE + row % 2 * (SHARE / 2) + row % SHARE / 2;
      if constexpr (WRITES) deltas[warp][t][CHUNKS == 32 || K_FIRST ? row : pairs] = delta[h];
    }
  }
  if (SPLIT == 1 || part == 0) outputs.send(tile, lane);

  // 6. States
  if constexpr (WRITES) {
    int32_t to_slot = lane;  // where lane t's token has its state written to; below 0: nowhere
    if (p.mode == LAST) to_slot = int(lane) + 1 == count ? start : -1;
    if (p.mode == SLOTS) to_slot = slot < p.first_slot || slot >= p.slots_end ? -1 : slot;
    if (int(lane) >= count || states_row < 0) to_slot = -1;
    char* const states =
        static_cast<char*>(p.states) + static_cast<int64_t>(states_row) * p.states_stride * int64_t(sizeof(T)) + in_slot;
    float s[LOADS][EACH];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      uint32_t words[4];
      if constexpr (!K_FIRST) read<16>(words, own(i));
      unpack<EACH>(s[i], K_FIRST ? w[i] : words, static_cast<const T*>(nullptr));
    }
    __syncwarp();
    // A loop: what does not fit into the instruction cache is slower.
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const int32_t i_state = __shfl_sync(ALL, to_slot, t);
      char* to = states + static_cast<int64_t>(i_state) * p.state_stride * int64_t(sizeof(T));
      const float g = coefficients.factors[t].w;
      if constexpr (K_FIRST) {
        float d[EACH];
#pragma unroll
        for (int n = 0; n < EACH; ++n) d[n] = deltas[warp][t][piece * EACH + n];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
          const float k = to_float(reinterpret_cast<const Token*>(head.vectors[2 * t])[line + i * LINES]);
#pragma unroll
          for (int n = 0; n < EACH; ++n) s[i][n] = fmaf(d[n], k, g * s[i][n]);
          uint32_t packed[4];
          pack<EACH>(packed, s[i], static_cast<const T*>(nullptr));
          if (i_state >= 0) store<16, STORE>(to + i * STEP, packed);
        }
        continue;
      }
      float k[EACH];
      uint32_t k_words[EACH / 2];
      read<EACH * 2>(k_words, &head.vectors[2 * t][lane % CHUNKS * EACH * 2]);
      unpack<EACH>(k, k_words, static_cast<const Token*>(nullptr));
      const float* d_t = &deltas[warp][t][part * SHARE + (CHUNKS == 32 ? 0 : lane / 16 * (SHARE / 2))];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const float d_row = d_t[i];
#pragma unroll
        for (int n = 0; n < EACH; ++n) s[i][n] = fmaf(d_row, k[n], g * s[i][n]);
        uint32_t packed[4];
        pack<EACH>(packed, s[i], static_cast<const T*>(nullptr));
        if (i_state >= 0) store<16, STORE>(to + i * 512, packed);
      }
    }
  }
  if (SPLIT == 1 || part == 0) outputs.end(p, output, token, count, lane);
}

template <typename T, int TOKENS, bool WRITES, int ROWS, int SPLIT, int GROUPS, int LOAD, int STORE, int RESIDENT, bool GIVEN = false,
          typename Token = __nv_bfloat16, bool K_FIRST = false>
__global__ void __launch_bounds__((SPLIT * GROUPS + 1) * 32,
                                  RESIDENT > SPLIT * GROUPS + 1 ? RESIDENT / (SPLIT * GROUPS + 1) : 1)
gdn_mtp(const __grid_constant__ MtpArguments p) {
  using S = Shape<T, TOKENS, WRITES, ROWS, SPLIT, GROUPS>;
  __shared__ typename S::Memory memory;
  PlainOutputs outputs;
  verify_rows<S, T, TOKENS, WRITES, ROWS, SPLIT, GROUPS, LOAD, STORE, GIVEN, Token, K_FIRST>(p, memory, outputs);
}

#endif  // __CUDACC__

}  // namespace gdn
