// The launches of cuda-chunk where there is wgmma: the preparation, then from chunk to chunk by warpgroups (hopper.cuh).
#include "tuned.h"

#include "hopper.cuh"
#include "launch.cuh"
#include "order.cuh"
#include "ordered.cuh"
#include "tensor_map.cuh"

namespace gdn {

// Whether hopper.cuh is there, and not empty.
static bool has_wgmma(int device) {
  static std::array<std::atomic<int>, 64> known{};  // 0: not asked yet, 1: no, 2: yes
  const bool kept = device >= 0 && device < 64;
  int answer = kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (answer == 0) {
    bool there = false;
    TVM_FFI_CHECK_CUDA_ERROR(flashcore::ask_for_wgmma(there));
    answer = there ? 2 : 1;
    if (kept) known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

// [T, heads, 128] bf16 for copy_box: 64 tokens of one head, `halves` times 64 columns; tokens from T on are zeros.
inline bool make_map(CUtensorMap& map, const void* base, int64_t T, int heads, uint32_t halves) {
  const cuuint64_t tokens = static_cast<cuuint64_t>(T), count = static_cast<cuuint64_t>(heads);
  return flashcore::make_tensor_map<4>(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, {64, tokens, 2, count},
                                       {count * D * 2, 128, D * 2}, {64, CHUNK, halves, 1});
}

// All states' rows for copy_state: 64 or 128 of them, in four blocks of 32 columns.
inline bool make_state_map(CUtensorMap& map, const Prefill& p, uint32_t rows) {
  return flashcore::make_tensor_map<3>(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, p.state,
                                       {32, static_cast<cuuint64_t>(p.N) * p.HV * D, D / 32}, {D * 4, 128}, {32, rows, D / 32});
}

// By warpgroups: one for a CTA while every CTA can have an SM, and else two, which share the tiles. Where sequences are cut there
// are as many CTAs of those as can be resident; else one for each item, whose state it reads before anything else.
template <int GROUPS, int STAGES>
static void walk_wide(const Prefill& p, const Maps& maps, uint32_t parts, int device, cudaStream_t stream) {
  const uint32_t items = p.HV * parts, resident = sms(device);
  const dim3 grid = GROUPS == 1 ? dim3(2, p.HV, parts) : dim3(p.segment ? std::min(items, resident) : items);
  launch<gdn_prefill_group<GROUPS, STAGES>>(grid, group_threads(GROUPS, true), group_shared<GROUPS, STAGES>(), device, stream,
                                            p, maps, static_cast<int>(items));
}
template <int GROUPS, int STAGES>
static void transfer_wide(const Prefill& p, const Maps& maps, uint32_t parts, int device, cudaStream_t stream) {
  launch<gdn_prefill_group_transfer<GROUPS, STAGES>>(dim3(4 / GROUPS, p.HV, parts), group_threads(GROUPS, false),
                                                     group_shared<GROUPS, STAGES>(), device, stream, p, maps);
}
// For one warpgroup's boxes, and for two.
static bool make_maps(const Prefill& p, Maps& one, Maps& two) {
  const bool there = make_map(one.q, p.q, p.T, p.H, 2) && make_map(one.k, p.k, p.T, p.H, 2) &&
                     make_map(one.v, p.v, p.T, p.HV, 1) && make_map(two.v, p.v, p.T, p.HV, 2);
  two.q = one.q, two.k = one.k;
  return there;
}
static void walk_parts(const Prefill& p, const Maps& one, const Maps& two, uint32_t parts, int device, cudaStream_t stream) {
  // How many segments there are when all sequences have the mean length; `parts` is the most that there can be.
  const int64_t unit = int64_t{p.segment} * CHUNK, likely = p.segment ? p.N * ((p.T / p.N + unit - 1) / unit) : p.N;
  const int64_t heads = likely * p.HV, moved = (likely - p.N) * p.HV, count = sms(device);  // a sequence's last does not move
  if (p.segment) {
    if (4 * moved <= count) transfer_wide<1, 4>(p, one, parts, device, stream);
    else transfer_wide<2, 3>(p, two, parts, device, stream);
    scan(p, device, stream);
  }
  if (2 * heads <= count) walk_wide<1, 4>(p, one, parts, device, stream);
  else walk_wide<2, 3>(p, two, parts, device, stream);
}

// Whether what walk_parts would give to two warpgroups can go in order of length instead: the copy engine can bring all states;
// kernel.cu lets them begin at multiples of 8 bytes.
static bool can_order(const Prefill& p, Maps& one, Maps& two, int device) {
  return !p.segment && int64_t{2} * p.N * p.HV > sms(device) && make_state_map(one.state, p, GROUP_ROWS) &&
         make_state_map(two.state, p, 2 * GROUP_ROWS);
}
static void walk_ordered(const Prefill& p, const Maps& one, const Maps& two, int device, cudaStream_t stream) {
  launch<gdn_prefill_ordered>(dim3(p.ctas), ORDERED_THREADS, ordered_shared(), device, stream, p, one, two);
}

bool walk_wide(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream) {
  Maps one{}, two{};
  if (!has_wgmma(device) || !make_maps(p, one, two)) return false;
  const uint32_t parts = make_room(p, segments, MATRIX, allocate);
  if (can_order(p, one, two, device)) {
    p.plan = static_cast<Plan*>(allocate(sizeof(Plan) + p.N * sizeof(Piece))), p.ctas = sms(device);
    prepare<true, true>(p, one.k, device, stream);
    walk_ordered(p, one, two, device, stream);
  } else {
    prepare<true>(p, one.k, device, stream);
    walk_parts(p, one, two, parts, device, stream);
  }
  return true;
}

}  // namespace gdn
