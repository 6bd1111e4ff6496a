// GDN decode by slots of a pool: cuda-v5's kernel (decode.cuh) on packed rows, in place. The binding is in pool_binding.cuh.

#include "tuned.h"

#include "pool_binding.cuh"

namespace ffi = tvm::ffi;

namespace {

void run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log, ffi::TensorView dt_bias,
         ffi::TensorView pool, ffi::TensorView state_indices, ffi::Optional<double> scale, ffi::TensorView output,
         ffi::TensorView new_pool) {
  if (new_pool.data_ptr() != pool.data_ptr()) TVM_FFI_THROW(ValueError) << "new_pool: expected pool itself, in place";
  gdn::packed_decode<float>(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, output, new_pool, {}, {}, 1,
                            gdn::NORM_EPSILON);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
// what gdn_cli.serving calls, by the pool's type
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_decode, gdn::packed_decode<float>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_decode_bf16, gdn::packed_decode<__nv_bfloat16>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_decode_f16, gdn::packed_decode<__half>);
