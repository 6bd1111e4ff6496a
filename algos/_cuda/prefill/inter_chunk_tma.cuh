// From chunk to chunk with mma.sync where there is TMA but no wgmma: on Blackwell, and on sm_90 without "a". The arithmetic is that of
// inter_chunk_sm80.cuh, the roles and the pipeline those of inter_chunk_sm90.cuh: a thread loads tiles by TMA, two warps store the
// outputs, and WARPS consumer warps have 16 rows of S each. M comes from the intra-chunk kernel: a maker would read K and Q from
// shared memory once more, as each consumer warp does.
//
// A chunk as a whole, not 16 tokens at a time: all products of a step are independent of each other, and the next step's run meanwhile.
// Operands come from shared memory one group of 8 products ahead. One warp has a quarter of an SM to itself, so nothing else hides a
// latency:
//
//   tensor core   S K^T        | S Q^T, first half | S Q^T, second half, R (T - I)^T | D^T K
//   meanwhile     S decayed      R                   D packed                          M D, O stored
#pragma once

#include "inter_chunk_sm90_tiles.cuh"

namespace gdn {

// WARPS: 4 for half of V, as in inter_chunk_sm90.cuh; 2 for a quarter, which has its half's V loaded and uses half of it.
template <int WARPS_, typename Base>
struct TmaShared : Base {
  static constexpr int WARPS = WARPS_, PIECES = WARPS_ * 2, PREPARED = sizeof(Prepared), UNIT_ROWS = WARPS * 16;
  static constexpr int TILES = HEAD_DIM / UNIT_ROWS;
  static constexpr bool MAKES_M = false;
};
constexpr int TMA_STAGES = 4;
template <int WARPS> using TmaTile = TmaShared<WARPS, GroupShared<1, TMA_STAGES>>;
template <int WARPS> using TmaTiles = TmaShared<WARPS, TilesShared<1, TMA_STAGES>>;  // of a CTA that has several
constexpr int TMA_PRODUCER = 4;                                                      // its producer, whatever the tiles are
__host__ __device__ constexpr int tma_threads(int warps, bool outputs) { return (warps + 1 + (outputs ? 2 : 0)) * 32; }

#if FLASHCORE_COPY_ENGINE

// The chunks of a work tile by a consumer warp: `S` its 16 rows of the state, `piece` the first of their two pieces in a row of V.
// `row`: of the state, for CHECKPOINTS alone. Without OUTPUTS: for segments (context_parallel.cuh).
template <bool OUTPUTS, bool CHECKPOINTS = false, bool K_FIRST = false, typename Shared>
__device__ __forceinline__ void consume_mma(float (&S)[16][4], const Prefill& p, Shared& s, PipelineState<Shared::STAGES>& pipe,
                                     const Segment& at, bool values, int piece, int row = 0) {
  constexpr int GROUPS_K = 8, GROUPS_Q = OUTPUTS ? 8 : 0, GROUPS_S = 8, LOADS = GROUPS_K + GROUPS_Q + GROUPS_S;
  const int count = __shfl_sync(0xffffffffu, at.count, 0);
  const auto own = pipe.template take<Shared::LOOPS>(count);
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    const int thread = thread_again(), lane = thread % 32, t = lane % 4;
    auto& stage = s.stages[own.stage(chunk)];
    const char* const prepared = reinterpret_cast<const char*>(&stage.prepared);
    const uint32_t k_tile = shared_address(stage.k), q_tile = shared_address(stage.q);
    const uint32_t T = shared_address(stage.prepared.T), M = shared_address(stage.prepared.M);
    const uint32_t v_own = shared_address(stage.v[0]) + in_matrix(lane / 16 * 8 + lane % 8, piece + lane / 8 % 2);
    // A lane's row and piece of 16 x 16 numbers in any tile, from column 16 i of 64 on: 16 rows further are 2048 bytes further.
    uint32_t lane_at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) lane_at[i] = in_matrix(lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ i * 32;
    mbarrier_wait(shared_address(&s.full[own.stage(chunk)]), own.parity(chunk));
    const int left = at.tokens - chunk * CHUNK;
    if (left < CHUNK) {  // rows past the sequence's end: zeros in K and V, because 0 x NaN is not 0. Those of Q reach no output
      constexpr int THREADS = Shared::WARPS * 32;
      clear_rows<THREADS>(stage.k, left, thread), clear_rows<THREADS>(stage.k + QK_TILE / 2, left, thread);
      clear_rows<THREADS>(stage.v[0], left, thread);
      fence_proxy_async();  // TMA will overwrite them
      named_barrier_sync<THREADS>(1);
    }

    // Right operands, for eight products each: of 16 columns of K (8.), of Q (8.); of 16 tokens and half of K's columns (11.)
    uint32_t right[2][4][4];
    const auto fetch = [&](int n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = n % 8;
        if (n < GROUPS_K + GROUPS_Q)
          load_matrices(right[n % 2][j], (n < GROUPS_K ? k_tile : q_tile) + lane_at[i % 4] + i / 4 * (QK_TILE / 2) + j * 2048);
        else
          load_transposed(right[n % 2][j], k_tile + lane_at[j] + i % 2 * (QK_TILE / 2) + i / 2 * 2048);
      }
    };
    fetch(0);
    const float kept = decay_of_chunk(prepared);
    float x[8][4] = {}, o[8][4] = {};  // x: S K^T, then R, then D
    uint32_t before[8][4], R[4][4], plain[4][4], decayed[4][4];

    // 8. S K^T; and S packed and decayed
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      fetch(step + 1);
      as_left(before[step], S[2 * step], S[2 * step + 1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto& b = right[step % 2][j];
        multiply_tokens<Token>(x[2 * j], before[step], b[0], b[1]), multiply_tokens<Token>(x[2 * j + 1], before[step], b[2], b[3]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int c = 0; c < 4; ++c) S[2 * step + e][c] *= kept;
    }

    // 9. R, of 16 tokens
    const auto rest = [&](int j) {
      uint32_t v[4] = {};
      if (OUTPUTS || values) load_transposed(v, v_own + j * 2048);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 in = gates_of(prepared, IN_K, 2 * j + e, t), beta = gates_of(prepared, BETA, 2 * j + e, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const uint32_t word = v[2 * e + c / 2];
          const float value = token_of<Token>(word, c % 2);
          float& r = x[2 * j + e][c];
          r = (c % 2 ? beta.y : beta.x) * fmaf(-(c % 2 ? in.y : in.x), r, value);
        }
      }
      as_left(R[j], x[2 * j], x[2 * j + 1]);
    };
    // d += X B^T for 16 tokens: X as left operands of 16 tokens each, B row i of the blocks of T or M up to the diagonal
    const auto row_times = [&](float (&d)[8][4], const uint32_t (&X)[4][4], uint32_t matrix, int i) {
#pragma unroll
      for (int u = 0; u < 4; ++u)
        if (u <= i) {
          uint32_t b[4];
          load_matrices(b, matrix + lane_at[u] + i * 2048);
          multiply_tokens<Token>(d[2 * i], X[u], b[0], b[1]), multiply_tokens<Token>(d[2 * i + 1], X[u], b[2], b[3]);
        }
    };
    // 11. D decayed, of 16 tokens
    const auto decay = [&](int i) {
      if constexpr (OUTPUTS) as_left(plain[i], x[2 * i], x[2 * i + 1]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 out = gates_of(prepared, OUT, 2 * i + e, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) x[2 * i + e][c] *= c % 2 ? out.y : out.x;
      }
      as_left(decayed[i], x[2 * i], x[2 * i + 1]);
    };
    // 8. S Q^T; meanwhile 9, and 10. D = R + (T - I) R
    if constexpr (OUTPUTS) {
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const int n = GROUPS_K + step;
        fetch(n + 1);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const auto& b = right[n % 2][j];
          multiply_tokens<Token>(o[2 * j], before[step], b[0], b[1]), multiply_tokens<Token>(o[2 * j + 1], before[step], b[2], b[3]);
        }
        if (step < 4) rest(step);
        else row_times(x, R, T, step - 4);
        if (step > 4) decay(step - 5);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) rest(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) row_times(x, R, T, i);
#pragma unroll
      for (int i = 0; i < 3; ++i) decay(i);
    }
    decay(3);

    // 11. S' = e^(G_C) S + D^T K; meanwhile 12. O = scale e^G Q S^T + M D
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = GROUPS_K + GROUPS_Q + i, u = i / 2;
      if (n + 1 < LOADS) fetch(n + 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto& b = right[n % 2][j];
        const int column = i % 2 * 8 + 2 * j;
        multiply_tokens<Token>(S[column], decayed[u], b[0], b[2]), multiply_tokens<Token>(S[column + 1], decayed[u], b[1], b[3]);
      }
      if (OUTPUTS && i % 2) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float2 in = gates_of(prepared, IN_Q, 2 * u + e, t);
#pragma unroll
          for (int c = 0; c < 4; ++c) o[2 * u + e][c] *= p.scale * (c % 2 ? in.y : in.x);
        }
        row_times(o, plain, M, u);
      }
    }
    if constexpr (CHECKPOINTS) {
      if (at.keeps(chunk)) store_state<K_FIRST>(at.kept(chunk), S, row, 0, lane);
    }
    if constexpr (OUTPUTS) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t words[4];
        as_left(words, o[2 * j], o[2 * j + 1]);
        store_transposed(v_own + j * 2048, words);
      }
    }
    __syncwarp();
    if (lane < ARRIVALS)
      mbarrier_arrive(shared_address(OUTPUTS ? &s.outputs_ready[own.stage(chunk)] : &s.empty[own.stage(chunk)]));
  }
}

#endif  // FLASHCORE_COPY_ENGINE

// grid (8 / WARPS, HV, numbers of segments).
template <int WARPS, bool CHECKPOINTS = false, bool K_FIRST = false>
__global__ void __launch_bounds__(tma_threads(WARPS, true), 1)
gdn_prefill_inter_chunk_tma(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if FLASHCORE_COPY_ENGINE
  constexpr int PRODUCER = WARPS, STORER = WARPS + 1;
  auto& s = *reinterpret_cast<TmaTile<WARPS>*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int first = blockIdx.x * WARPS, hv = blockIdx.y, half = first / 4;  // of 16 rows of V
  const int row = (first + warp) * 16;
  float S[16][4];
  if (!p.segment && warp < WARPS) load_state<K_FIRST>(S, p.original(p.state_of(blockIdx.z), hv), row, 0, lane);  // needs no cu_seqlens
  if (warp == PRODUCER && elect_one()) prefetch_tensor_map(maps.k), prefetch_tensor_map(maps.v), prefetch_tensor_map(maps.q);
  group_begin<true>(s);
  PipelineState<TMA_STAGES> pipe;
  const Segment at(p, hv, blockIdx.z);
  if (!at.there()) return;
  if (warp == PRODUCER) {
    if (elect_one()) produce<true>(p, maps, s, pipe, at, half, true);
    return;
  }
  if (warp >= STORER) return store_staged_outputs(p, s, pipe, at, half, threadIdx.x - STORER * 32, first % 4 * 2);
  if (p.segment) {
    wait_for_kernel_before();  // for the segment's state
    load_start<K_FIRST>(S, at, row, 0, lane);
  }
  consume_mma<true, CHECKPOINTS, K_FIRST>(S, p, s, pipe, at, true, (first % 4 + warp) * 2, row);
  if (at.last) store_state<K_FIRST>(at.end(), S, row, 0, lane);
#endif
}

#if FLASHCORE_COPY_ENGINE

// A CTA's tiles of one size: as run_tiles of inter_chunk_sm90_tiles.cuh.
template <int WARPS, bool K_FIRST>
__device__ __forceinline__ void run_boxes(const Prefill& p, const Maps& maps, Schedule schedule) {
  using Shared = TmaTiles<WARPS>;
  using At = UnitSegment<Shared::UNIT_ROWS>;
  constexpr int PRODUCER = TMA_PRODUCER, STORER = PRODUCER + 1;
  if (blockIdx.x >= static_cast<uint32_t>(Shared::TILES) * p.N * p.HV) return;
  auto& s = *reinterpret_cast<Shared*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) s.first = tile_of<Shared::TILES, Shared::UNIT_ROWS>(p, blockIdx.x);
  group_begin<true>(s);
  PipelineState<Shared::STAGES> pipe;
  if (warp == PRODUCER) {
    if (elect_one()) produce_tiles<K_FIRST>(p, maps, s, pipe, schedule);
    return;
  }
  if (warp >= STORER) {
    return for_each_scheduled_tile(s, pipe, [&] { free_state(s, pipe); }, [&](const ScheduledTile& tile) {
      const At at(p, tile);
      store_staged_outputs(p, s, pipe, at, at.half, threadIdx.x - STORER * 32, at.unit * Shared::UNIT_ROWS % GROUP_ROWS / 8);
    });
  }
  if (warp >= WARPS) return;
  const int lane = threadIdx.x % 32;
  const auto row_of = [&](const At& at) { return at.unit * Shared::UNIT_ROWS + warp * 16; };
  float S[16][4];
  {
    const At at(p, s.first);
    load_state<K_FIRST>(S, at.original(), row_of(at), 0, lane);
  }
  for_each_scheduled_tile(s, pipe, [&] { consume_state<K_FIRST>(S, p, s, pipe, warp * 16, lane); }, [&](const ScheduledTile& tile) {
    const At at(p, tile);
    consume_mma<true>(S, p, s, pipe, at, true, (at.unit * WARPS % 4 + warp) * 2);
    store_state<K_FIRST>(at.end(), S, row_of(at), 0, lane);
  });
}

#endif  // FLASHCORE_COPY_ENGINE

// The same for sequences of different lengths, in the order of tile_scheduler.cuh, half or a quarter of V at a time: as
// inter_chunk_sm90_tiles.cuh. The maps differ in the box of states.
template <bool K_FIRST = false>
__global__ void __launch_bounds__(tma_threads(4, true), 1)
gdn_prefill_inter_chunk_tma_tiles(const __grid_constant__ Prefill p, const __grid_constant__ Maps halves,
                                  const __grid_constant__ Maps quarters) {
#if FLASHCORE_COPY_ENGINE
  if (threadIdx.x / 32 == TMA_PRODUCER && elect_one()) {
    prefetch_tensor_map(halves.k), prefetch_tensor_map(halves.v), prefetch_tensor_map(halves.q), prefetch_tensor_map(halves.state);
  }
  wait_for_kernel_before();
  const uint32_t said = p.plan->schedule;
  const Schedule schedule = static_cast<Schedule>(__shfl_sync(0xffffffffu, said, 0));
  if (schedule == QUARTERS) run_boxes<2, K_FIRST>(p, quarters, schedule);
  else run_boxes<4, K_FIRST>(p, halves, schedule);
#endif
}

// grid (4, HV, num_tokens / tokens of a segment), as that of gdn_prefill_transfer_sm90: the first half makes L, the second Phi.
template <bool K_FIRST = false>
__global__ void __launch_bounds__(tma_threads(4, false), 1)
gdn_prefill_transfer_tma(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if FLASHCORE_COPY_ENGINE
  auto& s = *reinterpret_cast<TmaTile<4>*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, half = blockIdx.x % 2;
  const int row = half * GROUP_ROWS + warp * 16;
  const bool values = blockIdx.x < 2;
  const Segment at(p, blockIdx.y, blockIdx.z + sequence_of<0>(p, blockIdx.z, p.segment * CHUNK, lane));
  wait_for_kernel_before();  // all CTAs do, so that the kernels after this one come after the one before, too
  if (!at.there() || at.last) return;
  if (at.opens && !values) {
    if (warp < 4) keep_original<K_FIRST>(at, row, lane);
    return;
  }
  group_begin<false>(s);
  PipelineState<TMA_STAGES> pipe;
  if (warp == 4) {
    if (elect_one()) produce<false>(p, maps, s, pipe, at, half, values);
    return;
  }
  float S[16][4];
  begin_transfer<K_FIRST>(S, at, at.opens, values, row, lane);
  consume_mma<false>(S, p, s, pipe, at, values, warp * 2);
  const int64_t to = at.state_at(at.slot);
  if (values) store_state(p.ends + to, S, row, 0, lane);
  else store_transfer(reinterpret_cast<uint4*>(p.transfers + to), S, row / 16, lane);
#endif
}

}  // namespace gdn
