// Context parallelism on sm_90a (context_parallel.cuh): Phi and L of each segment by wgmma, with the code of inter_chunk_sm90.cuh.
//
// A half of V takes 0.85 us per chunk alone on an SM, a whole tile 1.41 (both halves, two consumer warpgroups): halves while there are SMs
// for them. gdn_prefill_transfer_sm90 goes through all chunks of each segment, and the host has chosen. gdn_prefill_recall_sm90, where gates
// may forget, finds out itself how much work there is.
#pragma once

#include "inter_chunk_sm90.cuh"

namespace gdn {

#if FLASHCORE_WGMMA

// L (`values`) or Phi of GROUPS halves of V. The last warpgroup of THREADS is the producer's.
template <int GROUPS, int STAGES, int THREADS, bool K_FIRST>
__device__ __forceinline__ void run_transfer(const Prefill& p, const Maps& maps, const Segment& at, int half, bool values,
                                             bool from_state) {
  constexpr int PRODUCER = THREADS / 32 - 4;
  constexpr bool GIVES = THREADS > 256;  // else each thread has enough registers from the launch
  auto& s = *reinterpret_cast<GroupShared<GROUPS, STAGES>*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int row = half * GROUP_ROWS + warp * 16;
  group_begin<false>(s);
  PipelineState<STAGES> pipe;
  if (warp >= PRODUCER) {
    if constexpr (GIVES) warpgroup_reg_dealloc<producer_registers(false)>();
    if (warp == PRODUCER && elect_one()) produce<false>(p, maps, s, pipe, at, half, values);
    return;
  }
  if (warp >= GROUPS * 4) return;
  if constexpr (GIVES) warpgroup_reg_alloc<consumer_registers(GROUPS, false)>();
  float S[16][4];
  begin_transfer<K_FIRST>(S, at, from_state, values, row, lane);
  if constexpr (POOL) warpgroup_fence_operand(S);
  consume<false, false>(S, p, staged_chunks<false>(s, pipe, at), at, values);
  const int64_t to = at.state_at(at.slot);
  if (values) {
    store_state(p.ends + to, S, row, 0, lane);
  } else {
    store_transfer(reinterpret_cast<uint4*>(p.transfers + to), S, row / 16, lane);
  }
}

#endif  // FLASHCORE_WGMMA

// grid (4 / GROUPS, HV, num_tokens / tokens of a segment): the first half makes L, the second Phi.
template <int GROUPS, int STAGES, bool K_FIRST = false>
__global__ void __launch_bounds__(group_threads(GROUPS, false), 1)
gdn_prefill_transfer_sm90(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if FLASHCORE_WGMMA
  constexpr int HALF = 2 / GROUPS;
  // Uniform: else ptxas keeps addresses of products in vector registers, and the kernel is 370 instructions longer.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), half = blockIdx.x % HALF * GROUPS;
  const bool values = blockIdx.x < HALF;
  if (warp == GROUPS * 4 && elect_one()) prefetch_tensor_map(maps.k), prefetch_tensor_map(maps.v);
  const Segment at = segment_of(p, blockIdx.y, blockIdx.z, 1);
  wait_for_kernel_before();  // all CTAs do, so that the kernels after this one come after the one before, too
  if (!at.there() || at.last) return;
  if (at.opens && !values) {
    if (warp < GROUPS * 4) keep_original<K_FIRST>(at, half * GROUP_ROWS + warp * 16, threadIdx.x % 32);
    return;
  }
  run_transfer<GROUPS, STAGES, group_threads(GROUPS, false), K_FIRST>(p, maps, at, half, values, at.opens);
#endif
}

// What the CTAs for the segments with one number find out together, each for itself.
struct RecallPlan {
  uint32_t work, longest;  // chunks of all heads' tiles, and of the longest
  int memory;              // of this head: memory_of
};
constexpr int RECALL_THREADS = group_threads(2, false), RECALL_FULL_STAGES = 3, RECALL_HALF_STAGES = 4;
__host__ __device__ constexpr int recall_plan_at() {
  constexpr int full = group_shared<2, RECALL_FULL_STAGES>(), half = group_shared<1, RECALL_HALF_STAGES>();
  return full > half ? full : half;
}
constexpr int recall_shared() { return recall_plan_at() + sizeof(RecallPlan); }

// The same where gates may forget (p.bounds). grid (4, HV, num_tokens / tokens of a segment): L of each half, Phi of each half; or the
// CTA of the first half takes both. Which of the two is decided for all heads' segments of one number alike: they have p.sms SMs, and heads
// that forget have few chunks and no Phi.
template <bool K_FIRST = false>
__global__ void __launch_bounds__(RECALL_THREADS, 1)
gdn_prefill_recall_sm90(const __grid_constant__ Prefill p, const __grid_constant__ Maps one, const __grid_constant__ Maps two) {
#if FLASHCORE_WGMMA
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, half = blockIdx.x % 2, hv = blockIdx.y;
  const bool values = blockIdx.x < 2;
  Segment at = segment_of(p, hv, blockIdx.z, 1);
  wait_for_kernel_before();  // as above
  if (!at.there() || at.last) return;
  if (at.opens && !values) {
    if (warp < 4) keep_original<K_FIRST>(at, half * GROUP_ROWS + warp * 16, lane);
    return;
  }
  if (warp == RECALL_THREADS / 32 - 4 && elect_one()) {
    prefetch_tensor_map(one.k), prefetch_tensor_map(one.v), prefetch_tensor_map(two.k), prefetch_tensor_map(two.v);
  }
  RecallPlan& plan = *reinterpret_cast<RecallPlan*>(tile_memory() + recall_plan_at());
  if (threadIdx.x == 0) plan.work = plan.longest = 0;
  __syncthreads();
  uint32_t work = 0, longest = 0;
#pragma unroll 1
  for (int other = warp; other < p.HV; other += RECALL_THREADS / 32) {
    const int own = memory_of(p, at, other, lane);
    const uint32_t chunks = own > 0 ? own : at.count;
    work += own > 0 ? chunks : 2 * chunks, longest = max(longest, chunks);
    if (other == hv && lane == 0) plan.memory = own;
  }
  if (lane == 0) atomicAdd(&plan.work, work), atomicMax(&plan.longest, longest);
  __syncthreads();
  const int memory = __shfl_sync(0xffffffffu, plan.memory, 0);
  if (memory > 0 && !values) return;
  // The larger of the mean work of an SM and the longest tile, in us times 100: 2 * 85 and 85, or 141 and 141.
  const uint32_t sms = p.sms, mean = plan.work, most = plan.longest * sms;
  const bool halves = max(170 * mean, 85 * most) <= 141 * max(mean, most);
  if (blockIdx.x == 0 && threadIdx.x == 0) p.linked[static_cast<int64_t>(at.slot) * p.HV + hv] = memory == 0;
  if (!halves && half > 0) return;
  const bool from_state = memory == at.chunks_before + at.count;
  if (memory > 0) {  // these chunks alone, which may begin before the segment
    const int skipped = at.count - memory;
    at.first += skipped * CHUNK, at.number += skipped, at.count = memory, at.tokens = memory * CHUNK;
  }
  if (halves) run_transfer<1, RECALL_HALF_STAGES, RECALL_THREADS, K_FIRST>(p, one, at, half, values, from_state);
  else run_transfer<2, RECALL_FULL_STAGES, RECALL_THREADS, K_FIRST>(p, two, at, 0, values, from_state);
#endif
}

}  // namespace gdn
