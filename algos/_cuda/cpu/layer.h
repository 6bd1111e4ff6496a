// What a decode layer does after its convolution, on the CPU: verify.h's tokens, then the norm and
// the gate of each head's output, in place.
#pragma once

#include "packed.cuh"
#include "verify.h"

namespace gdn {

// y = o / sqrt(mean(o^2) + epsilon) weight silu(z), or sigmoid(z); o as it was rounded.
struct Layer {
  Verify verify;
  Tokens z;
  const void* weight;
  bool half_weight, sigmoid;
  float epsilon;

  float weight_at(int64_t i) const {
    return half_weight ? from_bf16(static_cast<const uint16_t*>(weight)[i])
                       : static_cast<const float*>(weight)[i];
  }
};

// One head of one sequence.
inline void norm_head(const void* p, int64_t i) {
  const Layer& j = *static_cast<const Layer*>(p);
  const Verify& call = j.verify;
  const int64_t n = i / call.HV, i_hv = i % call.HV;
  if (call.padding(n)) return;  // zeros, whatever z is
  uint16_t* output = call.output + (call.begin(n) * call.HV + i_hv) * V;
  for (int64_t t = 0; t < call.count(n); ++t, output += call.HV * V) {
    const uint16_t* const z = call.at(j.z, n, t) + i_hv * V;
    float o[V];
    widened(output, Float::BF16, -1.f, o);
    const float norm = 1.f / std::sqrt(dot(o, o) / V + j.epsilon);
    for (int c = 0; c < V; ++c) {
      const float x = from_bf16(z[c]), gate = gdn::sigmoid(x);
      output[c] = to_bf16(o[c] * norm * j.weight_at(c) * (j.sigmoid ? gate : x * gate));
    }
  }
}

// The arguments of the CUDA rung's function (layer_binding.cuh). ValueError if they do not fit.
inline Layer take_layer(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b,
                        ffi::TensorView A_log, ffi::TensorView dt_bias, ffi::TensorView pool,
                        ffi::TensorView state_indices,
                        ffi::Optional<ffi::TensorView> num_accepted_tokens,
                        ffi::Optional<ffi::TensorView> cu_seqlens, ffi::TensorView z,
                        ffi::TensorView norm_weight, ffi::Optional<double> scale,
                        ffi::TensorView output, double norm_epsilon, int64_t sigmoid,
                        int64_t first_slot, double epsilon) {
  const Packed<K> x(mixed_qkv, pool, 2);
  Layer j{take_verify(x.q, x.k, x.v, a, b, A_log, dt_bias, pool, state_indices,
                      num_accepted_tokens, cu_seqlens, scale, output, {}, {}, SLOTS,
                      first_slot, epsilon)};
  const Verify& call = j.verify;
  if (call.half()) TVM_FFI_THROW(ValueError) << "mixed_qkv: expected bfloat16, got float16";
  const int64_t B = state_indices.size(0), T = call.T, HV = call.HV;
  if (mixed_qkv.ndim() == 2 || cu_seqlens) {
    j.z = rows_of(flat(z, 3), "z", {mixed_qkv.size(-2), HV, V});
    j.z.sequence *= T;
  } else {
    int64_t strides[2];
    j.z.data = strided<const uint16_t, 2>(z, "z", BF16, {B, T, HV, V}, CPU, 2, strides);
    j.z.sequence = strides[0], j.z.token = strides[1];
  }
  j.half_weight = norm_weight.dtype() == BF16;
  j.weight = data<const char>(norm_weight, "norm_weight", j.half_weight ? BF16 : F32, {V}, CPU);
  if (!(norm_epsilon >= 0)) {
    TVM_FFI_THROW(ValueError) << "norm_epsilon: expected 0 or more, got " << norm_epsilon;
  }
  j.epsilon = std::max(static_cast<float>(norm_epsilon), FLT_MIN), j.sigmoid = sigmoid != 0;
  return j;
}

// All tokens of B sequences, then the norms.
inline void walk_layer(Layer& j, int64_t B) {
  walk(j.verify, B);
  Pool::get().run(B * j.verify.HV, norm_head, &j);
}

}  // namespace gdn
