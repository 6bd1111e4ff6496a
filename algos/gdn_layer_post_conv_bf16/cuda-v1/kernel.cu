// gdn_layer_post_conv/cuda-v1 for a bfloat16 pool, with its constants.

#include <tvm/ffi/function.h>

#include "layer_binding.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_post_conv, gdn::layer_post_conv);
