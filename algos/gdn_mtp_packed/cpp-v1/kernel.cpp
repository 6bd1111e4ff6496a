// GDN verify on the CPU as vLLM calls it, on packed rows: the binding. The code is in verify.h.

#include <tvm/ffi/function.h>

#include "verify.h"

namespace ffi = tvm::ffi;

// mixed_qkv [B, T, 2 H 128 + HV 128] bf16: q of all heads, then k, then v; a, b [B, T, HV] bf16,
// the first two axes of these with any stride; A_log [HV] f32, dt_bias [HV] f32 or bf16; pool [P,
// HV, 128, 128] f32 or bf16, slots and heads may lie apart; state_indices [B, T] and
// num_accepted_tokens [B], int32 or int64; scale None or 0: 1/sqrt(128). Writes output [B, T, HV,
// 128] bf16 and the pool's slots; new_pool is the pool.
void Run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
         ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
         ffi::TensorView num_accepted_tokens, ffi::Optional<double> scale, ffi::TensorView output,
         ffi::TensorView new_pool) {
  if (mixed_qkv.ndim() != 3 || pool.ndim() != 4) {
    TVM_FFI_THROW(ValueError) << "expected mixed_qkv of 3 axes, pool of 4";
  }
  const int64_t HV = pool.size(1), H = gdn::query_heads(mixed_qkv.size(2), HV);
  if (mixed_qkv.stride(2) != 1) {
    TVM_FFI_THROW(ValueError) << "mixed_qkv: expected rows without gaps; call .contiguous() on it";
  }
  gdn::check_in_place(pool, new_pool);
  const gdn::Heads<gdn::K> q(mixed_qkv, 0, H), k(mixed_qkv, H, H), v(mixed_qkv, 2 * H, HV);
  gdn::mtp_verify(q, k, v, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, {},
                  scale, output, {}, {}, gdn::SLOTS, 1, gdn::NORM_EPSILON);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mtp_verify, gdn::mtp_verify);
