// In which order items are walked where sequences differ in length: longest first, so that none is left for the end. One CTA
// of the preparation sorts, beside the others; the host reads no cu_seqlens. The walk (ordered.cuh) takes items in this
// order, whoever is free the next one.
#pragma once

#include "chunk.cuh"

namespace gdn {

struct Plan {
  uint32_t taken;            // items, beside the first one of each CTA
  uint32_t longest, chunks;  // chunks of the longest sequence, and of all
  // [N] sequences, in this order. Among those of as many chunks, or of BINS - 1 and more, any may come first.
  __device__ __forceinline__ int* order() { return reinterpret_cast<int*>(this + 1); }

  // Whether items are halves of V. An SM walks a whole item in FULL a chunk and a half, alone, in HALF (1.2 and 2.3 us on an
  // H200; only the ratio counts): halves cost more in all, but the longest sequence is through in about half of the time. So
  // they are taken where that sequence is most of what there is to wait for: longer than 3/4 of what all SMs have on average.
  static constexpr int64_t HALF = 12, FULL = 23;
  __device__ __forceinline__ bool halves(int HV, int ctas) const {
    return 4 * HALF * longest * ctas > 3 * FULL * chunks * HV;
  }
};

constexpr int BINS = 256;  // by chunks, and as many threads
struct OrderShared {
  uint32_t bins[BINS];     // how many sequences, then where the next one goes
  uint32_t before[BINS / 32];
  uint32_t longest, chunks;
};

// A counting sort by all threads of a CTA.
__device__ __forceinline__ void make_order(const Prefill& p, OrderShared& s) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const auto chunks_of = [&](int n) { return (max(p.border(n + 1) - p.border(n), 0) + CHUNK - 1) / CHUNK; };
  const auto bin_of = [](int chunks) { return BINS - 1 - min(chunks, BINS - 1); };
  s.bins[thread] = 0;
  if (thread == 0) s.longest = s.chunks = 0;
  __syncthreads();
  int longest = 0, all = 0;
#pragma unroll 1
  for (int n = thread; n < p.N; n += BINS) {
    const int chunks = chunks_of(n);
    atomicAdd(&s.bins[bin_of(chunks)], 1u);
    longest = max(longest, chunks), all += chunks;
  }
  atomicMax(&s.longest, static_cast<uint32_t>(longest)), atomicAdd(&s.chunks, static_cast<uint32_t>(all));
  __syncthreads();
  int to = static_cast<int>(s.bins[thread]);  // of this bin and those before it
  const int own = to;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int more = __shfl_sync(0xffffffffu, to, lane - (lane < d ? 0 : d));
    if (lane >= d) to += more;
  }
  if (lane == 31) s.before[warp] = to;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < BINS / 32 - 1; ++w)
    if (w < warp) to += s.before[w];
  s.bins[thread] = to - own;
  __syncthreads();
#pragma unroll 1
  for (int n = thread; n < p.N; n += BINS) p.plan->order()[atomicAdd(&s.bins[bin_of(chunks_of(n))], 1u)] = n;
  if (thread == 0) p.plan->taken = 0, p.plan->longest = s.longest, p.plan->chunks = s.chunks;
}

}  // namespace gdn
