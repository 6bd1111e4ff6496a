// The launches of cuda-chunk with wgmma: the intra-chunk kernel, then inter_chunk_sm90.cuh; many sequences that are not
// split go to launch_sm90_tiles.cu.
#include <algorithm>
#include <type_traits>

#include "context_parallel_sm90.cuh"
#include "intra_chunk_sm90.cuh"
#include "launch.cuh"
#include "tensor_maps.cuh"

namespace gdn {

// Whether inter_chunk_sm90.cuh is compiled in, and not empty.
static bool has_wgmma(int device) {
  static std::array<std::atomic<int>, 64> known{};  // 0: not asked yet, 1: no, 2: yes
  const bool kept = device >= 0 && device < 64;
  int answer = kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (answer == 0) {
    bool there = false;
    check(flashcore::ask_for_wgmma(there));
    answer = there ? 2 : 1;
    if (kept) known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

const char* fallback() {
  const char* answer = "";
  check(flashcore::ask_for_fallback(answer));
  return answer;
}

// GROUPS consumer warpgroups: one while there are no more half tiles than SMs, else two, which share K, Q, T and M of a tile. With
// two, if sequences are split, there are as many CTAs as can be resident; else one per tile, which first reads the tile's state.
//
// <1, 4> and <2, 3>: as many stages as fit, 4 of 56 KB or 3 of 64. Two stages for two warpgroups: 37.1 us instead of 31.2 at
// 32x256; two CTAs per SM of one warpgroup and two stages each: 35.9; several tiles per CTA with one warpgroup: 13.6 instead of
// 12.7 at 1x512 (ladder, H200, this kernel alone).
template <int GROUPS, int STAGES>
static void launch_inter_chunk(const Prefill& p, const Maps& maps, uint32_t parts, int device, cudaStream_t stream) {
  const uint32_t tiles = p.HV * parts, resident = sms_of(device);
  const dim3 grid = GROUPS == 1 ? dim3(2, p.HV, parts) : dim3(p.segment ? std::min(tiles, resident) : tiles);
  const auto with = [&](auto checkpoints) {
    by_layout(p, [&](auto k_first) {
      launch<gdn_prefill_inter_chunk_sm90<GROUPS, STAGES, decltype(checkpoints)::value, decltype(k_first)::value>>(
          Begin::WHILE_ENDING, grid, group_threads(GROUPS, true), group_shared<GROUPS, STAGES>(), device, stream, p, maps,
          static_cast<int>(tiles));
    });
  };
  if (p.has_checkpoints()) with(std::bool_constant<POOL>{});
  else with(std::false_type{});
}
// The number of segments if one sequence has nearly all tokens; its last has no transfer.
static int64_t likely_segments(const Prefill& p) {
  const int64_t unit = int64_t{p.segment} * CHUNK;
  return (p.num_tokens + unit - 1) / unit;
}
template <int GROUPS, int STAGES>
static void launch_transfer(const Prefill& p, const Maps& maps, uint32_t segments, int device, cudaStream_t stream) {
  by_layout(p, [&](auto k_first) {
    launch<gdn_prefill_transfer_sm90<GROUPS, STAGES, decltype(k_first)::value>>(
        Begin::WHILE_ENDING, dim3(4 / GROUPS, p.HV, segments), group_threads(GROUPS, false), group_shared<GROUPS, STAGES>(), device,
        stream, p, maps);
  });
}
static void launch_segments(const Prefill& p, const Maps& one, const Maps& two, int64_t likely, int device, cudaStream_t stream) {
  const uint32_t segments = static_cast<uint32_t>(p.num_tokens / (p.segment * CHUNK));  // the most that are not a sequence's last
  // Without bounds one warpgroup per CTA while all of them (two halves, each for L and for Phi) can have an SM.
  // Choosing by the actual number of segments came with two other changes: together 1x8192 71 us instead of 83 (ladder,
  // "Fewer products", H200). Not measured alone.
  if (p.bounds)
    by_layout(p, [&](auto k_first) {
      launch<gdn_prefill_recall_sm90<decltype(k_first)::value>>(Begin::WHILE_ENDING, dim3(4, p.HV, segments), RECALL_THREADS,
                                                                recall_shared(), device, stream, p, one, two);
    });
  else if (4 * (likely - 1) * p.HV <= sms_of(device)) launch_transfer<1, 4>(p, one, segments, device, stream);
  else launch_transfer<2, 3>(p, two, segments, device, stream);
  launch_scan(Begin::WHILE_ENDING, p, device, stream);
}
static void launch_inter_chunk_sm90(const Prefill& p, const Maps& one, const Maps& two, uint32_t parts, int device,
                                    cudaStream_t stream) {
  // `parts` is the maximum; likely are those of one sequence with nearly all tokens.
  const int64_t likely = p.segment ? likely_segments(p) : p.N, count = sms_of(device);
  if (p.segment) launch_segments(p, one, two, likely, device, stream);
  if (more_than_one_wave(likely, p.HV, count)) launch_inter_chunk<2, 3>(p, two, parts, device, stream);
  else launch_inter_chunk<1, 4>(p, one, parts, device, stream);
}

bool launch_sm90(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream) {
  if (!has_wgmma(device)) return false;
  Maps one{}, two{};
  make_maps(p, one, two);
  cut(p, segments, device, true);
  const bool whole = !p.segment && !p.has_checkpoints();
  if (whole && in_one_launch(p.num_tokens, p.N, p.H, p.HV, rates_of(device)) && launch_sm90_fused(p, one, allocate, device, stream)) return true;
  const uint32_t parts = allocate_workspace(p, segments, MATRIX, device, allocate, true);
  // Gates are looked at where that is why there are more segments. Elsewhere it gains less than it loses where nothing decays: 1x8192 71 to
  // 68 us, and 71 to 76.
  if (p.segment != segment_chunks(p.num_tokens, p.N, p.HV, segments, sms_of(device), false)) {
    // A step of the scan takes about as long as a chunk of a transfer: so long a detour is as good as Phi and the scan.
    const int segments = static_cast<int>(likely_segments(p));
    p.window = p.segment + segments, p.sms = std::max(sms_of(device) / std::max(segments - 1, 1), 1);
    p.bounds = static_cast<float*>(allocate(p.chunk_numbers() * p.HV * sizeof(float)));
    p.linked = static_cast<int*>(allocate(int64_t{parts} * p.HV * sizeof(int)));
  }
  if (whole && launch_sm90_tiles(p, one, two, allocate, device, stream)) return true;
  launch_intra_chunk<gdn_prefill_intra_chunk_sm90<false>, true>(p, one.k, device, stream);
  launch_inter_chunk_sm90(p, one, two, parts, device, stream);
  return true;
}

}  // namespace gdn
