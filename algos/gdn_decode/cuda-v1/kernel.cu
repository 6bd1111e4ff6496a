// GDN decode, the first CUDA rung: one warp per CTA, 8 rows of the state per warp, textbook order.
//
//   g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)        one pair per (batch, value head)
//   S = g S;  d = beta (v - S k);  S = S + d k^T;  o = scale * S q          S [V, K], k-last, K = V = 128
//
// Row i of S needs k, q and v[i], but no other rows, so a warp keeps its rows in registers: 32 lanes x float4 =
// one row of 128. The state is read once and written once; the two dot products are two rounds of warp shuffles.
//
// Grid: x = (batch * HV + value head) * 16 + tile of 8 rows.  CTA: 32 threads.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464); one warp per small V tile as in
// flash-linear-attention's recurrent kernel in Triton. Written here.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <cstdint>

#include "device.cuh"
#include "tensor.cuh"

namespace ffi = tvm::ffi;
using gdn::data;

namespace {

constexpr int K = 128, V = 128;
constexpr int ROWS = 8;         // rows per warp, so per CTA: see algo.toml
constexpr int TILES = V / ROWS;

__device__ float4 load_bf16x4(const __nv_bfloat16* p) {
  const uint2 u = *reinterpret_cast<const uint2*>(p);
  return {__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u),  // bf16 is the upper half of an f32
          __uint_as_float(u.y << 16), __uint_as_float(u.y & 0xffff0000u)};
}

__device__ float dot(float4 x, float4 y) { return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w; }

__device__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

__device__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }  // does not overflow for large |x|

__global__ void __launch_bounds__(32)
gdn_decode_v1(const __nv_bfloat16* __restrict__ q, const __nv_bfloat16* __restrict__ k,
              const __nv_bfloat16* __restrict__ v, const float* state, const float* __restrict__ A_log,
              const __nv_bfloat16* __restrict__ a, const float* __restrict__ dt_bias,
              const __nv_bfloat16* __restrict__ b, float scale, int HV, int group,
              __nv_bfloat16* __restrict__ output, float* new_state) {
  const int lane = threadIdx.x;
  const int i_bh = blockIdx.x / TILES;                        // batch * HV + value head
  const int i_h = i_bh / group;                               // batch * H + query/key head, as HV = H * group
  const int i_hv = i_bh % HV;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * ROWS;  // of all B * HV * V rows

  const float4* p_s = reinterpret_cast<const float4*>(state) + row0 * (K / 4) + lane;
  float4* p_n = reinterpret_cast<float4*>(new_state) + row0 * (K / 4) + lane;
  const float4 k4 = load_bf16x4(k + static_cast<int64_t>(i_h) * K + lane * 4);
  const float4 q4 = load_bf16x4(q + static_cast<int64_t>(i_h) * K + lane * 4);

  const float g = expf(-expf(A_log[i_hv]) * softplus(__bfloat162float(a[i_bh]) + dt_bias[i_hv]));
  const float beta = 1.f / (1.f + expf(-__bfloat162float(b[i_bh])));

  float4 s[ROWS];                                             // [ROWS, K] over the warp
#pragma unroll
  for (int r = 0; r < ROWS; ++r) s[r] = p_s[r * (K / 4)];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    s[r].x *= g, s[r].y *= g, s[r].z *= g, s[r].w *= g;       // S = g S
    const float d = beta * (__bfloat162float(v[row0 + r]) - warp_sum(dot(s[r], k4)));
    s[r].x += d * k4.x, s[r].y += d * k4.y, s[r].z += d * k4.z, s[r].w += d * k4.w;  // S = S + d k^T
    const float o = scale * warp_sum(dot(s[r], q4));
    p_n[r * (K / 4)] = s[r];
    if (lane == 0) output[row0 + r] = __float2bfloat16(o);
  }
}

}  // namespace

// q, k [B,1,H,128] bf16; v [B,1,HV,128] bf16; state [B,HV,128,128] f32; A_log, dt_bias [HV] f32; a, b [B,1,HV] bf16;
// scale None or 0: 1/sqrt(128). Writes output [B,1,HV,128] bf16 and new_state [B,HV,128,128] f32.
void Run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView new_state) {
  if (q.ndim() != 4 || v.ndim() != 4) TVM_FFI_THROW(ValueError) << "q and v: expected 4 dimensions [B, 1, heads, 128]";
  const int64_t B = q.size(0), H = q.size(2), HV = v.size(2);
  if (H < 1 || HV < 1 || HV % H) TVM_FFI_THROW(ValueError) << "HV = " << HV << " is not a multiple of H = " << H;
  const DLDevice device = state.device();
  if (device.device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "state: expected on a CUDA device";
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1};
  using bf = __nv_bfloat16;
  const auto* p_q = data<bf>(q, "q", bf16, {B, 1, H, K}, device, 8);
  const auto* p_k = data<bf>(k, "k", bf16, {B, 1, H, K}, device, 8);
  const auto* p_v = data<bf>(v, "v", bf16, {B, 1, HV, V}, device);
  const auto* p_s = data<float>(state, "state", f32, {B, HV, V, K}, device, gdn::ALIGNMENT);
  const auto* p_A = data<float>(A_log, "A_log", f32, {HV}, device);
  const auto* p_a = data<bf>(a, "a", bf16, {B, 1, HV}, device);
  const auto* p_t = data<float>(dt_bias, "dt_bias", f32, {HV}, device);
  const auto* p_b = data<bf>(b, "b", bf16, {B, 1, HV}, device);
  auto* p_o = data<bf>(output, "output", bf16, {B, 1, HV, V}, device);
  auto* p_n = data<float>(new_state, "new_state", f32, {B, HV, V, K}, device, gdn::ALIGNMENT);
  const int64_t ctas = B * HV * TILES;
  if (ctas == 0) return;
  if (ctas > INT32_MAX) TVM_FFI_THROW(ValueError) << "B * HV = " << B * HV << ": more than one launch can hold";
  const double s = scale.value_or(0.0);

  const gdn::CurrentDevice current(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  gdn_decode_v1<<<static_cast<unsigned>(ctas), 32, 0, stream>>>(
      p_q, p_k, p_v, p_s, p_A, p_a, p_t, p_b, static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K)) : s),
      static_cast<int>(HV), static_cast<int>(HV / H), p_o, p_n);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
