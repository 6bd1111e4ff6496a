// What follows the convolution of a decode layer, on the CPU: the code is in layer.h.

#include <tvm/ffi/function.h>

#include "layer.h"

namespace gdn {

// ValueError before anything is written.
inline void layer_post_conv(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b,
                            ffi::TensorView A_log, ffi::TensorView dt_bias, ffi::TensorView pool,
                            ffi::TensorView state_indices,
                            ffi::Optional<ffi::TensorView> num_accepted_tokens,
                            ffi::Optional<ffi::TensorView> cu_seqlens, ffi::TensorView z,
                            ffi::TensorView norm_weight, ffi::Optional<double> scale,
                            ffi::TensorView output, double norm_epsilon, int64_t sigmoid,
                            int64_t first_slot, double epsilon) {
  Layer j = take_layer(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices,
                       num_accepted_tokens, cu_seqlens, z, norm_weight, scale, output,
                       norm_epsilon, sigmoid, first_slot, epsilon);
  walk_layer(j, state_indices.size(0));
}

}  // namespace gdn

namespace ffi = tvm::ffi;

// mixed_qkv [B, T, 2 H 128 + HV 128], a, b [B, T, HV], z [B, T, HV, 128], norm_weight [128] bf16;
// A_log [HV] f32, dt_bias [HV] f32 or bf16; pool [P, HV, 128, 128] f32 or bf16; state_indices [B, T]
// and num_accepted_tokens [B], int32 or int64; scale None or 0: 1/sqrt(128). Writes output [B, T,
// HV, 128] bf16 and the pool's slots; new_pool is the pool.
void Run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
         ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
         ffi::TensorView num_accepted_tokens, ffi::Optional<double> scale, ffi::TensorView z,
         ffi::TensorView norm_weight, ffi::TensorView output, ffi::TensorView new_pool) {
  gdn::check_in_place(pool, new_pool);
  gdn::layer_post_conv(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens,
                       {}, z, norm_weight, scale, output, 1e-6, 0, 1, gdn::NORM_EPSILON);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_post_conv, gdn::layer_post_conv);
