// Which row of a table that `gdn tune` wrote is for this GPU and size. A row has gpu, sms, up_to and its constants.
#pragma once

#include <tvm/ffi/extra/cuda/base.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>

namespace gdn {

// SMs of a device; asked once for each of the first 64.
inline int sms(int device) {
  static std::array<std::atomic<int>, 64> known{};
  const bool kept = device >= 0 && device < 64;
  int count = kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    if (kept) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

// Of the GPU whose SMs are nearest in number (the first of equals), the first row that holds the size.
template <typename Row, size_t N>
size_t chosen(const Row (&rows)[N], int sms, int64_t size) {
  int nearest = std::numeric_limits<int>::max();
  for (const Row& row : rows) {
    if (std::abs(row.sms - sms) < std::abs(nearest - sms) || nearest == std::numeric_limits<int>::max()) nearest = row.sms;
  }
  size_t at = N;
  for (size_t i = 0; i < N && at == N; ++i) {
    if (rows[i].sms == nearest && size <= rows[i].up_to) at = i;
  }
  return at;
}

}  // namespace gdn
