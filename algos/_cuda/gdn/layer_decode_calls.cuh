// The launches of layer_decode.cuh's kernel, between the bindings and the files that have its instances.
#pragma once

#include "layer_decode.cuh"

namespace gdn {

// In layer_decode_launch_*.cu and layer_one_token_*.cu, a file for each T, so that they compile side by side: with a convolution, and
// without. heads: B * HV; group: HV / H, at most 8. Without scales (null) outputs are bfloat16.
template <typename T>
void launch_layer_decode(const LayerDecode<PlainPool<T>>& p, const HeadScales& scales, int64_t heads, int64_t group, int device,
                         cudaStream_t stream);
template <typename T>
void launch_one_token(const LayerDecode<PlainPool<T>>& p, int64_t heads, int device, cudaStream_t stream);

}  // namespace gdn
