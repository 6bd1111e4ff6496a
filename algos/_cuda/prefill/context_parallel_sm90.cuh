// Context parallelism on sm_90a (context_parallel.cuh) in one launch: Phi and L of each segment by wgmma (the transfer), the scan, and the
// inter-chunk kernel's work tiles. CTAs start in the order of their numbers, and one waits only for such as come before it.
#pragma once

#include "context_parallel_scan.cuh"
#include "inter_chunk_sm90.cuh"

namespace gdn {

// What the CTAs for the segments with one number find out together, each for itself.
struct TransferPlan {
  uint32_t work, longest;  // chunks of all heads' tiles, and of the longest
};
constexpr int TRANSFER_PRODUCER = 8;  // its first warp
// Registers of its consumers and of all other warpgroups, of which there are one or two.
constexpr __host__ __device__ int transfer_registers(int threads) { return threads > 384 ? 224 : 232; }
constexpr __host__ __device__ int other_registers(int threads) { return threads > 384 ? 32 : 40; }
constexpr int TRANSFER_FULL_STAGES = 3, TRANSFER_HALF_STAGES = 4;
__host__ __device__ constexpr int transfer_plan_at() {
  constexpr int full = group_shared<2, TRANSFER_FULL_STAGES>(), half = group_shared<1, TRANSFER_HALF_STAGES>();
  return full > half ? full : half;
}
constexpr int transfer_shared() { return transfer_plan_at() + sizeof(TransferPlan); }

#if FLASHCORE_WGMMA

// L (`values`) or Phi of GROUPS halves of V.
template <int THREADS, int GROUPS, int STAGES>
__device__ __forceinline__ void run_transfer(const Prefill& p, const Maps& maps, const Segment& at, int half, bool values,
                                             bool from_state) {
  auto& s = *reinterpret_cast<GroupShared<GROUPS, STAGES>*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int row = half * GROUP_ROWS + warp * 16;
  group_begin<false>(s);
  PipelineState<STAGES> pipe;
  if (warp >= TRANSFER_PRODUCER) {
    warpgroup_reg_dealloc<other_registers(THREADS)>();
    if (warp == TRANSFER_PRODUCER && elect_one()) produce<false>(p, maps, s, pipe, at, half, values);
    return;
  }
  if (warp >= GROUPS * 4) return;
  warpgroup_reg_alloc<transfer_registers(THREADS)>();
  float S[16][4];
  begin_transfer(S, at, from_state, values, row, lane);
  if constexpr (POOL) warpgroup_fence_operand(S);
  consume<false>(S, p, s, pipe, at, values);
  const int64_t to = at.state_at(at.slot);
  if (values) {
    store_state(p.ends + to, S, row, 0, lane);
  } else {
    store_transfer(reinterpret_cast<uint4*>(p.transfers + to), S, row / 16, lane);
  }
  done(p, at.slot, at.hv, WARP_DONE);
}

// The transfer of a segment's half of V, L or Phi: CTA number 4 (HV segment + hv) + 2 phi + half.
//
// A half takes 0.85 us per chunk alone on an SM, a whole tile 1.41 (both halves, two consumer warpgroups). So CTAs take halves while
// there are SMs for them; else the CTA of the first half takes both. Which of the two is decided for all heads' segments of one
// number alike: they have p.sms SMs, and heads whose gates forget have few chunks and no Phi.
template <int THREADS>
__device__ __forceinline__ void transfer(const Prefill& p, const Maps& one, const Maps& two, int number) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = number % 2;
  const bool values = number % 4 < 2;
  const int hv = number / 4 % p.HV;
  Segment at = segment_of(p, hv, number / 4 / p.HV, 1);
  if (!at.there() || at.last) return;
  if (at.opens && !values) {
    if (warp < 4) {
      keep_original(at, half * GROUP_ROWS + warp * 16, lane);
      done(p, at.before, hv, WARP_DONE);
    }
    return;
  }
  const int memory = memory_of(p, at, hv, lane);
  if (memory > 0 && !values) return;
  if (warp == TRANSFER_PRODUCER && elect_one()) {
    prefetch_tensor_map(one.k), prefetch_tensor_map(one.v), prefetch_tensor_map(two.k), prefetch_tensor_map(two.v);
  }
  TransferPlan& plan = *reinterpret_cast<TransferPlan*>(tile_memory() + transfer_plan_at());
  if (threadIdx.x == 0) plan.work = plan.longest = 0;
  __syncthreads();
  uint32_t work = 0, longest = 0;
#pragma unroll 1
  for (int other = warp; other < p.HV; other += THREADS / 32) {
    const int own = memory_of(p, at, other, lane);
    const uint32_t chunks = own > 0 ? own : at.count;
    work += own > 0 ? chunks : 2 * chunks, longest = max(longest, chunks);
  }
  if (lane == 0) atomicAdd(&plan.work, work), atomicMax(&plan.longest, longest);
  __syncthreads();
  // The larger of the mean work of an SM and the longest tile, in us times 100: 2 * 85 and 85, or 141 and 141.
  const uint32_t sms = p.sms, mean = plan.work, most = plan.longest * sms;
  const bool halves = max(170 * mean, 85 * most) <= 141 * max(mean, most);
  if (number % 4 == 0 && threadIdx.x == 0) atomicAdd(p.progress_of(at.slot, hv), memory > 0 ? APART : LINKED);
  if (!halves && half > 0) return;
  const bool from_state = memory == at.chunks_before + at.count;
  if (memory > 0) {  // these chunks alone, which may begin before the segment
    const int skipped = at.count - memory;
    at.first += skipped * CHUNK, at.number += skipped, at.count = memory, at.tokens = memory * CHUNK;
  }
  if (halves) run_transfer<THREADS, 1, TRANSFER_HALF_STAGES>(p, one, at, half, values, from_state);
  else run_transfer<THREADS, 2, TRANSFER_FULL_STAGES>(p, two, at, 0, values, from_state);
}

#endif  // FLASHCORE_WGMMA

// The first `transfers` CTAs are for that many segments that are not a sequence's last, those up to `before` for the scan, the rest for the
// inter-chunk kernel's work tiles. GROUPS, STAGES, CHECKPOINTS, tiles: as gdn_prefill_inter_chunk_sm90's.
template <int GROUPS, int STAGES, bool CHECKPOINTS = false>
__global__ void __launch_bounds__(group_threads(GROUPS, true), 1)
gdn_prefill_segments_sm90(const __grid_constant__ Prefill p, const __grid_constant__ Maps one, const __grid_constant__ Maps two,
                          const int transfers, const int before, const int tiles) {
#if FLASHCORE_WGMMA
  constexpr int THREADS = group_threads(GROUPS, true);
  const int number = blockIdx.x;
  if (number < transfers) return transfer<THREADS>(p, one, two, number);
  if (number < before) {
    if (threadIdx.x >= SCAN_THREADS) return warpgroup_reg_dealloc<other_registers(THREADS)>();
    warpgroup_reg_alloc<transfer_registers(THREADS)>();
    return scan(p, *reinterpret_cast<ScanShared*>(tile_memory()), number - transfers, before - transfers);
  }
  inter_chunk<GROUPS, STAGES, CHECKPOINTS, true>(p, GROUPS > 1 ? two : one, tiles, before);
#endif
}
template <int GROUPS, int STAGES>
constexpr int segments_shared() {
  return group_shared<GROUPS, STAGES>() > transfer_shared() ? group_shared<GROUPS, STAGES>() : transfer_shared();
}

}  // namespace gdn
