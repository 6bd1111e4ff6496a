// GDN decode, cuda-v5: registers only, the state's loads before everything else, one reduction for both dots; lanes per
// row, rows per warp and warps per CTA are chosen by measurement for each size (tuned.h, by `gdn tune`).
// The kernel is in decode.cuh, the binding in decode_binding.cuh.

#include "tuned.h"

#include "decode_binding.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run<float>);
