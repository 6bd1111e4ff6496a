// One decode step of Gated Delta Net in CUDA, as simple as it gets. Inputs and outputs are those of
// configs/gdn_decode.toml, in its order. Per sequence and value head, with the state S [V, K]:
//
//   g = exp(-exp(A_log) softplus(a + dt_bias))      beta = sigmoid(b)
//   S = g S       S = S + beta (v - S k) k^T        o = scale S q

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <cstdint>

namespace ffi = tvm::ffi;
using bf16 = __nv_bfloat16;

constexpr int D = 128;  // K and V

// Block (hv, i) has value head hv of sequence i; thread `row` has that row of its state.
__global__ void __launch_bounds__(D) decode(const bf16* q, const bf16* k, const bf16* v, const float* state,
                                            const float* A_log, const bf16* a, const float* dt_bias, const bf16* b,
                                            float scale, int group, bf16* output, float* new_state) {
  __shared__ float q_[D], k_[D], gates[2];
  const int head = blockIdx.y * gridDim.x + blockIdx.x, row = threadIdx.x;
  q_[row] = __bfloat162float(q[head / group * D + row]);  // `group` value heads share a query and a key head
  k_[row] = __bfloat162float(k[head / group * D + row]);
  if (row == 0) {
    const float x = __bfloat162float(a[head]) + dt_bias[blockIdx.x];
    const float softplus = fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)));
    gates[0] = expf(-expf(A_log[blockIdx.x]) * softplus);
    gates[1] = 1.f / (1.f + expf(-__bfloat162float(b[head])));
  }
  __syncthreads();

  const int64_t at = (static_cast<int64_t>(head) * D + row) * D;
  float Sk = 0.f, Sq = 0.f;
  for (int c = 0; c < D; ++c) Sk += gates[0] * state[at + c] * k_[c];
  const float d = gates[1] * (__bfloat162float(v[head * D + row]) - Sk);
  for (int c = 0; c < D; ++c) {
    const float now = gates[0] * state[at + c] + d * k_[c];
    new_state[at + c] = now;
    Sq += now * q_[c];
  }
  output[head * D + row] = __float2bfloat16(scale * Sq);
}

void Run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView new_state) {
  const auto half = [](const ffi::TensorView& t) { return static_cast<bf16*>(t.data_ptr()); };
  const auto full = [](const ffi::TensorView& t) { return static_cast<float*>(t.data_ptr()); };
  const int64_t B = q.size(0), H = q.size(2), HV = v.size(2);
  const double given = scale.value_or(0.0);
  const float s = given ? given : 1 / std::sqrt(double{D});
  const dim3 grid(static_cast<unsigned>(HV), static_cast<unsigned>(B));
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, q.device().device_id));
  decode<<<grid, D, 0, stream>>>(half(q), half(k), half(v), full(state), full(A_log), half(a), full(dt_bias), half(b),
                                 s, static_cast<int>(HV / H), half(output), full(new_state));
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
