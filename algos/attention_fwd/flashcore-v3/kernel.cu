// Attention forward, flashcore-v3: tensor cores, probabilities in registers, swizzled tiles by cp.async.
// The kernel is in attention.cuh, its instructions in mma_f16.cuh, the binding in attention_binding.cuh.

#include "attention.cuh"
#include "attention_binding.cuh"

using flashcore::Problem;
namespace ffi = tvm::ffi;

// q, k, v: [B, H, S, 64] f16. Writes output, of the same shape.
void Run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView output) {
  flashcore::run(q, k, v, output, [](const Problem& p, uint32_t heads, cudaStream_t stream, int) {
    static_assert(flashcore::V3_SHARED <= 48 * 1024, "more needs cudaFuncSetAttribute");
    const dim3 grid((p.S + flashcore::V3_ROWS - 1) / flashcore::V3_ROWS, heads);
    flashcore::flashcore_v3<<<grid, flashcore::V3_THREADS, flashcore::V3_SHARED, stream>>>(p);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
