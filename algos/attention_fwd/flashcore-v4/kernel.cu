// Attention forward, flashcore-v4: rows, keys and warps cut apart so that all SMs work, parts merged through the shared
// memory of a cluster in the same launch; the cut is chosen by measurement for each size (tuned.h, by `gdn tune`).
// The kernel is in attention.cuh, its instructions in ptx.cuh and cluster.cuh, its launch in launch.cuh.

#include "tuned.h"

#include "launch.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, flashcore::attend<false>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fallback, flashcore::fallback);
