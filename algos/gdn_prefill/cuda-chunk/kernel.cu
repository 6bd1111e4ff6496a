// GDN prefill, cuda-chunk: two launches, or four, or one. prepare.cuh makes, for all chunks at once, what their own tokens say;
// with wgmma but for M, which the walk makes beside itself. hopper.cuh or, without wgmma, state.cuh and split.cuh go from chunk
// to chunk; for few heads and long sequences segments.cuh lets them do so in several places at once. Short sequences go to
// cuda-recurrent's kernel. From where on, and in how many segments, is chosen by measurement for each number of sequences and
// heads (tuned.h, by `gdn tune`). The host reads no cu_seqlens and never waits: what it knows of lengths is their mean, and
// that one is often much longer than the others.

#include "tuned.h"

#include <tvm/ffi/extra/cuda/base.h>

#include "tuned_row.cuh"
#include "device.cuh"
#include "lengths.h"
#include "ways.h"

namespace gdn {

void check(cudaError_t error) { TVM_FFI_CHECK_CUDA_ERROR(error); }
void check(CUresult error) {
  if (error != CUDA_SUCCESS) TVM_FFI_THROW(RuntimeError) << "the driver makes no tensor map of q, k, v or state: CUresult " << error;
}
int sms_of(int device) { return sms(device); }

void prefill(const Call& call, const Allocate& allocate, int device, void* on) {
  Prefill p{};
  static_cast<Call&>(p) = call;
  const CurrentDevice current(device);
  const auto stream = static_cast<cudaStream_t>(on);
  const int count = sms(device);
  const Tuned& row = TUNED[chosen(TUNED, count, int64_t{p.N} * p.HV)];
  if (short_ones(p.T, p.N, p.HV, row.recurrent, count)) return walk_tokens(p, device, stream);
  if (!walk_wide(p, row.segments, allocate, device, stream)) walk_narrow(p, row.segments, allocate, device, stream);
}

}  // namespace gdn
