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
// Steps, as in docs/kernels/mtp.md: 1 load slots and the rest, 2 load S, 3 M and W, 4 x and y, 5 sums and outputs,
// 6 states.
//
// Why so:
//   - x and y are one product of matrices, S times [k_0 q_0 k_1 q_1 ...]^T, on the tensor cores (mma.sync, 8 columns for 4
//     tokens). Multiply-adds and shuffles would be 8 and more instructions for each element of S with 4 tokens. k and q are
//     bf16, so nothing is lost: S in bf16 is multiplied as it is; S in f32 as two parts of 11 bits each (tf32), which
//     leaves an error of 2^-21; S in f16 fits one part.
//   - The order of K in a product is free: lane c of the four of a row takes the 16 bytes that it has loaded.
//   - Dots of k and q with each other are such a product too, of the same registers with themselves: k_t.k_s, q_t.k_s and
//     the norms. The norms are factors of M, W, x and y, so k and q stay as they are.
//   - D is a product of gates, never G_t / G_s: with strong decay G is 0.
//   - Sums over s skip s > t: what is in a later token, a NaN or nothing, does no harm.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464); its form with an inverse of unit triangular matrices is
// the WY form of DeltaNet (arXiv 2406.06484), here for one short chunk. Written here.
#pragma once

#include <type_traits>

#include "decode.cuh"
#include "mma_bf16.cuh"
#include "mma_tf32.cuh"
#include "order.cuh"

namespace gdn {

constexpr int MOST_TOKENS = 8;

enum Mode { OUTPUTS, LAST, SLOTS, BUFFER };  // which states are written, and where: see mtp_verify

// Strides are of elements, and have 32 bits: their products with an index have 64. With cu_seqlens, those of the batch
// are 0. Indices are int32 or int64 as their shifts say (log2 of their bytes); a pool has less than 2^31 slots. The order
// is that of use, for the constant cache is cold: its first line ends before `pool`, the next ones before `v` and `epsilon`.
struct MtpArguments {
  const void* slots;           // [B] or [B, columns]
  const void* accepted;        // [B]: the state is read from column accepted - 1; null: from column 0
  const int32_t* cu_seqlens;   // [B + 1]; null: each sequence has `tokens` tokens
  Divisor by_HV{1};
  int32_t slots_stride, columns, tokens;
  uint8_t slot_shift, accepted_shift, rows_shift, dt_bias_bf16;

  const void* pool;            // [slots, HV, V, K] of T, each slot dense
  const __nv_bfloat16* k;      // [B, tokens, H, K], or [all tokens, H, K] with cu_seqlens; the others likewise
  const __nv_bfloat16* q;
  Divisor by_group{1};         // value heads of one query/key head
  uint32_t HV;
  int32_t slot_stride, first_slot, k_batch, k_token, q_batch, q_token, a_batch;

  const __nv_bfloat16* v;      // [.., HV, V]
  const __nv_bfloat16* a;      // [.., HV]
  const __nv_bfloat16* b;
  const float* A_log;          // [HV]
  const void* dt_bias;         // [HV] float or bfloat16
  int32_t a_token, b_batch, b_token, v_batch, v_token;
  float scale;

  float epsilon;               // of the norm, under the root; below 0: q and k are taken as they are
  int32_t mode;
  __nv_bfloat16* output;       // [.., HV, V], dense
  void* states;                // where states go: the pool, or [N, >= tokens, HV, V, K] of T
  const void* states_rows;     // [B], the row of `states`; null: the sequence's number
  int32_t states_stride, state_stride;  // of a row of `states` (0 for the pool), and of a state in it (or a slot)
};

#ifdef __CUDACC__

// N words (2 or 4) of q or k: through L1, since the CTAs of a head share them.
template <int N>
__device__ __forceinline__ void load_words(uint32_t* to, const __nv_bfloat16* from) {
  if constexpr (N == 2) {
    const uint2 u = __ldg(reinterpret_cast<const uint2*>(from));
    to[0] = u.x, to[1] = u.y;
  } else {
    const uint4 u = __ldg(reinterpret_cast<const uint4*>(from));
    to[0] = u.x, to[1] = u.y, to[2] = u.z, to[3] = u.w;
  }
}

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
template <int ROWS, typename T>
__device__ __forceinline__ void multiply_block(float (&d)[2][4], const uint32_t (&w)[ROWS / 8][4], const uint32_t* b,
                                               const T*) {
  constexpr int LAST = ROWS / 8 - 1;
  const auto second = [](uint32_t x) { return LAST ? x : 0u; };
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
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
      const uint32_t b0 = b[i / 2] << 16, b1 = b[i / 2] & 0xffff0000u;
      multiply_add_tf32(d[sizeof(T) == 4 ? 0 : i / 2 % 2], upper, b0, b1);
      if constexpr (sizeof(T) == 4) multiply_add_tf32(d[1], lower, b0, b1);
    }
  }
}

// A warp has ROWS rows (8 or 16) of S, or, if SPLIT of them share rows, a part of their columns; a CTA has GROUPS such
// groups of warps, all of one head. TOKENS: room for 4 or 8. Four lanes have a row, and lane c of them tokens c and c + 4.
template <typename T, int TOKENS, bool WRITES, int ROWS, int SPLIT, int GROUPS, int LOAD, int STORE, int RESIDENT>
__global__ void __launch_bounds__(SPLIT * GROUPS * 32, RESIDENT > SPLIT * GROUPS ? RESIDENT / (SPLIT * GROUPS) : 1)
gdn_mtp(const __grid_constant__ MtpArguments p) {
  constexpr int EACH = 16 / sizeof(T), BLOCK = 4 * EACH, BLOCKS = K / SPLIT / BLOCK;  // a lane's, a row's of one access
  constexpr int HALVES = ROWS / 8, N = TOKENS / 4, WARPS = SPLIT * GROUPS, TILE = ROWS * GROUPS, TILES = V / TILE;
  constexpr uint32_t ALL = 0xffffffffu;
  static_assert((ROWS == 8 || ROWS == 16) && (TOKENS == 4 || TOKENS == 8) && BLOCKS > 0 && V % TILE == 0);
  const uint32_t lane = threadIdx.x % 32, warp = WARPS == 1 ? 0 : threadIdx.x / 32;
  const uint32_t part = warp % SPLIT, group = warp / SPLIT, c = lane % 4;
  __shared__ Coefficients<TOKENS> coefficients;
  __shared__ float2 partial[SPLIT > 1 ? GROUPS : 1][SPLIT][N][HALVES][32];

  // 1. Load slots, then all that needs no slot. A token that is not there is the last one again: nothing reads its results.
  const uint32_t i_bh = blockIdx.x / TILES, i_b = p.by_HV.divide(i_bh), i_hv = i_bh - i_b * p.HV;
  const uint32_t i_h = p.by_group.divide(i_hv);
  const auto index = [](const void* of, uint32_t i, uint8_t shift) {  // the low word is enough, and -1 is -1 in it
    uint32_t word;
    ptx::load_now<4>(&word, static_cast<const char*>(of) + (static_cast<uint64_t>(i) << shift));
    return static_cast<int32_t>(word);
  };
  int32_t accepted = 1, begin = 0, count = p.tokens;
  const int32_t slot = index(p.slots, i_b * p.slots_stride + min(int(lane), p.columns - 1), p.slot_shift);
  if (p.accepted != nullptr) accepted = index(p.accepted, i_b, p.accepted_shift);
  if (p.cu_seqlens != nullptr) {
    begin = index(p.cu_seqlens, i_b, 2);
    count = min(index(p.cu_seqlens, i_b + 1, 2) - begin, count);
  }
  const auto token = [&](int t) { return max(begin + min(t, count - 1), 0); };  // any, if the sequence has none
  // Element `i` of token `t` (of all) of sequence i_b, with 64 bits
  const auto of_token = [&](const __nv_bfloat16* from, int32_t batch, int32_t token, int t, uint32_t i) {
    return from + (static_cast<int64_t>(static_cast<int32_t>(i_b)) * batch + static_cast<int64_t>(t) * token + i);
  };
  const uint32_t column = part * (K / SPLIT) + c * EACH;  // the lane's first
  const uint32_t i_row = blockIdx.x % TILES * TILE + group * ROWS + lane / 4;  // of the head; + 8 h
  uint32_t vectors[N][BLOCKS][EACH / 2];                  // vector lane / 4 (and + 8) at the columns of the lane
  uint32_t whole[N][SPLIT == 1 ? 1 : 4][4];               // and at columns of all warps, for its dots with the others
  uint32_t v[HALVES][N], a[N], b[N];                      // bf16; v of token c (and + 4), a and b of the vector's token
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int t = token(4 * j + lane / 8);
    const bool is_q = lane & 4;
    const __nv_bfloat16* from =
        of_token(is_q ? p.q : p.k, is_q ? p.q_batch : p.k_batch, is_q ? p.q_token : p.k_token, t, i_h * K);
    ptx::load_now<2>(&a[j], of_token(p.a, p.a_batch, p.a_token, t, i_hv));
    ptx::load_now<2>(&b[j], of_token(p.b, p.b_batch, p.b_token, t, i_hv));
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) ptx::load_now<EACH * 2>(vectors[j][i], from + column + i * BLOCK);
    if constexpr (SPLIT > 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::load_now<16>(whole[j][i], from + c * 8 + i * 32);
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      ptx::load_now<2>(&v[h][j], of_token(p.v, p.v_batch, p.v_token, token(4 * j + c), i_hv * V + (i_row + 8 * h)));
  }
  uint32_t A_log, bias, bias_low;
  ptx::load_now<4>(&A_log, p.A_log + i_hv);
  const char* bias_at = static_cast<const char*>(p.dt_bias) + (i_hv << (p.dt_bias_bf16 ? 1 : 2));
  ptx::load_now<2>(&bias, bias_at + (p.dt_bias_bf16 ? 0 : 2));  // a bfloat16 is the upper half of a float
  ptx::load_now<2>(&bias_low, bias_at);
  const auto k_at = [&](int t, int i) { return of_token(p.k, p.k_batch, p.k_token, t, i_h * K + column) + i * BLOCK; };
  // For the new states; with many elements a lane would run out of registers
  constexpr bool READY = WRITES && BLOCKS * HALVES * EACH <= 8;
  [[maybe_unused]] uint32_t ready[READY ? TOKENS : 1][BLOCKS][EACH / 2];
  if constexpr (READY) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i) ptx::load_now<EACH * 2>(ready[t][i], k_at(token(t), i));
  }
  int32_t states_row = i_b;
  if (WRITES && p.states_rows != nullptr) states_row = index(p.states_rows, i_b, p.rows_shift);
  __nv_bfloat16* output = p.output + ((static_cast<int64_t>(p.cu_seqlens ? 0 : i_b * p.tokens) + begin) * p.HV + i_hv) * V;
  const uint32_t at = ((i_hv * V + i_row) * K + column) * sizeof(T);  // bytes in a slot
  const char* from = static_cast<const char*>(p.pool) + at;
  ptx::pin(from);

  // Never. ptxas issues strong loads before a branch, but may wait for the slot before it issues others.
  if (static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.pool)) < 0) return;

  // 2. Load S
  const int32_t start = __shfl_sync(ALL, slot, p.columns > 1 ? accepted - 1 & 31 : 0);
  if (accepted < 1 || accepted > p.tokens || start < p.first_slot || count < 1) {  // padding: zeros, and no state
    for (int i = threadIdx.x; i < count * TILE; i += WARPS * 32)
      output[static_cast<int64_t>(i / TILE) * p.HV * V + (blockIdx.x % TILES * TILE + i % TILE)] = __float2bfloat16(0.f);
    return;
  }
  uint32_t w[BLOCKS][HALVES][4];
  from += static_cast<int64_t>(start) * p.slot_stride * int64_t(sizeof(T));
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
    for (int h = 0; h < HALVES; ++h) load<16, LOAD>(w[i][h], from + (h * 8 * K + i * BLOCK) * sizeof(T));

  // Where lane t's token has its state written to; below 0: nowhere
  [[maybe_unused]] int32_t to_slot = lane;
  if (p.mode == LAST) to_slot = int(lane) + 1 == count ? start : -1;
  if (p.mode == SLOTS) to_slot = slot < p.first_slot ? -1 : slot;
  if (int(lane) >= count || states_row < 0) to_slot = -1;
  [[maybe_unused]] char* const states =
      static_cast<char*>(p.states) + static_cast<int64_t>(states_row) * p.states_stride * int64_t(sizeof(T)) + at;

  // 3. M and W
  if (warp == 0) {
    float dots[2][N][4] = {};  // two sums, for half the latency
    const auto add = [&](float (&to)[N][4], const uint32_t* low, const uint32_t* high) {  // two words of each vector
      const uint32_t x[4] = {low[0], N == 2 ? high[0] : 0, low[1], N == 2 ? high[1] : 0};
      multiply_add(to[0], x, low[0], low[1]);
      if constexpr (N == 2) multiply_add(to[1], x, high[0], high[1]);
    };
    if constexpr (SPLIT == 1) {
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int n = 0; n < EACH / 2; n += 2)
          add(dots[(i * EACH / 4 + n / 2) % 2], &vectors[0][i][n], &vectors[N - 1][i][n]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) add(dots[i % 2], &whole[0][i / 2][i % 2 * 2], &whole[N - 1][i / 2][i % 2 * 2]);
    }
    float gate[N], beta[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dots[0][j][i] += dots[1][j][i];
      gate[j] = decay(__uint_as_float(A_log), low(a[j]) + __uint_as_float(bias << 16 | (p.dt_bias_bf16 ? 0 : bias_low)));
      beta[j] = sigmoid(low(b[j]));
    }
    make_coefficients<TOKENS>(coefficients, dots[0], gate, beta, p.scale, p.epsilon, lane);
  }

  if constexpr (WARPS == 1) __syncwarp();
  else __syncthreads();

  // 4. x and y
  float d[N][2][4] = {};
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) multiply_block<ROWS>(d[j], w[i], vectors[j][i], static_cast<const T*>(nullptr));
  float2 xy[N][HALVES];
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      xy[j][h] = {d[j][0][2 * h] + d[j][1][2 * h], d[j][0][2 * h + 1] + d[j][1][2 * h + 1]};
      if constexpr (SPLIT > 1) partial[group][part][j][h][lane] = xy[j][h];
    }
  if constexpr (SPLIT > 1) {
    __syncthreads();
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
  float r[N][HALVES], delta[N][HALVES] = {};
  float4 factors[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    factors[j] = coefficients.factors[4 * j + c];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) r[j][h] = factors[j].x * low(v[h][j]) - factors[j].y * xy[j][h].x;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int t = 4 * j + c;
    float o[HALVES];
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
          if constexpr (WRITES) delta[j][h] = fmaf(M, r_s, delta[j][h]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      if (t < count) output[t * static_cast<int64_t>(p.HV * V) + (i_row + 8 * h)] = __float2bfloat16(o[h]);
  }

  // 6. States
  if constexpr (WRITES) {
    float s[BLOCKS][HALVES][EACH];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) unpack<EACH>(s[i][h], w[i][h], static_cast<const T*>(nullptr));
    const auto advance = [&](int t, const auto& k_words) {
      const int32_t i_state = __shfl_sync(ALL, to_slot, t);
      char* to = states + static_cast<int64_t>(i_state) * p.state_stride * int64_t(sizeof(T));
      const float g = coefficients.factors[t].w;
      float d_t[HALVES];
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
        d_t[h] = __shfl_sync(ALL, t < 4 ? delta[0][h] : delta[N - 1][h], (lane & ~3u) + t % 4);
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i) {
        float k[EACH];
        unpack<EACH>(k, k_words[i], static_cast<const __nv_bfloat16*>(nullptr));
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
#pragma unroll
          for (int n = 0; n < EACH; ++n) s[i][h][n] = fmaf(d_t[h], k[n], g * s[i][h][n]);
          uint32_t packed[4];
          pack<EACH>(packed, s[i][h], static_cast<const T*>(nullptr));
          if (i_state >= 0) store<16, STORE>(to + (h * 8 * K + i * BLOCK) * sizeof(T), packed);
        }
      }
    };
    if constexpr (READY) {
#pragma unroll
      for (int t = 0; t < TOKENS; ++t)
        if (t < count) advance(t, ready[t]);
    } else {
      // A loop: what does not fit into the instruction cache is slower.
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        uint32_t k_words[BLOCKS][EACH / 2];
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) load_words<EACH / 2>(k_words[i], k_at(begin + t, i));
        advance(t, k_words);
      }
    }
  }
}

#endif  // __CUDACC__

}  // namespace gdn
