// Thread block clusters: CTAs that run at the same time and can access each other's shared memory. sm_90 and later.
#pragma once

#include <cstdint>

namespace flashcore {

// The address that corresponds to `p`, in this CTA's shared memory, in that of the cluster's CTA number `rank`.
template <typename T>
__device__ __forceinline__ T* peer(T* p, int rank) {
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(there);
}

// The two halves of a barrier of all threads of the cluster. After `wait`, writes before `arrive` are visible (release);
// writes before `arrive_only` need not be (relaxed).
__device__ __forceinline__ void cluster_arrive_only() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

}  // namespace flashcore
