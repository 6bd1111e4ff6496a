// Attention forward, flashcore-v4: rows, keys and warps divided so that all SMs work, parts merged through the shared
// memory of a cluster in the same launch; the configuration is chosen by measurement for each size (tuned.h, by `gdn tune`).
// The kernels are in flashcore*.cuh, their instructions in mma_f16.cuh and cluster.cuh, their launch in flashcore_launch.cuh.

#include "tuned.h"

#include "flashcore_launch.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, flashcore::attend<false>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fallback, flashcore::fallback);
