// The functions that dispatch.cu dispatches to, one for each launch_*.cu. These files are compiled separately, in parallel.
#pragma once

#include <cuda.h>

#include "dispatch_rule.h"

#pragma GCC visibility push(hidden)  // a process may have several builds of this library
namespace gdn {

// wgmma and TMA (launch_sm90.cu). Returns false, without a launch, if this build or this GPU has no wgmma.
bool launch_sm90(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream);
// mma.sync and TMA (launch_tma.cu). Returns false, without a launch, if this build or this GPU has no TMA.
bool launch_tma(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream);
// mma.sync and cp.async (launch_sm80.cu), which every GPU from sm_80 on has.
void launch_sm80(Prefill p, int segments, const Allocate& allocate, int device, cudaStream_t stream);
// cuda-recurrent's kernel (launch_recurrent.cu).
void launch_recurrent(const Prefill& p, int device, cudaStream_t stream);

// Defined in dispatch.cu, so that the other files need not include the binding's headers: throw if the runtime, or the driver that
// makes tensor maps, reports an error; number of SMs of a device, its rates.
void check(cudaError_t error);
void check(CUresult error);
int sms_of(int device);
Rates rates_of(int device);  // asked once

// When a kernel's first CTAs may begin: when the kernel before has ended, or while it ends (dependent_launch.cuh; sm_90 on). In the
// latter case each CTA waits before it reads what the kernel before writes.
enum class Begin { AFTER, WHILE_ENDING };

// The state after each segment (context_parallel_scan.cuh, in launch_sm80.cu), for all three.
void launch_scan(Begin begin, const Prefill& p, int device, cudaStream_t stream);

}  // namespace gdn
#pragma GCC visibility pop
