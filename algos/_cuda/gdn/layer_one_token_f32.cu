// One token for each row, for a pool of float32.

#include "tuned.h"

#include "layer_one_token.cuh"

template <>
void gdn::launch_one_token(const LayerDecode<PlainPool<float>>& p, int64_t heads, int device, cudaStream_t stream) {
  launch_layer_decode<OneToken, false>(p, heads, 1, device, stream);
}
