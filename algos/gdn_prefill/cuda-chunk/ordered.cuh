// hopper.cuh's walk where sequences differ in length: items longest first (order.cuh), each CTA taking the next one when it
// has asked for nearly all of those before, and an item being all of V, for two warpgroups, or half of it, for one that has
// the SM to itself. Which of both, lengths say; so each CTA has the code of both, and runs one.
//
// The thread that asks takes items. Each one's state comes through the ring of stages, the first one's, too; with it goes
// which item it is, and behind the last one a stage that says so.
#pragma once

#include "hopper.cuh"
#include "order.cuh"

namespace gdn {

template <int GROUPS, int STAGES>
struct OrderedShared : GroupShared<GROUPS, STAGES> {
  static constexpr bool LOOPS = true;
  uint32_t told[STAGES];  // of a stage with a state: whose it is
};
constexpr uint32_t NO_ITEM = 0xffffffffu;
// A CTA's memory and threads are for both ways.
constexpr int FULL_STAGES = 3, HALF_STAGES = 4;
constexpr int ORDERED_THREADS = group_threads(2, true);
constexpr int ordered_shared() {
  constexpr int full = sizeof(OrderedShared<2, FULL_STAGES>), half = sizeof(OrderedShared<1, HALF_STAGES>);
  return full > half ? full : half;
}

#if FLASHCORE_WGMMA

// Which half of V of which sequence and value head; its state's rows are those of all states from GROUP_ROWS * word on.
struct Told {
  int half, hv, slot;
  __device__ __forceinline__ Told(const Prefill& p, uint32_t word) {
    half = word & 1, slot = word / 2 / p.HV, hv = word / 2 - slot * p.HV;
  }
};
__device__ __forceinline__ uint32_t word_of(const Prefill& p, int half, int hv, int slot) {
  return (static_cast<uint32_t>(slot) * p.HV + hv) * 2 + half;  // less than NO_ITEM: slot < 32767 and hv < 65536
}

// Puts the word for the next state's stage, which is free then; whoever waits for the stage reads it.
template <typename Shared>
__device__ __forceinline__ void tell(Shared& s, const Turn<Shared::STAGES>& turn, uint32_t word) {
  wait_for(shared_address(&s.empty[turn.stage()]), turn.parity() ^ 1);
  s.told[turn.stage()] = word;
}
// Which item is next, for all lanes of a warp.
template <typename Shared>
__device__ __forceinline__ uint32_t hear(Shared& s, Turn<Shared::STAGES>& turn) {
  turn.made = turn.begun;  // it is; told to the compiler, which has no registers for both here
  const Turn<Shared::STAGES> now{__shfl_sync(0xffffffffu, turn.begun, 0)};
  wait_for(shared_address(&s.full[now.stage()]), now.parity());
  return __shfl_sync(0xffffffffu, s.told[now.stage()], 0);
}

// The one thread that asks. It takes the next item in front of the last chunk: the ring is full then, and what is asked for
// is walked while the counter answers. Earlier, a CTA with a long way to go would keep an item from those that are idle.
template <typename Shared>
__device__ __forceinline__ void ask_in_order(const Prefill& p, const Maps& maps, Shared& s, Turn<Shared::STAGES>& turn) {
  constexpr uint32_t HALVES = 2 / Shared::GROUPS;
  const uint32_t items = static_cast<uint32_t>(p.N) * p.HV * HALVES;
  uint32_t item = blockIdx.x;
#pragma unroll 1
  while (item < items) {
    const uint32_t number = item / HALVES, place = number / p.HV;
    const int n = p.plan->order()[place], hv = number - place * p.HV, half = item % HALVES;
    const uint32_t word = word_of(p, half, hv, n);
    tell(s, turn, word);
    ask_state(maps, s, turn, static_cast<int>(word * GROUP_ROWS));
    const Segment at(p, hv, n);
    const auto take = [&] { item = gridDim.x + atomicAdd(&p.plan->taken, 1u); };
    if (at.count == 0) take();
    ask<true>(p, maps, s, turn, at, half, true, take);
  }
  tell(s, turn, NO_ITEM);
  arrive(shared_address(&s.full[turn.stage()]));
}

// What each role does: hears which item is next, passes its state's stage on, and works through its chunks.
template <int GROUPS, int STAGES>
__device__ __forceinline__ void walk_in_order(const Prefill& p, const Maps& maps) {
  constexpr int MAKER = 8, ASKER = 12;  // their first warps; with one that walks, the second warpgroup has nothing to do
  auto& s = *reinterpret_cast<OrderedShared<GROUPS, STAGES>*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == ASKER && elected()) prefetch_map(maps.state), prefetch_map(maps.k), prefetch_map(maps.v), prefetch_map(maps.q);
  group_begin<true>(s);
  Turn<STAGES> turn;
  if (warp >= ASKER) {
    fewer_registers<asking(true)>();
    const int other = warp - ASKER;
    if (other == 0 && elected()) ask_in_order(p, maps, s, turn);
    if (other == 0 || other > PUTTING) return;
#pragma unroll 1
    for (uint32_t word; (word = hear(s, turn)) != NO_ITEM;) {
      free_state(s, turn);
      const Told of(p, word);
      put(p, s, turn, Segment(p, of.hv, of.slot), of.half, threadIdx.x - (ASKER + 1) * 32);
    }
    return;
  }
  if (warp >= MAKER) {
    fewer_registers<making(GROUPS)>();
#pragma unroll 1
    for (uint32_t word; (word = hear(s, turn)) != NO_ITEM;) {
      pass_state(s, turn);
      const Told of(p, word);
      make(p, s, turn, Segment(p, of.hv, of.slot));
    }
    return;
  }
  if (warp >= GROUPS * 4) return;
  more_registers<multiplying(GROUPS, true)>();
  float S[16][4];
#pragma unroll 1
  for (uint32_t word; (word = hear(s, turn)) != NO_ITEM;) {
    const Told of(p, word);
    const Segment at(p, of.hv, of.slot);
    const int before = thread_again();  // so that no address waits in a register while chunks are walked
    take_state(S, s, turn, before / 32 * 16, before % 32);
    group_walk<true>(S, p, s, turn, at, true);
    const int after = thread_again();
    float* const end = p.new_state + static_cast<int64_t>(word) * GROUP_ROWS * D;
#pragma unroll
    for (int j = 0; j < 16; ++j) store_state(end, S[j], after / 32 * 16, j, after % 32);
  }
}

#endif  // FLASHCORE_WGMMA

// As many CTAs as can be resident, at the most one for each item; `one` and `two` are for one warpgroup's boxes and for two.
// p.segment is 0.
__global__ void __launch_bounds__(ORDERED_THREADS, 1)
gdn_prefill_ordered(const __grid_constant__ Prefill p, const __grid_constant__ Maps one, const __grid_constant__ Maps two) {
#if FLASHCORE_WGMMA
  const int halves = __shfl_sync(0xffffffffu, static_cast<int>(p.plan->halves(p.HV, gridDim.x)), 0);
  if (halves) walk_in_order<1, HALF_STAGES>(p, one);
  else walk_in_order<2, FULL_STAGES>(p, two);
#endif
}

}  // namespace gdn
