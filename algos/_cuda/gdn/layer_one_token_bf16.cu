// For a pool of bfloat16, compiled beside the binding.

#include "layer_one_token.cuh"

template void gdn::launch_one_token(const LayerDecode<PlainPool<__nv_bfloat16>>&, int64_t, int, cudaStream_t);
