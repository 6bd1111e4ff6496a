// Causal attention forward, flashcore-v4: the kernel of attention_fwd/flashcore-v4 with its mask, cut by a table of its
// own (tuned.h, by `gdn tune`). The kernel is in attention.cuh, its launch in launch.cuh.

#include "tuned.h"

#include "launch.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, flashcore::attend<true>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fallback, flashcore::fallback);
