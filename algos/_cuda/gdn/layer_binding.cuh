// The binding of layer_post_conv.cuh's kernel: checks the arguments, and launches on the current stream. No allocation, no
// synchronisation.
#pragma once

#include "clusters.cuh"
#include "layer_decode_calls.cuh"
#include "layer_post_conv.cuh"
#include "mtp_binding.cuh"

namespace gdn {

// In layer_launch.cuh, whose instances have a file of their own for each T, so that they compile side by side.
template <typename T>
void launch_layer(const LayerArguments& p, int64_t heads, int device, cudaStream_t stream);

// A call with one token for each row as layer_decode.cuh's kernel has it. Throws ValueError if a stride is too long.
template <typename T>
LayerDecode<PlainPool<T>> one_token(const LayerArguments& p, const MtpCall& call) {
  LayerDecode<PlainPool<T>> x{};
  x.slots = p.slots, x.slots_step = p.slots_step, x.slots_wide = p.slot_shift == 3;
  x.first_slot = p.first_slot, x.slots_end = std::max(p.slots_end, p.first_slot);
  x.pool = reinterpret_cast<const T*>(p.pool), x.slot_stride = p.slot_stride, x.head_bytes = p.head_bytes;
  x.HV = p.HV, x.H = static_cast<uint32_t>(call.H), x.by_HV = p.by_HV, x.by_group = p.by_group;
  x.qkv = p.q, x.qkv_stride = p.q_batch;  // k and v follow in the row
  x.a = p.a, x.a_stride = p.a_batch, x.b = p.b, x.b_stride = p.b_batch;
  x.A_log = p.A_log, x.dt_bias = p.dt_bias, x.dt_bias_half = p.dt_bias_half;
  x.scale = p.scale, x.epsilon = p.epsilon, x.output = p.output;
  x.accepted = p.accepted, x.accepted_shift = static_cast<uint8_t>(p.accepted_shift);
  x.gate = p.z, x.gate_stride = p.z_batch, x.norm_weight = p.norm_weight, x.weight_bf16 = p.weight_bf16;
  x.norm_epsilon = p.norm_epsilon, x.sigmoid = p.sigmoid;
  return x;
}

// Whether layer_decode.cuh's kernel takes a call: there are clusters, a token for each row, whose length nobody has to read, the norm
// of q and k, and states at multiples of 32 bytes.
inline bool is_one_token(const LayerArguments& p, const MtpCall& call) {
  const int64_t bytes = call.of_state.bits / 8;
  const bool aligned = reinterpret_cast<uintptr_t>(p.pool) % 32 == 0 && p.slot_stride * bytes % 32 == 0 && p.head_bytes % 32 == 0;
  return call.T == 1 && !call.lengths && p.epsilon >= 0 && aligned && most_ctas(call.device.device_id) > 0;
}

// What follows the convolution of a decode layer, for up to 8 tokens of each sequence: mtp_verify in mode 2 with the norm of q and k, whose
// outputs o get an RMSNorm and a gate: o / sqrt(mean(o^2) + norm_epsilon) norm_weight silu(z), in float, of o rounded to bfloat16.
//
// mixed_qkv [B, T, 2 H 128 + HV 128] or [total, ..] bf16: q of all heads, k, then v; a, b [.., HV] bf16; A_log [HV] f32, dt_bias [HV]
// f32 or bf16; pool, state_indices, num_accepted_tokens, cu_seqlens and scale as in mtp_verify; z [.., HV, 128] bf16; tokens of these
// may lie apart. norm_weight [128] f32 or bf16. sigmoid: 1 for a gate of sigmoid(z). Writes output [.., HV, 128] bf16, dense: 0 of
// padding; and the pool's slots.
// Throws ValueError if an argument is different.
inline void layer_post_conv(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
                            ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
                            ffi::Optional<ffi::TensorView> num_accepted_tokens, ffi::Optional<ffi::TensorView> cu_seqlens,
                            ffi::TensorView z, ffi::TensorView norm_weight, ffi::Optional<double> scale, ffi::TensorView output,
                            double norm_epsilon, int64_t sigmoid, int64_t first_slot, double epsilon) {
  const Packed<K> x(mixed_qkv, pool, ALIGNMENT);
  LayerArguments p{};
  const MtpCall call = take_mtp<true>(p, x.q, x.k, x.v, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens,
                                      cu_seqlens, scale, output, {}, {}, SLOTS, first_slot, epsilon);
  if (call.k_first) TVM_FFI_THROW(ValueError) << "pool: expected k-last states";
  if (call.half_tokens) TVM_FFI_THROW(ValueError) << "mixed_qkv: expected bfloat16, got float16";
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1};
  p.z = call.taken(call.axes == 1 ? flat(z, 3) : z, "z", bf16, call.HV, true, 2, &p.z_batch, &p.z_token);
  p.weight_bf16 = norm_weight.dtype() == bf16;
  p.norm_weight = data<const char>(norm_weight, "norm_weight", p.weight_bf16 ? bf16 : f32, {V}, call.device);
  if (!(norm_epsilon >= 0)) TVM_FFI_THROW(ValueError) << "norm_epsilon: expected 0 or more, got " << norm_epsilon;
  p.norm_epsilon = under_root(norm_epsilon), p.sigmoid = sigmoid != 0;
  if (call.empty()) return;
  const int device = call.device.device_id;
  const CurrentDevice current(device);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(call.device.device_type, device));
  const int64_t heads = call.B * call.HV;
  if (is_one_token(p, call)) {
    if (call.of_state == f32) launch_one_token(one_token<float>(p, call), heads, device, stream);
    else launch_one_token(one_token<__nv_bfloat16>(p, call), heads, device, stream);
    return;
  }
  if (call.of_state == f32) launch_layer<float>(p, heads, device, stream);
  else launch_layer<__nv_bfloat16>(p, heads, device, stream);
}

// The op's call: in place, silu, 1e-6 under both roots, slots 0 and below are padding.
inline void run_layer(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log, ffi::TensorView dt_bias,
                      ffi::TensorView pool, ffi::TensorView state_indices, ffi::TensorView num_accepted_tokens,
                      ffi::Optional<double> scale, ffi::TensorView z, ffi::TensorView norm_weight, ffi::TensorView output,
                      ffi::TensorView new_pool) {
  if (new_pool.data_ptr() != pool.data_ptr()) TVM_FFI_THROW(ValueError) << "new_pool: expected pool itself, in place";
  layer_post_conv(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, {}, z, norm_weight, scale, output, 1e-6,
                  0, 1, 1e-6);
}

}  // namespace gdn
