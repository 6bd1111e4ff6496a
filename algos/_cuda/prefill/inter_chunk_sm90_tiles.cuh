// The recurrence of inter_chunk_sm90.cuh for sequences of different lengths: a persistent kernel. Work tiles come longest first
// (tile_scheduler.cuh); a CTA takes its next one when it has loaded nearly all chunks of the current one. A tile is all of V, for
// two consumer warpgroups, or half of it, for one that has the SM to itself. Which of the two, and whether the schedule is static,
// depends on the lengths, which only the device knows; so each CTA has the code of both, and runs one.
//
// A CTA begins as in inter_chunk_sm90.cuh, each warp by itself: the plan and the CTA's first tile are read together, in one
// access instead of that to cu_seqlens, and then the first state goes straight to registers. The producer takes the later tiles.
// Their states come through the stages of the pipeline, each with its tile; after the last one comes a stage with NO_TILE.
#pragma once

#include "inter_chunk_sm90.cuh"
#include "tile_scheduler.cuh"

namespace gdn {

template <int GROUPS, int STAGES>
struct TilesShared : GroupShared<GROUPS, STAGES> {
  static constexpr bool LOOPS = true, PLANNED = true, PACED = false;  // PACED is not timed here with one group
  ScheduledTile announced[STAGES];  // of a stage with a state: the state's tile
  ScheduledTile first;              // the CTA's first tile, whose state takes no stage
  uint32_t current[POOL ? 2 : 1][GROUPS * 4];  // `what` of each consumer warp's tile, kept here to save a register; its state
};
constexpr uint32_t NO_TILE = 0xffffffffu;
// A CTA has memory and threads for both kinds of tile.
constexpr int FULL_STAGES = 3, HALF_STAGES = 4;
constexpr int TILES_THREADS = group_threads(2, true);
constexpr int TILES_MAKER = 8, TILES_PRODUCER = 12;  // the roles' first warps; with one consumer, the second warpgroup is idle
constexpr int tiles_shared() {
  constexpr int full = sizeof(TilesShared<2, FULL_STAGES>), half = sizeof(TilesShared<1, HALF_STAGES>);
  return full > half ? full : half;
}

#if FLASHCORE_COPY_ENGINE

// Work tile `index` in the plan's order, where each sequence has TILES tiles for each value head. `what` encodes the sequence,
// value head and unit (half or quarter) of V: its rows of all states begin at UNIT_ROWS * what. It is less than NO_TILE: there
// are at most 32767 sequences and 65535 value heads, and quarters of so many states would be 128 TiB.
template <uint32_t TILES, int UNIT_ROWS = GROUP_ROWS>
__device__ __forceinline__ ScheduledTile tile_of(const Prefill& p, uint32_t index) {
  const uint32_t number = index / TILES, place = number / p.HV;
  const uint4 x = *reinterpret_cast<const uint4*>(p.plan->tiles() + place);
  return {(x.x * p.HV + number - place * p.HV) * (HEAD_DIM / UNIT_ROWS) + index % TILES, static_cast<int>(x.y),
          static_cast<int>(x.z), POOL ? static_cast<int>(x.w) : 0};
}
template <int UNIT_ROWS>
struct UnitSegment : Segment {
  static constexpr int UNITS = HEAD_DIM / UNIT_ROWS;
  int unit, half;  // of V
  __device__ __forceinline__ UnitSegment(const Prefill& p, const ScheduledTile& tile)
      : UnitSegment(p, tile, tile.what / UNITS / p.HV) {}
  __device__ __forceinline__ UnitSegment(const Prefill& p, const ScheduledTile& tile, int n)
      : Segment(p, tile.what / UNITS - n * p.HV, n, tile.first, tile.tokens, POOL ? tile.state : n),
        unit(tile.what % UNITS), half(unit * UNIT_ROWS / GROUP_ROWS) {}
};
using TileSegment = UnitSegment<GROUP_ROWS>;

// A state passes through the pipeline: the producer loads it,
template <bool K_FIRST, typename Shared>
__device__ __forceinline__ void produce_state(const Prefill& p, const Maps& maps, Shared& s, PipelineState<Shared::STAGES>& pipe,
                                              const ScheduledTile& tile) {
  const int stage = pipe.stage();
  const uint32_t full = shared_address(&s.full[stage]);
  mbarrier_wait(shared_address(&s.empty[stage]), pipe.parity() ^ 1);
  if constexpr (POOL) {
    if (tile.state < 0) {  // zeros
      mbarrier_arrive(full);
    } else {
      constexpr int ROWS = Shared::UNIT_ROWS, UNITS = HEAD_DIM / ROWS;
      if constexpr (K_FIRST) {
        const bool half = p.state_blocks() == 2;
        const int block = tile.what % UNITS * ROWS / (half ? 64 : 32);
        mbarrier_arrive_expect_tx(full, k_first_box(HEAD_DIM / Shared::TILES, half));
        tma_load_box(shared_address(&s.stages[stage]), maps.state, p.state_row(tile.what / UNITS % p.HV), block, tile.state, full);
      } else {
        mbarrier_arrive_expect_tx(full, p.state_blocks() * STATE_BLOCK<Shared>);
        const int row = p.state_row(tile.what / UNITS % p.HV) + tile.what % UNITS * ROWS;
        tma_load_box(shared_address(&s.stages[stage]), maps.state, row, 0, tile.state, full);
      }
    }
  } else {
    mbarrier_arrive_expect_tx(full, 4 * STATE_BLOCK<Shared>);
    tma_load_state(shared_address(&s.stages[stage]), maps.state, static_cast<int>(tile.what * Shared::UNIT_ROWS), full);
  }
  ++pipe.begun;
}
// the consumers read it from there, each from `row` on,
template <bool K_FIRST, typename Shared>
__device__ __forceinline__ void consume_state(float (&S)[16][4], const Prefill& p, Shared& s, PipelineState<Shared::STAGES>& pipe,
                                              int row, int lane) {
  const int stage = pipe.stage();
  mbarrier_wait(shared_address(&s.full[stage]), pipe.parity());
  const char* const tile = reinterpret_cast<const char*>(&s.stages[stage]);
  if constexpr (K_FIRST) {  // a box of bf16 has 64 columns of V
    if (p.state_blocks() == 2) row += s.announced[stage].what * Shared::UNIT_ROWS % 64;
  }
  read_state<STATE_BLOCK<Shared>, K_FIRST>(S, p, tile, POOL ? s.announced[stage].state : 0, row + lane / 4, lane);
  warp_arrives(s.outputs_ready[stage]);
  ++pipe.begun, ++pipe.made;
}
// the maker signals its barrier, and the epilogue frees its stage after all have read it.
template <typename Shared>
__device__ __forceinline__ void pass_state(Shared& s, PipelineState<Shared::STAGES>& pipe) {
  mbarrier_wait(shared_address(&s.full[pipe.stage()]), pipe.parity());
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVALS) mbarrier_arrive(pipe.m_ready_at(s.m_ready, 0));
  ++pipe.begun, ++pipe.made;
}
template <typename Shared>
__device__ __forceinline__ void free_state(Shared& s, PipelineState<Shared::STAGES>& pipe) {
  mbarrier_wait(shared_address(&s.outputs_ready[pipe.stage()]), pipe.parity());
  if constexpr (Shared::MAKES_M) mbarrier_wait(shared_address(&s.m_ready[pipe.stage()]), pipe.parity());
  fence_proxy_async();  // TMA will overwrite it
  warp_arrives(s.empty[pipe.stage()]);
  ++pipe.begun;
}

// Writes the tile whose state comes next, when its stage is free; the other roles read it when they have waited for the stage.
template <typename Shared>
__device__ __forceinline__ void announce(Shared& s, const PipelineState<Shared::STAGES>& pipe, const ScheduledTile& tile) {
  mbarrier_wait(shared_address(&s.empty[pipe.stage()]), pipe.parity() ^ 1);
  s.announced[pipe.stage()] = tile;
}
// The next tile, for all lanes of a warp.
template <typename Shared>
__device__ __forceinline__ ScheduledTile next_announced(Shared& s, PipelineState<Shared::STAGES>& pipe) {
  pipe.made = pipe.begun;  // they are equal here; the assignment lets the compiler keep only one register
  const PipelineState<Shared::STAGES> now{__shfl_sync(0xffffffffu, pipe.begun, 0)};
  mbarrier_wait(shared_address(&s.full[now.stage()]), now.parity());
  ScheduledTile tile = s.announced[now.stage()];
  tile.what = __shfl_sync(0xffffffffu, tile.what, 0);
  return tile;
}
// Runs `code` for each tile of this CTA, and `pass` before those whose states come through the pipeline (all but the first).
template <typename Shared, typename Pass, typename Code>
__device__ __forceinline__ void for_each_scheduled_tile(Shared& s, PipelineState<Shared::STAGES>& pipe, const Pass& pass,
                                                        const Code& code) {
  ScheduledTile tile = s.first;
#pragma unroll 1
  for (;;) {
    code(tile);
    tile = next_announced(s, pipe);
    if (tile.what == NO_TILE) return;
    pass();
  }
}

// The producer. It takes the next work tile before its last chunk: then the pipeline is full, and the consumers have work
// while the counter answers. Any earlier, a CTA with many chunks left would hold a tile that an idle CTA could take.
template <bool K_FIRST, typename Shared>
__device__ __forceinline__ void produce_tiles(const Prefill& p, const Maps& maps, Shared& s, PipelineState<Shared::STAGES>& pipe,
                                              Schedule schedule) {
  const uint32_t tiles = static_cast<uint32_t>(p.N) * p.HV * Shared::TILES;
  uint32_t index = blockIdx.x;
  ScheduledTile tile = s.first;
#pragma unroll 1
  for (;;) {
    const UnitSegment<Shared::UNIT_ROWS> at(p, tile);
    const auto take = [&] { index = schedule == STATIC ? index + gridDim.x : gridDim.x + atomicAdd(&p.plan->taken, 1u); };
    if (at.count == 0) take();
    produce<true>(p, maps, s, pipe, at, at.half, true, take);
    if (index >= tiles) break;
    tile = tile_of<Shared::TILES, Shared::UNIT_ROWS>(p, index);
    announce(s, pipe, tile);
    produce_state<K_FIRST>(p, maps, s, pipe, tile);
  }
  announce(s, pipe, {NO_TILE, 0, 0, 0});
  mbarrier_arrive(shared_address(&s.full[pipe.stage()]));
}

#if FLASHCORE_WGMMA

// Each role does its first tile's chunks, then reads which tile is next, handles its state's stage, and so on.
template <int GROUPS, int STAGES, bool K_FIRST>
__device__ __forceinline__ void run_tiles(const Prefill& p, const Maps& maps, const ScheduledTile& first, Schedule schedule) {
  constexpr int MAKER = TILES_MAKER, PRODUCER = TILES_PRODUCER;
  auto& s = *reinterpret_cast<TilesShared<GROUPS, STAGES>*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) s.first = first;
  group_begin<true>(s);
  PipelineState<STAGES> pipe;
  if (warp >= PRODUCER) {
    warpgroup_reg_dealloc<producer_registers(true)>();
    const int other = warp - PRODUCER;
    if (other == 0 && elect_one()) produce_tiles<K_FIRST>(p, maps, s, pipe, schedule);
    if (other == 0 || other > STORE_WARPS) return;
    for_each_scheduled_tile(s, pipe, [&] { free_state(s, pipe); }, [&](const ScheduledTile& tile) {
      const TileSegment at(p, tile);
      store_staged_outputs(p, s, pipe, at, at.half, threadIdx.x - (PRODUCER + 1) * 32);
    });
    return;
  }
  if (warp >= MAKER) {
    warpgroup_reg_dealloc<maker_registers(GROUPS)>();
    for_each_scheduled_tile(s, pipe, [&] { pass_state(s, pipe); },
                            [&](const ScheduledTile& tile) { make_m(p, s, pipe, TileSegment(p, tile)); });
    return;
  }
  if (warp >= GROUPS * 4) return;
  warpgroup_reg_alloc<consumer_registers(GROUPS, true)>();
  float S[16][4];
  const auto take = [&] {
    const int thread = thread_again();  // keeps addresses out of registers while chunks are consumed
    consume_state<K_FIRST>(S, p, s, pipe, thread / 32 * 16, thread % 32);
    if constexpr (POOL) warpgroup_fence_operand(S);
  };
  {
    const int thread = thread_again();
    if constexpr (POOL) {
      const TileSegment at(p, s.first);
      load_state<K_FIRST>(S, at.original(), at.half * GROUP_ROWS + thread / 32 * 16, 0, thread % 32);
      warpgroup_fence_operand(S);
    } else {
      load_state(S, p.rows(static_cast<int64_t>(s.first.what) * GROUP_ROWS), thread / 32 * 16, 0, thread % 32);
    }
  }
  for_each_scheduled_tile(s, pipe, take, [&](const ScheduledTile& tile) {
    s.current[0][thread_again() / 32] = tile.what;
    if constexpr (POOL) s.current[1][thread_again() / 32] = tile.state;
    const TileSegment at(p, tile);
    consume<true, (GROUPS > 1)>(S, p, staged_chunks<true>(s, pipe, at), at, true);
    const int thread = thread_again();
    const uint32_t what = s.current[0][thread / 32];
    if constexpr (POOL) {
      const NewStateRows end = p.final(static_cast<StateOf>(s.current[1][thread / 32]), what / 2 % p.HV);
      store_state<K_FIRST>(end, S, (what & 1) * GROUP_ROWS + thread / 32 * 16, 0, thread % 32);
    } else {
      store_state(p.new_rows(static_cast<int64_t>(what) * GROUP_ROWS), S, thread / 32 * 16, 0, thread % 32);
    }
  });
}

#endif  // FLASHCORE_WGMMA
#endif  // FLASHCORE_COPY_ENGINE

// p.ctas CTAs, as many as can be resident; `one` and `two` have the boxes for one consumer warpgroup and for two. p.segment is 0.
// A template, so that it is not compiled again for inter_chunk_tma.cuh, which uses the steps above.
template <bool K_FIRST = false>
__global__ void __launch_bounds__(TILES_THREADS, 1)
gdn_prefill_inter_chunk_sm90_tiles(const __grid_constant__ Prefill p, const __grid_constant__ Maps one,
                                   const __grid_constant__ Maps two) {
#if FLASHCORE_WGMMA
  constexpr int STATE = HEAD_DIM * HEAD_DIM;
  // The warp's number is uniform: as in gdn_prefill_transfer_sm90.
  if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == TILES_PRODUCER && elect_one()) {
    prefetch_tensor_map(two.k), prefetch_tensor_map(two.v), prefetch_tensor_map(two.q), prefetch_tensor_map(two.state);
    prefetch_tensor_map(one.k), prefetch_tensor_map(one.v), prefetch_tensor_map(one.q), prefetch_tensor_map(one.state);
    // prefetches the first state of a static schedule before the schedule is there
    if (!POOL && blockIdx.x < static_cast<uint32_t>(p.N) * p.HV)
      prefetch_l2(p.rows(static_cast<int64_t>(blockIdx.x) * HEAD_DIM), STATE * sizeof(float));
  }
  wait_for_kernel_before();
  // Reads the first tile both as a whole and as a half one, together with the schedule that decides: three loads at once.
  const uint32_t tiles = static_cast<uint32_t>(p.N) * p.HV;
  ScheduledTile half, whole;
  if (threadIdx.x == 0) half = tile_of<2>(p, min(blockIdx.x, 2 * tiles - 1)), whole = tile_of<1>(p, min(blockIdx.x, tiles - 1));
  const uint32_t said = p.plan->schedule;
  const Schedule schedule = static_cast<Schedule>(__shfl_sync(0xffffffffu, said, 0));
  if (schedule == HALVES) {
    if (blockIdx.x < 2 * tiles) run_tiles<1, HALF_STAGES, K_FIRST>(p, one, half, schedule);
  } else {
    if (blockIdx.x < tiles) run_tiles<2, FULL_STAGES, K_FIRST>(p, two, whole, schedule);
  }
#endif
}

}  // namespace gdn
