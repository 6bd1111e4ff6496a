// From chunk to chunk: the state, and the outputs. Letters: chunk.cuh. For the state S before a chunk,
//
//   R = beta (V - e^G K S^T),   D = R + (T - I) R,   O = scale e^G Q S^T + M D,   S' = e^(G_C) S + D^T (e^(G_C - G) K).
//
// A warp has 16 rows of S, all 128 columns, as accumulators in registers, and computes the transposed products (S K^T and
// so on): the accumulators of one product, packed to tokens, are the left operand of the next. So from chunk to
// chunk warps exchange nothing; the warps of a CTA share the chunk's tiles, which cp.async loads during the work on
// the previous chunk. S itself stays float.
//
// Steps, numbered as in docs/kernels/prefill-chunk.md: 6 load, 8 S K^T and S Q^T, 9 R, 10 D, 11 S', 12 O, 13 store. M (7) comes from the
// intra-chunk kernel. 8 to 12 are done for 16 tokens at a time.
#pragma once

#include "chunk.cuh"

namespace gdn {

// The tiles of a chunk, for 16 TILES rows of V.
template <int TILES>
struct Stage {
  char k[QK_TILE], q[QK_TILE];
  char v[CHUNK * TILES * 32];      // replaced by the outputs after V has been read
  Prepared prepared;
};

// A thread's pieces of a tile of 64 rows of PIECES pieces, one in every THREADS / PIECES rows: `to` and `from` are its first,
// `step` the distance to its next in elements. Straight-line code: a chunk's loads are part of the previous chunk's chain.
template <int PIECES, int THREADS>
__device__ __forceinline__ void copy_pieces(uint32_t to, const Token* from, int64_t step) {
  constexpr int ROWS = THREADS / PIECES;
  static_assert(PIECES >= 8 || ROWS % 8 == 0, "else in_tile turns from row to row");
#pragma unroll 8
  for (int i = 0; i < CHUNK / ROWS; ++i) {
    copy16((to ^ (i * ROWS & 7) * 16) + i * THREADS * 16, from, true);
    from += step;
  }
}
// The blocks of T up to the diagonal and the gates, or of M.
template <int THREADS, bool GATES>
__device__ __forceinline__ void copy_matrix(uint32_t to, const char* from, int thread) {
#pragma unroll 8
  for (int i = 0; i < MATRIX / 16 / THREADS; ++i) {
    const int row = thread / 8 + i * (THREADS / 8), piece = (thread ^ row) & 7;
    const bool gates = GATES && row < GATE_ROWS && piece >= 4;
    if (gates || piece / 2 <= row / SIDE) copy16(to + (thread + i * THREADS) * 16, from + (thread + i * THREADS) * 16, true);
  }
}

// The chunks of one segment of a sequence and value head, for 16 TILES rows of V from v0 on, loaded STAGES - 1 chunks
// ahead. Without OUTPUTS, tiles that only the outputs need are not loaded.
template <int TILES, int STAGES, int THREADS, bool OUTPUTS = true>
struct Chunks : Segment {
  Stage<TILES>* stages;
  int v0;

  __device__ __forceinline__ Chunks(char* memory, const Prefill& p_, int hv_, int v0_)
      : Segment(p_, hv_), stages(reinterpret_cast<Stage<TILES>*>(memory)), v0(v0_) {}

  __device__ __forceinline__ void load(int chunk) {
    if (chunk < count) {
      const int thread = thread_again();  // keeps addresses out of registers until here
      Stage<TILES>& stage = stages[chunk % STAGES];
      const int64_t stride = p.qk_stride(), v_stride = p.v_stride();
      const uint32_t k_tile = shared_address(stage.k), q_tile = shared_address(stage.q), v_tile = shared_address(stage.v);
      const int64_t done = static_cast<int64_t>(chunk) * CHUNK, left = tokens - done;
      const int64_t from = p.qk_at(first + done, h), v_from = p.v_at(first + done, hv) + v0;
      if (left >= CHUNK) {
        constexpr int ROWS = THREADS / QK_PIECES, V_PIECES = TILES * 2, V_ROWS = THREADS / V_PIECES;
        const int at = in_tile<QK_PIECES>(thread / QK_PIECES, thread % QK_PIECES);
        const int64_t own = from + thread / QK_PIECES * stride + thread % QK_PIECES * 8;
        copy_pieces<QK_PIECES, THREADS>(k_tile + at, p.k + own, ROWS * stride);
        if constexpr (OUTPUTS) copy_pieces<QK_PIECES, THREADS>(q_tile + at, p.q + own, ROWS * stride);
        copy_pieces<V_PIECES, THREADS>(v_tile + in_tile<V_PIECES>(thread / V_PIECES, thread % V_PIECES),
                                       p.v + v_from + thread / V_PIECES * v_stride + thread % V_PIECES * 8,
                                       V_ROWS * v_stride);
      } else {  // the last of a sequence
        const int rows = static_cast<int>(left);
        copy_tile<QK_PIECES>(k_tile, p.k + from, stride, rows, thread, THREADS);
        if constexpr (OUTPUTS) copy_tile<QK_PIECES>(q_tile, p.q + from, stride, rows, thread, THREADS);
        copy_tile<TILES * 2>(v_tile, p.v + v_from, v_stride, rows, thread, THREADS);
      }
      const char* const prepared = p.prepared + (static_cast<int64_t>(number + chunk) * p.HV + hv) * sizeof(Prepared);
      copy_matrix<THREADS, true>(shared_address(stage.prepared.T), prepared, thread);
      if constexpr (OUTPUTS) copy_matrix<THREADS, false>(shared_address(stage.prepared.M), prepared + MATRIX, thread);
    }
    commit_copies();
  }
  __device__ __forceinline__ void begin() {
#pragma unroll 1
    for (int chunk = 0; chunk < STAGES - 1; ++chunk) load(chunk);
  }
  // Waits for this chunk; all warps are done with the previous one.
  __device__ __forceinline__ Stage<TILES>& next(int chunk) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    load(chunk + STAGES - 1);
    return stages[chunk % STAGES];
  }
  // Row `token` of the chunk's outputs, 8 columns of it.
  __device__ __forceinline__ void store(const Stage<TILES>& stage, int chunk, int token, int piece) const {
    const int64_t at = static_cast<int64_t>(chunk) * CHUNK + token;
    if (at < tokens) {
      const uint4 words = padding() ? uint4{} : *reinterpret_cast<const uint4*>(stage.v + in_tile<TILES * 2>(token, piece));
      *reinterpret_cast<uint4*>(p.output + ((first + at) * p.HV + hv) * HEAD_DIM + v0 + piece * 8) = words;
    }
  }
};

// d += S X^T for 16 tokens from `row` on: S as left operands, X the tile of q or k. CHAINS independent sums: eight dependent
// products take 260 cycles.
template <int CHAINS>
__device__ __forceinline__ void state_times(float (&d)[2][4], const uint32_t (&S)[8][4], uint32_t tile, int row, int lane) {
  float sum[CHAINS][2][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t right[4];
    load_matrices(right, tile + in_tile<QK_PIECES>(row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
    multiply_tokens<Token>(sum[step % CHAINS][0], S[step], right[0], right[1]);
    multiply_tokens<Token>(sum[step % CHAINS][1], S[step], right[2], right[3]);
  }
#pragma unroll
  for (int chain = 0; chain < CHAINS; ++chain)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int c = 0; c < 4; ++c) d[e][c] += sum[chain][e][c];
}

// The same for two tiles at a time, which need no second sum.
__device__ __forceinline__ void state_times_two(float (&d)[2][4], float (&d2)[2][4], const uint32_t (&S)[8][4], uint32_t tile,
                                                uint32_t tile2, int row, int lane) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const int at = in_tile<QK_PIECES>(row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2);
    uint32_t right[4], right2[4];
    load_matrices(right, tile + at), load_matrices(right2, tile2 + at);
    multiply_tokens<Token>(d[0], S[step], right[0], right[1]), multiply_tokens<Token>(d[1], S[step], right[2], right[3]);
    multiply_tokens<Token>(d2[0], S[step], right2[0], right2[1]), multiply_tokens<Token>(d2[1], S[step], right2[2], right2[3]);
  }
}

// d += X B^T: X as a left operand, B block (i, j) of T or M.
__device__ __forceinline__ void block_times(float (&d)[2][4], const uint32_t (&X)[4], uint32_t matrix, int i, int j, int lane) {
  uint32_t right[4];
  load_matrices(right, matrix + in_matrix(i * SIDE + lane / 16 * 8 + lane % 8, 2 * j + lane / 8 % 2));
  multiply_tokens<Token>(d[0], X, right[0], right[1]);
  multiply_tokens<Token>(d[1], X, right[2], right[3]);
}

// Columns 8 j to 8 j + 15 of the state += X K: X a left operand of 16 tokens, which are those of the tile from `row` on.
__device__ __forceinline__ void keys_times(float (&S0)[4], float (&S1)[4], const uint32_t (&X)[4], uint32_t k_tile, int row,
                                           int j, int lane) {
  uint32_t right[4];
  load_transposed(right, k_tile + in_tile<QK_PIECES>(row + lane / 8 % 2 * 8 + lane % 8, j + lane / 16));
  multiply_tokens<Token>(S0, X, right[0], right[1]);
  multiply_tokens<Token>(S1, X, right[2], right[3]);
}

__device__ __forceinline__ void pair_of(float (&x)[2], const float* from) {
  const float2 pair = *reinterpret_cast<const float2*>(from);
  x[0] = pair.x, x[1] = pair.y;
}
__device__ __forceinline__ void scaled(float (&d)[2][4], const float (&by)[2][2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) d[e][c] *= by[e][c % 2];
}

// x = beta (V - in x). v: [n-tile of tokens][half of the rows], transposed: rows g (+ 8), tokens 2t and 2t + 1.
__device__ __forceinline__ void rest_of(float (&x)[2][4], const uint32_t (&v)[4], const float (&in)[2][2],
                                        const float (&beta)[2][2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t word = v[2 * e + c / 2];
      const float value = token_of<Token>(word, c % 2);
      x[e][c] = beta[e][c % 2] * fmaf(-in[e][c % 2], x[e][c], value);
    }
}

// Writes the outputs of 16 rows of V and 16 tokens from `row` on into the tile, a token's columns side by side again. Only this
// warp reads their V, and has done so.
template <int PIECES>
__device__ __forceinline__ void stage_transposed(char* tile, const float (&o)[2][4], int row, int piece, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = transposed(pack(o[e][2 * half], o[e][2 * half + 1]));
      *reinterpret_cast<uint32_t*>(tile + in_tile<PIECES>(row + e * 8 + lane / 4, piece + half) + 4 * (lane % 4)) = word;
    }
}

// Tokens 16 BLOCK to 16 BLOCK + 15 of a chunk, for the warp's 16 rows of V: R and D, their updates of the state, the outputs.
// `before` is the state before the chunk, S the updated state so far. If not `values`, V is zero.
template <int WARPS, int BLOCK, bool OUTPUTS = true>
__device__ __forceinline__ void tokens(Stage<WARPS>& stage, const uint32_t (&before)[8][4], float (&S)[16][4],
                                       uint32_t (&R)[4][4], uint32_t (&plain)[4][4], float scale, int warp, int lane,
                                       bool values = true) {
  constexpr int PIECES = WARPS * 2;
  const int t = lane % 4;
  const uint32_t k_tile = shared_address(stage.k), v_tile = shared_address(stage.v);
  float in[2][2], out[2][2], beta[2][2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int token = BLOCK * 16 + e * 8 + 2 * t;
    pair_of(in[e], stage.prepared.gate(IN_K, token)), pair_of(out[e], stage.prepared.gate(OUT, token));
    pair_of(beta[e], stage.prepared.gate(BETA, token));
  }
  // 8. S K^T, S Q^T
  float x[2][4] = {}, o[2][4] = {};
  if constexpr (OUTPUTS) state_times_two(x, o, before, k_tile, shared_address(stage.q), BLOCK * 16, lane);
  else state_times<2>(x, before, k_tile, BLOCK * 16, lane);
  // 9. R
  uint32_t v[4];
  load_transposed(v, v_tile + in_tile<PIECES>(BLOCK * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
  if constexpr (!OUTPUTS)
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = values ? v[i] : 0;
  rest_of(x, v, in, beta);
  as_left(R[BLOCK], x[0], x[1]);

  // 10. D = R + (T - I) R
  float d[2][4] = {};
  const uint32_t T = shared_address(stage.prepared.T);
#pragma unroll
  for (int u = 0; u < BLOCK; ++u) block_times(d, R[u], T, BLOCK, u, lane);  // independent of this block
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) d[e][c] += x[e][c];
  block_times(d, R[BLOCK], T, BLOCK, BLOCK, lane);
  if constexpr (OUTPUTS) as_left(plain[BLOCK], d[0], d[1]);
  scaled(d, out);
  uint32_t decayed[4];
  as_left(decayed, d[0], d[1]);
  // 12. O = scale e^G Q S^T + M D
  if constexpr (OUTPUTS) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (POOL) pair_of(in[e], stage.prepared.gate(IN_Q, BLOCK * 16 + e * 8 + 2 * t));
#pragma unroll
      for (int c = 0; c < 4; ++c) o[e][c] *= scale * in[e][c % 2];
    }
#pragma unroll
    for (int u = 0; u <= BLOCK; ++u) block_times(o, plain[u], shared_address(stage.prepared.M), BLOCK, u, lane);
    __syncwarp();  // V has been read
    stage_transposed<PIECES>(stage.v, o, BLOCK * 16, warp * 2, lane);
  }
  // 11. S' = e^(G_C) S + D^T K: the product
#pragma unroll
  for (int j = 0; j < 16; j += 2) keys_times(S[j], S[j + 1], decayed, k_tile, BLOCK * 16, j, lane);
}


template <int WARPS, int STAGES>
constexpr int state_shared() { return STAGES * sizeof(Stage<WARPS>); }

template <int WARPS, int STAGES, bool K_FIRST = false>
__global__ void __launch_bounds__(WARPS * 32) gdn_prefill_inter_chunk_sm80(const __grid_constant__ Prefill p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, v0 = blockIdx.x * WARPS * 16, hv = blockIdx.y;
  Chunks<WARPS, STAGES, WARPS * 32> chunks(shared_memory(), p, hv, v0);
  if (!chunks.there()) return;
  chunks.begin();

  float S[16][4];
  load_start<K_FIRST>(S, chunks, v0 + warp * 16, 0, lane);

#pragma unroll 1
  for (int chunk = 0; chunk < chunks.count; ++chunk) {
    Stage<WARPS>& stage = chunks.next(chunk);  // 6. Load a later chunk
    const int warp = thread_again() / 32, lane = thread_again() % 32;
    uint32_t before[8][4], R[4][4], plain[4][4];
    const float kept = *stage.prepared.gate(IN, CHUNK - 1);
#pragma unroll
    for (int step = 0; step < 8; ++step) as_left(before[step], S[2 * step], S[2 * step + 1]);
    // 11. The decay
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] *= kept;
    tokens<WARPS, 0>(stage, before, S, R, plain, p.scale, warp, lane);
    tokens<WARPS, 1>(stage, before, S, R, plain, p.scale, warp, lane);
    tokens<WARPS, 2>(stage, before, S, R, plain, p.scale, warp, lane);
    tokens<WARPS, 3>(stage, before, S, R, plain, p.scale, warp, lane);
    if (POOL && p.has_checkpoints() && chunks.keeps(chunk)) store_state<K_FIRST>(chunks.kept(chunk), S, v0 + warp * 16, 0, lane);
    // 13. Store
    __syncwarp();  // the outputs of this warp's rows are in the tile: 32 bytes of each token
#pragma unroll
    for (int i = 0; i < CHUNK * 2; i += 32) chunks.store(stage, chunk, (i + lane) / 2, warp * 2 + lane % 2);
  }

  if (!chunks.last) return;
  store_state<K_FIRST>(chunks.end(), S, v0 + warp * 16, 0, lane);
}

}  // namespace gdn
