// The binding of cuda-v5's kernel: checks the arguments, takes the constants for this GPU and size from TUNED
// (tuned.h, included before this file), and launches on the current stream. No allocation, no synchronisation.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "tuned_row.cuh"
#include "decode.cuh"
#include "device.cuh"
#include "tensor.cuh"

namespace gdn {

template <typename Call, size_t I>
void launch(const Call& p, int64_t heads, cudaStream_t stream) {
  constexpr Tuned t = TUNED[I];
  constexpr int TILES = V / (t.warps * (32 / t.lanes) * t.rows * t.passes);
  constexpr auto kernel = gdn_decode_v5<Call, t.lanes, t.rows, t.passes, t.warps, t.load, t.store, t.resident>;
  kernel<<<static_cast<uint32_t>(heads * TILES), t.warps * 32, 0, stream>>>(p);
}

template <typename Call, size_t... I>
void launch(size_t row, const Call& p, int64_t heads, cudaStream_t stream, std::index_sequence<I...>) {
  (void)((I == row && (launch<Call, I>(p, heads, stream), true)) || ...);
}

// Kernels count rows in 32 bits; 2^25 heads would be terabytes of state.
inline void check_heads(int64_t heads) {
  if (heads >= int64_t{1} << 25) TVM_FFI_THROW(ValueError) << "B * HV = " << heads << ": expected less than 2^25";
}

// The row of TUNED for B * HV heads on this GPU, launched on the current stream.
template <typename Call>
void launch(const Call& p, int64_t heads, DLDevice device) {
  check_heads(heads);
  const CurrentDevice current(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  const size_t row = chosen(TUNED, sms(device.device_id), heads);
  launch<Call>(row, p, heads, stream, std::make_index_sequence<ROWS_TUNED>{});
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// q, k [B,1,H,128] bf16; v [B,1,HV,128] bf16; state [B,HV,128,128] of T; A_log, dt_bias [HV] f32; a, b [B,1,HV] bf16;
// scale None or 0: 1/sqrt(128). Writes output [B,1,HV,128] bf16 and new_state like state, which may be state itself.
// Any B >= 0 and H >= 1, HV a multiple of H.
template <typename T>
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView new_state) {
  if (q.ndim() != 4 || v.ndim() != 4) TVM_FFI_THROW(ValueError) << "q and v: expected 4 dimensions [B, 1, heads, 128]";
  const int64_t B = q.size(0), H = q.size(2), HV = v.size(2);
  if (H < 1 || HV < 1 || HV % H) TVM_FFI_THROW(ValueError) << "HV = " << HV << " is not a multiple of H = " << H;
  const DLDevice device = state.device();
  if (device.device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "state: expected on a CUDA device";
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1};
  const DLDataType of_state = sizeof(T) == 2 ? bf16 : f32;
  using bf = __nv_bfloat16;
  const double s = scale.value_or(0.0);
  const Arguments<T> p = {
      data<const T>(state, "state", of_state, {B, HV, V, K}, device, 32),
      data<const bf>(k, "k", bf16, {B, 1, H, K}, device, ALIGNMENT),
      data<const bf>(q, "q", bf16, {B, 1, H, K}, device, ALIGNMENT),
      data<const bf>(v, "v", bf16, {B, 1, HV, V}, device),
      data<const bf>(a, "a", bf16, {B, 1, HV}, device),
      data<const bf>(b, "b", bf16, {B, 1, HV}, device),
      data<const float>(A_log, "A_log", f32, {HV}, device),
      data<const float>(dt_bias, "dt_bias", f32, {HV}, device),
      data<T>(new_state, "new_state", of_state, {B, HV, V, K}, device, 32),
      data<bf>(output, "output", bf16, {B, 1, HV, V}, device),
      static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K)) : s),
      static_cast<uint32_t>(HV),
      Divisor(static_cast<uint32_t>(HV)),
      Divisor(static_cast<uint32_t>(HV / H)),
  };
  if (B > 0) launch(p, B * HV, device);
}

}  // namespace gdn
