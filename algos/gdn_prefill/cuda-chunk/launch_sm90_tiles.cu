// The launches of cuda-chunk where many sequences are walked in order of length (tile_scheduler.cuh, inter_chunk_sm90_tiles.cuh).
#include "launch.cuh"
#include "tensor_maps.cuh"
#include "inter_chunk_sm90_tiles.cuh"

namespace gdn {

bool walk_ordered(Prefill p, Maps one, Maps two, const Allocate& allocate, int device, cudaStream_t stream) {
  const int count = sms_of(device);
  if (!crowded(p.N, p.HV, count)) return false;
  make_state_map(one.state, p, GROUP_ROWS), make_state_map(two.state, p, 2 * GROUP_ROWS);
  p.plan = static_cast<Plan*>(allocate(sizeof(Plan) + p.N * sizeof(ScheduledTile))), p.ctas = count;
  prepare<true, true>(p, one.k, device, stream);
  launch<gdn_prefill_ordered>(dim3(count), ORDERED_THREADS, ordered_shared(), device, stream, p, one, two);
  return true;
}

}  // namespace gdn
