// The kernels for a pool of float32, in a file of its own: all are compiled at the same time.

#include "tuned.h"

#include "layer_launch.cuh"

template void gdn::launch_layer<float>(const gdn::LayerArguments&, int64_t, int, cudaStream_t);
