// hopper.cuh's walk where sequences may differ in length: items longest first (order.cuh), each CTA taking the next one when it
// has asked for nearly all of those before, and an item being all of V, for two warpgroups, or half of it, for one that has
// the SM to itself. Which of both, and whether they simply take turns, lengths say; so each CTA has the code of both, and runs
// one.
//
// A CTA begins as hopper.cuh's does, each warp by itself: the plan and what it says of the CTA's first item come side by side,
// that is one access instead of cu_seqlens', and then the first state goes straight to registers. The thread that asks takes
// the items after it. Their states come through the ring of stages; with each goes what item it is, and behind the last one a
// stage that says so.
#pragma once

#include "hopper.cuh"
#include "order.cuh"

namespace gdn {

template <int GROUPS, int STAGES>
struct OrderedShared : GroupShared<GROUPS, STAGES> {
  static constexpr bool LOOPS = true;
  Piece told[STAGES];  // of a stage with a state: whose it is
  Piece first;         // the CTA's first item, whose state takes no stage
  uint32_t walked[GROUPS * 4];  // by each warp: what, so that it takes no register
};
constexpr uint32_t NO_ITEM = 0xffffffffu;
// A CTA's memory and threads are for both ways.
constexpr int FULL_STAGES = 3, HALF_STAGES = 4;
constexpr int ORDERED_THREADS = group_threads(2, true);
constexpr int ORDERED_MAKER = 8, ORDERED_ASKER = 12;  // the roles' first warps; where one walks, the second warpgroup rests
constexpr int ordered_shared() {
  constexpr int full = sizeof(OrderedShared<2, FULL_STAGES>), half = sizeof(OrderedShared<1, HALF_STAGES>);
  return full > half ? full : half;
}

#if FLASHCORE_WGMMA

// Item number `item` of all in their order, each sequence HALVES items for each value head. `what` is then which half of V of
// which sequence and value head: its state's rows are those of all states from GROUP_ROWS * what on. Less than NO_ITEM: there
// are at most 32767 sequences and 65535 value heads.
template <uint32_t HALVES>
__device__ __forceinline__ Piece piece_of(const Prefill& p, uint32_t item) {
  const uint32_t number = item / HALVES, place = number / p.HV;
  const uint4 x = *reinterpret_cast<const uint4*>(p.plan->pieces() + place);
  return {(x.x * p.HV + number - place * p.HV) * 2 + item % HALVES, static_cast<int>(x.y), static_cast<int>(x.z), 0};
}
struct Told : Segment {
  int half;
  __device__ __forceinline__ Told(const Prefill& p, const Piece& piece) : Told(p, piece, piece.what / 2 / p.HV) {}
  __device__ __forceinline__ Told(const Prefill& p, const Piece& piece, int n)
      : Segment(p, piece.what / 2 - n * p.HV, n, piece.first, piece.tokens), half(piece.what & 1) {}
};

// A state's way through the ring: the one thread that asks asks for it,
template <typename Shared>
__device__ __forceinline__ void ask_state(const Maps& maps, Shared& s, Turn<Shared::STAGES>& turn, int row) {
  const int stage = turn.stage();
  const uint32_t full = shared_address(&s.full[stage]);
  wait_for(shared_address(&s.empty[stage]), turn.parity() ^ 1);
  arrive_and_expect(full, 4 * STATE_BLOCK<Shared::GROUPS>);
  copy_state(shared_address(&s.stages[stage]), maps.state, row, full);
  ++turn.begun;
}
// the warps that walk take it from there, each from `row` on,
template <typename Shared>
__device__ __forceinline__ void take_state(float (&S)[16][4], Shared& s, Turn<Shared::STAGES>& turn, int row, int lane) {
  const int stage = turn.stage();
  wait_for(shared_address(&s.full[stage]), turn.parity());
  const char* const tile = reinterpret_cast<const char*>(&s.stages[stage]);
  row += lane / 4;
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = j / 4 * STATE_BLOCK<Shared::GROUPS> + in_matrix(row + half * 8, j % 4 * 2 + lane % 4 / 2) + lane % 2 * 8;
      const float2 pair = *reinterpret_cast<const float2*>(tile + at);
      S[j][2 * half] = pair.x, S[j][2 * half + 1] = pair.y;
    }
  __syncwarp();
  if (lane < ARRIVALS) arrive(shared_address(&s.laid[stage]));
  ++turn.begun, ++turn.made;
}
// those that make pass it on, and those that put free its stage when it is taken and all have seen it.
template <typename Shared>
__device__ __forceinline__ void pass_state(Shared& s, Turn<Shared::STAGES>& turn) {
  wait_for(shared_address(&s.full[turn.stage()]), turn.parity());
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVALS) arrive(turn.made_at(s.made, 0));
  ++turn.begun, ++turn.made;
}
template <typename Shared>
__device__ __forceinline__ void free_state(Shared& s, Turn<Shared::STAGES>& turn) {
  wait_for(shared_address(&s.laid[turn.stage()]), turn.parity());
  wait_for(shared_address(&s.made[turn.stage()]), turn.parity());
  set_free(s.empty[turn.stage()]);
  ++turn.begun;
}

// Puts the piece for the next state's stage, which is free then; whoever waits for the stage reads it.
template <typename Shared>
__device__ __forceinline__ void tell(Shared& s, const Turn<Shared::STAGES>& turn, const Piece& piece) {
  wait_for(shared_address(&s.empty[turn.stage()]), turn.parity() ^ 1);
  s.told[turn.stage()] = piece;
}
// Which item is next, for all lanes of a warp.
template <typename Shared>
__device__ __forceinline__ Piece hear(Shared& s, Turn<Shared::STAGES>& turn) {
  turn.made = turn.begun;  // it is; told to the compiler, which has no registers for both here
  const Turn<Shared::STAGES> now{__shfl_sync(0xffffffffu, turn.begun, 0)};
  wait_for(shared_address(&s.full[now.stage()]), now.parity());
  Piece piece = s.told[now.stage()];
  piece.what = __shfl_sync(0xffffffffu, piece.what, 0);
  return piece;
}
// `code` for each item of this CTA, the first one first, and `pass` in front of those whose states come through the ring.
template <typename Shared, typename Pass, typename Code>
__device__ __forceinline__ void each_told(Shared& s, Turn<Shared::STAGES>& turn, const Pass& pass, const Code& code) {
  Piece piece = s.first;
#pragma unroll 1
  for (;;) {
    code(piece);
    piece = hear(s, turn);
    if (piece.what == NO_ITEM) return;
    pass();
  }
}

// The one thread that asks. It takes the next item in front of the last chunk: the ring is full then, and what is asked for
// is walked while the counter answers. Earlier, a CTA with a long way to go would keep an item from those that are idle.
template <typename Shared>
__device__ __forceinline__ void ask_in_order(const Prefill& p, const Maps& maps, Shared& s, Turn<Shared::STAGES>& turn,
                                             Way way) {
  constexpr uint32_t HALVES = 2 / Shared::GROUPS;
  const uint32_t items = static_cast<uint32_t>(p.N) * p.HV * HALVES;
  uint32_t item = blockIdx.x;
  Piece piece = s.first;
#pragma unroll 1
  for (;;) {
    const Told at(p, piece);
    const auto take = [&] { item = way == IN_TURN ? item + gridDim.x : gridDim.x + atomicAdd(&p.plan->taken, 1u); };
    if (at.count == 0) take();
    ask<true>(p, maps, s, turn, at, at.half, true, take);
    if (item >= items) break;
    piece = piece_of<HALVES>(p, item);
    tell(s, turn, piece);
    ask_state(maps, s, turn, static_cast<int>(piece.what * GROUP_ROWS));
  }
  tell(s, turn, {NO_ITEM, 0, 0, 0});
  arrive(shared_address(&s.full[turn.stage()]));
}

// What each role does: works through its first item's chunks, hears which item is next, passes its state's stage on, and so on.
template <int GROUPS, int STAGES>
__device__ __forceinline__ void walk_in_order(const Prefill& p, const Maps& maps, const Piece& first, Way way) {
  constexpr int MAKER = ORDERED_MAKER, ASKER = ORDERED_ASKER;
  auto& s = *reinterpret_cast<OrderedShared<GROUPS, STAGES>*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) s.first = first;
  group_begin<true>(s);
  Turn<STAGES> turn;
  if (warp >= ASKER) {
    fewer_registers<asking(true)>();
    const int other = warp - ASKER;
    if (other == 0 && elected()) ask_in_order(p, maps, s, turn, way);
    if (other == 0 || other > PUTTING) return;
    each_told(s, turn, [&] { free_state(s, turn); }, [&](const Piece& piece) {
      const Told at(p, piece);
      put(p, s, turn, at, at.half, threadIdx.x - (ASKER + 1) * 32);
    });
    return;
  }
  if (warp >= MAKER) {
    fewer_registers<making(GROUPS)>();
    each_told(s, turn, [&] { pass_state(s, turn); }, [&](const Piece& piece) { make(p, s, turn, Told(p, piece)); });
    return;
  }
  if (warp >= GROUPS * 4) return;
  more_registers<multiplying(GROUPS, true)>();
  float S[16][4];
  const auto take = [&] {
    const int thread = thread_again();  // so that no address waits in a register while chunks are walked
    take_state(S, s, turn, thread / 32 * 16, thread % 32);
  };
  {
    const int thread = thread_again();
    const float* const start = p.state + static_cast<int64_t>(s.first.what) * GROUP_ROWS * D;
#pragma unroll
    for (int j = 0; j < 16; ++j) load_state(S[j], start, thread / 32 * 16, j, thread % 32);
  }
  each_told(s, turn, take, [&](const Piece& piece) {
    s.walked[thread_again() / 32] = piece.what;
    group_walk<true>(S, p, s, turn, Told(p, piece), true);
    const int thread = thread_again();
    float* const end = p.new_state + static_cast<int64_t>(s.walked[thread / 32]) * GROUP_ROWS * D;
#pragma unroll
    for (int j = 0; j < 16; ++j) store_state(end, S[j], thread / 32 * 16, j, thread % 32);
  });
}

#endif  // FLASHCORE_WGMMA

// p.ctas CTAs, as many as can be resident; `one` and `two` are for one warpgroup's boxes and for two. p.segment is 0.
__global__ void __launch_bounds__(ORDERED_THREADS, 1)
gdn_prefill_ordered(const __grid_constant__ Prefill p, const __grid_constant__ Maps one, const __grid_constant__ Maps two) {
#if FLASHCORE_WGMMA
  // The first item as a whole one and as a half, before it is known which it is: with the way itself, three loads at once.
  const uint32_t items = static_cast<uint32_t>(p.N) * p.HV;
  Piece half, whole;
  if (threadIdx.x == 0) half = piece_of<2>(p, min(blockIdx.x, 2 * items - 1)), whole = piece_of<1>(p, min(blockIdx.x, items - 1));
  const uint32_t said = p.plan->way;
  if (threadIdx.x / 32 == ORDERED_ASKER && elected()) {
    prefetch_map(two.k), prefetch_map(two.v), prefetch_map(two.q), prefetch_map(two.state);
    prefetch_map(one.k), prefetch_map(one.v), prefetch_map(one.q), prefetch_map(one.state);
    // the first state, where CTAs take turns, comes from DRAM while that is being read
    if (blockIdx.x < items) fetch_to_L2(p.state + static_cast<int64_t>(blockIdx.x) * D * D, D * D * sizeof(float));
  }
  const Way way = static_cast<Way>(__shfl_sync(0xffffffffu, said, 0));
  if (way == HALVES) {
    if (blockIdx.x < 2 * items) walk_in_order<1, HALF_STAGES>(p, one, half, way);
  } else {
    if (blockIdx.x < items) walk_in_order<2, FULL_STAGES>(p, two, whole, way);
  }
#endif
}

}  // namespace gdn
