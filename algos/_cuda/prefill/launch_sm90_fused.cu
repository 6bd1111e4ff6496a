// The launch of cuda-chunk on sm_90a in one kernel (inter_chunk_sm90_fused.cuh).
#include <algorithm>

#include "inter_chunk_sm90_fused.cuh"
#include "launch.cuh"
#include "tensor_maps.cuh"

namespace gdn {

#ifndef FUSED_TEAMS
#define FUSED_TEAMS 2
#endif
#ifndef FUSED_CTAS
#define FUSED_CTAS 1
#endif

bool launch_sm90_fused(const Prefill& p, Maps one, int device, cudaStream_t stream) {
  if constexpr (POOL) {
    return false;
  } else {
    make_state_map(one.state, p, GROUP_ROWS);
    const uint32_t tiles = 2 * p.N * p.HV, count = sms_of(device) / 2 * 2;
#if FUSED_CTAS > 1
    constexpr auto kernel = gdn_prefill_fused_pair_sm90<FUSED_TEAMS>;
#else
    constexpr auto kernel = gdn_prefill_fused_sm90<FUSED_TEAMS>;
#endif
    launch<kernel>(dim3(std::min(tiles, count)), fused_threads<FUSED_TEAMS>(), sizeof(FusedShared<FUSED_TEAMS, FUSED_CTAS>), device, stream, p, one);
    return true;
  }
}

}  // namespace gdn
