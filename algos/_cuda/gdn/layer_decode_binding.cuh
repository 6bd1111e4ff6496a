// The binding of layer_decode.cuh's kernel: checks the arguments, and launches on the current stream. No allocation, no
// synchronisation.
#pragma once

#include <optional>

#include "layer_decode_calls.cuh"
#include "pool_binding.cuh"
#include "transposed.cuh"

namespace gdn {

// Two channels of a pool of convolution states [slots, channels, 3], as LayerDecode has them. Throws ValueError for another layout.
template <typename Call>
void take_conv_state(Call& p, const ffi::TensorView& t, int64_t slots, int64_t channels, DLDevice device) {
  const DLDataType bf16{kDLBfloat, 16, 1};
  int64_t strides[3];
  p.conv_state = strided<__nv_bfloat16, 3>(t, "conv_state", bf16, {slots, channels, TAPS - 1}, device, 2, strides);
  const int64_t channel = strides[1], tap = strides[2];
  const bool words = reinterpret_cast<uintptr_t>(p.conv_state) % 4 == 0 && strides[0] % 2 == 0;
  p.taps_inner = tap == 1 && channel == TAPS - 1;
  if (!words || !(p.taps_inner || (channel == 1 && tap % 2 == 0 && tap >= channels && tap < int64_t{1} << 28))) {
    TVM_FFI_THROW(ValueError) << "conv_state: expected slots that are dense [channels, 3], or [3, channels] transposed, aligned to 4 "
                              << "bytes, got strides " << t.strides();
  }
  p.conv_slot_stride = strides[0];
  p.pair_bytes = p.taps_inner ? 12 : 4, p.word_bytes = p.taps_inner ? 4 : static_cast<uint32_t>(2 * tap);
}

// Outputs of a byte as take_packed has outputs, of which it takes the address: a tensor of bfloat16. Throws ValueError if they are not
// [B, HV, 128] uint8.
struct AsBf16 {
  int64_t shape[3], strides[3];
  DLTensor tensor;

  AsBf16(const ffi::TensorView& bytes, int64_t B, int64_t HV, DLDevice device)
      : shape{B, HV, V}, strides{HV * V, V, 1},
        tensor{data<char>(bytes, "output", {kDLUInt, 8, 1}, {B, HV, V}, device, 2), device, 3, {kDLBfloat, 16, 1}, shape, strides, 0} {}
  AsBf16(const AsBf16&) = delete;  // the tensor points into it
};

// One token of a decode layer: the causal convolution of mixed_qkv with SiLU, packed_decode's step with the norm of q and k, and an
// RMSNorm and a gate: o / sqrt(mean(o^2) + norm_epsilon) norm_weight silu(z), in float, of o rounded to bfloat16.
//
// mixed_qkv [B, C], C = 2 H 128 + HV 128, bf16: q of all heads, k, then v, before the convolution; a, b, A_log, dt_bias, pool,
// state_indices, scale, first_slot and epsilon as in packed_decode, bf16 and gates that are not given; pool T; HV at most 8 H.
// conv_weight [C, 4] bf16, the token's own tap last; conv_bias [C] bf16, or none; conv_state [slots, C, 3] bf16, the oldest token
// first: as many slots as pool, of any stride, each dense or dense transposed. z [B, HV, 128] bf16, rows may lie apart. norm_weight [128]
// f32 or bf16. sigmoid: 1 for a gate of sigmoid(z). Writes output [B, HV, 128] bf16, 0 of padding, and both pools' slots. With
// output_scale [B, HV] f32, of any strides, output is [B, HV, 128] bytes, e4m3, and y is these times output_scale: max |y| / 448 of a head.
// Throws ValueError if an argument is different.
template <typename T>
void layer_decode(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log, ffi::TensorView dt_bias,
                  ffi::TensorView pool, ffi::TensorView state_indices, ffi::Optional<double> scale, ffi::TensorView conv_weight,
                  ffi::Optional<ffi::TensorView> conv_bias, ffi::TensorView conv_state, ffi::TensorView z,
                  ffi::TensorView norm_weight, ffi::TensorView output, ffi::Optional<ffi::TensorView> output_scale,
                  double norm_epsilon, int64_t sigmoid, int64_t first_slot, double epsilon) {
  GivenGates<PlainPool<T>> packed{};
  std::optional<AsBf16> bytes;
  if (output_scale) {
    if (pool.ndim() != 4) TVM_FFI_THROW(ValueError) << "pool: expected [slots, HV, 128, 128], got " << pool.shape();
    bytes.emplace(output, mixed_qkv.size(0), pool.size(1), pool.device());
    output = ffi::TensorView(&bytes->tensor);
  }
  const PackedCall call = take_packed<T>(packed, mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, output, pool, {}, {},
                                         first_slot, epsilon);
  const int64_t B = call.B, HV = call.HV, channels = mixed_qkv.size(1);
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1};
  if (call.half) TVM_FFI_THROW(ValueError) << "mixed_qkv: expected bfloat16, got float16";
  if (call.k_first) TVM_FFI_THROW(ValueError) << "pool: expected states [V, K], got [K, V]";
  if (HV > 8 * call.H) TVM_FFI_THROW(ValueError) << "pool: expected at most 8 heads for one of q, got " << HV << " for " << call.H;
  LayerDecode<PlainPool<T>> p{packed, {}};
  p.conv_weight = data<const __nv_bfloat16>(conv_weight, "conv_weight", bf16, {channels, TAPS}, call.device, ALIGNMENT);
  if (conv_bias) p.conv_bias = data<const __nv_bfloat16>(conv_bias.value(), "conv_bias", bf16, {channels}, call.device, 4);
  take_conv_state(p, conv_state, pool.size(0), channels, call.device);
  p.gate = strided<const __nv_bfloat16>(z, "z", bf16, {B, HV, V}, call.device, 2, &p.gate_stride);
  p.weight_bf16 = norm_weight.dtype() == bf16;
  p.norm_weight = data<const char>(norm_weight, "norm_weight", p.weight_bf16 ? bf16 : f32, {V}, call.device);
  if (!(norm_epsilon >= 0)) TVM_FFI_THROW(ValueError) << "norm_epsilon: expected 0 or more, got " << norm_epsilon;
  if (!(epsilon >= 0)) TVM_FFI_THROW(ValueError) << "epsilon: expected 0 or more, got " << epsilon;
  HeadScales scales{};
  if (output_scale) {
    int64_t strides[2];
    scales.output_scale = strided<float, 2>(output_scale.value(), "output_scale", f32, {B, HV}, call.device, 4, strides);
    scales.scale_row = strides[0], scales.scale_head = strides[1];
  }
  p.norm_epsilon = under_root(norm_epsilon), p.sigmoid = sigmoid != 0;
  if (B == 0) return;
  // the kernel counts rows in 32 bits; 2^25 heads would be terabytes of state
  if (B * HV >= int64_t{1} << 25) TVM_FFI_THROW(ValueError) << "B * HV = " << B * HV << ": expected less than 2^25";
  const int device = call.device.device_id;
  const CurrentDevice current(device);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(call.device.device_type, device));
  launch_layer_decode<T>(p, scales, B * HV, HV / call.H, device, stream);
}

// The op's call: in place, silu, 1e-6 under both roots, slots 0 and below are padding; conv_state [slots, 3, C].
template <typename T>
void run_layer_decode(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log, ffi::TensorView dt_bias,
                      ffi::TensorView pool, ffi::TensorView state_indices, ffi::Optional<double> scale, ffi::TensorView conv_weight,
                      ffi::TensorView conv_state, ffi::TensorView z, ffi::TensorView norm_weight, ffi::TensorView output,
                      ffi::TensorView new_pool, ffi::TensorView new_conv_state) {
  if (new_pool.data_ptr() != pool.data_ptr()) TVM_FFI_THROW(ValueError) << "new_pool: expected pool itself, in place";
  if (new_conv_state.data_ptr() != conv_state.data_ptr())
    TVM_FFI_THROW(ValueError) << "new_conv_state: expected conv_state itself, in place";
  if (conv_state.ndim() != 3) TVM_FFI_THROW(ValueError) << "conv_state: expected [slots, 3, channels], got " << conv_state.shape();
  const Transposed state(conv_state);
  layer_decode<T>(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, conv_weight, {}, ffi::TensorView(&state.tensor), z,
                  norm_weight, output, {}, NORM_EPSILON, 0, 1, NORM_EPSILON);
}

}  // namespace gdn
