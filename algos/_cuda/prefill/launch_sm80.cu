// The launches of cuda-chunk without wgmma: the intra-chunk kernel, then inter_chunk_sm80.cuh or inter_chunk_sm80_split.cuh; and
// the scan, which sm_90a uses as well.
#include "tuned.h"

#include <algorithm>

#include "intra_chunk_sm80.cuh"
#include "launch.cuh"
#include "context_parallel_scan.cuh"
#include "context_parallel.cuh"
#include "inter_chunk_sm80_split.cuh"
#include "inter_chunk_sm80.cuh"

namespace gdn {

void launch_scan(Begin begin, const Prefill& p, int device, cudaStream_t stream) {
  const int items = HEAD_DIM / 16 * p.HV * p.N;
  launch<gdn_prefill_scan>(begin, dim3(std::min(items, sms_of(device))), SCAN_THREADS, sizeof(ScanShared), device, stream, p);
}

// Up to this many sequences times value heads, unsplit, four warps share 16 rows: 8 CTAs for each, up to 384, three per SM of an
// H200. In the first version a chunk took 2.2 us with four warps and 3.4 with one (ladder, H200); with more sequences the SMs are
// busy either way. 48 not measured alone. Four warps sum in another order, so batch-invariant builds do not use them.
#ifdef GDN_BATCH_INVARIANT
constexpr int64_t SPLIT_UP_TO = 0;
#else
constexpr int64_t SPLIT_UP_TO = 48;
#endif

// WARPS tiles of 16 rows of S per CTA, two stages: 112 KB, so that one CTA fits the 163 KB of sm_80. Not measured alone.
void launch_sm80(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream) {
  const uint32_t parts = allocate_workspace(p, segments, sizeof(Prepared), device, allocate);
  launch_intra_chunk<gdn_prefill_intra_chunk_sm80<false>, false>(p, {}, device, stream);
  constexpr int WARPS = 4, STAGES = 2, SHARED = state_shared<WARPS, STAGES>();
  const dim3 split_grid(HEAD_DIM / 16, p.HV, parts), grid(HEAD_DIM / 16 / WARPS, p.HV, parts);
  by_layout(p, [&](auto k_first) {
  constexpr bool K_FIRST = decltype(k_first)::value;
  if (p.segment) {
    launch<gdn_prefill_transfer_sm80<WARPS, STAGES, K_FIRST>>(Begin::AFTER, dim3(2 * HEAD_DIM / 16 / WARPS, p.HV, parts), WARPS * 32, SHARED,
                                                     device, stream, p);
    launch_scan(Begin::AFTER, p, device, stream);
  }
  if (!p.segment && int64_t{p.N} * p.HV <= SPLIT_UP_TO && !p.has_checkpoints())
    launch<gdn_prefill_inter_chunk_sm80_split<2, K_FIRST>>(Begin::AFTER, split_grid, SPLIT_THREADS, split_shared<2>(), device, stream, p);
  else
    launch<gdn_prefill_inter_chunk_sm80<WARPS, STAGES, K_FIRST>>(Begin::AFTER, grid, WARPS * 32, SHARED, device, stream, p);
  });
}

}  // namespace gdn
