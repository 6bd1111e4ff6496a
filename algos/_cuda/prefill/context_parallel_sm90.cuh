// Context parallelism on sm_90a (context_parallel.cuh): Phi and L by wgmma, and the scan in the same launch.
#pragma once

#include "context_parallel_scan.cuh"
#include "inter_chunk_sm90.cuh"

namespace gdn {

// What the CTAs for the segments with one number find out together, each for itself.
struct TransferPlan {
  uint32_t work, longest;  // chunks of all heads' tiles, and of the longest
  int memory;              // of this head: memory_of
};
constexpr int TRANSFER_THREADS = group_threads(2, false), TRANSFER_PRODUCER = 8;  // its first warp
constexpr int TRANSFER_FULL_STAGES = 3, TRANSFER_HALF_STAGES = 4;
__host__ __device__ constexpr int transfer_plan_at() {
  constexpr int full = group_shared<2, TRANSFER_FULL_STAGES>(), half = group_shared<1, TRANSFER_HALF_STAGES>();
  return full > half ? full : half;
}
constexpr int transfer_shared() { return transfer_plan_at() + sizeof(TransferPlan); }

#if FLASHCORE_WGMMA

// L (`values`) or Phi of GROUPS halves of V.
template <int GROUPS, int STAGES>
__device__ __forceinline__ void run_transfer(const Prefill& p, const Maps& maps, const Segment& at, int half, bool values,
                                             bool from_state) {
  auto& s = *reinterpret_cast<GroupShared<GROUPS, STAGES>*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int row = half * GROUP_ROWS + warp * 16;
  group_begin<false>(s);
  PipelineState<STAGES> pipe;
  if (warp >= TRANSFER_PRODUCER) {
    warpgroup_reg_dealloc<producer_registers(false)>();
    if (warp == TRANSFER_PRODUCER && elect_one()) produce<false>(p, maps, s, pipe, at, half, values);
    return;
  }
  if (warp >= GROUPS * 4) return;
  warpgroup_reg_alloc<consumer_registers(GROUPS, false)>();
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
  __syncwarp();
  if (lane == 0) __threadfence(), atomicAdd(p.progress_of(at.slot, at.hv), WARP_DONE);
}

// The transfer of a segment's half of V, L or Phi: CTA number 4 (HV segment + hv) + 2 phi + half.
//
// A half takes 0.85 us per chunk alone on an SM, a whole tile 1.41 (both halves, two consumer warpgroups). So CTAs take halves while
// there are SMs for them; else the CTA of the first half takes both. Which of the two is decided for all heads' segments of one
// number alike: they have p.sms SMs, and heads whose gates forget have few chunks and no Phi.
__device__ __forceinline__ void transfer(const Prefill& p, const Maps& one, const Maps& two, int number) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = number % 2;
  const bool values = number % 4 < 2;
  const int hv = number / 4 % p.HV;
  Segment at = segment_of(p, hv, number / 4 / p.HV, 1);
  if (!at.there() || at.last) return;
  if (at.opens && !values) {
    if (warp < 4) keep_original(at, half * GROUP_ROWS + warp * 16, lane);
    return;
  }
  if (warp == TRANSFER_PRODUCER && elect_one()) {
    prefetch_tensor_map(one.k), prefetch_tensor_map(one.v), prefetch_tensor_map(two.k), prefetch_tensor_map(two.v);
  }
  TransferPlan& plan = *reinterpret_cast<TransferPlan*>(tile_memory() + transfer_plan_at());
  if (threadIdx.x == 0) plan.work = plan.longest = 0;
  __syncthreads();
  uint32_t work = 0, longest = 0;
#pragma unroll 1
  for (int other = warp; other < p.HV; other += TRANSFER_THREADS / 32) {
    const int memory = memory_of(p, at, other, lane);
    const uint32_t chunks = memory > 0 ? memory : at.count;
    work += memory > 0 ? chunks : 2 * chunks, longest = max(longest, chunks);
    if (other == hv && lane == 0) plan.memory = memory;
  }
  if (lane == 0) atomicAdd(&plan.work, work), atomicMax(&plan.longest, longest);
  __syncthreads();
  // The larger of the mean work of an SM and the longest tile, in us times 100: 2 * 85 and 85, or 141 and 141.
  const uint32_t sms = p.sms, mean = plan.work, most = plan.longest * sms;
  const bool halves = max(170 * mean, 85 * most) <= 141 * max(mean, most);
  const int memory = __shfl_sync(0xffffffffu, plan.memory, 0);
  if (number % 4 == 0 && threadIdx.x == 0) atomicAdd(p.progress_of(at.slot, hv), memory > 0 ? APART : LINKED);
  if ((memory > 0 && !values) || (!halves && half > 0)) return;
  const bool from_state = memory == at.chunks_before + at.count;
  if (memory > 0) {  // these chunks alone, which may begin before the segment
    const int skipped = at.count - memory;
    at.first += skipped * CHUNK, at.number += skipped, at.count = memory, at.tokens = memory * CHUNK;
  }
  if (halves) run_transfer<1, TRANSFER_HALF_STAGES>(p, one, at, half, values, from_state);
  else run_transfer<2, TRANSFER_FULL_STAGES>(p, two, at, 0, values, from_state);
}

#endif  // FLASHCORE_WGMMA

// The transfers of at most `segments` segments that are not a sequence's last, and then the scan, which waits for them. CTAs start in the
// order of their numbers, so nothing that a CTA waits for comes after it.
__global__ void __launch_bounds__(TRANSFER_THREADS, 1)
gdn_prefill_transfer_sm90(const __grid_constant__ Prefill p, const __grid_constant__ Maps one, const __grid_constant__ Maps two,
                          const int segments) {
#if FLASHCORE_WGMMA
  const int transfers = 4 * p.HV * segments, number = blockIdx.x;
  if (number < transfers) return transfer(p, one, two, number);
  if (threadIdx.x >= SCAN_THREADS) return warpgroup_reg_dealloc<producer_registers(false)>();
  warpgroup_reg_alloc<consumer_registers(1, false)>();
  scan(p, *reinterpret_cast<ScanShared*>(tile_memory()), number - transfers, gridDim.x - transfers);
#endif
}

}  // namespace gdn
