// The launches of cuda-chunk on sm_90a for many sequences that are not split (tile_scheduler.cuh, inter_chunk_sm90_tiles.cuh).
#include "intra_chunk_sm90.cuh"
#include "launch.cuh"
#include "tensor_maps.cuh"
#include "inter_chunk_sm90_tiles.cuh"

namespace gdn {

bool launch_sm90_tiles(Prefill p, Maps one, Maps two, const Allocate& allocate, int device, cudaStream_t stream) {
  const int count = sms_of(device);
  if (!more_than_one_wave(p.N, p.HV, count)) return false;
  make_state_map(one.state, p, GROUP_ROWS, p.rows(0)), make_state_map(two.state, p, 2 * GROUP_ROWS, p.rows(0));
  p.plan = static_cast<Plan*>(allocate(sizeof(Plan) + p.N * sizeof(ScheduledTile))), p.ctas = count;
  launch_intra_chunk<gdn_prefill_intra_chunk_sm90<true>, true, true>(p, one.k, device, stream);
  by_layout(p, [&](auto k_first) {
    launch<gdn_prefill_inter_chunk_sm90_tiles<decltype(k_first)::value>>(Begin::WHILE_ENDING, dim3(count), TILES_THREADS, tiles_shared(),
                                                                         device, stream, p, one, two);
  });
  return true;
}

}  // namespace gdn
