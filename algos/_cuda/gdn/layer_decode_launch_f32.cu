// The kernels for a pool of float32, in a file of its own: all are compiled at the same time.

#include "tuned.h"

#include "layer_decode_launch.cuh"

template void gdn::launch_layer_decode<float, true>(const gdn::LayerDecode<gdn::PlainPool<float>>&, int64_t, int64_t, int, cudaStream_t);
