// The ways through a call. Each is compiled by itself: side by side, where there are cores for it.
#pragma once

#include <cuda.h>

#include "chunk.cuh"

#pragma GCC visibility push(hidden)  // a process may have several builds of this library
namespace gdn {

// By warpgroups (launch_sm90.cu); false, with nothing done, where this build or this GPU has no wgmma.
bool walk_wide(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream);
// By warps (launch_sm80.cu), which every GPU from sm_80 on has.
void walk_narrow(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream);
// By cuda-recurrent's kernel (launch_recurrent.cu).
void walk_tokens(const Prefill& p, int device, cudaStream_t stream);

// What would bring the binding's headers to each of them (kernel.cu): an exception for what is no success, of the runtime or of the
// driver that makes tensor maps; SMs of a device.
void check(cudaError_t error);
void check(CUresult error);
int sms_of(int device);

// The state behind each segment (context_parallel_scan.cuh, in launch_sm80.cu), for both of the first two.
void scan(const Prefill& p, int device, cudaStream_t stream);

}  // namespace gdn
#pragma GCC visibility pop
