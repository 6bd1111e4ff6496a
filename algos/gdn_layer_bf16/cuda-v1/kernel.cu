// gdn_layer/cuda-v1 for a bfloat16 pool, with its constants.

#include "tuned.h"

#include "layer_decode_binding.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run_layer_decode<__nv_bfloat16>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_decode, gdn::layer_decode<__nv_bfloat16>);
