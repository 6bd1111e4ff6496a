// One token for each row, for a pool of bfloat16.

#include "tuned.h"

#include "layer_one_token.cuh"

template <>
void gdn::launch_one_token(const LayerDecode<PlainPool<__nv_bfloat16>>& p, int64_t heads, int device, cudaStream_t stream) {
  launch_layer_decode<OneToken, false>(p, heads, 1, device, stream);
}
