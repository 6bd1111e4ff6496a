// GDN decode: eight warps per CTA, one row of the state per warp, one DRAM round trip that hides everything else.
//
//   g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)        one pair per (batch, value head)
//   S = g S;  d = beta (v - S k);  S = S + d k^T;  o = scale * S q          S [V, K], k-last, K = V = 128
//
// Changed from cuda-v1:
//   - one row per warp, not eight: eight times the warps in flight, so small batches reach all SMs; few registers.
//   - all loads are issued before any wait, the state's past L1. The grid has a dimension for each index: with a
//     flat grid, ptxas put the integer divisions, some 60 instructions, before the state's load.
//   - both dots are taken on the *old* state, x = S k and y = S q, and they share their round of shuffles with z = k.q;
//     the rest is algebra:
//         d = beta (v - g x),   o = scale (g y + d z),   S' = g S + d k^T
//     The gates (exp, log1p) are needed only after the shuffles and overlap with them; no second reduction waits for S'.
//
// Grid: x = value head within its group * 16 + tile of 8 rows, y = query/key head, z = batch.
// CTA: 256 threads, warp w has row w of the tile.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464); taking both dots on the old state is described by
// the SyFI contest entry. Written here.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "device.cuh"
#include "tensor.cuh"

namespace ffi = tvm::ffi;
using gdn::data;

namespace {

constexpr int K = 128, V = 128;
constexpr int WARPS = 8;        // rows per CTA: see algo.toml
constexpr int TILES = V / WARPS;

// no_allocate: these bytes are not read again; L1 is for q, k and the gates. Not .nc: new_state may be state itself,
// since each lane reads only elements that it later writes.
__device__ float4 load_state(const float4* p) {
  float4 x;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p));
  return x;
}

__device__ float4 load_bf16x4(const __nv_bfloat16* p) {
  const uint2 u = __ldg(reinterpret_cast<const uint2*>(p));
  return {__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u),  // bf16 is the upper half of an f32
          __uint_as_float(u.y << 16), __uint_as_float(u.y & 0xffff0000u)};
}

__device__ float dot(float4 x, float4 y) { return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w; }

__device__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }  // does not overflow for large |x|

__global__ void __launch_bounds__(WARPS * 32, 8)  // 8 CTAs per SM: at most 32 registers
gdn_decode_v4(const __nv_bfloat16* __restrict__ q, const __nv_bfloat16* __restrict__ k,
              const __nv_bfloat16* __restrict__ v, const float* state, const float* __restrict__ A_log,
              const __nv_bfloat16* __restrict__ a, const float* __restrict__ dt_bias,
              const __nv_bfloat16* __restrict__ b, float scale, __nv_bfloat16* __restrict__ output, float* new_state) {
  const int lane = threadIdx.x % 32;
  const unsigned i_h = blockIdx.z * gridDim.y + blockIdx.y;                  // batch * H + query/key head
  const int64_t tile = static_cast<int64_t>(i_h) * gridDim.x + blockIdx.x;   // of all B * HV * 16 tiles
  const int64_t row = tile * WARPS + threadIdx.x / 32;                       // of all B * HV * V rows
  const int64_t at = row * (K / 4) + lane;
  float4 s = load_state(reinterpret_cast<const float4*>(state) + at);        // [K] over the warp

  const int64_t i_bh = tile / TILES;                                         // batch * HV + value head
  const unsigned i_hv = (blockIdx.y * gridDim.x + blockIdx.x) / TILES;
  const float b_a = __bfloat162float(a[i_bh]), b_dt = dt_bias[i_hv], b_A = A_log[i_hv], b_b = __bfloat162float(b[i_bh]);
  const float4 k4 = load_bf16x4(k + static_cast<int64_t>(i_h) * K + lane * 4);
  const float4 q4 = load_bf16x4(q + static_cast<int64_t>(i_h) * K + lane * 4);
  const float b_v = __bfloat162float(v[row]);

  const float g = expf(-expf(b_A) * softplus(b_a + b_dt));
  const float beta = __fdividef(1.f, 1.f + expf(-b_b));                      // 0 where expf overflows, as it should be
  float x = dot(s, k4), y = dot(s, q4), z = dot(k4, q4);
#pragma unroll
  for (int m = 16; m > 0; m /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, m);
    y += __shfl_xor_sync(0xffffffffu, y, m);
    z += __shfl_xor_sync(0xffffffffu, z, m);
  }
  const float d = beta * (b_v - g * x);
  s.x = g * s.x + d * k4.x, s.y = g * s.y + d * k4.y, s.z = g * s.z + d * k4.z, s.w = g * s.w + d * k4.w;
  reinterpret_cast<float4*>(new_state)[at] = s;
  if (lane == 0) output[row] = __float2bfloat16(scale * (g * y + d * z));
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
  const double s = scale.value_or(0.0);
  const float f_scale = static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K)) : s);
  if (H > 65535) TVM_FFI_THROW(ValueError) << "H = " << H << ": expected at most 65535";

  const gdn::CurrentDevice current(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  for (int64_t i = 0; i < B; i += 65535) {  // one launch, unless B is more than the grid's z allows
    const dim3 grid(static_cast<unsigned>(HV / H * TILES), static_cast<unsigned>(H),
                    static_cast<unsigned>(std::min<int64_t>(B - i, 65535)));
    gdn_decode_v4<<<grid, WARPS * 32, 0, stream>>>(
        p_q + i * H * K, p_k + i * H * K, p_v + i * HV * V, p_s + i * HV * V * K, p_A, p_a + i * HV, p_t, p_b + i * HV,
        f_scale, p_o + i * HV * V, p_n + i * HV * V * K);
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
