// The launches of cuda-chunk with TMA and without wgmma: the intra-chunk kernel of sm_80, then inter_chunk_tma.cuh.
#include "intra_chunk_sm80.cuh"
#include "launch.cuh"
#include "tensor_maps.cuh"
#include "inter_chunk_tma.cuh"

namespace gdn {

// Whether inter_chunk_tma.cuh is compiled in, and not empty.
static bool has_tma(int device) {
  static std::array<std::atomic<int>, 64> known{};  // 0: not asked yet, 1: no, 2: yes
  const bool kept = device >= 0 && device < 64;
  int answer = kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (answer == 0) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, gdn_prefill_inter_chunk_tma_tiles<>));
    answer = attributes.ptxVersion >= 90 ? 2 : 1;
    if (kept) known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

template <int WARPS>
static void launch_inter_chunk(const Prefill& p, const Maps& maps, uint32_t parts, int device, cudaStream_t stream) {
  const dim3 grid(HEAD_DIM / 16 / WARPS, p.HV, parts);
  const auto with = [&](auto checkpoints) {
    by_layout(p, [&](auto k_first) {
      launch<gdn_prefill_inter_chunk_tma<WARPS, decltype(checkpoints)::value, decltype(k_first)::value>>(
          Begin::WHILE_ENDING, grid, tma_threads(WARPS, true), sizeof(TmaTile<WARPS>), device, stream, p, maps);
    });
  };
  if (p.has_checkpoints()) with(std::bool_constant<POOL>{});
  else with(std::false_type{});
}

bool launch_tma(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream) {
  if (!has_tma(device)) return false;
  Maps maps{}, unused{};
  make_maps(p, maps, unused);
  const int count = sms_of(device);
  const uint32_t parts = allocate_workspace(p, segments, sizeof(Prepared), device, allocate);
  if (!p.segment && !p.has_checkpoints() && 4 * int64_t{p.N} * p.HV > count) {
    Maps quarters = maps;
    make_state_map(maps.state, p, GROUP_ROWS, p.rows(0)), make_state_map(quarters.state, p, GROUP_ROWS / 2, p.rows(0));
    p.plan = static_cast<Plan*>(allocate(sizeof(Plan) + p.N * sizeof(ScheduledTile))), p.ctas = count;
    launch_intra_chunk<gdn_prefill_intra_chunk_sm80<true>, false, true>(p, {}, device, stream);
    by_layout(p, [&](auto k_first) {
      launch<gdn_prefill_inter_chunk_tma_tiles<decltype(k_first)::value>>(Begin::WHILE_ENDING, dim3(count), tma_threads(4, true),
                                                                          sizeof(TmaTiles<4>), device, stream, p, maps, quarters);
    });
    return true;
  }
  launch_intra_chunk<gdn_prefill_intra_chunk_sm80<false>, false>(p, {}, device, stream);
  if (p.segment) {
    const dim3 grid(4, p.HV, static_cast<uint32_t>(p.num_tokens / (p.segment * CHUNK)));
    by_layout(p, [&](auto k_first) {
      launch<gdn_prefill_transfer_tma<decltype(k_first)::value>>(Begin::WHILE_ENDING, grid, tma_threads(4, false), sizeof(TmaTile<4>),
                                                                 device, stream, p, maps);
    });
    launch_scan(Begin::WHILE_ENDING, p, device, stream);
  }
  // The number of segments if one sequence has nearly all tokens. Quarters of V while each can have an SM.
  const int64_t unit = int64_t{p.segment} * CHUNK, likely = p.segment ? (p.num_tokens + unit - 1) / unit : p.N;
  if (4 * likely * p.HV <= count) launch_inter_chunk<2>(p, maps, parts, device, stream);
  else launch_inter_chunk<4>(p, maps, parts, device, stream);
  return true;
}

}  // namespace gdn
