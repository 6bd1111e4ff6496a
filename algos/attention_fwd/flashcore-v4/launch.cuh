// The launch of flashcore-v4: takes the cut for this GPU and size from TUNED (tuned.h, included before this file).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

#include "attention.cuh"
#include "binding.cuh"
#include "choice.cuh"

namespace flashcore {

// What is asked of a device, once for each of the first 64.
struct Device {
  int sms = 0;
  int clusters = 0;  // whether it has them
  int shared = 0;    // bytes of shared memory that a CTA may have
};

inline Device device(int id) {
  static std::array<std::atomic<uint64_t>, 64> known{};  // one word, so that no thread sees half of it
  const bool kept = id >= 0 && id < 64;
  const uint64_t word = kept ? known[id].load(std::memory_order_relaxed) : 0;
  Device found{static_cast<int>(word >> 40), static_cast<int>(word >> 32 & 1), static_cast<int>(word & 0xffffffffu)};
  if (found.sms == 0) {
    int major = 0;
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&found.sms, cudaDevAttrMultiProcessorCount, id));
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&found.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id));
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id));
    found.clusters = major >= 9;
    const uint64_t high = static_cast<uint64_t>(found.sms) << 8 | static_cast<uint64_t>(found.clusters);
    if (kept) known[id].store(high << 32 | static_cast<uint32_t>(found.shared), std::memory_order_relaxed);
  }
  return found;
}

using gdn::ROWS_TUNED;
using Rows = std::make_index_sequence<ROWS_TUNED>;

template <size_t I>
using CutOf = Cut<TUNED[I].rows, TUNED[I].warps, TUNED[I].tiles, TUNED[I].keys, TUNED[I].stages, TUNED[I].splits>;

template <size_t I>
constexpr int shared_of(const Device& on) {
  return CutOf<I>::shared(on.clusters ? CutOf<I>::SPLITS : 1);
}

// The row of TUNED (choice.cuh); where this GPU has less shared memory than it asks for (sm_86 and its like have 99 KiB),
// the one that asks for least.
template <size_t... I>
size_t chosen(const Device& on, int64_t size, std::index_sequence<I...>) {
  const int shared[] = {shared_of<I>(on)...};
  const size_t at = gdn::chosen(on.sms, size);
  return shared[at] <= on.shared ? at : std::min_element(shared, shared + ROWS_TUNED) - shared;
}

template <bool CAUSAL, size_t I>
void launch(const Problem& p, uint32_t heads, cudaStream_t stream, int id) {
  using C = CutOf<I>;
  constexpr auto kernel = flashcore_v4<C, CAUSAL>;
  const Device on = device(id);
  const uint32_t splits = on.clusters ? C::SPLITS : 1, blocks = (p.S + C::ROWS - 1) / C::ROWS;
  const int shared = shared_of<I>(on);

  static std::array<std::atomic<bool>, 64> allowed{};  // a kernel must be told once, on each device, of more than 48 KiB
  const bool kept = id >= 0 && id < 64;
  if (shared > 48 * 1024 && !(kept && allowed[id].load(std::memory_order_relaxed))) {
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    if (kept) allowed[id].store(true, std::memory_order_relaxed);
  }

  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = splits, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = CAUSAL ? dim3(splits, heads, blocks) : dim3(splits, blocks, heads);
  config.blockDim = dim3(C::THREADS);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &cluster, config.numAttrs = splits > 1 ? 1 : 0;
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, p));
}

template <bool CAUSAL, size_t... I>
void launch(size_t row, const Problem& p, uint32_t heads, cudaStream_t stream, int id, std::index_sequence<I...>) {
  (void)((I == row && (launch<CAUSAL, I>(p, heads, stream, id), true)) || ...);
}

// q, k, v and output: [B, H, S, 64] f16; CAUSAL: row i sees keys 0 .. i.
template <bool CAUSAL>
void attend(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView output) {
  run(q, k, v, output, [](const Problem& p, uint32_t heads, cudaStream_t stream, int id) {
    const size_t row = chosen(device(id), static_cast<int64_t>(heads) * p.S, Rows{});
    launch<CAUSAL>(row, p, heads, stream, id, Rows{});
  });
}

}  // namespace flashcore
