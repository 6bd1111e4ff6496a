// The launch of cuda-chunk on sm_90a in one kernel, with a CTA for each tile (inter_chunk_sm90_whole.cuh).
#include "inter_chunk_sm90_whole.cuh"
#include "launch.cuh"
#include "tensor_maps.cuh"

namespace gdn {

void launch_sm90_whole(const Prefill& p, const Maps& two, int device, cudaStream_t stream) {
  launch<gdn_prefill_whole_sm90<>>(Begin::AFTER, dim3(static_cast<uint32_t>(p.N) * p.HV), WHOLE_THREADS, sizeof(WholeShared), device,
                                   stream, p, two);
}

}  // namespace gdn
