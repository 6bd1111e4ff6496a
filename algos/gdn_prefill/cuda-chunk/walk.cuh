// The launches of cuda-chunk: preparation, then the way from chunk to chunk that this GPU and this build have.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "choice.cuh"
#include "hopper.cuh"
#include "prepare.cuh"
#include "segments.cuh"
#include "split.cuh"
#include "state.cuh"
#include "tensor.cuh"
#include "tensor_map.cuh"

namespace gdn {

// Launches with more shared memory than the 48 KiB that a kernel has unasked; asked for once on each of the first 64 GPUs.
// Of this library alone (static): a process may have several builds of it, each with kernels of its own to be told.
template <auto KERNEL, typename... Arguments>
static void launch(dim3 grid, int threads, int shared, int device, cudaStream_t stream, const Arguments&... arguments) {
  static std::array<std::atomic<bool>, 64> ready{};
  const bool kept = device >= 0 && device < 64;
  if (!kept || !ready[device].load(std::memory_order_relaxed)) {
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    if (kept) ready[device].store(true, std::memory_order_relaxed);
  }
  KERNEL<<<grid, threads, shared, stream>>>(arguments...);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// Of the device's memory as the caller has it: torch's caching allocator when that is torch, so no synchronisation, and it
// is given back as soon as the launches are queued.
inline ffi::Tensor scratch(int64_t rows, int64_t bytes, DLDevice device) {
  return ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {rows, bytes}, DLDataType{kDLUInt, 8, 1}, device);
}

// A sequence of the mean length in `segments` parts; not in pieces so short, nor a whole so short, that four launches and
// half as many products again cost more than they save.
constexpr int SHORTEST_SEGMENT = 8, SHORTEST_CUT = 24;  // chunks; memory is 16 KB a chunk and 128 KB a segment
inline int segment_of(int64_t T, int64_t N, int segments) {
  const int64_t chunks = T / N / CHUNK;
  if (segments < 2 || chunks < SHORTEST_CUT) return 0;
  return static_cast<int>(std::max<int64_t>(SHORTEST_SEGMENT, (chunks + segments - 1) / segments));
}

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

static void prepare(const Prefill& p, uint32_t numbers, int device, cudaStream_t stream) {
  const int members = p.HV / p.H;
  const int64_t parts = int64_t{numbers} * p.H < 2 * sms(device) ? members : 1;  // with few chunks, a CTA for each value head
  const dim3 grid(numbers, p.H, static_cast<uint32_t>(parts));
  constexpr int SHARED = sizeof(PrepareShared), THREADS = PREPARE_THREADS;
  if (members > PAIR * parts) launch<gdn_prefill_prepare<true>>(grid, THREADS, SHARED, device, stream, p);
  else launch<gdn_prefill_prepare<false>>(grid, THREADS, SHARED, device, stream, p);
}

static void scan(const Prefill& p, int device, cudaStream_t stream) {
  launch<gdn_prefill_scan>(dim3(D / 16, p.HV, p.N), SCAN_THREADS, sizeof(ScanShared), device, stream, p);
}

// By warpgroups: one for a CTA while every CTA can have an SM, and else two, which share the tiles.
template <int GROUPS, int STAGES>
static void walk_wide(const Prefill& p, const Maps& maps, uint32_t parts, int device, cudaStream_t stream) {
  launch<gdn_prefill_group<GROUPS, STAGES>>(dim3(2 / GROUPS, p.HV, parts), group_threads(GROUPS), group_shared<GROUPS, STAGES>(),
                                            device, stream, p, maps);
}
template <int GROUPS, int STAGES>
static void transfer_wide(const Prefill& p, const Maps& maps, uint32_t parts, int device, cudaStream_t stream) {
  launch<gdn_prefill_group_transfer<GROUPS, STAGES>>(dim3(4 / GROUPS, p.HV, parts), group_threads(GROUPS),
                                                     group_shared<GROUPS, STAGES>(), device, stream, p, maps);
}
static bool walk_wide(const Prefill& p, uint32_t parts, int device, cudaStream_t stream) {
  // How many segments there are when all sequences have the mean length; `parts` is the most that there can be.
  const int64_t unit = int64_t{p.segment} * CHUNK, likely = p.segment ? p.N * ((p.T / p.N + unit - 1) / unit) : p.N;
  const int64_t heads = likely * p.HV, moved = (likely - p.N) * p.HV, count = sms(device);  // a sequence's last does not move
  Maps one{}, two{};
  const bool there = make_map(one.q, p.q, p.T, p.H, 2) && make_map(one.k, p.k, p.T, p.H, 2) && make_map(one.v, p.v, p.T, p.HV, 1) &&
                     make_map(two.v, p.v, p.T, p.HV, 2);
  if (!there) return false;
  two.q = one.q, two.k = one.k;
  if (p.segment) {
    if (4 * moved <= count) transfer_wide<1, 4>(p, one, parts, device, stream);
    else transfer_wide<2, 3>(p, two, parts, device, stream);
    scan(p, device, stream);
  }
  if (2 * heads <= count) walk_wide<1, 4>(p, one, parts, device, stream);
  else walk_wide<2, 3>(p, two, parts, device, stream);
  return true;
}

// By warps, which every GPU from sm_80 on has: four for the same rows while there are few heads.
static void walk_narrow(const Prefill& p, uint32_t parts, int device, cudaStream_t stream) {
  constexpr int WARPS = 4, STAGES = 2, SHARED = state_shared<WARPS, STAGES>();
  const dim3 split_grid(D / 16, p.HV, parts), grid(D / 16 / WARPS, p.HV, parts);
  if (p.segment) {
    launch<gdn_prefill_transfer<WARPS, STAGES>>(dim3(2 * D / 16 / WARPS, p.HV, parts), WARPS * 32, SHARED, device, stream, p);
    scan(p, device, stream);
  }
  if (!p.segment && int64_t{p.N} * p.HV <= 48)
    launch<gdn_prefill_split<2>>(split_grid, SPLIT_THREADS, split_shared<2>(), device, stream, p);
  else
    launch<gdn_prefill_state<WARPS, STAGES>>(grid, WARPS * 32, SHARED, device, stream, p);
}

// All of it. `segments`: see segment_of.
static void walk(Prefill& p, int segments, DLDevice on, cudaStream_t stream) {
  const int device = on.device_id;
  const int64_t numbers = p.T / CHUNK + p.N;
  const ffi::Tensor prepared = scratch(numbers, int64_t{p.HV} * sizeof(Prepared), on);
  p.prepared = static_cast<char*>(prepared.data_ptr());
  prepare(p, static_cast<uint32_t>(numbers), device, stream);

  uint32_t parts = p.N;
  ffi::Optional<ffi::Tensor> ends, transfers;
  if ((p.segment = segment_of(p.T, p.N, segments))) {
    parts += static_cast<uint32_t>(p.T / (p.segment * CHUNK));
    constexpr int64_t BYTES = D * D * sizeof(float);
    ends = scratch(int64_t{parts} * p.HV, BYTES, on), transfers = scratch(int64_t{parts} * p.HV, BYTES, on);
    p.ends = static_cast<float*>(ends.value().data_ptr()), p.transfers = static_cast<float*>(transfers.value().data_ptr());
  }
  if (!(has_wgmma(device) && walk_wide(p, parts, device, stream))) walk_narrow(p, parts, device, stream);
}

}  // namespace gdn
