// Tensor maps, which describe a tensor to TMA: made on the host by the driver, at every call, in well under a microsecond.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "warpgroup.cuh"

namespace flashcore {

// More threads than the marker kernel below allows in a build without wgmma.
constexpr int COMPILED_WITH_WGMMA = 64;
// Never launched: its maximum number of threads tells the host whether this library was compiled with wgmma.
static __global__ void __launch_bounds__(FLASHCORE_WGMMA ? COMPILED_WITH_WGMMA : 32) flashcore_compiled_for() {}

// cuTensorMapEncodeTiled of the running driver, without linking to it; null if the driver is older than CUDA 12.
inline auto tensor_map_encoder() {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                              const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  return encode;
}

// Whether this library has kernels with wgmma for the current device.
static cudaError_t ask_for_wgmma(bool& there) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, flashcore_compiled_for);
  there = error == cudaSuccess && attributes.maxThreadsPerBlock >= COMPILED_WITH_WGMMA;
  return error;
}

// The answer of fallback() of an algo with kernels with and without wgmma, for the current device: "", or why the slower ones
// run on a GPU that has wgmma.
static cudaError_t ask_for_fallback(const char*& answer) {
  answer = "";
  int device = 0, major = 0;
  bool wgmma = false;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = ask_for_wgmma(wgmma);
  if (error == cudaSuccess && major == 9 && !wgmma) answer = "mma.sync in place of wgmma, which is not in a build for sm_90, only for sm_90a";
  return error;
}

// A tensor of N dimensions at `base`, innermost first, in boxes with the 128-byte swizzle; elements outside of it are zeros.
// `strides`: bytes, from the second dimension on. The device's context must be current (device.cuh), or the driver fails.
template <int N>
CUresult make_tensor_map(CUtensorMap& map, CUtensorMapDataType type, const void* base, const cuuint64_t (&sizes)[N],
                     const cuuint64_t (&strides)[N - 1], const cuuint32_t (&box)[N]) {
  cuuint32_t every[N];
  for (cuuint32_t& step : every) step = 1;
  const auto encode = tensor_map_encoder();
  if (!encode) return CUDA_ERROR_NOT_FOUND;
  return encode(&map, type, N, const_cast<void*>(base), sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// [heads, S, 64] f16 at `base`, in tiles of `rows` rows (at most 256); rows from S on are zeros.
inline CUresult make_tensor_map(CUtensorMap& map, const void* base, uint32_t heads, int S, int rows) {
  const cuuint64_t S_ = static_cast<cuuint64_t>(S);
  return make_tensor_map<3>(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, base, {64, S_, heads}, {128, S_ * 128},
                            {64, static_cast<cuuint32_t>(rows), 1});
}

}  // namespace flashcore
