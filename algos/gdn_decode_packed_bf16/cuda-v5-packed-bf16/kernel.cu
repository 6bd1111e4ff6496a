// gdn_decode_packed/cuda-v5-packed with the states in bfloat16 or float16, and other constants, since a row has half the
// bytes.

#include "tuned.h"

#include "pool_binding.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run_in_place<__nv_bfloat16>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_decode_bf16, gdn::packed_decode<__nv_bfloat16>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_decode_f16, gdn::packed_decode<__half>);
