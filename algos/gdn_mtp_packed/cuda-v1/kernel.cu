// GDN verify on packed rows, the state of each token to its slot: the kernel is in mtp.cuh, its binding in mtp_binding.cuh,
// its instances in launch_*.cu.

#include "mtp_binding.cuh"

namespace ffi = tvm::ffi;

namespace {

// mixed_qkv [B, T, 2 H 128 + HV 128] bf16: q of all heads, then k, then v; a, b [B, T, HV] bf16; A_log [HV] f32; dt_bias [HV]
// f32 or bf16; pool [P, HV, 128, 128] f32 or bf16; state_indices [B, T] and num_accepted_tokens [B], int32 or int64; scale
// None or 0: 1/sqrt(128). Writes output [B, T, HV, 128] bf16 and the pool's slots; new_pool is the pool.
void run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log, ffi::TensorView dt_bias,
         ffi::TensorView pool, ffi::TensorView state_indices, ffi::TensorView num_accepted_tokens,
         ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView new_pool) {
  if (new_pool.data_ptr() != pool.data_ptr()) TVM_FFI_THROW(ValueError) << "new_pool: expected pool itself, in place";
  if (mixed_qkv.ndim() != 3 || pool.ndim() != 4) TVM_FFI_THROW(ValueError) << "expected mixed_qkv of 3 axes, pool of 4";
  const int64_t width = mixed_qkv.size(2), HV = pool.size(1), H = (width - HV * gdn::V) / (2 * gdn::K);
  if (HV < 1 || H < 1 || 2 * H * gdn::K + HV * gdn::V != width || HV % H) {
    TVM_FFI_THROW(ValueError) << "mixed_qkv: " << width << " columns are not 2 H 128 + HV 128 with HV = " << HV
                              << ", a multiple of H";
  }
  const gdn::Heads<gdn::K> q(mixed_qkv, 0, H), k(mixed_qkv, H, H), v(mixed_qkv, 2 * H, HV);
  gdn::mtp_verify<true>(q, k, v, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, {}, scale, output, {}, {},
                  gdn::SLOTS, 1, 1e-6);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mtp_verify, gdn::mtp_verify<true>);
