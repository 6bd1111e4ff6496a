// The launch of layer_decode.cuh's kernel with the constants that TUNED (tuned.h, included before this file) has for this GPU and size.
#pragma once

#include <tvm/ffi/extra/cuda/base.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

#include "layer_decode.cuh"
#include "tuned_row.cuh"

namespace gdn {

// CTAs of a cluster that this GPU can have: 8 everywhere, 16 of those of data centres. 0 without clusters.
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

// static: a process may have several builds of this library, and each must set the attributes of its own kernels.
template <typename Call, bool CONV, int LANES, int ROWS, int PASSES, int WARPS, int LOAD, int STORE, int RESIDENT>
static void launch_layer_decode(const Call& p, int64_t heads, int64_t group, int device, cudaStream_t stream) {
  using Shape = LayerDecodeShape<typename Call::State, CONV, LANES, ROWS, PASSES, WARPS>;
  constexpr auto kernel = gdn_layer_decode<Call, CONV, LANES, ROWS, PASSES, WARPS, LOAD, STORE, RESIDENT>;
  constexpr int BYTES = sizeof(typename Shape::Memory);
  const auto ctas = static_cast<uint32_t>(group * Shape::TILES);
  // more than 48 KiB, and more than 8 CTAs, have to be requested; once for each of the first 64 devices is enough
  static std::array<std::atomic<bool>, 64> asked{};
  const bool kept = device >= 0 && device < 64;
  if (!(kept && asked[device].load(std::memory_order_relaxed))) {
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    if (most_ctas(device) > 8) TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    if (kept) asked[device].store(true, std::memory_order_relaxed);
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = ctas, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(heads * Shape::TILES)), config.blockDim = dim3(Shape::THREADS);
  config.dynamicSmemBytes = BYTES, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = ctas > 1;
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, p));
}

// Of a row of TUNED: CTAs of a head.
constexpr int64_t tiles_of(const Tuned& row) { return V / (row.warps * (32 / row.lanes) * row.rows * row.passes); }

template <typename Call, bool CONV, size_t I>
static void launch_layer_decode_row(const Call& p, int64_t heads, int64_t group, int device, cudaStream_t stream) {
  constexpr Tuned t = TUNED[I];
  launch_layer_decode<Call, CONV, t.lanes, t.rows, t.passes, t.warps, t.load, t.store, t.resident>(p, heads, group, device, stream);
}

template <typename Call, bool CONV, size_t... I>
static void launch_layer_decode_row(size_t row, const Call& p, int64_t heads, int64_t group, int device, cudaStream_t stream,
                                    std::index_sequence<I...>) {
  (void)((I == row && (launch_layer_decode_row<Call, CONV, I>(p, heads, group, device, stream), true)) || ...);
  // many heads for one of q, and constants with many CTAs for each of them
  if (row == sizeof...(I)) launch_layer_decode<Call, CONV, 16, 4, 2, 8, LOAD_FIRST, STORE_PLAIN, 1>(p, heads, group, device, stream);
}

// group: value heads of a query/key head that a cluster has; 1 without CONV.
template <typename T, bool CONV>
void launch_layer_decode(const LayerDecode<PlainPool<T>>& p, int64_t heads, int64_t group, int device, cudaStream_t stream) {
  const int most = most_ctas(device), here = sms(device);
  if (most == 0) TVM_FFI_THROW(RuntimeError) << "gdn_layer needs compute capability 9.0";
  const size_t row = first_row(TUNED, here, [=](const Tuned& row) {
    return as_tuned(heads, row.sms, here) <= row.up_to && tiles_of(row) * group <= most;
  });
  constexpr std::make_index_sequence<ROWS_TUNED> rows;
  if (p.plain()) return launch_layer_decode_row<LayerDecode<PlainPool<T>>, CONV>(row, p, heads, group, device, stream, rows);
  const LayerDecode<PoolArguments<T>> any{p, p};
  launch_layer_decode_row<LayerDecode<PoolArguments<T>>, CONV>(row, any, heads, group, device, stream, rows);
}

}  // namespace gdn
