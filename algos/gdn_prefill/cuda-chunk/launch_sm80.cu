// The launches of cuda-chunk without wgmma: the preparation, then from chunk to chunk by warps (inter_chunk_sm80.cuh, inter_chunk_sm80_split.cuh); and scan.
#include "tuned.h"

#include "launch.cuh"
#include "context_parallel_scan.cuh"
#include "context_parallel.cuh"
#include "inter_chunk_sm80_split.cuh"
#include "inter_chunk_sm80.cuh"

namespace gdn {

void scan(const Prefill& p, int device, cudaStream_t stream) {
  launch<gdn_prefill_scan>(dim3(D / 16, p.HV, p.N), SCAN_THREADS, sizeof(ScanShared), device, stream, p);
}

// Four warps for the same rows while there are few heads; they sum in another order, so not where bits must not depend on N.
#ifdef GDN_BATCH_INVARIANT
constexpr int64_t SPLIT_UP_TO = 0;
#else
constexpr int64_t SPLIT_UP_TO = 48;
#endif
void walk_narrow(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream) {
  const uint32_t parts = make_room(p, segments, sizeof(Prepared), device, allocate);
  prepare<false>(p, {}, device, stream);
  constexpr int WARPS = 4, STAGES = 2, SHARED = state_shared<WARPS, STAGES>();
  const dim3 split_grid(D / 16, p.HV, parts), grid(D / 16 / WARPS, p.HV, parts);
  if (p.segment) {
    launch<gdn_prefill_transfer<WARPS, STAGES>>(dim3(2 * D / 16 / WARPS, p.HV, parts), WARPS * 32, SHARED, device, stream, p);
    scan(p, device, stream);
  }
  if (!p.segment && int64_t{p.N} * p.HV <= SPLIT_UP_TO)
    launch<gdn_prefill_split<2>>(split_grid, SPLIT_THREADS, split_shared<2>(), device, stream, p);
  else
    launch<gdn_prefill_state<WARPS, STAGES>>(grid, WARPS * 32, SHARED, device, stream, p);
}

}  // namespace gdn
