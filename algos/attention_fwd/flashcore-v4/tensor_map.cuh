// What the copy engine is told of a tensor: made on the host by the driver, for every call, in well under a microsecond.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flashcore {

// cuTensorMapEncodeTiled of the driver that runs, without linking to it; null where it has none.
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

// [heads, S, 64] f16 at `base`, in tiles of `rows` rows (at most 256), swizzled by 128 bytes; rows from S on are zeros.
// False where the driver refuses.
inline bool make_tensor_map(CUtensorMap& map, const void* base, uint32_t heads, int S, int rows) {
  const cuuint64_t sizes[] = {64, static_cast<cuuint64_t>(S), heads};
  const cuuint64_t strides[] = {128, static_cast<cuuint64_t>(S) * 128};  // bytes, from the second dimension on
  const cuuint32_t tile[] = {64, static_cast<cuuint32_t>(rows), 1}, every[] = {1, 1, 1};
  const auto encode = tensor_map_encoder();
  return encode && encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, const_cast<void*>(base), sizes, strides, tile, every,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace flashcore
