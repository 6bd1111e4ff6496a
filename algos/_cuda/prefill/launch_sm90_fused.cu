// The launch of cuda-chunk on sm_90a in one kernel (inter_chunk_sm90_fused.cuh).
#include <algorithm>

#include "inter_chunk_sm90_fused.cuh"
#include "launch.cuh"
#include "tensor_maps.cuh"

namespace gdn {

#ifndef FUSED_TEAMS
#define FUSED_TEAMS 2
#endif

bool launch_sm90_fused(const Prefill& p, const Maps& one, int device, cudaStream_t stream) {
  if constexpr (POOL) {
    return false;
  } else {
    const uint32_t tiles = 2 * p.N * p.HV, count = sms_of(device);
    launch<gdn_prefill_fused_sm90<FUSED_TEAMS>>(dim3(std::min(tiles, count)), fused_threads<FUSED_TEAMS>(),
                                                sizeof(FusedShared<FUSED_TEAMS>), device, stream, p, one);
    return true;
  }
}

}  // namespace gdn
