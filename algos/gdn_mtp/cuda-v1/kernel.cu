// GDN verify, outputs alone: the kernel is in mtp.cuh, its binding in mtp_binding.cuh, its instances in launch_*.cu.

#include "mtp_binding.cuh"

namespace ffi = tvm::ffi;

namespace {

// Inputs as in the definition: q, k [B, T, H, 128], v [B, T, HV, 128], a, b [B, T, HV] bf16; initial_state [P, HV, 128, 128],
// A_log, dt_bias [HV] f32; initial_state_indices [B], below 0: padding; scale None or 0: 1/sqrt(128). Writes output
// [B, T, HV, 128] bf16. final_state is the pool itself, or else gets a copy of it.
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView initial_state,
         ffi::TensorView initial_state_indices, ffi::TensorView A_log, ffi::TensorView a, ffi::TensorView dt_bias,
         ffi::TensorView b, ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView final_state) {
  gdn::mtp_verify<false>(q, k, v, a, b, A_log, dt_bias, initial_state, initial_state_indices, {}, {}, scale, output, {}, {},
                  gdn::OUTPUTS, 0, -1.0);
  if (final_state.data_ptr() == initial_state.data_ptr()) return;
  const int64_t P = initial_state.size(0), HV = initial_state.size(1);
  const DLDevice device = initial_state.device();
  const DLDataType f32{kDLFloat, 32, 1};
  const float* from = gdn::data<const float>(initial_state, "initial_state", f32, {P, HV, gdn::V, gdn::K}, device);
  float* to = gdn::data<float>(final_state, "final_state", f32, {P, HV, gdn::V, gdn::K}, device);
  const gdn::CurrentDevice current(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaMemcpyAsync(to, from, sizeof(float) * P * HV * gdn::V * gdn::K, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mtp_verify, gdn::mtp_verify<false>);
