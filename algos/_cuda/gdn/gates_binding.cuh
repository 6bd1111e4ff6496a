// The binding of gates_kernel.cuh: one launch on the current stream.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>

#include <cstdint>

#include "device.cuh"
#include "gates_kernel.cuh"
#include "strided.cuh"

namespace gdn {

// a, b [rows, HV] bf16, f16 or f32, both the same; rows may lie apart. A_log [HV] f32; dt_bias [HV] f32 or, with those of 16 bits, like
// them. Writes log_g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), [rows, HV] f32.
inline void gates(ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log, ffi::TensorView dt_bias, ffi::TensorView log_g,
                  ffi::TensorView beta) {
  constexpr int THREADS = 128;
  const DLDataType bf16{kDLBfloat, 16, 1}, f16{kDLFloat, 16, 1}, f32{kDLFloat, 32, 1};
  const DLDevice device = log_g.device();
  if (device.device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "log_g: expected on a CUDA device";
  if (a.ndim() != 2) TVM_FFI_THROW(ValueError) << "a: expected [rows, HV], got " << a.shape();
  const int64_t rows = a.size(0), HV = a.size(1);
  if (HV < 1 || rows * HV >= int64_t{1} << 31) TVM_FFI_THROW(ValueError) << "a: expected fewer than 2^31 elements, got " << a.shape();
  const DLDataType type = a.dtype() == f16 ? f16 : a.dtype() == f32 ? f32 : bf16;
  GateArguments p{};
  p.a = strided<const char>(a, "a", type, {rows, HV}, device, type.bits / 8, &p.a_row);
  p.b = strided<const char>(b, "b", type, {rows, HV}, device, type.bits / 8, &p.b_row);
  p.A_log = data<const float>(A_log, "A_log", f32, {HV}, device);
  p.wide = type == f32, p.half_bias = !p.wide && dt_bias.dtype() == type;
  p.dt_bias = data<const char>(dt_bias, "dt_bias", p.half_bias ? type : f32, {HV}, device);
  p.log_g = data<float>(log_g, "log_g", f32, {rows, HV}, device), p.beta = data<float>(beta, "beta", f32, {rows, HV}, device);
  p.HV = static_cast<uint32_t>(HV), p.by_HV = Divisor(p.HV), p.elements = static_cast<uint32_t>(rows * HV);
  if (p.elements == 0) return;
  const CurrentDevice current(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  const uint32_t blocks = (p.elements + THREADS - 1) / THREADS;
  if (type == f16) gdn_gates<__half><<<blocks, THREADS, 0, stream>>>(p);
  else gdn_gates<__nv_bfloat16><<<blocks, THREADS, 0, stream>>>(p);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

}  // namespace gdn
