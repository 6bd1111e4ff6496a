// Selects the row of TUNED (tuned.h, included before this file) for this GPU and size.
#pragma once

#include <tvm/ffi/extra/cuda/base.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>

namespace gdn {

// Number of SMs of a device; cached for the first 64.
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

constexpr size_t ROWS_TUNED = sizeof(TUNED) / sizeof(TUNED[0]);

// The row of a table like TUNED: among those of the GPU with the nearest number of SMs (the first of equals), the first for
// which `holds(row)`.
template <typename Row, size_t ROWS, typename Holds>
inline size_t first_row(const Row (&table)[ROWS], int sms, Holds holds) {
  int nearest = std::numeric_limits<int>::max();
  for (const Row& row : table) {
    if (std::abs(row.sms - sms) < std::abs(nearest - sms) || nearest == std::numeric_limits<int>::max()) nearest = row.sms;
  }
  size_t at = ROWS;
  for (size_t i = 0; i < ROWS && at == ROWS; ++i) {
    if (table[i].sms == nearest && holds(table[i])) at = i;
  }
  return at;
}

// A size on a GPU with `sms` SMs as a GPU with `tuned` SMs would have it (0: nobody has tuned): with as much work for an SM, rounded up.
inline int64_t as_tuned(int64_t size, int tuned, int sms) {
  return tuned == 0 || tuned == sms ? size : (size * tuned + sms - 1) / sms;
}

// The row for a size, in a table without lengths.
template <typename Row, size_t ROWS>
inline size_t chosen(const Row (&table)[ROWS], int sms, int64_t size) {
  return first_row(table, sms, [=](const Row& row) { return as_tuned(size, row.sms, sms) <= row.up_to; });
}
// The row for a length and a size, as algo.toml defines them.
template <typename Row, size_t ROWS>
inline size_t chosen(const Row (&table)[ROWS], int sms, int64_t length, int64_t size) {
  return first_row(
      table, sms, [=](const Row& row) { return length <= row.length_up_to && as_tuned(size, row.sms, sms) <= row.up_to; });
}

}  // namespace gdn
