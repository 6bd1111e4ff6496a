// The kernels for a pool of bfloat16, in a file of its own: all are compiled at the same time.

#include "tuned.h"

#include "layer_launch.cuh"

template void gdn::launch_layer<__nv_bfloat16>(const gdn::LayerArguments&, int64_t, int, cudaStream_t);
