// The launch of layer_post_conv.cuh's kernel with the constants that TUNED (tuned.h, included before this file) has for this GPU and
// size.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

#include "clusters.cuh"
#include "layer_post_conv.cuh"
#include "tuned_row.cuh"

namespace gdn {

// static: a process may have several builds of this library, and each must set the attributes of its own kernels.
template <typename T, int TOKENS, int ROWS, int SPLIT, int GROUPS, int LOAD, int STORE, int RESIDENT>
static void launch_layer(const LayerArguments& p, int64_t heads, int device, cudaStream_t stream) {
  using S = Shape<T, TOKENS, true, ROWS, SPLIT, GROUPS>;
  constexpr auto kernel = gdn_layer_post_conv<T, TOKENS, ROWS, SPLIT, GROUPS, LOAD, STORE, RESIDENT>;
  constexpr int BYTES = sizeof(LayerMemory<T, TOKENS, ROWS, SPLIT, GROUPS>);
  // more than 48 KiB has to be requested; once for each of the first 64 devices is enough
  static std::array<std::atomic<bool>, 64> asked{};
  const bool kept = device >= 0 && device < 64;
  if (BYTES > 48 << 10 && !(kept && asked[device].load(std::memory_order_relaxed))) {
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    if (kept) asked[device].store(true, std::memory_order_relaxed);
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = S::TILES, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(heads * S::TILES)), config.blockDim = dim3(S::THREADS);
  config.dynamicSmemBytes = BYTES, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = S::TILES > 1;
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, p));
}

template <typename T, int TOKENS, size_t I>
void launch_layer_row(const LayerArguments& p, int64_t heads, int device, cudaStream_t stream) {
  constexpr Tuned t = TUNED[I];
  // As in mtp_launch.cuh. With all rows in a CTA each warp would have too many.
  constexpr int ROWS = TOKENS == 4 ? t.rows : 16, SPLIT = TOKENS == 4 || t.split > 2 ? t.split : 2;
  constexpr int GROUPS = t.groups * t.rows > ROWS ? t.groups * t.rows / ROWS : 1;
  constexpr int RESIDENT = TOKENS == 4 ? t.resident : 1;
  launch_layer<T, TOKENS, ROWS, SPLIT, GROUPS, t.load, t.store, RESIDENT>(p, heads, device, stream);
}

template <typename T, int TOKENS, size_t... I>
void launch_layer_row(size_t row, const LayerArguments& p, int64_t heads, int device, cudaStream_t stream, std::index_sequence<I...>) {
  (void)((I == row && (launch_layer_row<T, TOKENS, I>(p, heads, device, stream), true)) || ...);
}

template <typename T, int TOKENS>
void launch_layer(const LayerArguments& p, int64_t heads, int device, cudaStream_t stream) {
  if (most_ctas(device) == 0) return launch_layer<T, TOKENS, 16, 2, 8, LOAD_FIRST, STORE_PLAIN, 1>(p, heads, device, stream);
  const size_t row = chosen(TUNED, sms(device), heads);
  launch_layer_row<T, TOKENS>(row, p, heads, device, stream, std::make_index_sequence<ROWS_TUNED>{});
}

// heads: B * HV; each has CTAs of its own.
template <typename T>
void launch_layer(const LayerArguments& p, int64_t heads, int device, cudaStream_t stream) {
  if (p.tokens <= 4) launch_layer<T, 4>(p, heads, device, stream);
  else launch_layer<T, 8>(p, heads, device, stream);
}

}  // namespace gdn
