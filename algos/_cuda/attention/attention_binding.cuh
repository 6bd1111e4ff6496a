// The binding of every flashcore rung: checks the arguments and launches on the current stream. No allocation, no
// synchronisation.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "device.cuh"
#include "problem.cuh"
#include "tensor.cuh"

namespace flashcore {

namespace ffi = tvm::ffi;

// q, k, v and output: [B, H, S, 64] f16, contiguous, on one CUDA device; any B, H and S, 0 included.
// launch(problem, heads, stream, device) is called once, or for every 65535 heads if B * H is more than a
// dimension of the grid allows.
template <typename Launch>
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView output, Launch launch) {
  if (q.ndim() != 4) TVM_FFI_THROW(ValueError) << "q: expected 4 dimensions [B, H, S, 64]";
  const int64_t B = q.size(0), H = q.size(1), S = q.size(2);
  const DLDevice device = q.device();
  if (device.device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "q: expected on a CUDA device";
  for (const auto& [t, name] : {std::pair{&k, "k"}, {&v, "v"}, {&output, "output"}}) {
    if (t->device().device_type != device.device_type || t->device().device_id != device.device_id)
      TVM_FFI_THROW(ValueError) << name << ": expected on the device of q";
  }
  const DLDataType f16{kDLFloat, 16, 1};
  const auto* p_q = gdn::data<const __half>(q, "q", f16, {B, H, S, D}, device, gdn::ALIGNMENT);
  const auto* p_k = gdn::data<const __half>(k, "k", f16, {B, H, S, D}, device, gdn::ALIGNMENT);
  const auto* p_v = gdn::data<const __half>(v, "v", f16, {B, H, S, D}, device, gdn::ALIGNMENT);
  auto* p_o = gdn::data<__half>(output, "output", f16, {B, H, S, D}, device, gdn::ALIGNMENT);
  // the kernels count rows, and bytes within a head, in 32 bits, and blocks of rows in a dimension of the grid
  if (S > int64_t{1} << 20) TVM_FFI_THROW(ValueError) << "S = " << S << ": expected at most 2^20";
  if (S == 0) return;

  const gdn::CurrentDevice current(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  constexpr int64_t MOST = 65535;
  for (int64_t first = 0; first < B * H; first += MOST) {
    const int64_t at = first * S * D;
    const Problem p{p_q + at, p_k + at, p_v + at, p_o + at, static_cast<int>(S)};
    launch(p, static_cast<uint32_t>(std::min(B * H - first, MOST)), stream, device.device_id);
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
  }
}

}  // namespace flashcore
