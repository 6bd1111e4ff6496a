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
#include "order.cuh"
#include "ordered.cuh"
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

// All states' rows for copy_state: 64 or 128 of them, in four blocks of 32 columns.
inline bool make_state_map(CUtensorMap& map, const Prefill& p, uint32_t rows) {
  return flashcore::make_tensor_map<3>(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, p.state,
                                       {32, static_cast<cuuint64_t>(p.N) * p.HV * D, D / 32}, {D * 4, 128}, {32, rows, D / 32});
}

// WIDE: `keys` is a map of k as copy_box takes it, and 8 KB for a chunk and value head are made; else 16, with M. ORDERED: the
// plan, too.
template <bool WIDE, bool ORDERED = false>
static void prepare(const Prefill& p, const CUtensorMap& keys, uint32_t numbers, int device, cudaStream_t stream) {
  const int members = p.HV / p.H;
  const int64_t parts = int64_t{numbers} * p.H < 2 * sms(device) ? members : 1;  // with few chunks, a CTA for each value head
  const dim3 grid(numbers + ORDERED, p.H, static_cast<uint32_t>(parts));
  launch<gdn_prefill_prepare<WIDE, ORDERED>>(grid, PREPARE_THREADS, sizeof(PrepareShared), device, stream, p, keys);
}

static void scan(const Prefill& p, int device, cudaStream_t stream) {
  launch<gdn_prefill_scan>(dim3(D / 16, p.HV, p.N), SCAN_THREADS, sizeof(ScanShared), device, stream, p);
}

// By warpgroups: one for a CTA while every CTA can have an SM, and else two, which share the tiles. Of those there are as many
// CTAs as can be resident; or one for each item, where the copy engine cannot bring states: kernel.cu lets them begin at
// multiples of 8 bytes.
template <int GROUPS, int STAGES>
static void walk_wide(const Prefill& p, Maps maps, uint32_t parts, int device, cudaStream_t stream) {
  const uint32_t items = p.HV * parts, resident = sms(device);
  const bool loops = GROUPS > 1 && items > resident && make_state_map(maps.state, p, GROUPS * GROUP_ROWS);
  const dim3 grid = GROUPS == 1 ? dim3(2, p.HV, parts) : dim3(loops ? resident : items);
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
static void walk_wide(const Prefill& p, const Maps& one, const Maps& two, uint32_t parts, int device, cudaStream_t stream) {
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

// Whether what walk_wide would give to two warpgroups can go in order of length instead: the engine can bring all states.
static bool can_order(const Prefill& p, Maps& one, Maps& two, int device) {
  return !p.segment && int64_t{2} * p.N * p.HV > sms(device) && make_state_map(one.state, p, GROUP_ROWS) &&
         make_state_map(two.state, p, 2 * GROUP_ROWS);
}
static void walk_ordered(const Prefill& p, const Maps& one, const Maps& two, int device, cudaStream_t stream) {
  launch<gdn_prefill_ordered>(dim3(sms(device)), ORDERED_THREADS, ordered_shared(), device, stream, p, one, two);
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

// Cuts the sequences, in place: see segment_of. How many parts there are then, of all.
inline uint32_t cut(Prefill& p, int segments) {
  p.segment = segment_of(p.T, p.N, segments);
  return p.N + (p.segment ? static_cast<uint32_t>(p.T / (p.segment * CHUNK)) : 0);
}

// All of it. `order`: 1 where items are taken longest first, if there are many.
static void walk(Prefill& p, int segments, int order, DLDevice on, cudaStream_t stream) {
  const int device = on.device_id;
  const int64_t numbers = p.T / CHUNK + p.N;
  Maps one{}, two{};
  const bool wide = has_wgmma(device) && make_maps(p, one, two);
  const ffi::Tensor prepared = scratch(numbers, int64_t{p.HV} * (wide ? MATRIX : sizeof(Prepared)), on);
  p.prepared = static_cast<char*>(prepared.data_ptr());

  const uint32_t parts = cut(p, segments);
  const bool ordered = wide && order && can_order(p, one, two, device);
  ffi::Optional<ffi::Tensor> plan;
  if (ordered) {
    plan = scratch(1, sizeof(Plan) + p.N * sizeof(int), on);
    p.plan = static_cast<Plan*>(plan.value().data_ptr());
    prepare<true, true>(p, one.k, static_cast<uint32_t>(numbers), device, stream);
    walk_ordered(p, one, two, device, stream);
    return;
  }
  if (wide) prepare<true>(p, one.k, static_cast<uint32_t>(numbers), device, stream);
  else prepare<false>(p, {}, static_cast<uint32_t>(numbers), device, stream);
  ffi::Optional<ffi::Tensor> ends, transfers;
  if (p.segment) {
    constexpr int64_t BYTES = D * D * sizeof(float);
    ends = scratch(int64_t{parts} * p.HV, BYTES, on), transfers = scratch(int64_t{parts} * p.HV, BYTES, on);
    p.ends = static_cast<float*>(ends.value().data_ptr()), p.transfers = static_cast<float*>(transfers.value().data_ptr());
  }
  if (wide) walk_wide(p, one, two, parts, device, stream);
  else walk_narrow(p, parts, device, stream);
}

}  // namespace gdn
