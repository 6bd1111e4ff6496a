// For a pool of bfloat16, compiled beside the binding.

#include "layer_decode_tuned.cuh"

template void gdn::launch_layer_decode(const LayerDecode<PlainPool<__nv_bfloat16>>&, const HeadScales&, int64_t, int64_t, int, cudaStream_t);
