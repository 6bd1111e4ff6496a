// Causal attention forward, flashcore-v4: the kernel of attention_fwd/flashcore-v4 with its mask, and its own table of
// configurations (tuned.h, by `gdn tune`). The kernels are in flashcore*.cuh, their launch in flashcore_launch.cuh.

#include "tuned.h"

#include "flashcore_launch.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, flashcore::attend<true>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fallback, flashcore::fallback);
