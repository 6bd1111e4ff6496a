// The kernels for a pool of float32, compiled beside the binding.

#include "tuned.h"

#include "layer_decode_launch.cuh"

namespace {

struct Table {
  static constexpr auto& rows = TUNED;
};

}  // namespace

template <>
void gdn::launch_layer_decode(const LayerDecode<PlainPool<float>>& p, const HeadScales& scales, int64_t heads, int64_t group,
                              int device, cudaStream_t stream) {
  launch_scaled<Table>(p, scales, heads, group, device, stream);
}
