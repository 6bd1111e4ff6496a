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

// A launch of `clusters` clusters.
struct PairLaunch {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config{};
  PairLaunch(uint32_t clusters, cudaStream_t stream) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 2, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(2 * clusters), config.blockDim = dim3(FUSED_THREADS), config.dynamicSmemBytes = sizeof(FusedShared);
    config.stream = stream, config.attrs = &cluster, config.numAttrs = 1;
  }
};

// How many clusters can be resident: half as many as SMs, if no SM is without a neighbour. Asked once for each of the first 64 GPUs.
template <bool K_FIRST>
static uint32_t clusters_of(int device) {
  static std::array<std::atomic<int>, 64> known{};  // 0: not asked yet
  const bool kept = device >= 0 && device < 64;
  int answer = kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (answer == 0) {
    check(cudaFuncSetAttribute(gdn_prefill_fused_sm90<K_FIRST>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(FusedShared)));
    const PairLaunch all(sms_of(device) / 2, nullptr);
    check(cudaOccupancyMaxActiveClusters(&answer, gdn_prefill_fused_sm90<K_FIRST>, &all.config));
    if (kept) known[device].store(answer, std::memory_order_relaxed);
  }
  return answer;
}

template <bool K_FIRST>
static bool launch_fused(Prefill p, Maps one, const Allocate& allocate, int device, cudaStream_t stream) {
  const uint32_t tiles = static_cast<uint32_t>(p.N) * p.HV, clusters = clusters_of<K_FIRST>(device);
  if (clusters == 0) return false;
  CUtensorMap new_states{};
  if (tiles > clusters) {
    if (p.N > FUSED_SEQUENCES) return false;
    make_state_map(one.state, p, GROUP_ROWS, p.rows(0)), make_state_map(new_states, p, GROUP_ROWS, p.new_rows(0));
    p.tickets = static_cast<unsigned long long*>(allocate(sizeof *p.tickets)), p.launch = launch_number();
    // Anything may be there (open_tickets). compute-sanitizer reports that it is read all the same, so a build for it clears it first.
    if (ARRIVALS > 1) check(cudaMemsetAsync(p.tickets, 0, sizeof *p.tickets, stream));
  }
  const PairLaunch pairs(std::min(tiles, clusters), stream);
  check(cudaLaunchKernelEx(&pairs.config, gdn_prefill_fused_sm90<K_FIRST>, p, one, new_states));
  return true;
}

bool launch_sm90_fused(Prefill p, Maps one, const Allocate& allocate, int device, cudaStream_t stream) {
  bool launched = false;
  by_layout(p, [&](auto k_first) { launched = launch_fused<decltype(k_first)::value>(p, one, allocate, device, stream); });
  return launched;
}

}  // namespace gdn
