// What follows the convolution of a decode layer, in one launch: the kernel is in layer_post_conv.cuh, the calls are in
// layer_binding.cuh, its instances in layer_launch_*.cu.

#include <tvm/ffi/function.h>

#include "layer_binding.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_post_conv, gdn::layer_post_conv);
