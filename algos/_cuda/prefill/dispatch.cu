// GDN prefill, cuda-chunk: chunks of 64 tokens. The files:
//
//   binding.cpp, call.h            checks of the arguments; like tensors.cuh and launch_recurrent.cu in cuda-chunk's own folder,
//                                  or for pools in prefill_pool
//   dispatch*                      the choice of the code path, by the number of tokens, sequences and heads
//   chunk.cuh                      shared by the kernels: the letters, the division into chunks, layouts in memory
//   tensors.cuh                    where a call's tensors are: dense (gdn_prefill/cuda-chunk), or in rows and slots with gaps
//                                  (gdn_prefill_packed/cuda-chunk-packed)
//   intra_chunk_*.cuh              launch 1: for all chunks at once, T = (I + A)^-1 and the gates; without wgmma M, too. _steps:
//                                  the steps of both kernels, _sm90 and _sm80
//   inter_chunk_sm90*.cuh          launch 2 on sm_90a: from chunk to chunk with wgmma and TMA, M computed at the same time;
//                                  _tiles: many sequences of different lengths, in the order of tile_scheduler.cuh
//                                  _fused: launches 1 and 2 in one, by pairs of CTAs
//   row_products.cuh               Q K^T and K K^T, in the kernels for sm_90a
//   inter_chunk_tma.cuh            launch 2 with TMA and mma.sync, where there is no wgmma: Blackwell, sm_90 without "a"
//   inter_chunk_sm80*.cuh          launch 2 elsewhere: with mma.sync and cp.async
//   context_parallel*.cuh          two more launches for few heads and long sequences: segments in parallel
//   launch*.cu, launch.cuh         grids, shared memory, tensor_maps.cuh
//
// Short sequences go to cuda-recurrent's kernel. Up to which length, and the number of segments, is chosen by measurement for each
// number of sequences and heads (tuned.h, by `gdn tune`). The host does not read cu_seqlens and never waits: it only knows the
// mean length, and that one sequence is often much longer than the others.

#include "tuned.h"

#include <tvm/ffi/extra/cuda/base.h>

#include <array>
#include <mutex>

#include "tuned_row.cuh"
#include "device.cuh"
#include "dispatch_rule.h"
#include "dispatch.h"

namespace gdn {

void check(cudaError_t error) { TVM_FFI_CHECK_CUDA_ERROR(error); }
void check(CUresult error) {
  constexpr const char* WHAT = "the driver makes no tensor map of q, k, v or state: CUresult ";
  if (error == CUDA_ERROR_INVALID_VALUE) TVM_FFI_THROW(ValueError) << WHAT << error;  // sizes or strides: engines fall back
  if (error != CUDA_SUCCESS) TVM_FFI_THROW(RuntimeError) << WHAT << error;
}
int sms_of(int device) { return sms(device); }
static Rates ask_for_rates(int device) {
  const auto ask = [device](cudaDeviceAttr what) {
    int answer = 0;
    if (cudaDeviceGetAttribute(&answer, what, device) != cudaSuccess) cudaGetLastError(), answer = 0;
    return static_cast<double>(answer);  // clocks in kHz, the bus in bits
  };
  const double memory = ask(cudaDevAttrMemoryClockRate), bus = ask(cudaDevAttrGlobalMemoryBusWidth), clock = ask(cudaDevAttrClockRate);
  const bool told = memory > 0 && bus > 0 && clock > 0;  // not every driver tells, as of a part of a GPU
  return {told ? COPY * 2 * memory * 1e-3 * bus / 8 : HOME.bytes, told ? clock * 1e-3 : HOME.clock, sms(device)};
}
Rates rates_of(int device) {
  static std::array<Rates, 64> known{};
  static std::array<std::once_flag, 64> asked;
  if (device < 0 || device >= 64) return ask_for_rates(device);  // more GPUs than a host has
  std::call_once(asked[device], [&] { known[device] = ask_for_rates(device); });
  return known[device];
}

void prefill(const Call& call, const Allocate& allocate, int device, void* on) {
  Prefill p{};
  static_cast<Call&>(p) = call;
  const CurrentDevice current(device);
  const auto stream = static_cast<cudaStream_t>(on);
  const int count = sms(device);
  const Tuned& row = TUNED[chosen(TUNED, count, int64_t{p.N} * p.HV)];
  const bool whole = !p.has_checkpoints() || p.num_tokens < CHUNK;  // cuda-recurrent's kernel keeps no states in between
  if (whole && use_recurrent(p.num_tokens, p.N, p.HV, row.recurrent, count)) return launch_recurrent(p, device, stream);
  if (launch_sm90(p, row.segments, allocate, device, stream) || launch_tma(p, row.segments, allocate, device, stream)) return;
  launch_sm80(p, row.segments, allocate, device, stream);
}

}  // namespace gdn
