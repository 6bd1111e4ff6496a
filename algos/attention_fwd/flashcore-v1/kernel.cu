// Attention forward, flashcore-v1: scalar and simple, the starting point of the ladder.
// The kernel is in attention.cuh, the binding in attention_binding.cuh.

#include "attention.cuh"
#include "attention_binding.cuh"

using flashcore::Problem;
namespace ffi = tvm::ffi;

// q, k, v: [B, H, S, 64] f16. Writes output, of the same shape.
void Run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView output) {
  flashcore::run(q, k, v, output, [](const Problem& p, uint32_t heads, cudaStream_t stream, int) {
    const dim3 grid((p.S + flashcore::V1_ROWS - 1) / flashcore::V1_ROWS, heads);
    flashcore::flashcore_v1<<<grid, flashcore::V1_ROWS, 0, stream>>>(p);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
