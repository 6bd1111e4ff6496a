// One decode step of Gated Delta Net on the CPU, as simple as it gets. Inputs and outputs are those of
// configs/gdn_decode.toml, in its order. Per sequence and value head, with the state S [V, K]:
//
//   g = exp(-exp(A_log) softplus(a + dt_bias))      beta = sigmoid(b)
//   S = g S       S = S + beta (v - S k) k^T        o = scale S q

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ffi = tvm::ffi;

namespace {

constexpr int D = 128;  // K and V

float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t{x} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint16_t to_bf16(float f) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

const uint16_t* bf16(const ffi::TensorView& t) { return static_cast<const uint16_t*>(t.data_ptr()); }
const float* f32(const ffi::TensorView& t) { return static_cast<const float*>(t.data_ptr()); }

}  // namespace

void Run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView new_state) {
  const int64_t B = q.size(0), H = q.size(2), HV = v.size(2);  // HV value heads share H query and key heads
  const double given = scale.value_or(0.0);
  const float s = given ? given : 1 / std::sqrt(double{D});
  auto* o = static_cast<uint16_t*>(output.data_ptr());
  auto* S_new = static_cast<float*>(new_state.data_ptr());

  for (int64_t i = 0; i < B * HV; ++i) {
    const int64_t hv = i % HV, i_qk = i / HV * H + hv / (HV / H);
    float q_[D], k_[D];
    for (int c = 0; c < D; ++c) {
      q_[c] = from_bf16(bf16(q)[i_qk * D + c]);
      k_[c] = from_bf16(bf16(k)[i_qk * D + c]);
    }
    const float x = from_bf16(bf16(a)[i]) + f32(dt_bias)[hv];
    const float softplus = std::fmax(x, 0.f) + std::log1p(std::exp(-std::fabs(x)));
    const float g = std::exp(-std::exp(f32(A_log)[hv]) * softplus);
    const float beta = 1 / (1 + std::exp(-from_bf16(bf16(b)[i])));

    for (int64_t row = i * D; row < (i + 1) * D; ++row) {
      const float* old = f32(state) + row * D;
      float Sk = 0, Sq = 0;
      for (int c = 0; c < D; ++c) Sk += g * old[c] * k_[c];
      const float d = beta * (from_bf16(bf16(v)[row]) - Sk);
      for (int c = 0; c < D; ++c) {
        const float now = g * old[c] + d * k_[c];
        S_new[row * D + c] = now;
        Sq += now * q_[c];
      }
      o[row] = to_bf16(s * Sq);
    }
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
