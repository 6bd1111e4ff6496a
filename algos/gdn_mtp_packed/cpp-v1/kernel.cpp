// GDN verify on the CPU as vLLM calls it, on packed rows: the binding. The code is in verify.h.

#include <tvm/ffi/function.h>

#include "verify.h"

namespace ffi = tvm::ffi;

namespace {

// Some heads of every row of mixed_qkv, [B, T, heads, 128], in place.
struct Heads {
  int64_t shape[4], strides[4];
  DLTensor tensor;

  Heads(const ffi::TensorView& rows, int64_t first, int64_t heads)
      : shape{rows.size(0), rows.size(1), heads, gdn::K},
        strides{rows.stride(0), rows.stride(1), gdn::K, 1},
        tensor{rows.data_ptr(), rows.device(), 4, rows.dtype(), shape, strides,
               rows.byte_offset() + static_cast<uint64_t>(first * gdn::K * 2)} {}
  Heads(const Heads&) = delete;
  operator ffi::TensorView() const { return ffi::TensorView(&tensor); }
};

}  // namespace

// mixed_qkv [B, T, 2 H 128 + HV 128] bf16: q of all heads, then k, then v; a, b [B, T, HV] bf16, the first two axes of
// these with any stride; A_log, dt_bias [HV] f32; pool [P, HV, 128, 128] f32, its slots may lie apart; state_indices
// [B, T] and num_accepted_tokens [B], int32 or int64; scale None or 0: 1/sqrt(128). Writes output [B, T, HV, 128] bf16
// and the pool's slots; new_pool is the pool.
void Run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
         ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
         ffi::TensorView num_accepted_tokens, ffi::Optional<double> scale, ffi::TensorView output,
         ffi::TensorView new_pool) {
  if (mixed_qkv.ndim() != 3 || pool.ndim() != 4) TVM_FFI_THROW(ValueError) << "expected mixed_qkv of 3 axes, pool of 4";
  const int64_t width = mixed_qkv.size(2), HV = pool.size(1), H = (width - HV * gdn::V) / (2 * gdn::K);
  if (H < 1 || 2 * H * gdn::K + HV * gdn::V != width || HV % H) {
    TVM_FFI_THROW(ValueError) << "mixed_qkv: " << width << " columns are no rows of q, k and v of 128 for " << HV
                              << " value heads";
  }
  if (mixed_qkv.stride(2) != 1) TVM_FFI_THROW(ValueError) << "mixed_qkv: expected rows without gaps";
  bool same = new_pool.data_ptr() == pool.data_ptr() && new_pool.byte_offset() == pool.byte_offset() && new_pool.ndim() == 4;
  for (int i = 0; same && i < 4; ++i) same = new_pool.size(i) == pool.size(i) && new_pool.stride(i) == pool.stride(i);
  if (!same) TVM_FFI_THROW(ValueError) << "new_pool: expected the pool itself, which is updated in place";
  const Heads q(mixed_qkv, 0, H), k(mixed_qkv, H, H), v(mixed_qkv, 2 * H, HV);
  gdn::mtp_verify(q, k, v, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, {}, scale, output, {}, {},
                  gdn::SLOTS, 1, 1e-6);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mtp_verify, gdn::mtp_verify);
