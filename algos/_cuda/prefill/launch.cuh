// Shared by launch_*.cu: a launch with more shared memory, the launch of the intra-chunk kernel, segments and memory for them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "dispatch_rule.h"
#include "intra_chunk_steps.cuh"
#include "dispatch.h"

namespace gdn {

// Launches with more shared memory than the default of 48 KiB; set once on each of the first 64 GPUs, on others
// each time. 64 is simply more GPUs than a host has.
// static: a process may have several builds of this library, and each must set the attributes of its own kernels.
template <auto KERNEL, typename... Arguments>
static void launch(Begin begin, dim3 grid, int threads, int shared, int device, cudaStream_t stream, const Arguments&... arguments) {
  static std::array<std::atomic<bool>, 64> ready{};
  const bool kept = device >= 0 && device < 64;
  if (!kept || !ready[device].load(std::memory_order_relaxed)) {
    check(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    if (kept) ready[device].store(true, std::memory_order_relaxed);
  }
  cudaLaunchAttribute overlaps{};
  overlaps.id = cudaLaunchAttributeProgrammaticStreamSerialization, overlaps.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &overlaps, config.numAttrs = begin == Begin::WHILE_ENDING;
  check(cudaLaunchKernelEx(&config, KERNEL, arguments...));
}

// Calls `with` with whether states are [K, V] in memory, as a constant: only a pool's can be.
template <typename With>
static void by_layout(const Prefill& p, const With& with) {
  if (p.is_k_first()) with(std::bool_constant<POOL>{});
  else with(std::false_type{});
}

// KERNEL: gdn_prefill_intra_chunk_sm90 or _sm80. PERSISTENT (sm90): with more chunks than resident CTAs, a CTA has several:
// 1x32768 210.0 us instead of 212.5, 4x2048 with 16/32 heads 103.3 instead of 108.0, within 1 % up to 528 chunks times heads
// (ladder, H200, whole op). Else one CTA per chunk and head. SORTS: one more CTA, which sorts the sequences.
template <auto KERNEL, bool PERSISTENT, bool SORTS = false>
static void launch_intra_chunk(const Prefill& p, const CUtensorMap& keys, int device, cudaStream_t stream) {
  const int group = p.HV / p.H, resident = INTRA_CTAS * sms_of(device) - SORTS;
  const IntraSchedule schedule =
      intra_schedule(p.num_tokens, p.N, p.H, PERSISTENT ? resident : std::numeric_limits<int64_t>::max());
  // With few chunks one CTA per value head: K K^T is computed again for each, but SMs would be idle otherwise. With many it loses:
  // 17.7 us in a lab, two heads per CTA 14.4 at 8192 tokens (ladder, H200, both with M). The border, two CTAs per SM of the four
  // that fit, not measured alone.
  const int parts = int64_t{schedule.numbers} * p.H < 2 * sms_of(device) ? group : 1;
  const dim3 grid = schedule.each > 0 ? dim3(resident + SORTS) : dim3(schedule.numbers + SORTS, p.H, parts);
  launch<KERNEL>(Begin::AFTER, grid, INTRA_THREADS, sizeof(IntraShared), device, stream, p, keys, schedule);
}

// Splits the sequences, in place: see segment_chunks. Returns the maximum number of parts of all sequences.
inline uint32_t cut(Prefill& p, int segments, int device, bool forgets) {
  p.segment = segment_chunks(p.num_tokens, p.N, p.HV, segments, sms_of(device), forgets);
  return p.N + (p.segment ? static_cast<uint32_t>(p.num_tokens / (p.segment * CHUNK)) : 0);
}

// Memory for the intra-chunk kernel's results, and for segments. For the number of parts see cut.
static uint32_t allocate_workspace(Prefill& p, int segments, int64_t prepared, int device, const Allocate& allocate,
                                   bool forgets = false) {
  p.prepared = static_cast<char*>(allocate((p.num_tokens / CHUNK + p.N) * p.HV * prepared));
  const uint32_t parts = cut(p, segments, device, forgets);
  if (p.segment) {
    const int64_t bytes = int64_t{parts} * p.HV * HEAD_DIM * HEAD_DIM * sizeof(float);
    p.ends = static_cast<float*>(allocate(bytes)), p.transfers = static_cast<float*>(allocate(bytes));
  }
  return parts;
}

}  // namespace gdn
