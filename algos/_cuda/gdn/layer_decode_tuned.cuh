// layer_decode.cuh's kernel with its convolution and the constants of tuned.h.
#pragma once

#include "tuned.h"

#include "layer_decode_launch.cuh"

namespace gdn {

struct TunedRows {
  static constexpr auto& rows = TUNED;
};

template <typename T>
void launch_layer_decode(const LayerDecode<PlainPool<T>>& p, const HeadScales& scales, int64_t heads, int64_t group, int device,
                         cudaStream_t stream) {
  if (!scales.output_scale) return launch_layer_decode<TunedRows, true>(p, heads, group, device, stream);
  launch_tuned<TunedRows, true>(ScaledLayerDecode<PoolArguments<T>>{{p, p}, scales}, heads, group, device, stream);
}

}  // namespace gdn
