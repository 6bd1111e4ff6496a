// The launch of layer_decode.cuh's kernel with the constants that a table like TUNED has for this GPU and size.
#pragma once

#include <tvm/ffi/extra/cuda/base.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "clusters.cuh"
#include "layer_decode_calls.cuh"
#include "tuned_row.cuh"

namespace gdn {

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

// Of a row of a table: CTAs of a head.
template <typename Row>
constexpr int64_t tiles_of(const Row& row) {
  return V / (row.warps * (32 / row.lanes) * row.rows * row.passes);
}

template <typename Table, typename Call, bool CONV, size_t I>
static void launch_layer_decode_row(const Call& p, int64_t heads, int64_t group, int device, cudaStream_t stream) {
  constexpr auto t = Table::rows[I];
  launch_layer_decode<Call, CONV, t.lanes, t.rows, t.passes, t.warps, t.load, t.store, t.resident>(p, heads, group, device, stream);
}

template <typename Table, typename Call, bool CONV, size_t... I>
static void launch_layer_decode_row(size_t row, const Call& p, int64_t heads, int64_t group, int device, cudaStream_t stream,
                                    std::index_sequence<I...>) {
  (void)((I == row && (launch_layer_decode_row<Table, Call, CONV, I>(p, heads, group, device, stream), true)) || ...);
  // many heads for one of q, and constants with many CTAs for each of them
  if constexpr (CONV)
    if (row == sizeof...(I)) launch_layer_decode<Call, CONV, 16, 4, 2, 8, LOAD_FIRST, STORE_PLAIN, 1>(p, heads, group, device, stream);
}

// Table: a type whose member `rows` is a table like TUNED, since a template cannot take the table itself. group: value heads of a
// query/key head that a cluster has; 1 without CONV.
template <typename Table, bool CONV, typename Call>
static void launch_tuned(const Call& p, int64_t heads, int64_t group, int device, cudaStream_t stream) {
  constexpr auto& rows = Table::rows;
  using Row = std::remove_reference_t<decltype(rows[0])>;
  const int most = most_ctas(device), here = sms(device);
  if (most == 0) TVM_FFI_THROW(RuntimeError) << "gdn_layer needs compute capability 9.0";
  const size_t row = first_row(rows, here, [=](const Row& row) {
    return as_tuned(heads, row.sms, here) <= row.up_to && tiles_of(row) * group <= most;
  });
  constexpr std::make_index_sequence<sizeof(rows) / sizeof(rows[0])> numbers;
  launch_layer_decode_row<Table, Call, CONV>(row, p, heads, group, device, stream, numbers);
}

template <typename Table, bool CONV, typename T>
static void launch_layer_decode(const LayerDecode<PlainPool<T>>& p, int64_t heads, int64_t group, int device, cudaStream_t stream) {
  if (p.plain()) return launch_tuned<Table, CONV>(p, heads, group, device, stream);
  launch_tuned<Table, CONV>(LayerDecode<PoolArguments<T>>{p, p}, heads, group, device, stream);
}

}  // namespace gdn
