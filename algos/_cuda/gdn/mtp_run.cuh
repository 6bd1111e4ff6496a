// The entry points of gdn_mtp and gdn_mtp_packed, for pools of float32 and bfloat16: their calls of mtp_verify
// (mtp_binding.cuh).
#pragma once

#include "mtp_binding.cuh"

namespace gdn {

// Inputs as in the definition: q, k [B, T, H, 128], v [B, T, HV, 128], a, b [B, T, HV] bf16; initial_state [P, HV, 128, 128]
// f32 or bf16; A_log, dt_bias [HV] f32; initial_state_indices [B], below 0: padding; scale None or 0: 1/sqrt(128). Writes
// output [B, T, HV, 128] bf16. final_state is the pool itself, or else gets a copy of it.
inline void run_outputs(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView initial_state,
                        ffi::TensorView initial_state_indices, ffi::TensorView A_log, ffi::TensorView a, ffi::TensorView dt_bias,
                        ffi::TensorView b, ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView final_state) {
  mtp_verify<false>(q, k, v, a, b, A_log, dt_bias, initial_state, initial_state_indices, {}, {}, scale, output, {}, {},
                    OUTPUTS, 0, -1.0);
  if (final_state.data_ptr() == initial_state.data_ptr()) return;
  const int64_t P = initial_state.size(0), HV = initial_state.size(1);
  const DLDevice device = initial_state.device();
  const DLDataType of_state = initial_state.dtype();
  const char* from = data<const char>(initial_state, "initial_state", of_state, {P, HV, V, K}, device);
  char* to = data<char>(final_state, "final_state", of_state, {P, HV, V, K}, device);
  const CurrentDevice current(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaMemcpyAsync(to, from, of_state.bits / 8 * P * HV * V * K, cudaMemcpyDeviceToDevice, stream));
}

// mixed_qkv [B, T, 2 H 128 + HV 128] bf16: q of all heads, then k, then v; a, b [B, T, HV] bf16; A_log [HV] f32; dt_bias [HV]
// f32 or bf16; pool [P, HV, 128, 128] f32 or bf16; state_indices [B, T] and num_accepted_tokens [B], int32 or int64; scale
// None or 0: 1/sqrt(128). Writes output [B, T, HV, 128] bf16 and the pool's slots; new_pool is the pool.
inline void run_slots(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
                      ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
                      ffi::TensorView num_accepted_tokens, ffi::Optional<double> scale, ffi::TensorView output,
                      ffi::TensorView new_pool) {
  if (new_pool.data_ptr() != pool.data_ptr()) TVM_FFI_THROW(ValueError) << "new_pool: expected pool itself, in place";
  const Packed<K> x(mixed_qkv, pool, ALIGNMENT);
  mtp_verify<true>(x.q, x.k, x.v, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, {}, scale, output, {}, {},
                   SLOTS, 1, 1e-6);
}

}  // namespace gdn
