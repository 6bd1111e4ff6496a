// The device of a call. cuda-v1 has the file, the rungs above it share it.
#pragma once

#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

namespace gdn {

// For as long as it lives the device is the current one, as below ffi::CUDADeviceGuard, and its context is current too. That guard
// leaves a thread alone that counts on this device already, as a new thread does on device 0, with no context behind it. A launch
// finds itself one, but what asks the driver, such as for a tensor map, fails there. cudaSetDevice binds the context from CUDA 12 on.
struct CurrentDevice : tvm::ffi::CUDADeviceGuard {
  explicit CurrentDevice(int device) : CUDADeviceGuard(device) { TVM_FFI_CHECK_CUDA_ERROR(cudaSetDevice(device)); }
};

}  // namespace gdn
