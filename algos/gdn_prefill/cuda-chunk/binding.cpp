// The binding: checks the arguments, and calls dispatch.cu. No CUDA here: see call.h.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "call.h"
#include "tensor.cuh"

namespace gdn {

// q, k [num_tokens, H, 128] bf16; v [num_tokens, HV, 128] bf16; state [N, HV, 128, 128] f32; A_log, dt_bias [HV] f32; a, b
// [num_tokens, HV] bf16; cu_seqlens [N + 1] i64, from 0 on, never falling, num_tokens at the end; scale None or 0: 1/sqrt(128).
// Writes output [num_tokens, HV, 128] bf16 and new_state like state, which may be state itself. HV a multiple of H.
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::TensorView cu_seqlens,
         ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView new_state) {
  if (q.ndim() != 3 || v.ndim() != 3) TVM_FFI_THROW(ValueError) << "q and v: expected 3 dimensions [num_tokens, heads, 128]";
  if (cu_seqlens.ndim() != 1 || cu_seqlens.size(0) < 1) TVM_FFI_THROW(ValueError) << "cu_seqlens: expected [N + 1]";
  const int64_t num_tokens = q.size(0), H = q.size(1), HV = v.size(1), N = cu_seqlens.size(0) - 1;
  if (H < 1 || HV < 1 || HV % H) TVM_FFI_THROW(ValueError) << "HV = " << HV << " is not a multiple of H = " << H;
  const DLDevice device = state.device();
  if (device.device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "state: expected on a CUDA device";
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1}, i64{kDLInt, 64, 1};
  using bf = __nv_bfloat16;
  const double s = scale.value_or(0.0);
  const Call call = {
      data<const bf>(q, "q", bf16, {num_tokens, H, HEAD_DIM}, device, ALIGNMENT),
      data<const bf>(k, "k", bf16, {num_tokens, H, HEAD_DIM}, device, ALIGNMENT),
      data<const bf>(v, "v", bf16, {num_tokens, HV, HEAD_DIM}, device, ALIGNMENT),
      data<const float>(state, "state", f32, {N, HV, HEAD_DIM, HEAD_DIM}, device, ALIGNMENT),
      data<const float>(A_log, "A_log", f32, {HV}, device),
      data<const bf>(a, "a", bf16, {num_tokens, HV}, device),
      data<const float>(dt_bias, "dt_bias", f32, {HV}, device),
      data<const bf>(b, "b", bf16, {num_tokens, HV}, device),
      data<const int64_t>(cu_seqlens, "cu_seqlens", i64, {N + 1}, device),
      data<bf>(output, "output", bf16, {num_tokens, HV, HEAD_DIM}, device, ALIGNMENT),
      data<float>(new_state, "new_state", f32, {N, HV, HEAD_DIM, HEAD_DIM}, device, ALIGNMENT),
      static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(HEAD_DIM)) : s),
      static_cast<int>(H),
      static_cast<int>(HV),
      static_cast<int>(N),
      num_tokens,
  };
  if (N == 0) return;
  if (N > 32767 || HV > 65535) TVM_FFI_THROW(ValueError) << "N = " << N << ", HV = " << HV << ": expected at most 32767 and 65535";
  if (N * HV >= int64_t{1} << 25) TVM_FFI_THROW(ValueError) << "N * HV = " << N * HV << ": expected less than 2^25";
  if (num_tokens >= int64_t{1} << 31) TVM_FFI_THROW(ValueError) << num_tokens << " tokens: expected less than 2^31";

  // torch's caching allocator if the caller is torch: no synchronisation, and freed as soon as the launches are queued
  std::vector<ffi::Tensor> buffers;
  const Allocate allocate = [&](int64_t bytes) {
    buffers.push_back(ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {bytes}, DLDataType{kDLUInt, 8, 1}, device));
    return buffers.back().data_ptr();
  };
  prefill(call, allocate, device.device_id, TVMFFIEnvGetStream(device.device_type, device.device_id));
}

// Called by gdn after the build (Kernel.fallback).
std::string told_fallback() { return fallback(); }

}  // namespace gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fallback, gdn::told_fallback);
