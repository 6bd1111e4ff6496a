// GDN prefill, cuda-chunk: two launches, or four. prepare.cuh makes, for all chunks at once, what their own tokens say;
// state.cuh or, for few heads, split.cuh goes from chunk to chunk; for few heads and long sequences segments.cuh lets it do
// so in several places at once. Which, and how wide, is chosen by measurement for each number of sequences and heads
// (tuned.h, by `gdn tune`). The host reads no cu_seqlens and never waits: what it knows of lengths is their mean.

#include "tuned.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <utility>

#include "choice.cuh"
#include "prepare.cuh"
#include "segments.cuh"
#include "split.cuh"
#include "state.cuh"
#include "tensor.cuh"

namespace gdn {

// Launches with more shared memory than the 48 KiB that a kernel has unasked; asked for once on each of the first 64 GPUs.
template <auto KERNEL>
void launch(dim3 grid, int threads, int shared, const Prefill& p, int device, cudaStream_t stream) {
  static std::array<std::atomic<bool>, 64> ready{};
  const bool kept = device >= 0 && device < 64;
  if (!kept || !ready[device].load(std::memory_order_relaxed)) {
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    if (kept) ready[device].store(true, std::memory_order_relaxed);
  }
  KERNEL<<<grid, threads, shared, stream>>>(p);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// Of the device's memory as the caller has it: torch's caching allocator when that is torch, so no synchronisation, and it
// is given back as soon as the launches are queued.
inline ffi::Tensor scratch(int64_t rows, int64_t bytes, DLDevice device) {
  return ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {rows, bytes}, DLDataType{kDLUInt, 8, 1}, device);
}

// A sequence of the mean length in `segments` parts; not in pieces so short, nor a whole so short, that four launches and
// half as many products again cost more than they save.
constexpr int SHORTEST_SEGMENT = 26, SHORTEST_CUT = 64;  // chunks; memory is 16 KB a chunk and 128 KB a segment
inline int segment_of(int64_t T, int64_t N, int segments) {
  const int64_t chunks = T / N / CHUNK;
  if (segments < 2 || chunks < SHORTEST_CUT) return 0;
  return static_cast<int>(std::max<int64_t>(SHORTEST_SEGMENT, (chunks + segments - 1) / segments));
}

template <size_t I>
void walk(Prefill& p, int64_t T, DLDevice on, cudaStream_t stream) {
  constexpr int WARPS = TUNED[I].warps, STAGES = TUNED[I].stages;
  const int device = on.device_id;
  uint32_t parts = p.N;
  ffi::Optional<ffi::Tensor> ends, transfers;
  if ((p.segment = segment_of(T, p.N, TUNED[I].segments))) {
    parts += static_cast<uint32_t>(T / (p.segment * CHUNK));
    constexpr int64_t BYTES = D * D * sizeof(float);
    ends = scratch(int64_t{parts} * p.HV, BYTES, on), transfers = scratch(int64_t{parts} * p.HV, BYTES, on);
    p.ends = static_cast<float*>(ends.value().data_ptr()), p.transfers = static_cast<float*>(transfers.value().data_ptr());
    launch<gdn_prefill_transfer<4, 2>>(dim3(2 * D / 16 / 4, p.HV, parts), 4 * 32, state_shared<4, 2>(), p, device, stream);
    launch<gdn_prefill_scan>(dim3(D / 16, p.HV, p.N), SCAN_THREADS, sizeof(ScanShared), p, device, stream);
  }
  if constexpr (WARPS == 0) {
    const dim3 grid(D / 16, p.HV, parts);
    launch<gdn_prefill_split<STAGES>>(grid, SPLIT_THREADS, split_shared<STAGES>(), p, device, stream);
  } else {
    const dim3 grid(D / 16 / WARPS, p.HV, parts);
    launch<gdn_prefill_state<WARPS, STAGES>>(grid, WARPS * 32, state_shared<WARPS, STAGES>(), p, device, stream);
  }
}

template <size_t... I>
void walk(size_t row, Prefill& p, int64_t T, DLDevice on, cudaStream_t stream, std::index_sequence<I...>) {
  (void)((I == row && (walk<I>(p, T, on, stream), true)) || ...);
}

// q, k [T,H,128] bf16; v [T,HV,128] bf16; state [N,HV,128,128] f32; A_log, dt_bias [HV] f32; a, b [T,HV] bf16;
// cu_seqlens [N+1] i64, from 0 on, never falling, T at the end; scale None or 0: 1/sqrt(128).
// Writes output [T,HV,128] bf16 and new_state like state, which may be state itself. HV a multiple of H.
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::TensorView cu_seqlens,
         ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView new_state) {
  if (q.ndim() != 3 || v.ndim() != 3) TVM_FFI_THROW(ValueError) << "q and v: expected 3 dimensions [T, heads, 128]";
  if (cu_seqlens.ndim() != 1 || cu_seqlens.size(0) < 1) TVM_FFI_THROW(ValueError) << "cu_seqlens: expected [N + 1]";
  const int64_t T = q.size(0), H = q.size(1), HV = v.size(1), N = cu_seqlens.size(0) - 1;
  if (H < 1 || HV < 1 || HV % H) TVM_FFI_THROW(ValueError) << "HV = " << HV << " is no multiple of H = " << H;
  const DLDevice device = state.device();
  if (device.device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "state: expected on a CUDA device";
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1}, i64{kDLInt, 64, 1};
  using bf = __nv_bfloat16;
  const double s = scale.value_or(0.0);
  Prefill p = {
      data<const bf>(q, "q", bf16, {T, H, D}, device, 16),
      data<const bf>(k, "k", bf16, {T, H, D}, device, 16),
      data<const bf>(v, "v", bf16, {T, HV, D}, device, 16),
      data<const float>(state, "state", f32, {N, HV, D, D}, device, 8),
      data<const float>(A_log, "A_log", f32, {HV}, device, 4),
      data<const bf>(a, "a", bf16, {T, HV}, device, 2),
      data<const float>(dt_bias, "dt_bias", f32, {HV}, device, 4),
      data<const bf>(b, "b", bf16, {T, HV}, device, 2),
      data<const int64_t>(cu_seqlens, "cu_seqlens", i64, {N + 1}, device, 8),
      data<bf>(output, "output", bf16, {T, HV, D}, device, 16),
      data<float>(new_state, "new_state", f32, {N, HV, D, D}, device, 8),
      nullptr,
      nullptr,
      nullptr,
      static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(D)) : s),
      static_cast<int>(H),
      static_cast<int>(HV),
      static_cast<int>(N),
      0,
      T,
  };
  if (N == 0) return;
  if (N > 32767 || HV > 65535) TVM_FFI_THROW(ValueError) << "N = " << N << ", HV = " << HV << ": expected at most 32767 and 65535";

  ffi::CUDADeviceGuard guard(device.device_id);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  const int64_t numbers = T / CHUNK + N;
  constexpr int64_t ALIGNED = 1024;  // of Prepared; torch's allocator promises 512
  const ffi::Tensor prepared = scratch(1, numbers * HV * sizeof(Prepared) + ALIGNED, device);
  p.prepared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(prepared.data_ptr()) + ALIGNED - 1) / ALIGNED * ALIGNED);
  const int count = sms(device.device_id);
  const int64_t parts = numbers * H < 2 * count ? HV / H : 1;  // with few chunks, a CTA for each value head
  const dim3 grid(static_cast<uint32_t>(numbers), H, parts);
  constexpr int SHARED = sizeof(PrepareShared), THREADS = PREPARE_THREADS;
  if (HV / H > PAIR * parts) launch<gdn_prefill_prepare<true>>(grid, THREADS, SHARED, p, device.device_id, stream);
  else launch<gdn_prefill_prepare<false>>(grid, THREADS, SHARED, p, device.device_id, stream);
  walk(chosen(count, N * HV), p, T, device, stream,
       std::make_index_sequence<ROWS_TUNED>{});
}

}  // namespace gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run);
