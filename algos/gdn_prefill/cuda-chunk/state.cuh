// From chunk to chunk: the state, and the outputs. For the state S [V, K] before a chunk and its tokens' rows of Q, K, V,
//
//   R = beta (V - e^G K S^T),   D = T R,   O = scale e^G Q S^T + M D,   S' = e^(G_C) S + D^T (e^(G_C - G) K).
//
// A warp has 16 rows of S, all 128 columns, as accumulators in registers, and works on the transposed products (S K^T and
// so on): what one product leaves in its accumulators is, packed to bf16, what the next takes on its left. So between the
// chunks there is no exchange between warps at all; those of a CTA share the chunk's tiles, which cp.async brings in while
// the chunk before is worked on. S itself stays float.
#pragma once

#include "chunk.cuh"

namespace gdn {

// 16 WARPS rows of V.
template <int WARPS>
struct StateStage {
  char k[D_TILE], q[D_TILE];
  char v[CHUNK * WARPS * 32];      // and, when V has been read, the outputs
  Prepared prepared;
};
constexpr int STAGES = 2;

template <int WARPS>
constexpr int state_shared() { return STAGES * sizeof(StateStage<WARPS>); }

// The chunk from token `begin` on, `count` tokens of it: asks for everything that it takes.
template <int WARPS>
__device__ __forceinline__ void copy_chunk(StateStage<WARPS>& stage, const Prefill& p, int hv, int v0, int64_t begin,
                                           int count, int64_t number, int thread) {
  const int h = hv / (p.HV / p.H);
  const int64_t stride = static_cast<int64_t>(p.H) * D, v_stride = static_cast<int64_t>(p.HV) * D;
  copy_tile<D_PIECES>(flashcore::shared_address(stage.k), p.k + begin * stride + h * D, stride, count, thread, WARPS * 32);
  copy_tile<D_PIECES>(flashcore::shared_address(stage.q), p.q + begin * stride + h * D, stride, count, thread, WARPS * 32);
  copy_tile<WARPS * 2>(flashcore::shared_address(stage.v), p.v + begin * v_stride + hv * D + v0, v_stride, count, thread,
                       WARPS * 32);
  const char* prepared = p.prepared + (number * p.HV + hv) * sizeof(Prepared);
  const uint32_t to = flashcore::shared_address(&stage.prepared);
#pragma unroll 1
  for (int i = thread * 16; i < static_cast<int>(sizeof(Prepared)); i += WARPS * 32 * 16) flashcore::copy16(to + i, prepared + i, true);
}

// d += S X^T for 16 tokens from `row` on: S as left operands, X the tile of q or k.
__device__ __forceinline__ void state_times(float (&d)[2][4], const uint32_t (&S)[8][4], uint32_t tile, int row, int lane) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t right[4];
    flashcore::load_matrices(right, tile + in_tile<D_PIECES>(row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
    mma(d[0], S[step], right[0], right[1]);
    mma(d[1], S[step], right[2], right[3]);
  }
}

// d += sum over u <= i of X_u B_iu^T: X as left operands, B the blocks of T or M.
template <int I>
__device__ __forceinline__ void below(float (&d)[2][4], const uint32_t (&X)[4][4], uint32_t blocks, int lane) {
#pragma unroll
  for (int u = 0; u <= I; ++u) {
    uint32_t right[4];
    flashcore::load_matrices(right, blocks + block_at(I, u) + in_block(lane / 16 * 8 + lane % 8, lane / 8 % 2));
    mma(d[0], X[u], right[0], right[1]);
    mma(d[1], X[u], right[2], right[3]);
  }
}

// Tokens 16 I to 16 I + 15 of a chunk, for the warp's 16 rows of V: R and D, what they add to the state, the outputs.
// `before` is the state in front of the chunk, S what has become of it so far.
template <int WARPS, int I>
__device__ __forceinline__ void tokens(StateStage<WARPS>& stage, const uint32_t (&before)[8][4], float (&S)[16][4],
                                       uint32_t (&R)[4][4], uint32_t (&plain)[4][4], float scale, int warp, int lane) {
  constexpr int PIECES = WARPS * 2;
  const int g = lane / 4, t = lane % 4;
  const uint32_t v_tile = flashcore::shared_address(stage.v);
  float in[2][2], out[2][2], beta[2][2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int token = I * 16 + e * 8 + 2 * t;
    const auto pair = [&](float (&to)[2], const float* from) {
      const float2 x = *reinterpret_cast<const float2*>(from + token);
      to[0] = x.x, to[1] = x.y;
    };
    pair(in[e], stage.prepared.in), pair(out[e], stage.prepared.out), pair(beta[e], stage.prepared.beta);
  }

  float x[2][4] = {};
  state_times(x, before, flashcore::shared_address(stage.k), I * 16, lane);
  uint32_t v[4];  // [n-tile of tokens][half of the rows], transposed: rows g (+ 8), tokens 2t and 2t + 1
  flashcore::load_transposed(v, v_tile + in_tile<PIECES>(I * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t word = v[2 * e + c / 2];
      const float value = __uint_as_float(c % 2 ? word & 0xffff0000u : word << 16);
      x[e][c] = beta[e][c % 2] * fmaf(-in[e][c % 2], x[e][c], value);
    }
  as_left(R[I], x[0], x[1]);

  float d[2][4] = {};
  below<I>(d, R, flashcore::shared_address(stage.prepared.T), lane);
  as_left(plain[I], d[0], d[1]);
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) d[e][c] *= out[e][c % 2];
  uint32_t decayed[4];
  as_left(decayed, d[0], d[1]);
  const uint32_t k_tile = flashcore::shared_address(stage.k);
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    uint32_t right[4];  // these tokens, columns 8 j to 8 j + 15
    flashcore::load_transposed(right, k_tile + in_tile<D_PIECES>(I * 16 + lane / 8 % 2 * 8 + lane % 8, j + lane / 16));
    mma(S[j], decayed, right[0], right[1]);
    mma(S[j + 1], decayed, right[2], right[3]);
  }

  float o[2][4] = {};
  state_times(o, before, flashcore::shared_address(stage.q), I * 16, lane);
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) o[e][c] *= scale * in[e][c % 2];
  below<I>(o, plain, flashcore::shared_address(stage.prepared.M), lane);
  // V of these tokens and rows was read above by all lanes of the warp, and nobody else reads it
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = transposed(pack(o[e][2 * half], o[e][2 * half + 1]));
      const int at = in_tile<PIECES>(I * 16 + e * 8 + g, warp * 2 + half) + 4 * t;
      *reinterpret_cast<uint32_t*>(stage.v + at) = word;
    }
}

template <int WARPS>
__global__ void __launch_bounds__(WARPS * 32) gdn_prefill_state(const __grid_constant__ Prefill p) {
  StateStage<WARPS>* const stages = reinterpret_cast<StateStage<WARPS>*>(flashcore::shared_memory());
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int v0 = blockIdx.x * WARPS * 16, hv = blockIdx.y, n = blockIdx.z;
  const int64_t first = p.cu_seqlens[n], tokens_left = p.cu_seqlens[n + 1] - first;
  const int64_t number = first / CHUNK + n;
  const int chunks = static_cast<int>((tokens_left + CHUNK - 1) / CHUNK);
  const auto ask = [&](int chunk) {
    const int64_t left = tokens_left - static_cast<int64_t>(chunk) * CHUNK;
    if (chunk < chunks)
      copy_chunk<WARPS>(stages[chunk % STAGES], p, hv, v0, first + static_cast<int64_t>(chunk) * CHUNK,
                        left < CHUNK ? static_cast<int>(left) : CHUNK, number + chunk, thread);
    flashcore::commit_copies();
  };
  ask(0);

  // columns 8 j + 2t and one more of rows g and g + 8
  float S[16][4];
  const int64_t rows = (static_cast<int64_t>(n) * p.HV + hv) * D + v0 + warp * 16 + g;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(p.state + rows * D + 8 * j + 2 * t);
    const float2 y = *reinterpret_cast<const float2*>(p.state + (rows + 8) * D + 8 * j + 2 * t);
    S[j][0] = x.x, S[j][1] = x.y, S[j][2] = y.x, S[j][3] = y.y;
  }

  for (int chunk = 0; chunk < chunks; ++chunk) {
    ask(chunk + 1);  // into the stage that all warps have left behind
    flashcore::wait_for_copies<1>();
    __syncthreads();
    StateStage<WARPS>& stage = stages[chunk % STAGES];

    uint32_t before[8][4], R[4][4], plain[4][4];
    const float kept = stage.prepared.in[CHUNK - 1];
#pragma unroll
    for (int step = 0; step < 8; ++step) as_left(before[step], S[2 * step], S[2 * step + 1]);
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] *= kept;
    tokens<WARPS, 0>(stage, before, S, R, plain, p.scale, warp, lane);
    tokens<WARPS, 1>(stage, before, S, R, plain, p.scale, warp, lane);
    tokens<WARPS, 2>(stage, before, S, R, plain, p.scale, warp, lane);
    tokens<WARPS, 3>(stage, before, S, R, plain, p.scale, warp, lane);

    __syncwarp();  // the outputs of this warp's rows lie in the tile: 32 bytes of each token
    const int64_t begin = first + static_cast<int64_t>(chunk) * CHUNK;
#pragma unroll
    for (int i = 0; i < CHUNK * 2; i += 32) {
      const int token = (i + lane) / 2, piece = warp * 2 + lane % 2;
      if (begin + token < first + tokens_left) {
        const uint4 words = *reinterpret_cast<const uint4*>(stage.v + in_tile<WARPS * 2>(token, piece));
        *reinterpret_cast<uint4*>(p.output + ((begin + token) * p.HV + hv) * D + v0 + piece * 8) = words;
      }
    }
    __syncthreads();  // the next chunk but one goes into this stage
  }

#pragma unroll
  for (int j = 0; j < 16; ++j) {
    *reinterpret_cast<float2*>(p.new_state + rows * D + 8 * j + 2 * t) = make_float2(S[j][0], S[j][1]);
    *reinterpret_cast<float2*>(p.new_state + (rows + 8) * D + 8 * j + 2 * t) = make_float2(S[j][2], S[j][3]);
  }
}

}  // namespace gdn
