// GDN verify on the CPU, outputs alone: the binding of FlashInfer-Trace's call. The code is in
// verify.h.

#include <tvm/ffi/function.h>

#include <cstring>

#include "verify.h"

namespace ffi = tvm::ffi;

// Inputs as in the definition: q, k [B, T, H, 128], v [B, T, HV, 128], a, b [B, T, HV] bf16;
// initial_state [P, HV, 128, 128], A_log, dt_bias [HV] f32; initial_state_indices [B], negative:
// padding; scale None or 0: 1/sqrt(128). Writes output [B, T, HV, 128] bf16. final_state is the
// pool itself, or else gets a copy of it.
void Run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView initial_state,
         ffi::TensorView initial_state_indices, ffi::TensorView A_log, ffi::TensorView a,
         ffi::TensorView dt_bias, ffi::TensorView b, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView final_state) {
  if (initial_state.ndim() != 4) {
    TVM_FFI_THROW(ValueError) << "initial_state: expected [slots, HV, 128, 128], got "
                              << initial_state.shape();
  }
  const int64_t P = initial_state.size(0), HV = initial_state.size(1);
  const float* from = nullptr;
  float* to = nullptr;
  if (final_state.data_ptr() != initial_state.data_ptr()) {  // checked before anything is written
    const auto states = [&](const ffi::TensorView& t, const char* name) {
      return gdn::data<float>(t, name, gdn::F32, {P, HV, gdn::V, gdn::K}, gdn::CPU);
    };
    from = states(initial_state, "initial_state"), to = states(final_state, "final_state");
  }
  gdn::mtp_verify(q, k, v, a, b, A_log, dt_bias, initial_state, initial_state_indices, {}, {},
                  scale, output, {}, {}, gdn::OUTPUTS, 0, -1.0);
  if (to) std::memcpy(to, from, sizeof(float) * P * HV * gdn::V * gdn::K);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
