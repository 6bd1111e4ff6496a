// The launch of cuda-recurrent's kernel with a table of recurrent.h.
#pragma once

#include <tvm/ffi/extra/cuda/base.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

#include "tuned_row.cuh"
#include "recurrent.cuh"

namespace gdn {

// static: a process may have several builds of this library, and each must set the attributes of its own kernels.
template <int WARPS, int SPLIT, int AHEAD, typename Call>
static void launch_recurrent(const Call& p, int64_t heads, int device, cudaStream_t stream) {
  using L = Layout<WARPS, SPLIT, AHEAD, Call::POOL>;
  constexpr auto kernel = gdn_prefill_recurrent<WARPS, SPLIT, AHEAD, Call>;
  // more than 48 KiB has to be requested; once for each of the first 64 devices is enough
  static std::array<std::atomic<bool>, 64> asked{};
  const bool kept = device >= 0 && device < 64;
  if (!kept || !asked[device].load(std::memory_order_relaxed)) {
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::BYTES));
    if (kept) asked[device].store(true, std::memory_order_relaxed);
  }
  kernel<<<static_cast<uint32_t>(heads * (V_DIM / (WARPS * ROWS))), L::THREADS, L::BYTES, stream>>>(p);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// Table: a type whose member `rows` is the table of recurrent.h, since a template cannot take the table itself.
template <typename Table, typename Call, size_t... I>
static void launch_recurrent(size_t row, const Call& p, int64_t heads, int device, cudaStream_t stream,
                             std::index_sequence<I...>) {
  constexpr auto& rows = Table::rows;
  (void)((I == row && (launch_recurrent<rows[I].warps, rows[I].split, rows[I].ahead>(p, heads, device, stream), true)) || ...);
}

// heads: N * HV; each has its own CTAs.
template <typename Table, typename Call = Arguments>
static void launch_recurrent(const Call& p, int64_t heads, int device, cudaStream_t stream) {
  constexpr size_t COUNT = sizeof(Table::rows) / sizeof(Table::rows[0]);
  launch_recurrent<Table>(chosen(Table::rows, sms(device), heads), p, heads, device, stream, std::make_index_sequence<COUNT>{});
}

}  // namespace gdn
