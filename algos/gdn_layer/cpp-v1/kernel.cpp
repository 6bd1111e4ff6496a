// One token of a decode layer, on the CPU: the causal convolution of each row's channels with SiLU,
// rounded to bfloat16 as engines have it, then layer.h's step and norm.
//
//   c = silu(w0 s0 + w1 s1 + w2 s2 + w3 x + bias);  s0, s1, s2 = s1, s2, x
//
// Provenance: the convolution is Mamba's (arXiv 2312.00752). Written here.

#include <tvm/ffi/function.h>

#include <vector>

#include "e4m3.h"
#include "layer.h"
#include "transposed.cuh"

namespace gdn {

constexpr int64_t TAPS = 4;

struct Convolution {
  const Layer& layer;
  Tokens x;
  const uint16_t *weight, *bias;  // bias may be null
  uint16_t* state;
  int64_t slot, channel, tap;  // elements of state from one to the next
  int64_t channels;
  uint16_t* output;  // [B, channels]
};

// One row.
inline void convolve(const void* p, int64_t n) {
  const Convolution& j = *static_cast<const Convolution*>(p);
  uint16_t* const to = j.output + n * j.channels;
  if (j.layer.verify.padding(n)) {  // zeros come of it, whatever this is
    std::fill(to, to + j.channels, 0);
    return;
  }
  const uint16_t* const x = j.x.data + n * j.x.token;
  uint16_t* const state = j.state + j.layer.verify.start(n) * j.slot;
  for (int64_t i = 0; i < j.channels; ++i) {
    uint16_t* const s = state + i * j.channel;
    const uint16_t* const w = j.weight + i * TAPS;
    const uint16_t window[TAPS] = {s[0], s[j.tap], s[2 * j.tap], x[i]};
    float c = j.bias ? from_bf16(j.bias[i]) : 0.f;
    for (int t = 0; t < TAPS; ++t) c += from_bf16(w[t]) * from_bf16(window[t]);
    to[i] = to_bf16(c * sigmoid(c));
    for (int t = 0; t < TAPS - 1; ++t) s[t * j.tap] = window[t + 1];
  }
}

// Heads [V] of bfloat16 to bytes with a scale for each: max |y| / 448.
struct Quantisation {
  const uint16_t* rows;
  uint8_t* output;
  float* scale;
  int64_t HV, scale_row, scale_head;
};

inline void quantise(const void* p, int64_t i) {
  const Quantisation& j = *static_cast<const Quantisation*>(p);
  const uint16_t* const y = j.rows + i * V;
  float largest = 1e-10f;  // a head of zeros has a scale, too
  for (int c = 0; c < V; ++c) largest = std::max(largest, std::fabs(from_bf16(y[c])));
  const float scale = largest / LARGEST_E4M3;
  j.scale[i / j.HV * j.scale_row + i % j.HV * j.scale_head] = scale;
  for (int c = 0; c < V; ++c) j.output[i * V + c] = to_e4m3(from_bf16(y[c]) / scale);
}

// The arguments of the CUDA rung's function (layer_decode_binding.cuh), but for the layout of
// conv_state and for how many heads of the pool there are for one of q: any. ValueError before
// anything is written.
void layer_decode(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b,
                  ffi::TensorView A_log, ffi::TensorView dt_bias, ffi::TensorView pool,
                  ffi::TensorView state_indices, ffi::Optional<double> scale,
                  ffi::TensorView conv_weight, ffi::Optional<ffi::TensorView> conv_bias,
                  ffi::TensorView conv_state, ffi::TensorView z, ffi::TensorView norm_weight,
                  ffi::TensorView output, ffi::Optional<ffi::TensorView> output_scale,
                  double norm_epsilon, int64_t sigmoid, int64_t first_slot, double epsilon) {
  if (mixed_qkv.ndim() != 2 || state_indices.ndim() != 1 || pool.ndim() != 4) {
    TVM_FFI_THROW(ValueError) << "expected mixed_qkv of 2 axes, state_indices of 1 and pool of 4";
  }
  int64_t B = mixed_qkv.size(0), channels = mixed_qkv.size(1);
  const Tokens x = rows_of(mixed_qkv, "mixed_qkv", {B, channels});
  const Whole slots = whole(state_indices, "state_indices", {B});
  static thread_local std::vector<uint16_t> rows;  // kept from call to call
  rows.resize(static_cast<size_t>(B * channels));
  int64_t shape[2] = {B, channels}, strides[2] = {channels, 1};
  const DLTensor convolved{rows.data(), CPU, 2, BF16, shape, strides, 0};
  int64_t column[2] = {B, 1}, steps[2] = {slots.step, 1};
  const DLTensor indices{state_indices.data_ptr(), CPU, 2, state_indices.dtype(), column, steps,
                         state_indices.byte_offset()};
  const int64_t HV = pool.size(1);
  Quantisation quantised{};
  static thread_local std::vector<uint16_t> wide;
  int64_t heads[3] = {B, HV, V}, apart[3] = {HV * V, V, 1};
  DLTensor outputs{nullptr, CPU, 3, BF16, heads, apart, 0};
  if (output_scale) {
    wide.resize(static_cast<size_t>(B * HV * V));
    outputs.data = wide.data(), quantised.rows = wide.data(), quantised.HV = HV;
    quantised.output = data<uint8_t>(output, "output", {kDLUInt, 8, 1}, {B, HV, V}, CPU);
    int64_t at[2];
    const ffi::TensorView scales = output_scale.value();
    quantised.scale = strided<float, 2>(scales, "output_scale", F32, {B, HV}, CPU, 4, at);
    quantised.scale_row = at[0], quantised.scale_head = at[1];
    output = ffi::TensorView(&outputs);
  }
  Layer layer = take_layer(ffi::TensorView(&convolved), a, b, A_log, dt_bias, pool,
                           ffi::TensorView(&indices), {}, {}, z, norm_weight, scale, output,
                           norm_epsilon, sigmoid, first_slot, epsilon);
  if (!(epsilon >= 0)) TVM_FFI_THROW(ValueError) << "epsilon: expected 0 or more, got " << epsilon;
  Convolution j{layer, x};
  j.weight = data<const uint16_t>(conv_weight, "conv_weight", BF16, {channels, TAPS}, CPU);
  if (conv_bias) {
    j.bias = data<const uint16_t>(conv_bias.value(), "conv_bias", BF16, {channels}, CPU);
  }
  int64_t at[3];
  j.state = strided<uint16_t, 3>(conv_state, "conv_state", BF16, {pool.size(0), channels, TAPS - 1},
                                 CPU, 2, at);
  j.slot = at[0], j.channel = at[1], j.tap = at[2];
  j.channels = channels, j.output = rows.data();
  Pool::get().run(B, convolve, &j);
  walk_layer(layer, B);
  if (output_scale) Pool::get().run(B * HV, quantise, &quantised);
}

// The op's call: in place, silu, 1e-6 under both roots, slots 0 and below are padding; conv_state
// [P, 3, channels].
void run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
         ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
         ffi::Optional<double> scale, ffi::TensorView conv_weight, ffi::TensorView conv_state,
         ffi::TensorView z, ffi::TensorView norm_weight, ffi::TensorView output,
         ffi::TensorView new_pool, ffi::TensorView new_conv_state) {
  check_in_place(pool, new_pool);
  if (!same_tensor(conv_state, new_conv_state) || conv_state.ndim() != 3) {
    TVM_FFI_THROW(ValueError) << "new_conv_state: expected conv_state itself, [slots, 3, channels]";
  }
  const Transposed state(conv_state);
  layer_decode(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, conv_weight, {},
               ffi::TensorView(&state.tensor), z, norm_weight, output, {}, NORM_EPSILON, 0,
               1, NORM_EPSILON);
}

}  // namespace gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_decode, gdn::layer_decode);
