// The kernel of cuda-recurrent: the state in registers from the first token of a sequence to its last, 16 tokens per step.
//
// With g_t, beta_t of a token as in decode and G_t = log g_0 + ... + log g_t of the block's tokens, the 16 tokens of a block
// are one step of the recurrence (exact: the WY form of the delta rule, with pt-chunk's letters, whose D has the rows d_t):
//
//   x_t = S k_t,  y_t = S q_t                                      on the state S before the block
//   d_t = beta_t (v_t - e^(G_t) x_t) - sum over s < t of A_ts d_s  A_ts = beta_t e^(G_t - G_s) k_t.k_s
//   o_t = scale e^(G_t) y_t + sum over s <= t of M_ts d_s          M_ts = scale e^(G_t - G_s) q_t.k_s
//   S'  = e^(G_15) S + sum over s of e^(G_15 - G_s) d_s k_s^T
//
// So D = T (V - e^G x), where T = (I + A)^-1 diag(beta) comes from k, g and beta alone.
//
// Where k and q are normalised here, k and q above are raw and d_t is divided by |k_t|. Then the norms are factors of rows alone:
// with b_t = beta_t / |k_t|, d_t = b_t (v_t - e^(G_t) / |k_t| x_t) - sum of b_t / |k_t| e^(G_t - G_s) k_t.k_s d_s, so that T = (I +
// A)^-1 diag(b); and 1 / |q_t| is a factor of scale. S' is as above.
//
// A warp has 16 rows of S as the f32 accumulators of m16n8k16 products, which are, pair by pair, the left operand of the
// next product: S for x and y, x for d, d for S', without shuffles or shared memory in between. k and q are bf16 by
// definition. T and v - e^G x are used as sums of two bf16 (16 bits); S in x and y, d and M as one bf16. The
// state itself is never rounded: the next step's x sees the error of a step's rounding of S and corrects it.
//
// A CTA has WARPS tiles of 16 rows, all of one head of one sequence. SPLIT = 2 gives a tile two warps with half of the
// columns each, which exchange their x: a step is shorter, at the price of one exchange in shared memory. AHEAD more warps
// (the preparing warps) prepare the next blocks, two each at a time: the part that does not depend on the state, which is
// copies, gates, k.k, q.k and T. They work in rounds of 2 AHEAD blocks: while the row warps are at round r, the preparing
// warps have the copies of round r + 2 under way and prepare round r + 1. There are three rounds of tiles, two of T. The row
// warps wait until a round is ready, the preparing warps until the round two before is free; except with SPLIT, no warp
// waits for another of its kind.
//
// Differences from the textbook version:
//   - Arithmetic. Without tensor cores a token costs 3 FMA or more per element of S: 64 sequences of 64 tokens take
//     52 us of FMA on all 132 SMs of an H200 at 1.98 GHz. Here it is 56 products of 16 x 8 x 16 per tile and step.
//   - (I + A)^-1 by substitution, in f32: squaring A instead overflows the range of bf16 when keys repeat. A lane
//     has a row, so 16 tokens would leave half of a warp idle: it takes two blocks.
//   - Decays within a block are exp2 of differences of sums of log2 g, each g at least 2^-150 (below the smallest
//     float): never a division by a decay, and never inf - inf.
//   - With L2 cold, cu_seqlens costs one access to DRAM and the tokens another. The first copies do not wait for it:
//     they assume that all sequences are equally long, which is right for a single one and an even batch, and are
//     repeated, to the next tiles, if that was wrong.
//   - The state's loads are issued after those copies: after the states of all CTAs the copies would arrive last.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464), its WY form DeltaNet's (arXiv 2406.06484); operands
// passed on in registers as in FlashAttention-2 (arXiv 2307.08691). Written here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "access.cuh"
#include "gates.cuh"

namespace gdn {

constexpr int K_DIM = 128, V_DIM = 128;
constexpr int BLOCK = 16;  // tokens per step
constexpr int ROWS = 16;   // of the state, per tile

// A dense call. gdn_prefill_packed/cuda-chunk-packed has the one on slots of a pool.
struct Arguments {
  using Token = __nv_bfloat16;
  static constexpr bool POOL = false;  // states in a pool; q and k are normalised here
  const float* state;          // [N, HV, 128, 128]
  const int64_t* cu_seqlens;   // [N + 1]
  const __nv_bfloat16* k;      // [num_tokens, H, 128]
  const __nv_bfloat16* q;      // [num_tokens, H, 128]
  const __nv_bfloat16* v;      // [num_tokens, HV, 128]
  const __nv_bfloat16* a;      // [num_tokens, HV]
  const __nv_bfloat16* b;      // [num_tokens, HV]
  const float* A_log;          // [HV]
  const float* dt_bias;        // [HV]
  float* new_state;            // like state, and may be state itself: a lane reads only elements that it later writes
  __nv_bfloat16* output;       // [num_tokens, HV, 128]
  float scale;
  uint32_t H, HV;
  int64_t num_tokens, average; // of all sequences; mean per sequence, rounded down
  Divisor by_HV, by_group;     // group: value heads of one query/key head

  // Sequence n has the tokens from its border to the next. Clamped: wrong values in cu_seqlens cause no access outside.
  __device__ __forceinline__ int64_t border(uint32_t n) const {
    const int64_t x = __ldg(cu_seqlens + n);
    return x < 0 ? 0 : x < num_tokens ? x : num_tokens;
  }
  __device__ __forceinline__ const void* border_at(uint32_t n) const { return cu_seqlens + n; }
  // Elements of q and k: to a token's row of a head, and from a token to the next. The same for v.
  __device__ __forceinline__ int64_t qk_at(int64_t token, uint32_t h) const { return (token * H + h) * K_DIM; }
  __device__ __forceinline__ int64_t v_at(int64_t token, uint32_t hv) const { return (token * HV + hv) * V_DIM; }
  __device__ __forceinline__ uint32_t qk_stride() const { return K_DIM * H; }
  __device__ __forceinline__ uint32_t v_stride() const { return V_DIM * HV; }
  // The bits of a token's a and b, and the gates of these.
  __device__ __forceinline__ uint32_t a_of(int64_t token, uint32_t hv) const { return gate_bits(a, token * HV + hv, false); }
  __device__ __forceinline__ uint32_t b_of(int64_t token, uint32_t hv) const { return gate_bits(b, token * HV + hv, false); }
  __device__ __forceinline__ static float log2_g(uint32_t bits, float A_log, float dt_bias) {
    return log2_gate(bits, false, A_log, dt_bias);
  }
  __device__ __forceinline__ static float beta(uint32_t bits) { return beta_gate(bits, false, false); }
  __device__ __forceinline__ const void* bias_at(uint32_t hv) const { return dt_bias + hv; }
  __device__ __forceinline__ float bias(uint32_t hv) const { return dt_bias[hv]; }
};

// Shared memory, in bytes. Rows are padded so that the 8 rows of a matrix are in different banks.
template <int WARPS, int SPLIT, int AHEAD, bool NORMS_ = false, typename Token_ = __nv_bfloat16>
struct Layout {
  using Token = Token_;
  static constexpr bool NORMS = NORMS_;
  static constexpr int THREADS = (WARPS * SPLIT + AHEAD) * 32;
  static constexpr int ROUND = 2 * AHEAD;  // blocks
  static constexpr int ROW = K_DIM * 2 + 16, V_ROW = WARPS * ROWS * 2 + 16;
  // a tile: k, q and v of a block; later its output replaces v
  static constexpr int Q_AT = BLOCK * ROW, V_AT = 2 * BLOCK * ROW, TILE = V_AT + BLOCK * V_ROW;
  // the prepared block: T as two bf16 and M as one; e^(G_t), e^(G_15 - G_s). With NORMS then e^(G_t) / |k_t| and e^(G_t) / |q_t|
  static constexpr int SMALL_ROW = BLOCK * 2 + 16, SMALL = BLOCK * SMALL_ROW;
  static constexpr int T_HIGH = 0, T_LOW = SMALL, M_AT = 2 * SMALL, DECAYS = 3 * SMALL, MADE = DECAYS + (NORMS ? 4 : 2) * BLOCK * 4;
  // private to a preparing warp, for each of its two blocks: A, beta; the two blocks are 4 banks apart
  static constexpr int A_ROW = BLOCK + 4, OWN = (BLOCK * A_ROW + BLOCK + 4) * 4;
  // the exchange between two warps that share rows
  static constexpr int TOLD = 3 * 32 * 16;

  static constexpr int MADE_AT = 3 * ROUND * TILE, OWN_AT = MADE_AT + 2 * ROUND * MADE, TOLD_AT = OWN_AT + ROUND * OWN;
  // barriers: a round is ready, or free; even and odd rounds have separate ones, since a warp may be one round behind
  static constexpr int READY_AT = TOLD_AT + (SPLIT == 2 ? 2 * WARPS * 2 * TOLD : 0), DONE_AT = READY_AT + 16;
  static constexpr int BYTES = DONE_AT + 16;
};

}  // namespace gdn

#ifdef __CUDACC__

#include "mma_bf16.cuh"

namespace gdn {

// x and y as tokens in one register; and the rounding errors as two more.
template <typename Token>
__device__ __forceinline__ void split(uint32_t& high_part, uint32_t& low_part, float x, float y) {
  high_part = token_pair<Token>(x, y);
  low_part = token_pair<Token>(x - token_of<Token>(high_part, 0), y - token_of<Token>(high_part, 1));
}

// Two neighbouring 16 x 8 accumulators as one 16 x 16 left operand in two parts.
template <typename Token>
__device__ __forceinline__ void split(uint32_t (&high_part)[4], uint32_t (&low_part)[4], const float (&left)[4],
                                      const float (&right)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    split<Token>(high_part[i], low_part[i], left[2 * i], left[2 * i + 1]);
    split<Token>(high_part[2 + i], low_part[2 + i], right[2 * i], right[2 * i + 1]);
  }
}

template <typename Token>
__device__ __forceinline__ void rounded(uint32_t (&to)[4], const float (&left)[4], const float (&right)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to[i] = token_pair<Token>(left[2 * i], left[2 * i + 1]), to[2 + i] = token_pair<Token>(right[2 * i], right[2 * i + 1]);
  }
}

// d[0] and d[1] += a b for the 16 columns of b from one load of four matrices.
template <typename Token>
__device__ __forceinline__ void multiply_tokens(float (&d)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  multiply_tokens<Token>(d[0], a, b[0], b[1]);
  multiply_tokens<Token>(d[1], a, b[2], b[3]);
}

// The work of this CTA: its sequence, its heads, its rows of the head.
template <int WARPS>
struct Place {
  int64_t first;              // token
  int length, blocks;         // tokens, blocks of them
  uint32_t sequence;
  uint32_t head, value_head;  // of H, of HV
  uint32_t row;               // of V

  Place() = default;
  // Everything that does not need cu_seqlens; tokens are guessed as if all sequences were equally long.
  template <typename Call>
  __device__ __forceinline__ explicit Place(const Call& p) {
    constexpr uint32_t TILES = V_DIM / (WARPS * ROWS);
    const uint32_t both = blockIdx.x / TILES;
    sequence = p.by_HV.divide(both), value_head = both - sequence * p.HV, head = p.by_group.divide(value_head);
    row = blockIdx.x % TILES * (WARPS * ROWS);
    set(sequence * p.average, (sequence + 1) * p.average);
  }
  // Sets the actual tokens; returns whether the guess was right.
  template <typename Call>
  __device__ __forceinline__ bool guessed(const Call& p) {
    const int64_t guess = first;
    const int tokens = length;
    set(p.border(sequence), p.border(sequence + 1));
    return first == guess && length == tokens;
  }
  __device__ __forceinline__ void set(int64_t begin, int64_t end) {
    first = begin, length = end > begin ? static_cast<int>(end - begin) : 0;
    blocks = (length + BLOCK - 1) / BLOCK;
  }
};

// One block for 16 rows, and the columns of this `part` of SPLIT: s in and out; the output overwrites v in the tile.
template <typename L, int SPLIT>
__device__ __forceinline__ void step(float (&s)[K_DIM / 8 / SPLIT][4], char* tile, const char* made, char* told, uint32_t warp,
                                     uint32_t part, uint32_t lane, float scale) {
  using Token = typename L::Token;
  constexpr int STEPS = K_DIM / 16 / SPLIT;
  const uint32_t g = lane / 4, t = lane % 4;
  // the lane's row in the four matrices of a 16 x 16 block: first the ones above each other, or the ones side by side
  const uint32_t row = lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 16;
  const uint32_t row_t = lane / 8 % 2 * 8 + lane % 8, column_t = lane / 16 * 16;
  const uint32_t row_o = row ^ part * 8;  // first the tokens whose output this warp writes
  const uint32_t tile_at = shared_address(tile), keys = tile_at + part * (STEPS * 32), made_at = shared_address(made) + column;
  const uint32_t v_at = L::V_AT + warp * (ROWS * 2);

  float x[2][4] = {}, y[2][4] = {};
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    uint32_t of_s[4], b[4];
    rounded<Token>(of_s, s[2 * j], s[2 * j + 1]);
    load_matrices(b, keys + row * L::ROW + column + j * 32);
    multiply_tokens<Token>(x, of_s, b);
    load_matrices(b, keys + L::Q_AT + row_o * L::ROW + column + j * 32);
    multiply_tokens<Token>(y, of_s, b);
  }
  uint32_t v[4], b[4], high_part[4], low_part[4];
  load_transposed(v, tile_at + v_at + row * L::V_ROW + column);
  if constexpr (SPLIT == 2) {  // x of all tokens, y of the partner's tokens
    float4* const mine = reinterpret_cast<float4*>(told + part * L::TOLD) + lane;
    const float4* const others = reinterpret_cast<const float4*>(told + (part ^ 1) * L::TOLD) + lane;
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const float(&from)[4] = n < 2 ? x[n] : y[1];
      mine[32 * n] = {from[0], from[1], from[2], from[3]};
    }
    named_barrier_sync_partner(warp);
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      float(&to)[4] = n < 2 ? x[n] : y[0];
      const float4 from = others[32 * n];
      to[0] += from.x, to[1] += from.y, to[2] += from.z, to[3] += from.w;
    }
  }

  // D = T (V - e^G x); of a lane's columns, which are tokens, 2t and 2t + 1 of either half
  const float* decays = reinterpret_cast<const float*>(made + L::DECAYS) + 2 * t;
  float d[2][4], decay_in[2][2], decay_out[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 here = *reinterpret_cast<const float2*>(decays + (L::NORMS ? 2 * BLOCK : 0) + 8 * n);
    const float2 rest = *reinterpret_cast<const float2*>(decays + BLOCK + 8 * n);
    decay_in[n][0] = here.x, decay_in[n][1] = here.y, decay_out[n][0] = rest.x, decay_out[n][1] = rest.y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float v_i = token_of<Token>(v[2 * n + i / 2], i % 2);
      d[n][i] = fmaf(-decay_in[n][i % 2], x[n][i], v_i);
    }
  }
  split<Token>(high_part, low_part, d[0], d[1]);
  {
    float parts[3][2][4] = {};  // independent sums
    load_matrices(b, made_at + row * L::SMALL_ROW + L::T_HIGH);
    multiply_tokens<Token>(parts[0], high_part, b), multiply_tokens<Token>(parts[1], low_part, b);
    load_matrices(b, made_at + row * L::SMALL_ROW + L::T_LOW);
    multiply_tokens<Token>(parts[2], high_part, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = parts[0][i / 4][i % 4] + (parts[1][i / 4][i % 4] + parts[2][i / 4][i % 4]);
  }

  // S' before o: the next block waits for it
  const float decay_block = reinterpret_cast<const float*>(made + L::DECAYS)[BLOCK - 1];
  float decayed[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) decayed[i / 4][i % 4] = d[i / 4][i % 4] * decay_out[i / 4][i % 2];
  rounded<Token>(high_part, decayed[0], decayed[1]);
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    load_transposed(b, keys + row_t * L::ROW + column_t + j * 32);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float(&into)[4] = s[2 * j + n];
#pragma unroll
      for (int i = 0; i < 4; ++i) into[i] *= decay_block;
      multiply_tokens<Token>(into, high_part, b[2 * n], b[2 * n + 1]);
    }
  }

  rounded<Token>(high_part, d[0], d[1]);
  load_matrices(b, made_at + row_o * L::SMALL_ROW + L::M_AT);
  if constexpr (SPLIT == 1) __syncwarp();  // all lanes have read v; with SPLIT the partners' barrier ensures that
#pragma unroll
  for (int n = 0; n < 2 / SPLIT; ++n) {
    if constexpr (L::NORMS) {
      const float2 here = *reinterpret_cast<const float2*>(decays + 3 * BLOCK + (part ? 8 : 8 * n));
      decay_in[0][0] = decay_in[1][0] = here.x, decay_in[0][1] = decay_in[1][1] = here.y;  // the last use
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[n][i] *= scale * (part ? decay_in[1][i % 2] : decay_in[n][i % 2]);
    multiply_tokens<Token>(y[n], high_part, b[2 * n], b[2 * n + 1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t token = (n + part) * 8 + 2 * t + i % 2, of_warp = g + i / 2 * 8;
      *reinterpret_cast<Token*>(tile + v_at + token * L::V_ROW + of_warp * 2) = to_token<Token>(y[n][i]);
    }
  }
}

// The row warps: SPLIT neighbours share 16 rows, with K / SPLIT columns each.
template <int WARPS, int SPLIT, int AHEAD, typename Call>
__device__ __forceinline__ void advance(const Call& p, uint32_t number, [[maybe_unused]] int of) {
  using L = Layout<WARPS, SPLIT, AHEAD, Call::POOL, typename Call::Token>;
  const uint32_t lane = threadIdx.x % 32, warp = number / SPLIT, part = SPLIT == 2 ? number % 2 : 0;
  const auto state_at = [](uint32_t thread) {  // its first element: row g, column 2t of its warp's
    const uint32_t number = thread / 32, row = number / SPLIT * ROWS + thread % 32 / 4;
    const uint32_t column = number % SPLIT * (K_DIM / SPLIT) + thread % 4 * 2;
    return static_cast<uint64_t>(blockIdx.x) * (WARPS * ROWS * K_DIM) + row * K_DIM + column;
  };
  float s[K_DIM / 8 / SPLIT][4];
  Place<WARPS> place;
  if constexpr (Call::POOL) {
    place = Place<WARPS>(p);
    p.load(s, p.original(of, place.value_head), place.row + warp * ROWS, part * (K_DIM / 8 / SPLIT), lane);
  } else {
    const float* const from = p.state + state_at(threadIdx.x);
#pragma unroll
    for (int i = 0; i < K_DIM / 4 / SPLIT; ++i) {
      uint32_t w[2];
      load<8, LOAD_PLAIN>(w, from + i % 2 * 8 * K_DIM + i / 2 * 8);
      s[i / 2][i % 2 * 2] = __uint_as_float(w[0]), s[i / 2][i % 2 * 2 + 1] = __uint_as_float(w[1]);
    }
    place = Place<WARPS>(p);
  }
  const bool guessed = place.guessed(p);
  char* const memory = pinned(shared_memory());
  // its 16 bytes of a token's output: a token has two lanes
  const uint32_t token = part * 8 + lane / 2, half = lane % 2;
  const int last = lane < 32 / SPLIT ? place.length : 0;
  typename Call::Token* output = p.output + ((place.first + token) * p.HV + place.value_head) * V_DIM + place.row + warp * ROWS + half * 8;
  char* const of_pair = memory + L::TOLD_AT + warp * (2 * L::TOLD);
  int block = 0;
#pragma unroll 1
  for (uint32_t tiles = guessed ? 0 : 1, round = 0; block < place.blocks; tiles = tiles == 2 ? 0 : tiles + 1, ++round) {
    const uint32_t made = round % 2, barriers = shared_address(memory) + made * 8;
    Barrier(barriers + L::READY_AT).wait(round / 2);
    char* tile = memory + tiles * L::ROUND * L::TILE;
    const char* prepared = memory + L::MADE_AT + made * L::ROUND * L::MADE;
#pragma unroll 1
    for (int i = 0; i < L::ROUND && block < place.blocks; ++i, ++block, tile += L::TILE, prepared += L::MADE) {
      char* const told = of_pair + block % 2 * (WARPS * 2 * L::TOLD);
      step<L, SPLIT>(s, tile, prepared, told, warp, part, lane, p.scale);
      __syncwarp();
      uint4 o = *reinterpret_cast<const uint4*>(tile + L::V_AT + token * L::V_ROW + (warp * ROWS + half * 8) * 2);
      if constexpr (Call::POOL) {
        if (p.padding(of)) o = {0, 0, 0, 0};
      }
      if (block * BLOCK + static_cast<int>(token) < last) *reinterpret_cast<uint4*>(output) = o;
      output += static_cast<int64_t>(BLOCK) * p.HV * V_DIM;
    }
    Barrier(barriers + L::DONE_AT).arrive(lane);
  }
  if constexpr (Call::POOL) {
    const Place<WARPS> place(p);  // again, for few registers
    p.store(p.final(of, place.value_head), s, place.row + warp * ROWS, part * (K_DIM / 8 / SPLIT), lane);
  } else {
    float* const to = p.new_state + state_at(thread_again());
#pragma unroll
    for (int i = 0; i < K_DIM / 4 / SPLIT; ++i) {
      const uint32_t w[2] = {__float_as_uint(s[i / 2][i % 2 * 2]), __float_as_uint(s[i / 2][i % 2 * 2 + 1])};
      store<8, STORE_PLAIN>(to + i % 2 * 8 * K_DIM + i / 2 * 8, w);
    }
  }
}

// Issues the copies of two blocks' k, q and v to two tiles; zeros after the sequence's end.
template <int WARPS, typename L, typename Call>
__device__ __forceinline__ void fetch(const Call& p, const Place<WARPS>& place, int block, uint32_t tile, uint32_t lane) {
  const int left = place.length - block * BLOCK;
  const int64_t token = place.first + static_cast<int64_t>(block) * BLOCK;
  {
    const uint32_t row = lane / 16, column = lane % 16;
    const int64_t from = p.qk_at(token + row, place.head) + column * 8;
    const typename L::Token *k = p.k + from, *q = p.q + from;
    const uint32_t to = tile + row * L::ROW + column * 16, stride = 2 * p.qk_stride();
    const int mine = left - static_cast<int>(row);
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      const uint32_t at = to + i / 8 * L::TILE + i % 8 * 2 * L::ROW;
      copy16(at, k, 2 * i < mine), copy16(at + L::Q_AT, q, 2 * i < mine);
      k += stride, q += stride;
    }
  }
  const uint32_t row = lane / (2 * WARPS), column = lane % (2 * WARPS);
  constexpr int EACH = 16 / WARPS;  // rows
  const typename L::Token* v = p.v + p.v_at(token + row, place.value_head) + place.row + column * 8;
  const uint32_t to = tile + L::V_AT + row * L::V_ROW + column * 16, stride = EACH * p.v_stride();
  const int mine = left - static_cast<int>(row);
#pragma unroll
  for (int i = 0; i < 2 * WARPS; ++i) {
    copy16(to + i / WARPS * L::TILE + i % WARPS * EACH * L::V_ROW, v, EACH * i < mine);
    v += stride;
  }
}

// Computes T, M, e^(G_t) and e^(G_15 - G_s) from two blocks' k and q, and log2 g and beta of each lane's token. The first 16 lanes
// have the first block's tokens.
template <typename L, typename Call>
__device__ __forceinline__ void make(const Call& p, const char* tiles, char* both_made, float* own, uint32_t lane, float log2_g,
                                     float beta, int blocks) {
  using Token = typename L::Token;
  const float scale = p.scale;
  const uint32_t g = lane / 4, t = lane % 4, token = lane % 16, half = lane / 16;
  float sum = log2_g;  // G_t, of log2
#pragma unroll
  for (uint32_t m = 1; m < BLOCK; m *= 2) {
    const float before = __shfl_sync(0xffffffffu, sum, (token - m) % 16, 16);
    if (token >= m) sum += before;
  }
  const float end = __shfl_sync(0xffffffffu, sum, 15, 16);
  float* const betas = own + half * (L::OWN / 4) + BLOCK * L::A_ROW;
  {
    float* const decays = reinterpret_cast<float*>(both_made + half * L::MADE + L::DECAYS);
    decays[token] = exp2_approx(sum), decays[BLOCK + token] = exp2_approx(end - sum);
    if (!L::NORMS) betas[token] = beta;
  }

  // for one block or both together: they are independent
  const auto products = [&](auto how_many) {
    constexpr int COUNT = decltype(how_many)::value;
    const uint32_t tile = shared_address(tiles);
    const uint32_t right_at = tile + (lane / 16 * 8 + lane % 8) * L::ROW + lane / 8 % 2 * 16;
    const uint32_t left_at = tile + lane % 16 * L::ROW + lane / 16 * 16;
    float kk[2][2][4] = {}, qk[2][2][4] = {};  // k.k and q.k of all pairs
    [[maybe_unused]] float qq[2][2][4] = {};   // NORMS: its diagonal
#pragma unroll
    for (int j = 0; j < K_DIM / 16; ++j)
#pragma unroll
      for (int of = 0; of < COUNT; ++of) {
        uint32_t keys[4], k[4], q[4];
        const uint32_t at = of * L::TILE + j * 32;
        load_matrices(keys, right_at + at), load_matrices(k, left_at + at), load_matrices(q, left_at + L::Q_AT + at);
        multiply_tokens<Token>(kk[of], k, keys), multiply_tokens<Token>(qk[of], q, keys);
        if constexpr (L::NORMS) {
          uint32_t queries[4];  // q's words, but four moves into pairs of registers cost more
          load_matrices(queries, right_at + L::Q_AT + at);
          multiply_tokens<Token>(qq[of], q, queries);
        }
      }
    [[maybe_unused]] float factor = scale;  // NORMS: of the lane's token, scale / |q|; and beta becomes beta / |k|^2
    if constexpr (L::NORMS) {
      const uint32_t row = lane % 8, holder = 4 * row + row / 2;  // the lane with rows `row` and `row` + 8 of the diagonals
      float of_k = 0.f, of_q = 0.f;
#pragma unroll
      for (int of = 0; of < COUNT; ++of)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float k = __shfl_sync(0xffffffffu, g % 2 ? kk[of][h][2 * h + 1] : kk[of][h][2 * h], holder);
          const float q = __shfl_sync(0xffffffffu, g % 2 ? qq[of][h][2 * h + 1] : qq[of][h][2 * h], holder);
          if (lane / 8 == of * 2 + h) of_k = k, of_q = q;
        }
      of_k = p.inverse_norm(of_k), of_q = p.inverse_norm(of_q);
      float* const decays = reinterpret_cast<float*>(both_made + half * L::MADE + L::DECAYS) + token;
      const float in = exp2_approx(sum);
      decays[2 * BLOCK] = of_k * in, decays[3 * BLOCK] = of_q * in;
      beta *= of_k, betas[token] = beta, beta *= of_k, factor *= of_q;
    }
#pragma unroll
    for (int of = 0; of < COUNT; ++of) {
      float* const A = own + of * (L::OWN / 4);
      char* const M = both_made + of * L::MADE + L::M_AT;
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // rows g and g + 8
        const uint32_t row = g + 8 * h, first = of * BLOCK;
        const float sum_t = __shfl_sync(0xffffffffu, sum, first + row), beta_t = __shfl_sync(0xffffffffu, beta, first + row);
        const float factor_t = L::NORMS ? __shfl_sync(0xffffffffu, factor, first + row) : scale;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float of_T[2], of_M[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t column = 8 * n + 2 * t + i;
            const float decay_ts = exp2_approx(sum_t - __shfl_sync(0xffffffffu, sum, first + column));
            of_T[i] = column < row ? beta_t * decay_ts * kk[of][n][2 * h + i] : 0.f;
            of_M[i] = column <= row ? factor_t * decay_ts * qk[of][n][2 * h + i] : 0.f;
          }
          *reinterpret_cast<float2*>(A + row * L::A_ROW + 8 * n + 2 * t) = make_float2(of_T[0], of_T[1]);
          *reinterpret_cast<uint32_t*>(M + row * L::SMALL_ROW + (8 * n + 2 * t) * 2) = token_pair<Token>(of_M[0], of_M[1]);
        }
      }
    }
  };
  if (blocks == 2) products(std::integral_constant<int, 2>{});
  else products(std::integral_constant<int, 1>{});
  __syncwarp();

  // T (I + A) = I from the last column to the first, row t of T in lane t; then T diag(beta)
  const float* const A = own + half * (L::OWN / 4);
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
    split<Token>(high_part[s / 2], low_part[s / 2], row[s] * beta_s.x, row[s + 1] * beta_s.y);
  }
  char* const to = both_made + half * L::MADE + token * L::SMALL_ROW;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 high_four = {high_part[4 * i], high_part[4 * i + 1], high_part[4 * i + 2], high_part[4 * i + 3]};
    const uint4 low_four = {low_part[4 * i], low_part[4 * i + 1], low_part[4 * i + 2], low_part[4 * i + 3]};
    reinterpret_cast<uint4*>(to + L::T_HIGH)[i] = high_four;
    reinterpret_cast<uint4*>(to + L::T_LOW)[i] = low_four;
  }
  __syncwarp();  // before A is written again
}

// A preparing warp: warp i has blocks 2i and 2i + 1 of every round.
template <int WARPS, int SPLIT, int AHEAD, typename Call>
class Preparation {
  using L = Layout<WARPS, SPLIT, AHEAD, Call::POOL, typename Call::Token>;
  Place<WARPS> place;
  char* memory;
  uint32_t warp, lane;
  float A_log, dt_bias;
  uint32_t a, b;  // of the lane's token, as their bits

  __device__ __forceinline__ char* tile(int at) const { return memory + (at * L::ROUND + 2 * warp) * L::TILE; }

  __device__ __forceinline__ void begin(const Call& p, int block, int at) {
    if (block < place.blocks) {
      const int token = block * BLOCK + static_cast<int>(lane);
      const int64_t at_token = place.first + (token < place.length ? token : 0);
      a = p.a_of(at_token, place.value_head), b = p.b_of(at_token, place.value_head);
      fetch<WARPS, L>(p, place, block, shared_address(tile(at)), lane);
    }
    commit_copies();
  }

 public:
  // Issues the copies of the first blocks, at the guessed addresses.
  __device__ __forceinline__ void guess(const Call& p, uint32_t number) {
    place = Place<WARPS>(p);
    memory = pinned(shared_memory()), warp = number, lane = threadIdx.x % 32;
    // prefetch: ptxas puts the loads of these after the copies in any case; then they need not wait for DRAM
    prefetch(p.border_at(place.sequence)), prefetch(p.A_log + place.value_head), prefetch(p.bias_at(place.value_head));
    A_log = p.A_log[place.value_head], dt_bias = p.bias(place.value_head);
    begin(p, 2 * warp, 0);
  }

  __device__ __forceinline__ void prepare(const Call& p) {
    constexpr float LEAST = -150.f;  // log2 of a number below the smallest float
    float* const own = reinterpret_cast<float*>(memory + L::OWN_AT + 2 * warp * L::OWN);
    // if the guess was wrong, a round of copies only comes before the first one; the guessed tiles count as free
#pragma unroll 1
    for (int round = place.guessed(p) ? 0 : -1, tiles = 0; round * L::ROUND < place.blocks; ++round) {
      const int block = round * L::ROUND + static_cast<int>(2 * warp), next = tiles == 2 ? 0 : tiles + 1, made = round % 2;
      const bool there = round >= 0 && block * BLOCK + static_cast<int>(lane) < place.length;
      const float log2_g = there ? at_least(p.log2_g(a, A_log, dt_bias), LEAST) : 0.f;
      const float beta = there ? p.beta(b) : 0.f;
      const uint32_t barriers = shared_address(memory) + made * 8;
      if (round >= 2) Barrier(barriers + L::DONE_AT).wait(round / 2 - 1);
      begin(p, block + L::ROUND, next);
      if (round >= 0) {
        wait_for_copies<1>();
        __syncwarp();
        if (block < place.blocks)
          make<L>(p, tile(tiles), memory + L::MADE_AT + (made * L::ROUND + 2 * warp) * L::MADE, own, lane, log2_g, beta,
                  min(place.blocks - block, 2));
        Barrier(barriers + L::READY_AT).arrive(lane);
      }
      tiles = next;
    }
    wait_for_copies<0>();  // of a wrong guess, if there are no tokens
  }
};

// At least one CTA per SM: without a number ptxas limits registers to 128 or 96, so that more CTAs fit.
template <int WARPS, int SPLIT, int AHEAD, typename Call = Arguments>
__global__ void __launch_bounds__((WARPS * SPLIT + AHEAD) * 32, 1)
gdn_prefill_recurrent(const __grid_constant__ Call p) {
  using L = Layout<WARPS, SPLIT, AHEAD, Call::POOL, typename Call::Token>;
  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // tells the compiler that it is the same in all lanes
  Preparation<WARPS, SPLIT, AHEAD, Call> ahead;
  [[maybe_unused]] int of = 0;  // POOL: which state, which waits for it
  if constexpr (Call::POOL) {
    if (warp < WARPS * SPLIT) of = p.state_of(Place<WARPS>(p).sequence);
  }
  if (warp >= WARPS * SPLIT) {
    ahead.guess(p, warp - WARPS * SPLIT);
  } else if (threadIdx.x == 0) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t barriers = shared_address(shared_memory()) + odd * 8;
      Barrier(barriers + L::READY_AT).init(AHEAD), Barrier(barriers + L::DONE_AT).init(WARPS * SPLIT);
    }
  }
  __syncthreads();  // for the barriers; and small loads have been issued by now: after the state they would arrive last
  if (warp < WARPS * SPLIT) advance<WARPS, SPLIT, AHEAD>(p, warp, of);
  else ahead.prepare(p);
}

}  // namespace gdn

#endif  // __CUDACC__
