// GDN prefill, cuda-recurrent: the state stays in registers from a sequence's first token to its last, 16 tokens per step
// on tensor cores; one launch. The kernel is in recurrent.cuh; this file checks the arguments, takes the constants for this
// GPU and size from recurrent.h, and launches on the current stream. No allocation, no synchronisation.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <cstdint>

#include "recurrent.h"

#include "device.cuh"
#include "recurrent_launch.cuh"
#include "tensor.cuh"

namespace gdn {

struct Table { static constexpr const auto& rows = TUNED; };

// q, k [num_tokens, H, 128] bf16; v [num_tokens, HV, 128] bf16; state [N, HV, 128, 128] f32; A_log, dt_bias [HV] f32; a, b
// [num_tokens, HV] bf16; cu_seqlens [N + 1] int64, from 0 up to num_tokens, read on the device; scale None or 0: 1/sqrt(128).
// Writes output [num_tokens, HV, 128] bf16 and new_state like state, which may be state itself. Any N, num_tokens >= 0 and H >=
// 1, HV a multiple of H.
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::TensorView cu_seqlens,
         ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView new_state) {
  if (q.ndim() != 3 || v.ndim() != 3) TVM_FFI_THROW(ValueError) << "q and v: expected 3 dimensions [num_tokens, heads, 128]";
  if (state.ndim() != 4) TVM_FFI_THROW(ValueError) << "state: expected 4 dimensions [N, HV, 128, 128]";
  const int64_t num_tokens = q.size(0), H = q.size(1), HV = v.size(1), N = state.size(0);
  if (H < 1 || HV < 1 || HV % H) TVM_FFI_THROW(ValueError) << "HV = " << HV << " is not a multiple of H = " << H;
  const DLDevice device = state.device();
  if (device.device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "state: expected on a CUDA device";
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1}, i64{kDLInt, 64, 1};
  using bf = __nv_bfloat16;
  const double s = scale.value_or(0.0);
  const Arguments p = {
      data<const float>(state, "state", f32, {N, HV, V_DIM, K_DIM}, device, 8),
      data<const int64_t>(cu_seqlens, "cu_seqlens", i64, {N + 1}, device),
      data<const bf>(k, "k", bf16, {num_tokens, H, K_DIM}, device, ALIGNMENT),
      data<const bf>(q, "q", bf16, {num_tokens, H, K_DIM}, device, ALIGNMENT),
      data<const bf>(v, "v", bf16, {num_tokens, HV, V_DIM}, device, ALIGNMENT),
      data<const bf>(a, "a", bf16, {num_tokens, HV}, device),
      data<const bf>(b, "b", bf16, {num_tokens, HV}, device),
      data<const float>(A_log, "A_log", f32, {HV}, device),
      data<const float>(dt_bias, "dt_bias", f32, {HV}, device),
      data<float>(new_state, "new_state", f32, {N, HV, V_DIM, K_DIM}, device, 8),
      data<bf>(output, "output", bf16, {num_tokens, HV, V_DIM}, device, ALIGNMENT),
      static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K_DIM)) : s),
      static_cast<uint32_t>(H),
      static_cast<uint32_t>(HV),
      num_tokens,
      N ? num_tokens / N : 0,
      Divisor(static_cast<uint32_t>(HV)),
      Divisor(static_cast<uint32_t>(HV / H)),
  };
  if (N == 0) return;
  // the kernel counts rows in 32 bits; 2^25 heads would be terabytes of state
  if (N * HV >= int64_t{1} << 25) TVM_FFI_THROW(ValueError) << "N * HV = " << N * HV << ": expected less than 2^25";

  const CurrentDevice current(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  launch_recurrent<Table>(p, N * HV, device.device_id, stream);
}

}  // namespace gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run);
