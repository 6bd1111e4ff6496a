// Prefill in one launch: T = (I + A)^-1 and the gates are made by the CTA that goes from chunk to chunk, not by a kernel before it.
// Half of V for a CTA: one consumer warpgroup, the maker of M, and TEAMS warpgroups that make T, each for every TEAMS-th
// chunk. In the producer's warpgroup one thread loads Q and V, a warp loads K and computes the gates, two store the outputs.
//
// Two rings of stages: K and T (and the gates), which are needed from the first product of T on until S' is complete; and Q, V
// and M, until the outputs are stored. The first has a stage more, because T takes longer than a chunk of the consumers.
//
// Who waits for what, for each stage: `keys_full` TMA -> team, maker, consumers; `gates_ready` gates -> team, maker; `t_ready`
// team -> consumers; `keys_empty` consumers -> K and gates. `full` TMA -> maker, consumers; `m_ready` maker -> consumers;
// `outputs_ready` consumers -> epilogue; `empty` epilogue -> Q and V.
//
// Steps: as in inter_chunk_sm90.cuh and intra_chunk_steps.cuh.
#pragma once

#include "inter_chunk_sm90.cuh"
#include "intra_chunk_sm90.cuh"

namespace gdn {

struct KeyStage {
  char k[QK_TILE];  // two halves of 64 columns each
  char T[MATRIX];   // and the gates: Prepared::T
};
struct ValueStage {  // or the state before a tile: see load_state_stage
  char q[QK_TILE];
  char v[1][V_TILE];  // replaced by the outputs after V has been read
  char M[MATRIX];
};
static_assert(sizeof(ValueStage) == 4 * STATE_BLOCK<1>);
template <int TEAMS_, int CTAS_>
struct FusedShared {
  static constexpr int GROUPS = 1, TEAMS = TEAMS_, CTAS = CTAS_, KEYS = 4, STAGES = 3;
  KeyStage keys[KEYS];
  ValueStage stages[STAGES];
  char operands[TEAMS][2][6 * OPERAND];  // of a team, alternating
  Gates gates[KEYS];
  uint64_t keys_full[KEYS], gates_ready[KEYS], t_ready[KEYS], keys_empty[KEYS];
  uint64_t full[STAGES], m_ready[STAGES], outputs_ready[STAGES], empty[STAGES];
};
template <int TEAMS> __host__ __device__ constexpr int fused_threads() { return (TEAMS + 3) * 128; }

#if FLASHCORE_WGMMA

// How many chunks have gone through a ring of N stages, uniform in a warp.
template <int N>
struct Ring {
  int begun = 0;
  __device__ __forceinline__ int stage(int i) const { return (begun + i) % N; }
  __device__ __forceinline__ uint32_t parity(int i) const { return (begun + i) / N & 1; }
};

__device__ __forceinline__ void wait_for(const uint64_t& barrier, uint32_t parity) { mbarrier_wait(shared_address(&barrier), parity); }
// A warp's arrival, at the barriers of all CTAs of the cluster, after all of its lanes' accesses.
template <int CTAS>
__device__ __forceinline__ void warp_arrives_at_all(const uint64_t& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVALS) {
#pragma unroll
    for (int rank = 0; rank < CTAS; ++rank) {
      if constexpr (CTAS > 1) mbarrier_arrive_at_peer(at_peer(shared_address(&barrier), rank));
      else mbarrier_arrive(shared_address(&barrier));
    }
  }
}
// A team or the maker has made `matrix`, with the barrier that says so: also in the other CTA of a cluster.
template <int CTAS>
__device__ __forceinline__ void share(const char* matrix, const uint64_t& ready, int barrier) {
  fence_proxy_async();
  if constexpr (CTAS == 1) {
    __syncwarp();
    if (threadIdx.x % 32 < ARRIVALS) mbarrier_arrive(shared_address(&ready));
  } else {
    named_barrier_sync<128>(barrier);
    if (threadIdx.x % 128 == 0) {
      mbarrier_arrive(shared_address(&ready));
      const int peer = cluster_rank() ^ 1;
      copy_to_peer(at_peer(shared_address(matrix), peer), shared_address(matrix), MATRIX, at_peer(shared_address(&ready), peer));
    }
  }
}
// In a cluster of two a CTA makes T and M of every other chunk, and gets the others from its peer. Whether chunk number `number`
// of those that have gone through is this CTA's; for the other one, a thread announces the bytes.
template <int CTAS>
__device__ __forceinline__ bool makes(int number) { return CTAS == 1 || number % 2 == cluster_rank(); }
__device__ __forceinline__ void expect_matrix(const uint64_t& ready) { mbarrier_arrive_expect_tx(shared_address(&ready), MATRIX); }
// A warp's arrival, after all of its lanes' accesses.
__device__ __forceinline__ void warp_arrives(const uint64_t& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVALS) mbarrier_arrive(shared_address(&barrier));
}

// Steps 1 and 2: a warp loads K and computes the gates. Raw gates of the next chunk are loaded meanwhile.
template <typename Shared>
__device__ __forceinline__ void make_gates(const Prefill& p, const Maps& maps, Shared& s, int done, const Segment& at) {
  const Ring<Shared::KEYS> ring{done};
  constexpr int CTAS = Shared::CTAS;
  const int lane = threadIdx.x % 32;
  ChunkTile tile{0, at.h, at.first, at.tokens, 1};
  RawGates raw;
  raw.load_head(p, at.hv);
  ChunkTile own = tile;  // the next of those whose T is made here
  const int skipped = makes<CTAS>(done) ? 0 : CHUNK;
  own.begin += skipped, own.left -= skipped;
  raw.load_tokens(p, own, at.hv, lane);
#pragma unroll 1
  for (int chunk = 0; chunk < at.count; ++chunk, tile.begin += CHUNK, tile.left -= CHUNK) {
    const int stage = ring.stage(chunk);
    wait_for(s.keys_empty[stage], ring.parity(chunk) ^ 1);
    const bool makes_t = makes<CTAS>(done + chunk);
    if (elect_one()) {
      load_k(s.keys[stage].k, maps.k, tile, s.keys_full[stage]);
      if (!makes_t) expect_matrix(s.t_ready[stage]);
    }
    __syncwarp();
    if (!makes_t) continue;
    const RawGates now = raw;
    const int count = own.count();
    own.begin += CTAS * CHUNK, own.left -= CTAS * CHUNK;
    if (own.left > 0) raw.load_tokens(p, own, at.hv, lane);
    compute_gates(s.gates[stage], now, count, lane);
    warp_arrives(s.gates_ready[stage]);
  }
}

// A warp's row of K K^T, from its accumulators.
struct OwnRow {
  Block own;       // the diagonal
  Words k[3];      // right operands
  __device__ __forceinline__ OwnRow(const float (&d)[8][4], int row) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        own[e][c] = row < 2 ? row < 1 ? d[e][c] : d[2 + e][c] : row < 3 ? d[4 + e][c] : d[6 + e][c];
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (j < row) {
        f16_words(k[j], reinterpret_cast<const Block&>(d[2 * j]));
#pragma unroll
        for (int i = 0; i < 4; ++i) k[j][i] = transposed(k[j][i]);
      }
  }
  __device__ __forceinline__ void diagonal(Block& x, int, int) const {
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int c = 0; c < 4; ++c) x[e][c] = own[e][c];
  }
  __device__ __forceinline__ void below_diagonal(Words& w, int, int j, int) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = k[j][i];
  }
};
constexpr int MAKER_BARRIER = 2, TEAM_BARRIER = 3;  // named barriers; 1: of the consumers
struct NoNorms {
  float key[1], query[1];
};

// Steps 3, 4 and 5 for every TEAMS-th chunk, by a team: a warp has a row of 16 x 16 blocks of T.
template <typename Shared>
__device__ __forceinline__ void make_t(const Prefill& p, Shared& s, int done, const Segment& at, int team) {
  constexpr int CTAS = Shared::CTAS, TEAMS = Shared::TEAMS * CTAS;  // in the cluster
  const int turn = CTAS > 1 ? cluster_rank() + team * CTAS : team;
  const Ring<Shared::KEYS> ring{done};
  const int row = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0), barrier = TEAM_BARRIER + team;
  const int count = __shfl_sync(0xffffffffu, at.count, 0);
#pragma unroll 1
  for (int chunk = (turn + TEAMS - done % TEAMS) % TEAMS; chunk < count; chunk += TEAMS) {
    const int thread = thread_again() % 128, lane = thread % 32;
    const int stage = ring.stage(chunk), left = at.tokens - chunk * CHUNK;
    KeyStage& here = s.keys[stage];
    wait_for(s.keys_full[stage], ring.parity(chunk));
    if (left < CHUNK) {  // rows past the sequence's end: zeros, because 0 x NaN is not 0
      clear_rows(here.k, left, thread), clear_rows(here.k + QK_TILE / 2, left, thread);
      fence_proxy_async();
      named_barrier_sync<128>(barrier);
    }
    // 3. K K^T
    float d[8][4];
    const KMajor k(shared_address(here.k));
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint64_t columns = advance(k, step / 4 * (QK_TILE / 2) + step % 4 * 32);
      product(d, columns, columns, step > 0);
    }
    warpgroup_commit();
    wait_for(s.gates_ready[stage], ring.parity(chunk));
    warpgroup_wait<0>();
    warpgroup_fence_operand(d);
    // 4. Inverse, 5. T - I and the gates
    char* const operands = s.operands[team][(done + chunk) / TEAMS % 2];
    invert_row<StoreMatrix>(here.T, operands, OwnRow(d, row), s.gates[stage], row, barrier, lane);
    if (row == 0) store_gates(here.T, s.gates[stage], NoNorms{}, thread_again() % 32, false);
    share<CTAS>(here.T, s.t_ready[stage], barrier);
  }
}

// Step 7, by the maker: see make_m in inter_chunk_sm90.cuh.
template <typename Shared>
__device__ __forceinline__ void make_m_fused(const Prefill& p, Shared& s, int done, int states, const Segment& at) {
  const Ring<Shared::KEYS> keys_ring{done};
  const Ring<Shared::STAGES> ring{done + states};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int count = __shfl_sync(0xffffffffu, at.count, 0);
  constexpr int CTAS = Shared::CTAS;
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    const int key_stage = keys_ring.stage(chunk);
    if (!makes<CTAS>(done + chunk)) {
      wait_for(s.full[ring.stage(chunk)], ring.parity(chunk));  // else the parity of the next wait means another phase
      continue;
    }
    ValueStage& stage = s.stages[ring.stage(chunk)];
    const KMajor queries(shared_address(stage.q)), keys(shared_address(s.keys[key_stage].k));
    wait_for(s.keys_full[key_stage], keys_ring.parity(chunk));
    wait_for(s.full[ring.stage(chunk)], ring.parity(chunk));
    float d[8][4];
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint32_t bytes = step / 4 * (QK_TILE / 2) + step % 4 * 32;
      product(d, advance(queries, bytes), advance(keys, bytes), step > 0);
    }
    warpgroup_commit();
    wait_for(s.gates_ready[key_stage], keys_ring.parity(chunk));
    const float* const sums = s.gates[key_stage].G;
    const float G[2] = {sums[warp * 16 + g], sums[warp * 16 + g + 8]};
    const uint32_t to = shared_address(stage.M) + in_matrix(warp * 16 + lane % 16, 0);
    warpgroup_wait<0>();
    warpgroup_fence_operand(d);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t words[4] = {};
      if (j <= warp) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float2 before = *reinterpret_cast<const float2*>(sums + 16 * j + 8 * e + 2 * t);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int row = warp * 16 + g + c / 2 * 8, column = j * 16 + e * 8 + 2 * t + c % 2;
            const float value = p.scale * exp2_approx(G[c / 2] - (c % 2 ? before.y : before.x)) * d[2 * j + e][c];
            d[2 * j + e][c] = column <= row ? value : 0.f;
          }
        }
        as_left(words, d[2 * j], d[2 * j + 1]);
      }
      store_matrices(to ^ (2 * j + lane / 16) << 4, words);
    }
    share<CTAS>(stage.M, s.m_ready[ring.stage(chunk)], MAKER_BARRIER);
  }
}

// Step 6 for Q and V, by one thread.
template <typename Shared>
__device__ __forceinline__ void load_values(const Maps& maps, Shared& s, int done, int states, const Segment& at, int half) {
  const Ring<Shared::STAGES> ring{done + states};
  int token = at.first;
#pragma unroll 1
  for (int chunk = 0; chunk < at.count; ++chunk, token += CHUNK) {
    const int stage = ring.stage(chunk);
    const uint32_t full = shared_address(&s.full[stage]);
    wait_for(s.empty[stage], ring.parity(chunk) ^ 1);
    if (!makes<Shared::CTAS>(done + chunk)) expect_matrix(s.m_ready[stage]);
    mbarrier_arrive_expect_tx(full, QK_TILE + V_TILE);
    tma_load_box(shared_address(s.stages[stage].v), maps.v, token, half, at.hv, full);
    tma_load_box(shared_address(s.stages[stage].q), maps.q, token, 0, at.h, full);
  }
}

// The state before a tile comes through the ring of values, in a stage of its own, but for a CTA's first tile: the producer loads
// it, the consumers read it and the epilogue frees the stage; the maker, or in a cluster the producer, completes m_ready's phase.
template <typename Shared>
__device__ __forceinline__ void load_state_stage(const Maps& maps, Shared& s, int index, int row) {
  const Ring<Shared::STAGES> ring{index};
  const int stage = ring.stage(0);
  wait_for(s.empty[stage], ring.parity(0) ^ 1);
  if constexpr (Shared::CTAS > 1) mbarrier_arrive(shared_address(&s.m_ready[stage]));
  const uint32_t full = shared_address(&s.full[stage]);
  mbarrier_arrive_expect_tx(full, 4 * STATE_BLOCK<1>);
  tma_load_state(shared_address(&s.stages[stage]), maps.state, row, full);
}
template <typename Shared>
__device__ __forceinline__ void pass_state_stage(Shared& s, int index) {
  const Ring<Shared::STAGES> ring{index};
  wait_for(s.full[ring.stage(0)], ring.parity(0));
  if constexpr (Shared::CTAS == 1) warp_arrives(s.m_ready[ring.stage(0)]);
}
template <typename Shared>
__device__ __forceinline__ void free_state_stage(Shared& s, int index) {
  const Ring<Shared::STAGES> ring{index};
  wait_for(s.outputs_ready[ring.stage(0)], ring.parity(0));
  wait_for(s.m_ready[ring.stage(0)], ring.parity(0));
  fence_proxy_async();
  warp_arrives_at_all<Shared::CTAS>(s.empty[ring.stage(0)]);
}
template <typename Shared>
__device__ __forceinline__ void read_state_stage(float (&S)[16][4], Shared& s, int index, int row, int lane) {
  const Ring<Shared::STAGES> ring{index};
  const int stage = ring.stage(0);
  wait_for(s.full[stage], ring.parity(0));
  const char* const tile = reinterpret_cast<const char*>(&s.stages[stage]);
  row += lane / 4;
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = j / 4 * STATE_BLOCK<1> + in_matrix(row + half * 8, j % 4 * 2 + lane % 4 / 2) + lane % 2 * 8;
      const float2 pair = *reinterpret_cast<const float2*>(tile + at);
      S[j][2 * half] = pair.x, S[j][2 * half + 1] = pair.y;
    }
  warp_arrives(s.outputs_ready[stage]);
}

// Step 13: see store_outputs in inter_chunk_sm90.cuh.
template <typename Shared>
__device__ __forceinline__ void store_outputs_fused(const Prefill& p, Shared& s, int done, int states, const Segment& at, int half,
                                                    int thread) {
  const Ring<Shared::STAGES> ring{done + states};
  const int first = thread / 8, piece = thread % 8;
  const uint32_t own = in_matrix(first, piece);
  const int64_t row = static_cast<int64_t>(p.HV) * HEAD_DIM;
  __nv_bfloat16* to = p.output + (at.first + first) * row + at.hv * HEAD_DIM + half * GROUP_ROWS + piece * 8;
  int left = at.tokens - first;
#pragma unroll 1
  for (int chunk = 0; chunk < at.count; ++chunk, left -= CHUNK) {
    const int stage = ring.stage(chunk);
    wait_for(s.outputs_ready[stage], ring.parity(chunk));
#pragma unroll 1
    for (int i = 0; i < CHUNK; i += STORE_WARPS * 4) {
      if (i < left) store16(to, *reinterpret_cast<const uint4*>(s.stages[stage].v[0] + own + i * 128));
      to += STORE_WARPS * 4 * row;
    }
    fence_proxy_async();  // TMA will overwrite it
    warp_arrives_at_all<Shared::CTAS>(s.empty[stage]);
  }
}

// Steps 8 to 12: see consume in inter_chunk_sm90.cuh, whose order of products this has.
template <typename Shared>
__device__ __forceinline__ void consume_fused(float (&S)[16][4], const Prefill& p, Shared& s, int done, int states,
                                              const Segment& at) {
  const Ring<Shared::KEYS> keys_ring{done};
  const Ring<Shared::STAGES> ring{done + states};
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
  const uint32_t v_at = in_matrix(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
  const int count = __shfl_sync(0xffffffffu, at.count, 0);
  uint32_t outputs[4][4] = {};
  const auto stage_outputs = [&](int chunk) {
    const int stage = ring.stage(chunk);
#pragma unroll
    for (int j = 0; j < 4; ++j) store_transposed(shared_address(s.stages[stage].v) + v_at + j * 2048, outputs[j]);
    warp_arrives(s.outputs_ready[stage]);
  };

  uint32_t before[8][4];
#pragma unroll
  for (int step = 0; step < 8; ++step) as_left(before[step], S[2 * step], S[2 * step + 1]);

#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    const int key_stage = keys_ring.stage(chunk), value_stage = ring.stage(chunk);
    KeyStage& here = s.keys[key_stage];
    ValueStage& stage = s.stages[value_stage];
    const char* const prepared = here.T;
    const uint32_t k_tile = shared_address(here.k), v_tile = shared_address(stage.v);
    const KMajor keys(k_tile), queries(shared_address(stage.q));
    const MNMajor<QK_TILE / 2> keys_mn(k_tile);
    wait_for(s.keys_full[key_stage], keys_ring.parity(chunk));
    const int left = at.tokens - chunk * CHUNK;
    if (left < CHUNK) {  // here a team has cleared K, if it is not the peer's
      wait_for(s.t_ready[key_stage], keys_ring.parity(chunk));
      wait_for(s.full[value_stage], ring.parity(chunk));
      if constexpr (Shared::CTAS > 1) clear_rows(here.k, left, thread), clear_rows(here.k + QK_TILE / 2, left, thread);
      clear_rows(stage.v[0], left, thread);
      fence_proxy_async();
      warpgroup_sync(1);
    }

    // 8. S K^T, S Q^T
    float x[8][4], o[8][4], d[2][4][4];
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      product(x, before[step], advance(keys, step / 4 * (QK_TILE / 2) + step % 4 * 32), step > 0);
    warpgroup_commit();
    // 12 of the previous chunk: O to its stage
    if (chunk > 0) stage_outputs(chunk - 1);
    wait_for(s.full[value_stage], ring.parity(chunk));
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step) product(o, before[step], advance(queries, step * 32), step > 0);
    warpgroup_commit();
    wait_for(s.t_ready[key_stage], keys_ring.parity(chunk));
    uint32_t v[4][4];
    float2 in[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_transposed(v[j], v_tile + v_at + j * 2048);
      in[2 * j] = gates_of(prepared, IN, 2 * j, t), in[2 * j + 1] = gates_of(prepared, IN, 2 * j + 1, t);
    }
    const auto value = [&](int i, int c) {
      const uint32_t word = v[i / 2][i % 2 * 2 + c / 2];
      return __uint_as_float(c % 2 ? word & 0xffff0000u : word << 16);
    };

    // 9. R
    warpgroup_wait<1>();
    warpgroup_fence_operand(x);
    const float kept = gates_of(prepared, IN, 7, 3).y;
    uint32_t R[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 2 * j; i < 2 * j + 2; ++i) {
        const float2 beta = gates_of(prepared, BETA, i, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float by = -(c % 2 ? in[i].y : in[i].x);
          d[j / 2][i % 4][c] = (c % 2 ? beta.y : beta.x) * fmaf(by, x[i][c], value(i, c));
        }
      }
      as_left(R[j], d[j / 2][2 * (j % 2)], d[j / 2][2 * (j % 2) + 1]);
    }

    // 10. D = R + (T - I) R
    warpgroup_arrive();
    triangle_times(d, R, shared_address(prepared));
    warpgroup_commit();
#pragma unroll
    for (int step = 4; step < 8; ++step) product(o, before[step], advance(queries, QK_TILE / 2 + (step - 4) * 32), 1);
    warpgroup_commit();
    // 11. S' = e^(G_C) S + D^T K: the decay, under 10
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] *= kept;
    warpgroup_wait<1>();
    warpgroup_fence_operand(d[0]), warpgroup_fence_operand(d[1]);
    uint32_t plain[4][4], decayed[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float later[2][4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 out = gates_of(prepared, OUT, 2 * j + e, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) later[e][c] = d[j / 2][2 * (j % 2) + e][c] * (c % 2 ? out.y : out.x);
      }
      as_left(decayed[j], later[0], later[1]);
    }
    // 11. The product
    warpgroup_arrive();
#pragma unroll
    for (int u = 0; u < 4; ++u) product_mn(S, decayed[u], advance(keys_mn, u * 2048), 1);
    warpgroup_commit();
    // 12. O = scale e^G Q S^T + M D
#pragma unroll
    for (int j = 0; j < 4; ++j) as_left(plain[j], d[j / 2][2 * (j % 2)], d[j / 2][2 * (j % 2) + 1]);
    warpgroup_wait<1>();
    warpgroup_fence_operand(o);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 gate = gates_of(prepared, IN, i, t);
#pragma unroll
      for (int c = 0; c < 4; ++c) o[i][c] *= p.scale * (c % 2 ? gate.y : gate.x);
    }
    wait_for(s.m_ready[value_stage], ring.parity(chunk));
    warpgroup_arrive();
    square_times(o, plain, shared_address(stage.M));
    warpgroup_commit();
    // 11. S packed for the next chunk, under 12's product
    warpgroup_wait<1>();
    warpgroup_fence_operand(S);
    warp_arrives_at_all<Shared::CTAS>(s.keys_empty[key_stage]);
#pragma unroll
    for (int step = 0; step < 8; ++step) as_left(before[step], S[2 * step], S[2 * step + 1]);
    warpgroup_wait<0>();
    warpgroup_fence_operand(o);
#pragma unroll
    for (int j = 0; j < 4; ++j) as_left(outputs[j], o[2 * j], o[2 * j + 1]);
  }
  if (count > 0) stage_outputs(count - 1);
}

#endif  // FLASHCORE_WGMMA

// Registers by warpgroup: consumers, maker, each team, producer; in all what the launch has.
template <int TEAMS>
struct FusedRegisters {
  static constexpr int CONSUMER = TEAMS > 1 ? 232 : 248, MAKER = TEAMS > 1 ? 80 : 96, TEAM = TEAMS > 1 ? 64 : 128, PRODUCER = 40;
  static_assert(CONSUMER + MAKER + TEAMS * TEAM + PRODUCER <= 65536 / fused_threads<TEAMS>() / 8 * 8 * (TEAMS + 3));
};

#if FLASHCORE_WGMMA
// Work tile `number` is a half of V of a sequence and value head; a CTA has those from its own number on in steps of the grid. The
// two halves belong to a cluster's two CTAs.
template <int TEAMS, int CTAS>
__device__ __forceinline__ void run_fused(const Prefill& p, const Maps& maps) {
  using Shared = FusedShared<TEAMS, CTAS>;
  using Registers = FusedRegisters<TEAMS>;
  constexpr int MAKER = 4, TEAM = 8, PRODUCER = TEAM + 4 * TEAMS;  // their first warps
  auto& s = *reinterpret_cast<Shared*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int tiles = 2 * p.HV * p.N;
  float S[16][4];
  if (warp < MAKER) load_state(S, p.rows(static_cast<int64_t>(blockIdx.x) * GROUP_ROWS), warp * 16, 0, lane);
  if (warp == PRODUCER && elect_one()) prefetch_tensor_map(maps.k), prefetch_tensor_map(maps.v), prefetch_tensor_map(maps.q);
  if (threadIdx.x == 0) {
    constexpr int MADE = CTAS > 1 ? 1 : 4 * ARRIVALS;
#pragma unroll
    for (int i = 0; i < Shared::KEYS; ++i) {
      mbarrier_init(shared_address(&s.keys_full[i]), 1), mbarrier_init(shared_address(&s.gates_ready[i]), ARRIVALS);
      mbarrier_init(shared_address(&s.t_ready[i]), MADE), mbarrier_init(shared_address(&s.keys_empty[i]), CTAS * 4 * ARRIVALS);
    }
#pragma unroll
    for (int i = 0; i < Shared::STAGES; ++i) {
      mbarrier_init(shared_address(&s.full[i]), 1), mbarrier_init(shared_address(&s.m_ready[i]), MADE);
      mbarrier_init(shared_address(&s.outputs_ready[i]), 4 * ARRIVALS);
      mbarrier_init(shared_address(&s.empty[i]), CTAS * STORE_WARPS * ARRIVALS);
    }
    mbarrier_init_fence();
  }
  if constexpr (CTAS > 1) {
    __syncwarp();
    cluster_sync();
  } else {
    __syncthreads();
  }
  int done = 0, states = 0;  // chunks, and tiles before this one: as many states have come through the ring, with this one's
  const auto for_each_tile = [&](const auto& code) {
#pragma unroll 1
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
      const int of = number / 2, n = of / p.HV;
      const Segment at(p, of - n * p.HV, n);
      code(at, number);
      done += at.count, ++states;
    }
  };
  if (warp >= PRODUCER) {
    warpgroup_reg_dealloc<Registers::PRODUCER>();
    const int other = warp - PRODUCER;
    if (other == 0) {
      if (elect_one()) {
        for_each_tile([&](const Segment& at, int number) {
          const int64_t next = number + gridDim.x;
          if (next < tiles) prefetch_l2(p.rows(next * GROUP_ROWS), GROUP_ROWS * HEAD_DIM * sizeof(float));
          if (states > 0) load_state_stage(maps, s, done + states - 1, number * GROUP_ROWS);
          load_values(maps, s, done, states, at, number % 2);
        });
      }
    } else if (other == STORE_WARPS + 1) {
      for_each_tile([&](const Segment& at, int) { make_gates(p, maps, s, done, at); });
    } else {
      for_each_tile([&](const Segment& at, int number) {
        if (states > 0) free_state_stage(s, done + states - 1);
        store_outputs_fused(p, s, done, states, at, number % 2, threadIdx.x - (PRODUCER + 1) * 32);
      });
    }
  } else if (warp >= TEAM) {
    if constexpr (TEAMS > 1) warpgroup_reg_dealloc<Registers::TEAM>();
    for_each_tile([&](const Segment& at, int) { make_t(p, s, done, at, (warp - TEAM) / 4); });
  } else if (warp >= MAKER) {
    warpgroup_reg_dealloc<Registers::MAKER>();
    for_each_tile([&](const Segment& at, int) {
      if (states > 0) pass_state_stage(s, done + states - 1);
      make_m_fused(p, s, done, states, at);
    });
  } else {
    warpgroup_reg_alloc<Registers::CONSUMER>();
    for_each_tile([&](const Segment& at, int number) {
      const int64_t row = static_cast<int64_t>(number) * GROUP_ROWS;
      const int thread = thread_again();
      if (states > 0) read_state_stage(S, s, done + states - 1, thread / 32 * 16, thread % 32);
      consume_fused(S, p, s, done, states, at);
      store_state(p.new_rows(row), S, thread_again() / 32 * 16, 0, thread_again() % 32);
    });
  }
  if constexpr (CTAS > 1) {  // the peer still arrives at this CTA's barriers
    __syncwarp();
    cluster_sync();
  }
}
#endif  // FLASHCORE_WGMMA

template <int TEAMS>
__global__ void __launch_bounds__(fused_threads<TEAMS>(), 1)
gdn_prefill_fused_sm90(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if FLASHCORE_WGMMA
  run_fused<TEAMS, 1>(p, maps);
#endif
}
// With clusters of two CTAs.
template <int TEAMS>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(fused_threads<TEAMS>(), 1)
gdn_prefill_fused_pair_sm90(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if FLASHCORE_WGMMA
  run_fused<TEAMS, 2>(p, maps);
#endif
}

}  // namespace gdn
