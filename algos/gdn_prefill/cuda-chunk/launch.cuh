// What launch_*.cu share: a launch with more shared memory, that of the intra-chunk kernel, segments and the memory for both.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>

#include "dispatch_rule.h"
#include "intra_chunk.cuh"
#include "dispatch.h"

namespace gdn {

// Launches with more shared memory than the 48 KiB that a kernel has unasked; asked for once on each of the first 64 GPUs.
// Of this library alone (static): a process may have several builds of it, each with kernels of its own to be told.
template <auto KERNEL, typename... Arguments>
static void launch(dim3 grid, int threads, int shared, int device, cudaStream_t stream, const Arguments&... arguments) {
  static std::array<std::atomic<bool>, 64> ready{};
  const bool kept = device >= 0 && device < 64;
  if (!kept || !ready[device].load(std::memory_order_relaxed)) {
    check(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    if (kept) ready[device].store(true, std::memory_order_relaxed);
  }
  KERNEL<<<grid, threads, shared, stream>>>(arguments...);
  check(cudaGetLastError());
}

// WIDE: `keys` is a map of k as tma_load_box takes it, and 8 KB for a chunk and value head are made; else 16, with M. ORDERED: the
// plan, too.
template <bool WIDE, bool ORDERED = false>
static void launch_intra_chunk(const Prefill& p, const CUtensorMap& keys, int device, cudaStream_t stream) {
  const int members = p.HV / p.H, room = PREPARE_CTAS * sms_of(device) - ORDERED;
  // Each chunk and head has a CTA on its own by mma.sync.
  const Share share = share_of(p.num_tokens, p.N, p.H, WIDE ? room : std::numeric_limits<int64_t>::max());
  const int parts = int64_t{share.numbers} * p.H < 2 * sms_of(device) ? members : 1;  // with few chunks, a CTA for each value head
  const dim3 grid = share.each > 0 ? dim3(room + ORDERED) : dim3(share.numbers + ORDERED, p.H, parts);
  launch<gdn_prefill_prepare<WIDE, ORDERED>>(grid, PREPARE_THREADS, sizeof(PrepareShared), device, stream, p, keys, share);
}

// Cuts the sequences, in place: see segment_chunks. How many parts there are then, of all.
inline uint32_t cut(Prefill& p, int segments, int device) {
  p.segment = segment_chunks(p.num_tokens, p.N, p.HV, segments, sms_of(device));
  return p.N + (p.segment ? static_cast<uint32_t>(p.num_tokens / (p.segment * CHUNK)) : 0);
}

// Memory for what the intra-chunk kernel leaves, and for segments. How many parts there are: see cut.
static uint32_t allocate_workspace(Prefill& p, int segments, int64_t prepared, int device, const Allocate& allocate) {
  p.prepared = static_cast<char*>(allocate((p.num_tokens / CHUNK + p.N) * p.HV * prepared));
  const uint32_t parts = cut(p, segments, device);
  if (p.segment) {
    const int64_t bytes = int64_t{parts} * p.HV * HEAD_DIM * HEAD_DIM * sizeof(float);
    p.ends = static_cast<float*>(allocate(bytes)), p.transfers = static_cast<float*>(allocate(bytes));
  }
  return parts;
}

}  // namespace gdn
