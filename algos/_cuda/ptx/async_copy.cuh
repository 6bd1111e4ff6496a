// Asynchronous copies from global to shared memory (cp.async, sm_80 on), past the registers; done only after a wait.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ptx {

// 16 bytes, past L1. If not `there`: zeros, and `from` may point anywhere, since nothing is read.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool there) {
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// BYTES (8 or 16) bytes to where `to` points in shared memory.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(BYTES) : "memory");
}

// Ends a group of this thread's copies. wait_for_copies<N> waits until at most the N youngest groups are under way.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace ptx
