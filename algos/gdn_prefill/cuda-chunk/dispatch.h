// What kernel.cu dispatches to: one function for each launch_*.cu. These are compiled by themselves, side by side where there are
// cores.
#pragma once

#include <cuda.h>

#include "chunk.cuh"

#pragma GCC visibility push(hidden)  // a process may have several builds of this library
namespace gdn {

// wgmma and TMA (launch_sm90.cu); false, with nothing done, where this build or this GPU has no wgmma.
bool launch_sm90(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream);
// mma.sync (launch_sm80.cu), which every GPU from sm_80 on has.
void launch_sm80(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream);
// cuda-recurrent's kernel (launch_recurrent.cu).
void launch_recurrent(const Prefill& p, int device, cudaStream_t stream);

// In kernel.cu, so that the binding's headers are compiled there alone: an exception for what is no success, of the runtime or of
// the driver that makes tensor maps; SMs of a device.
void check(cudaError_t error);
void check(CUresult error);
int sms_of(int device);

// The state behind each segment (context_parallel_scan.cuh, in launch_sm80.cu), for launch_sm90 and launch_sm80.
void launch_scan(const Prefill& p, int device, cudaStream_t stream);

}  // namespace gdn
#pragma GCC visibility pop
