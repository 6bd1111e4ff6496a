// GDN decode by slots of a pool: cuda-v5's kernel (decode.cuh) on packed rows, in place. The binding is in pool_binding.cuh.

#include "tuned.h"

#include "gates_binding.cuh"
#include "pool_binding.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run_in_place<float>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_decode, gdn::packed_decode<float>);  // for gdn.serving
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gates, gdn::gates);
