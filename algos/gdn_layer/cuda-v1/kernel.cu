// One token of a decode layer in one launch: the kernel is in layer_decode.cuh, the calls are in layer_decode_binding.cuh, its instances
// in layer_decode_launch_f32.cu.

#include "tuned.h"

#include "layer_decode_binding.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run_layer_decode<float>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_decode, gdn::layer_decode<float>);
