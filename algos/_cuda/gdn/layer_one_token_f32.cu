// For a pool of float32, compiled beside the binding.

#include "layer_one_token.cuh"

template void gdn::launch_one_token(const LayerDecode<PlainPool<float>>&, int64_t, int, cudaStream_t);
