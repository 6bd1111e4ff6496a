// The launch of cuda-chunk on sm_90a in one kernel (inter_chunk_sm90_fused.cuh).
#include <algorithm>
#include <chrono>

#include "inter_chunk_sm90_fused.cuh"
#include "launch.cuh"
#include "tensor_maps.cuh"

namespace gdn {

// No two launches of a process have the same; 40 bits.
static unsigned long long launch_number() {
  static std::atomic<unsigned long long> last{static_cast<unsigned long long>(std::chrono::steady_clock::now().time_since_epoch().count())};
  return ++last & 0xffffffffffull;
}

bool launch_sm90_fused(Prefill p, Maps one, const Allocate& allocate, int device, cudaStream_t stream) {
  const uint32_t tiles = static_cast<uint32_t>(p.N) * p.HV, clusters = sms_of(device) / 2;
#ifndef FUSED_ALONE
  make_map(one.q, p.q, p.num_tokens, p.H, p.qk_stride(), 1), make_map(one.k, p.k, p.num_tokens, p.H, p.qk_stride(), 1);
#endif
  if (tiles > clusters) {
    if (p.N > FUSED_SEQUENCES) return false;
    make_state_map(one.state, p, GROUP_ROWS);
    p.tickets = static_cast<unsigned long long*>(allocate(sizeof *p.tickets)), p.launch = launch_number();
  }
  launch<gdn_prefill_fused_sm90>(dim3(2 * std::min(tiles, clusters)), FUSED_THREADS, sizeof(FusedShared), device, stream, p, one);
  return true;
}

}  // namespace gdn
