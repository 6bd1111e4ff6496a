// The launch of flashcore-v4: takes the configuration for this GPU and size from TUNED (tuned.h, included before this file).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "flashcore.cuh"
#include "attention_binding.cuh"
#include "tuned_row.cuh"
#include "flashcore_once.cuh"
#include "tensor_map.cuh"
#include "flashcore_wgmma.cuh"

namespace flashcore {

// Properties of a device, cached for the first 64.
struct Device {
  int sms = 0;
  bool clusters = false;  // and TMA
  bool wgmma = false;     // it runs code compiled for sm_90a, not sm_90
  int shared = 0;         // bytes of shared memory that a CTA may have
};

// static: a process may have several builds of this library, and each must set the attributes of its own kernels.
static Device device(int id) {
  static std::array<std::atomic<uint64_t>, 64> known{};  // one word, so that no thread sees half of it
  const bool kept = id >= 0 && id < 64;
  const uint64_t word = kept ? known[id].load(std::memory_order_relaxed) : 0;
  Device found{static_cast<int>(word >> 40), (word >> 32 & 1) != 0, (word >> 33 & 1) != 0,
               static_cast<int>(word & 0xffffffffu)};
  if (found.sms == 0) {
    int major = 0;
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&found.sms, cudaDevAttrMultiProcessorCount, id));
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&found.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id));
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id));
    TVM_FFI_CHECK_CUDA_ERROR(ask_for_wgmma(found.wgmma));
    found.clusters = major >= 9;
    const uint64_t high = static_cast<uint64_t>(found.sms) << 8 | static_cast<uint64_t>(found.wgmma) << 1 | found.clusters;
    if (kept) known[id].store(high << 32 | static_cast<uint32_t>(found.shared), std::memory_order_relaxed);
  }
  return found;
}

// Which kernel a row of TUNED is for: its `wgmma`, as in algo.toml.
enum Path {
  MMA_SYNC = 0,     // flashcore.cuh: products by mma.sync, keys step by step; runs everywhere
  WGMMA = 1,        // flashcore_wgmma.cuh: products by wgmma, for sizes that products limit; sm_90a
  WGMMA_AHEAD = 2,  // the same, the next step's scores issued before the exponentials of this one
  AT_ONCE = 3,      // flashcore_once.cuh: products by mma.sync, all keys loaded at once; sm_90
};

// Used instead of rows of TUNED that cannot run: configurations of flashcore.cuh, which runs everywhere; the best ones in
// one run on an H200, for B, S of 1, 512, of 1, 1024 to 4, 256, and from 4, 512 on. Here `up_to` is heads * S; 5792
// and 11585 are the geometric means of the measured sizes, 4096, 8192 and 16384.
constexpr int64_t ANY = std::numeric_limits<int64_t>::max();
constexpr Tuned INSTEAD[] = {
    {"", 0, ANY, 5792, 32, 8, 1, 64, 1, 1, MMA_SYNC},
    {"", 0, ANY, 11585, 32, 4, 2, 64, 1, 1, MMA_SYNC},
    {"", 0, ANY, ANY, 64, 4, 2, 64, 1, 1, MMA_SYNC},
};

using gdn::ROWS_TUNED;
constexpr size_t ROWS_ALL = ROWS_TUNED + sizeof(INSTEAD) / sizeof(INSTEAD[0]);
using Rows = std::make_index_sequence<ROWS_ALL>;

constexpr const Tuned& row(size_t i) { return i < ROWS_TUNED ? TUNED[i] : INSTEAD[i - ROWS_TUNED]; }

constexpr Path path(size_t i) { return static_cast<Path>(row(i).wgmma); }

// The type of a row's configuration. Lazy, so that only the chosen one must compile.
template <size_t I, Path = path(I)>
struct CutFor;
template <size_t I>
struct CutFor<I, MMA_SYNC> {
  using type = Cut<row(I).rows, row(I).warps, row(I).tiles, row(I).keys, row(I).stages, row(I).splits>;
};
template <size_t I>
struct CutFor<I, WGMMA> {
  using type = WideCut<row(I).rows, row(I).warps, row(I).keys, row(I).stages, row(I).splits, false>;
};
template <size_t I>
struct CutFor<I, WGMMA_AHEAD> {
  using type = WideCut<row(I).rows, row(I).warps, row(I).keys, row(I).stages, row(I).splits, true>;
};
template <size_t I>
struct CutFor<I, AT_ONCE> {
  using type = OnceCut<row(I).rows, row(I).warps, row(I).keys, row(I).stages>;
};
template <size_t I>
using CutOf = typename CutFor<I>::type;

template <size_t I>
constexpr int shared_of(const Device& on) {
  if constexpr (path(I) == MMA_SYNC) {
    return CutOf<I>::shared(on.clusters ? CutOf<I>::SPLITS : 1);
  } else {
    return CutOf<I>::SHARED;
  }
}

// Whether a row's kernel exists and can take sequences of S: with few heads they may be longer than those tuned for.
template <size_t I>
bool possible(const Device& on, int S) {
  if constexpr (path(I) == AT_ONCE) {
    return on.clusters && S <= CutOf<I>::MOST_KEYS;
  } else {
    return path(I) == MMA_SYNC || on.wgmma;
  }
}

// The row of TUNED (tuned_row.cuh), or the next one of that GPU that can run, or one of INSTEAD; if this GPU has too little
// shared memory for it (sm_86, for example, has 99 KiB), the one that needs least.
template <size_t... I>
size_t chosen(const Device& on, int64_t heads, int S, std::index_sequence<I...>) {
  const int shared[] = {shared_of<I>(on)...};
  const bool can[] = {possible<I>(on, S)...};
  size_t at = gdn::chosen(TUNED, on.sms, S, heads);
  const auto same_gpu = [](size_t i) { return i + 1 < ROWS_TUNED && row(i + 1).sms == row(i).sms; };
  while (on.wgmma && !can[at] && same_gpu(at)) ++at;
#ifdef GDN_BATCH_INVARIANT
  heads = 8;  // the choice in INSTEAD then depends on S alone, too
#endif
  if (!can[at])
    for (at = ROWS_TUNED; heads * S > row(at).up_to;) ++at;
  if (shared[at] <= on.shared) return at;
  at = ROWS_TUNED;
  for (size_t i = 0; i < ROWS_ALL; ++i)
    if (can[i] && shared[i] < shared[at]) at = i;
  return at;
}

template <bool CAUSAL, size_t I>
static void launch(const Problem& p, uint32_t heads, cudaStream_t stream, int id) {
  using C = CutOf<I>;
  const Device on = device(id);
  const uint32_t splits = on.clusters ? C::SPLITS : 1, blocks = (p.S + C::ROWS - 1) / C::ROWS;
  const int shared = shared_of<I>(on);

  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = splits, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = CAUSAL ? dim3(splits, heads, blocks) : dim3(splits, blocks, heads);
  config.blockDim = dim3(C::THREADS);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &cluster, config.numAttrs = splits > 1 ? 1 : 0;

  static std::array<std::atomic<bool>, 64> allowed{};  // a kernel with more than 48 KiB needs an attribute, set once per device
  const bool kept = id >= 0 && id < 64;
  const auto allow = [&](auto kernel) {
    if (shared <= 48 * 1024 || (kept && allowed[id].load(std::memory_order_relaxed))) return;
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    if (kept) allowed[id].store(true, std::memory_order_relaxed);
  };
  if constexpr (path(I) != MMA_SYNC) {
    constexpr auto kernel = [] {
      if constexpr (path(I) == AT_ONCE) return flashcore_v4_once<C, CAUSAL>;
      else return flashcore_v4_wide<C, CAUSAL>;
    }();
    Maps maps;
    CUresult made = make_tensor_map(maps.q, p.q, heads, p.S, C::ROWS);
    if (made == CUDA_SUCCESS) made = make_tensor_map(maps.k, p.k, heads, p.S, C::KEYS);
    if (made == CUDA_SUCCESS) made = make_tensor_map(maps.v, p.v, heads, p.S, C::KEYS);
    if (made != CUDA_SUCCESS)
      TVM_FFI_THROW(RuntimeError) << "the driver makes no tensor map of [" << heads << ", " << p.S << ", 64] f16: CUresult " << made;
    allow(kernel);
    TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, maps, p));
  } else {
    constexpr auto kernel = flashcore_v4<C, CAUSAL>;
    allow(kernel);
    TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, p));
  }
}

template <bool CAUSAL, size_t... I>
static void launch(size_t at, const Problem& p, uint32_t heads, cudaStream_t stream, int id, std::index_sequence<I...>) {
  (void)((I == at && (launch<CAUSAL, I>(p, heads, stream, id), true)) || ...);
}

// Called by gdn after the build (Kernel.fallback): see ask_for_fallback.
static std::string fallback() {
  const char* answer = "";
  TVM_FFI_CHECK_CUDA_ERROR(ask_for_fallback(answer));
  return answer;
}

// q, k, v and output: [B, H, S, 64] f16; CAUSAL: row i sees keys 0 .. i.
template <bool CAUSAL>
void attend(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView output) {
  run(q, k, v, output, [](const Problem& p, uint32_t heads, cudaStream_t stream, int id) {
    const size_t at = chosen(device(id), heads, p.S, Rows{});
    launch<CAUSAL>(at, p, heads, stream, id, Rows{});
  });
}

}  // namespace flashcore
