// inter_chunk_tma.cuh for many sequences: a consumer warp has 32 rows of S instead of 16, so four have all of V, and each operand that
// comes from shared memory serves two products. S is 128 registers. So S Q^T comes behind D, in two halves of the tokens, for which
// S is packed to bf16 again; packed as -S and as 2 S, or ptxas would keep 64 registers of packed numbers from one to the next.
#pragma once

#include "inter_chunk_sm90_tiles.cuh"

namespace gdn {

constexpr int WHOLE_STAGES = 3;
struct TmaWhole : TilesShared<2, WHOLE_STAGES> {
  static constexpr int WARPS = 4, PREPARED = sizeof(Prepared);
  static constexpr bool MAKES_M = false;
};

#if FLASHCORE_COPY_ENGINE

template <typename Shared>
__device__ __forceinline__ void consume_whole(float (&S)[2][16][4], const Prefill& p, Shared& s, PipelineState<Shared::STAGES>& pipe,
                                             const Segment& at) {
  const int count = __shfl_sync(0xffffffffu, at.count, 0);
  const auto own = pipe.template take<Shared::LOOPS>(count);
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    const int thread = thread_again(), lane = thread % 32, warp = thread / 32, t = lane % 4;
    auto& stage = s.stages[own.stage(chunk)];
    const char* const prepared = reinterpret_cast<const char*>(&stage.prepared);
    const uint32_t k_tile = shared_address(stage.k), q_tile = shared_address(stage.q);
    const uint32_t T = shared_address(stage.prepared.T), M = shared_address(stage.prepared.M);
    const uint32_t v_tile = shared_address(stage.v[warp / 2]);
    uint32_t lane_at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) lane_at[i] = in_matrix(lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ i * 32;
    const uint32_t v_own = v_tile + (lane_at[0] ^ warp % 2 * 64);  // of the second 16 rows: ^ 32
    mbarrier_wait(shared_address(&s.full[own.stage(chunk)]), own.parity(chunk));
    const int left = at.tokens - chunk * CHUNK;
    if (left < CHUNK) {  // as in consume_mma
      constexpr int THREADS = 128;
      clear_rows<THREADS>(stage.k, left, thread), clear_rows<THREADS>(stage.k + QK_TILE / 2, left, thread);
      clear_rows<THREADS>(stage.v[0], left, thread), clear_rows<THREADS>(stage.v[1], left, thread);
      fence_proxy_async();
      named_barrier_sync<THREADS>(1);
    }
    const float kept = gates_of(prepared, IN, 7, 3).y;
    uint32_t R[2][4][4], decayed[2][4][4];
    {
      float x[2][8][4] = {};
      // 8. S K^T
      uint32_t right[2][2][4];
      const auto fetch = [&](int n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) load_matrices(right[n % 2][j], k_tile + lane_at[n / 2 % 4] + n / 8 * (QK_TILE / 2) + (n % 2 * 2 + j) * 2048);
      };
      fetch(0);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        if (n < 15) fetch(n + 1);
        const int step = n / 2;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          uint32_t left[4];
          as_left(left, S[m][2 * step], S[m][2 * step + 1]);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const auto& b = right[n % 2][j];
            const int i = n % 2 * 4 + 2 * j;
            multiply_add(x[m][i], left, b[0], b[1]), multiply_add(x[m][i + 1], left, b[2], b[3]);
          }
        }
      }
      // 9. R
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t v[2][4];
        load_transposed(v[0], v_own + j * 2048), load_transposed(v[1], (v_own ^ 32) + j * 2048);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float2 in = gates_of(prepared, IN_K, 2 * j + e, t), beta = gates_of(prepared, BETA, 2 * j + e, t);
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const uint32_t word = v[m][2 * e + c / 2];
              const float value = __uint_as_float(c % 2 ? word & 0xffff0000u : word << 16);
              float& r = x[m][2 * j + e][c];
              r = (c % 2 ? beta.y : beta.x) * fmaf(-(c % 2 ? in.y : in.x), r, value);
            }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) as_left(R[m][j], x[m][2 * j], x[m][2 * j + 1]);
      }
      // 10. D = R + (T - I) R, the last tokens first: R of later tokens is not needed any more, and D takes its place
#pragma unroll
      for (int i = 3; i >= 0; --i) {
#pragma unroll
        for (int u = 0; u < 4; ++u)
          if (u <= i) {
            uint32_t b[4];
            load_matrices(b, T + lane_at[u] + i * 2048);
#pragma unroll
            for (int m = 0; m < 2; ++m)
              multiply_add(x[m][2 * i], R[m][u], b[0], b[1]), multiply_add(x[m][2 * i + 1], R[m][u], b[2], b[3]);
          }
#pragma unroll
        for (int m = 0; m < 2; ++m) as_left(R[m][i], x[m][2 * i], x[m][2 * i + 1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float2 out = gates_of(prepared, OUT, 2 * i + e, t);
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int c = 0; c < 4; ++c) x[m][2 * i + e][c] *= c % 2 ? out.y : out.x;
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) as_left(decayed[m][i], x[m][2 * i], x[m][2 * i + 1]);
      }
    }
    // 8. S Q^T and 12. O, 32 tokens at a time
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float o[2][4][4] = {};
      const float by = half ? p.scale * 0.5f : -p.scale;
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        uint32_t right[2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j)
          load_matrices(right[j], q_tile + lane_at[step % 4] + step / 4 * (QK_TILE / 2) + (half * 2 + j) * 2048);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          uint32_t left[4];
          float y[2][4];
#pragma unroll
          for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int c = 0; c < 4; ++c) y[e][c] = half ? S[m][2 * step + e][c] + S[m][2 * step + e][c] : -S[m][2 * step + e][c];
          as_left(left, y[0], y[1]);
#pragma unroll
          for (int j = 0; j < 2; ++j)
            multiply_add(o[m][2 * j], left, right[j][0], right[j][1]), multiply_add(o[m][2 * j + 1], left, right[j][2], right[j][3]);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int i = half * 2 + j;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float2 in = gates_of(prepared, IN_Q, 2 * i + e, t);
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int c = 0; c < 4; ++c) o[m][2 * j + e][c] *= by * (c % 2 ? in.y : in.x);
        }
#pragma unroll
        for (int u = 0; u < 4; ++u)
          if (u <= i) {
            uint32_t b[4];
            load_matrices(b, M + lane_at[u] + i * 2048);
#pragma unroll
            for (int m = 0; m < 2; ++m)
              multiply_add(o[m][2 * j], R[m][u], b[0], b[1]), multiply_add(o[m][2 * j + 1], R[m][u], b[2], b[3]);
          }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          uint32_t words[4];
          as_left(words, o[m][2 * j], o[m][2 * j + 1]);
          store_transposed((v_own ^ m * 32) + i * 2048, words);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) S[m][j][c] *= kept;
    uint32_t right[2][2][4];
    const auto fetch = [&](int n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) load_transposed(right[n % 2][j], k_tile + lane_at[n % 2 * 2 + j] + n / 2 % 2 * (QK_TILE / 2) + n / 4 * 2048);
    };
    fetch(0);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      if (n < 15) fetch(n + 1);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const auto& b = right[n % 2][j];
          const int column = n % 4 * 4 + 2 * j;
          multiply_add(S[m][column], decayed[m][n / 4], b[0], b[2]), multiply_add(S[m][column + 1], decayed[m][n / 4], b[1], b[3]);
        }
    }
    __syncwarp();
    if (lane < ARRIVALS) mbarrier_arrive(shared_address(&s.outputs_ready[own.stage(chunk)]));
  }
}

#endif  // FLASHCORE_COPY_ENGINE

}  // namespace gdn
