// Prefill in one launch by single CTAs: a CTA has a work tile with all of V. Two consumer warpgroups go from chunk to chunk, and two
// teams make T and then M of every other chunk. Where tiles fill the SMs: there a pair of CTAs (inter_chunk_sm90_fused.cuh) would
// take two rounds, and two launches move T through memory.
//
// A team does all else that its chunks need, in this order, which hides one step's latency behind the next:
//
//   store the outputs of the chunk three before; ask for Q and V in their place
//   T and the gates, from K; then ask for the K of its next chunk
//   M, from K and Q
//
// Who sets which barrier of a stage for whom: `keys_full` TMA -> team, consumers; `t_ready` team -> consumers; `keys_empty`
// consumers -> team, when S' is there; `full` TMA -> team, consumers; `m_ready` team -> consumers; `outputs_ready` consumers ->
// team. Q, V and M have no `empty`: who stores a chunk's outputs loads that stage again.
//
// Steps: as in inter_chunk_sm90.cuh and intra_chunk_steps.cuh.
#pragma once

#include "inter_chunk_sm90_fused.cuh"

namespace gdn {

struct WholeStage {
  char q[QK_TILE];
  char v[2][V_TILE];  // replaced by the outputs after V has been read
  char M[MATRIX];
};
struct WholeShared {
  static constexpr int KEYS = 4, STAGES = 3, TEAMS = 2;
  KeyStage keys[KEYS];
  WholeStage stages[STAGES];
  char operands[TEAMS][6 * OPERAND];
  Gates gates[TEAMS];
  uint64_t keys_full[KEYS], t_ready[KEYS], keys_empty[KEYS];
  uint64_t full[STAGES], m_ready[STAGES], outputs_ready[STAGES];
};
static_assert(sizeof(WholeShared) <= 227 * 1024);
constexpr int WHOLE_THREADS = 512;
// Registers of a consumer and of a team: in all what the launch has.
constexpr int WHOLE_CONSUMER = 192, WHOLE_TEAM = 64;
static_assert(2 * WHOLE_CONSUMER + 2 * WHOLE_TEAM <= 65536 / 128);

#if FLASHCORE_WGMMA

// A tile's chunks, for a consumer warpgroup: see consume.
struct WholeChunks {
  static constexpr bool ALL_AT_ONCE = false;
  WholeShared& s;
  int group;
  Ring<WholeShared::KEYS> keys{};
  Ring<WholeShared::STAGES> ring{};
  __device__ __forceinline__ ChunkTiles tiles(int chunk) const {
    KeyStage& here = s.keys[keys.stage(chunk)];
    WholeStage& stage = s.stages[ring.stage(chunk)];
    return {here.k, stage.q, stage.v[group], here.T, shared_address(stage.M)};
  }
  __device__ __forceinline__ void wait_for_keys(int chunk) const { wait_for(s.keys_full[keys.stage(chunk)], keys.parity(chunk)); }
  __device__ __forceinline__ void wait_for_values(int chunk) const { wait_for(s.full[ring.stage(chunk)], ring.parity(chunk)); }
  __device__ __forceinline__ void wait_for_t(int chunk) const { wait_for(s.t_ready[keys.stage(chunk)], keys.parity(chunk)); }
  __device__ __forceinline__ void wait_for_m(int chunk) const { wait_for(s.m_ready[ring.stage(chunk)], ring.parity(chunk)); }
  __device__ __forceinline__ void state_complete(int chunk) const { warp_arrives(s.keys_empty[keys.stage(chunk)]); }
  __device__ __forceinline__ void outputs_written(int chunk) const { warp_arrives(s.outputs_ready[ring.stage(chunk)]); }
  __device__ __forceinline__ void sync() const { named_barrier_sync<128>(group + 1); }
};

// A team's matrix is there: for the consumers.
__device__ __forceinline__ void team_is_done(const uint64_t& ready, int barrier) {
  fence_proxy_async();
  named_barrier_sync<128>(barrier);
  if (threadIdx.x % 128 < GROUP_ARRIVALS) mbarrier_arrive(shared_address(&ready));
}

// Steps 1 to 7 and 13 of every other chunk, by a team.
__device__ __forceinline__ void run_team(const Prefill& p, const Maps& maps, WholeShared& s, const Segment& at, int team) {
  const Ring<WholeShared::KEYS> keys{};
  const Ring<WholeShared::STAGES> ring{};
  constexpr int TEAMS = WholeShared::TEAMS, STAGES = WholeShared::STAGES;
  const int row = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0), barrier = 3 + team;
  const int count = __shfl_sync(0xffffffffu, at.count, 0);
  const auto load_keys = [&](int chunk) {
    load_k(s.keys[keys.stage(chunk)].k, maps.k, {0, at.h, at.first + chunk * CHUNK, 0, 1}, s.keys_full[keys.stage(chunk)]);
  };
  if (row == 0 && team < count && elect_one()) load_keys(team);
  __syncwarp();
#pragma unroll 1
  for (int chunk = team; chunk < count + STAGES; chunk += TEAMS) {
    const int thread = thread_again() % 128, lane = thread % 32;
    KeyStage& here = s.keys[keys.stage(chunk)];
    WholeStage& stage = s.stages[ring.stage(chunk)];
    const uint64_t& keys_full = s.keys_full[keys.stage(chunk)];
    const int left = at.tokens - chunk * CHUNK;
    RawGates raw;  // of 2: asked for before all that waits
    if (row == 0 && chunk < count) raw.load_tokens(p, {0, at.h, at.first + chunk * CHUNK, left, 1}, at.hv, lane);
    // 13. Store
    if (chunk >= STAGES) {
      const int before = chunk - STAGES;
      wait_for(s.outputs_ready[ring.stage(before)], ring.parity(before));
      __nv_bfloat16* to = output_at(p, at, before * CHUNK + thread / 8, 0, thread % 8);
      store_chunk<2, 128 / 8>(to, int64_t{p.HV} * HEAD_DIM, stage.v[0] + in_matrix(thread / 8, thread % 8),
                              at.tokens - before * CHUNK - thread / 8, at.padding());
      fence_proxy_async();
      named_barrier_sync<128>(barrier);
    }
    if (chunk >= count) continue;
    // 6. Load Q and V, of the first chunks after K
    if (row == 0 && elect_one()) {
      const uint32_t full = shared_address(&s.full[ring.stage(chunk)]);
      const int token = at.first + chunk * CHUNK;
      if (chunk < TEAMS) wait_for(keys_full, 0);
      mbarrier_arrive_expect_tx(full, QK_TILE + 2 * V_TILE);
      tma_load_box(shared_address(stage.v), maps.v, token, 0, at.hv, full);
      tma_load_box(shared_address(stage.q), maps.q, token, 0, at.h, full);
    }
    __syncwarp();
    // 3. K K^T
    wait_for(keys_full, keys.parity(chunk));
    if (left < CHUNK) {  // rows past the sequence's end: zeros, because 0 x NaN is not 0
      clear_rows(here.k, left, thread), clear_rows(here.k + QK_TILE / 2, left, thread);
      fence_proxy_async();
      named_barrier_sync<128>(barrier);
    }
    Gates& gates = s.gates[team];
    {
      float d[8][4];
      const KMajor k(shared_address(here.k));
      begin_row_products(d, k, k);
      // 2. Gates
      if (row == 0) {
        raw.load_head(p, at.hv);
        compute_gates(p, gates, raw, min(left, CHUNK), lane);
      }
      named_barrier_sync<128>(barrier);
      warpgroup_wait<0>();
      warpgroup_fence_operand(d);
      // 4. Inverse, 5. T - I and the gates
      invert_row<StoreMatrix>(here.T, s.operands[team], OwnRow(d, row), gates, row, barrier, lane);
    }
    if (row == 0) store_gates(here.T, gates, FusedNorms{}, thread_again() % 32, false);
    team_is_done(s.t_ready[keys.stage(chunk)], barrier);
    // 1. Load the next chunk's K
    const int next = chunk + TEAMS;
    if (row == 0 && next < count && elect_one()) {
      const int last = next - WholeShared::KEYS;
      if (last >= 0) wait_for(s.keys_empty[keys.stage(last)], keys.parity(last));
      load_keys(next);
    }
    __syncwarp();
    // 7. M
    wait_for(s.full[ring.stage(chunk)], ring.parity(chunk));
    float d[8][4];
    begin_row_products(d, KMajor(shared_address(stage.q)), KMajor(shared_address(here.k)));
    const int own = thread_again() % 32, g = row * 16 + own / 4;
    const float by[2] = {p.scale, p.scale}, G[2] = {gates.G[g], gates.G[g + 8]};
    warpgroup_wait<0>();
    warpgroup_fence_operand(d);
    store_m(d, by, G, row, own, shared_address(stage.M) + in_matrix(row * 16 + own % 16, 0),
            [&](int j, int t) { return *reinterpret_cast<const float2*>(gates.G + 8 * j + 2 * t); });
    team_is_done(s.m_ready[ring.stage(chunk)], barrier);
  }
}

#endif  // FLASHCORE_WGMMA

// grid: a CTA for each tile. Dense tensors alone: q and k are not normalised here.
template <typename = void>
__global__ void __launch_bounds__(WHOLE_THREADS, 1)
gdn_prefill_whole_sm90(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if FLASHCORE_WGMMA
  constexpr int TEAMS_FROM = 8;  // warps
  auto& s = *reinterpret_cast<WholeShared*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int n = blockIdx.x / p.HV, hv = blockIdx.x - n * p.HV;
  float S[16][4];
  if (warp < TEAMS_FROM) load_state(S, p.original(p.state_of(n), hv), warp * 16, 0, lane);  // needs no cu_seqlens
  if (threadIdx.x == TEAMS_FROM * 32) {
    prefetch_tensor_map(maps.k), prefetch_tensor_map(maps.v), prefetch_tensor_map(maps.q);
#pragma unroll
    for (int i = 0; i < WholeShared::KEYS; ++i) {
      mbarrier_init(shared_address(&s.keys_full[i]), 1), mbarrier_init(shared_address(&s.t_ready[i]), GROUP_ARRIVALS);
      mbarrier_init(shared_address(&s.keys_empty[i]), 8 * ARRIVALS);
    }
#pragma unroll
    for (int i = 0; i < WholeShared::STAGES; ++i) {
      mbarrier_init(shared_address(&s.full[i]), 1), mbarrier_init(shared_address(&s.m_ready[i]), GROUP_ARRIVALS);
      mbarrier_init(shared_address(&s.outputs_ready[i]), 8 * ARRIVALS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int first = p.border(n);
  const Segment at(p, hv, n, first, max(p.border(n + 1) - first, 0), p.state_of(n));
  if (warp >= TEAMS_FROM) {
    warpgroup_reg_dealloc<WHOLE_TEAM>();
    return run_team(p, maps, s, at, warp / 4 - 2);
  }
  warpgroup_reg_alloc<WHOLE_CONSUMER>();
  consume<true, true>(S, p, WholeChunks{s, warp / 4}, at, true);
  store_state(at.end(), S, warp * 16, 0, lane);
#endif
}

}  // namespace gdn
