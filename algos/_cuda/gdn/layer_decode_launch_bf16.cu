// The kernels for a pool of bfloat16, in a file of its own: all are compiled at the same time.

#include "tuned.h"

#include "layer_decode_launch.cuh"

template void gdn::launch_layer_decode<__nv_bfloat16, true>(const gdn::LayerDecode<gdn::PlainPool<__nv_bfloat16>>&, int64_t, int64_t, int, cudaStream_t);
