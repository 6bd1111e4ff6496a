// Clusters of a GPU.
#pragma once

#include <tvm/ffi/extra/cuda/base.h>

#include <array>
#include <atomic>

namespace gdn {

// CTAs of a cluster that this GPU can have: 16 of those of data centres, 8 of others. 0 without clusters, before capability 9.0.
inline int most_ctas(int device) {
  static std::array<std::atomic<int>, 64> known{};  // plus one; 0: not asked yet
  const bool kept = device >= 0 && device < 64;
  int most = kept ? known[device].load(std::memory_order_relaxed) - 1 : -1;
  if (most < 0) {
    int major = 0;
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    most = major < 9 ? 0 : major <= 10 ? 16 : 8;
    if (kept) known[device].store(most + 1, std::memory_order_relaxed);
  }
  return most;
}

}  // namespace gdn
