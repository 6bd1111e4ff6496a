// inter_chunk_sm80.cuh for few heads: four warps share the 16 rows of S that one warp has there. Each has 32 columns of S, 16
// of the chunk's tokens and a fourth of all products; they exchange S, then R, then D through shared memory as fragments, lane
// for lane, with a barrier each. Three exchanges cost less than three fourths of the products.
#pragma once

#include "inter_chunk_sm80.cuh"

namespace gdn {

constexpr int SPLIT_THREADS = 128;

struct Exchange {
  uint4 S[8][32], R[4][32], plain[4][32], decayed[4][32];  // left operands, a lane's four registers each
};

template <int STAGES>
constexpr int split_shared() { return STAGES * sizeof(Stage<1>) + sizeof(Exchange); }

__device__ __forceinline__ void give(uint4& to, const uint32_t (&x)[4]) { to = {x[0], x[1], x[2], x[3]}; }
__device__ __forceinline__ void take(uint32_t (&x)[4], const uint4& from) {
  const uint4 u = from;
  x[0] = u.x, x[1] = u.y, x[2] = u.z, x[3] = u.w;
}

template <int STAGES, bool K_FIRST = false>
__global__ void __launch_bounds__(SPLIT_THREADS, 1) gdn_prefill_inter_chunk_sm80_split(const __grid_constant__ Prefill p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const int v0 = blockIdx.x * 16, hv = blockIdx.y;
  Exchange& x = *reinterpret_cast<Exchange*>(shared_memory() + STAGES * sizeof(Stage<1>));
  Chunks<1, STAGES, SPLIT_THREADS> chunks(shared_memory(), p, hv, v0);
  if (!chunks.there()) return;
  chunks.begin();

  float S[4][4];  // columns 32 warp to 32 warp + 31
  load_start<K_FIRST>(S, chunks, v0, warp * 4, lane);

#pragma unroll 1
  for (int chunk = 0; chunk < chunks.count; ++chunk) {
    uint32_t left[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      as_left(left, S[2 * i], S[2 * i + 1]);
      give(x.S[warp * 2 + i][lane], left);
    }
    Stage<1>& stage = chunks.next(chunk);  // 6. Load a later chunk. A barrier: S is there
    const uint32_t k_tile = shared_address(stage.k), q_tile = shared_address(stage.q);
    const uint32_t v_tile = shared_address(stage.v);

    uint32_t before[8][4];
#pragma unroll
    for (int step = 0; step < 8; ++step) take(before[step], x.S[step][lane]);
    float in[2][2], out[2][2], beta[2][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = warp * 16 + e * 8 + 2 * t;
      pair_of(in[e], stage.prepared.gate(IN_K, token)), pair_of(out[e], stage.prepared.gate(OUT, token));
      pair_of(beta[e], stage.prepared.gate(BETA, token));
    }
    // 8. S K^T
    float d[2][4] = {}, o[2][4] = {};  // d: R, and then D
    state_times<2>(d, before, k_tile, warp * 16, lane);
    // 9. R
    uint32_t v[4];
    load_transposed(v, v_tile + in_tile<2>(warp * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2));
    rest_of(d, v, in, beta);
    uint32_t R[4];
    as_left(R, d[0], d[1]);
    give(x.R[warp][lane], R);
    __syncthreads();

    // 10. D = R + (T - I) R
    const uint32_t T = shared_address(stage.prepared.T), M = shared_address(stage.prepared.M);
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (u <= warp) {
        take(left, x.R[u][lane]);
        block_times(d, left, T, warp, u, lane);
      }
    uint32_t plain[4];
    as_left(plain, d[0], d[1]);
    give(x.plain[warp][lane], plain);
    scaled(d, out);
    as_left(left, d[0], d[1]);
    give(x.decayed[warp][lane], left);
    // 8. S Q^T
    state_times<2>(o, before, q_tile, warp * 16, lane);
    __syncthreads();

    // 11. S' = e^(G_C) S + D^T K
    const float kept = *stage.prepared.gate(IN, CHUNK - 1);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] *= kept;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      take(left, x.decayed[u][lane]);
#pragma unroll
      for (int j = 0; j < 4; j += 2) keys_times(S[j], S[j + 1], left, k_tile, u * 16, warp * 4 + j, lane);
    }
    // 12. O = scale e^G Q S^T + M D
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (POOL) pair_of(in[e], stage.prepared.gate(IN_Q, warp * 16 + e * 8 + 2 * t));
#pragma unroll
      for (int c = 0; c < 4; ++c) o[e][c] *= p.scale * in[e][c % 2];
    }
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (u <= warp) {
        take(left, x.plain[u][lane]);
        block_times(o, left, M, warp, u, lane);
      }
    stage_transposed<2>(stage.v, o, warp * 16, 0, lane);
    // 13. Store
    __syncwarp();
    chunks.store(stage, chunk, warp * 16 + lane / 2, lane % 2);
  }

  if (!chunks.last) return;
  store_state<K_FIRST>(chunks.end(), S, v0, warp * 4, lane);
}

}  // namespace gdn
