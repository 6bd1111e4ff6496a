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
static void launch_inter_chunk(const Prefill& p, const Maps& one, const Maps& two, uint32_t parts, int device, cudaStream_t stream) {
  const uint32_t count = sms_of(device), tiles = p.HV * parts * 2 / GROUPS;
  const auto with = [&](auto checkpoints) {
    constexpr bool CHECKPOINTS = decltype(checkpoints)::value;
    constexpr int THREADS = group_threads(GROUPS, true);
    if (p.segment) {
      const uint32_t segments = p.num_tokens / (p.segment * CHUNK);  // the most that are not a sequence's last
      const uint32_t transfers = 4 * p.HV * segments, before = transfers + std::min(uint32_t{SCAN_SLICES} * p.HV * p.N, count);
      launch<gdn_prefill_segments_sm90<GROUPS, STAGES, CHECKPOINTS>>(
          dim3(before + (GROUPS > 1 ? std::min(tiles, count) : tiles)), THREADS, segments_shared<GROUPS, STAGES>(), device,
          stream, p, one, two, static_cast<int>(transfers), static_cast<int>(before), static_cast<int>(tiles));
    } else {
      launch<gdn_prefill_inter_chunk_sm90<GROUPS, STAGES, CHECKPOINTS>>(GROUPS == 1 ? dim3(2, p.HV, parts) : dim3(tiles), THREADS,
                                                                        group_shared<GROUPS, STAGES>(), device, stream, p,
                                                                        GROUPS > 1 ? two : one, static_cast<int>(tiles));
    }
  };
  if (p.has_checkpoints()) with(std::bool_constant<POOL>{});
  else with(std::false_type{});
}
// The number of segments if one sequence has nearly all tokens; its last has no transfer.
static int64_t likely_segments(const Prefill& p) {
  const int64_t unit = int64_t{p.segment} * CHUNK;
  return (p.num_tokens + unit - 1) / unit;
}

bool launch_sm90(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream) {
  if (!has_wgmma(device)) return false;
  Maps one{}, two{};
  make_maps(p, one, two);
  const uint32_t parts = allocate_workspace(p, segments, MATRIX, device, allocate, true);
  if (p.segment) {
    // A step of the scan takes about as long as a chunk of a transfer: so long a detour is as good as Phi and the scan.
    const int segments = static_cast<int>(likely_segments(p));
    p.window = p.segment + segments, p.sms = std::max(sms_of(device) / std::max(segments - 1, 1), 1);
    p.bounds = static_cast<float*>(allocate(p.chunk_numbers() * p.HV * sizeof(float)));
    p.segments = static_cast<int>(parts), p.progress = static_cast<uint32_t*>(allocate(int64_t{parts} * p.HV * sizeof(uint32_t)));
  }
  if (!p.segment && !p.has_checkpoints() && launch_sm90_tiles(p, one, two, allocate, device, stream)) return true;
  launch_intra_chunk<gdn_prefill_intra_chunk_sm90<false>, true>(p, one.k, device, stream);
  const int64_t likely = p.segment ? likely_segments(p) : p.N;  // `parts` is the maximum
  if (more_than_one_wave(likely, p.HV, sms_of(device))) launch_inter_chunk<2, 3>(p, one, two, parts, device, stream);
  else launch_inter_chunk<1, 4>(p, one, two, parts, device, stream);
  return true;
}

}  // namespace gdn
