// _cuda/ptx/dependent_launch.cuh for the CPU of cuda_runtime.h, where a kernel begins when the one before has ended.
#pragma once

namespace ptx {

inline void wait_for_kernel_before() {}

}  // namespace ptx
