// GDN decode with the state in bfloat16: cuda-v5's kernel and binding (decode.cuh, decode_binding.cuh, which this folder
// shares) with other constants, since a row has half the bytes.

#include "tuned.h"

#include "decode_binding.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run<__nv_bfloat16>);
