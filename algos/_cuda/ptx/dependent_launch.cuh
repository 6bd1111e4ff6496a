// Programmatic dependent launch (sm_90 on; CUDA Programming Guide, section of that name): the next kernel is launched as soon as the CTAs of the
// one before have ended, before their writes are visible. So its CTAs begin without work, and wait.
#pragma once

#include <cuda_runtime.h>

namespace ptx {

// Waits until what the kernel before wrote is visible. What earlier kernels wrote is visible only if that one has waited, too. Does nothing
// in a kernel that was launched in the usual way.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ptx
