// Sets the device of a call.
#pragma once

#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

namespace gdn {

// Makes the device and its context current during its lifetime. ffi::CUDADeviceGuard alone does nothing if the device is already
// the thread's, as device 0 is in a new thread, which has no context yet. A launch then creates one, but calls of the driver, such
// as for a tensor map, fail. cudaSetDevice binds the context from CUDA 12 on.
struct CurrentDevice : tvm::ffi::CUDADeviceGuard {
  explicit CurrentDevice(int device) : CUDADeviceGuard(device) { TVM_FFI_CHECK_CUDA_ERROR(cudaSetDevice(device)); }
};

}  // namespace gdn
