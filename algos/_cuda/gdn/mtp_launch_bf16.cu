// The kernels for outputs alone and a pool of bfloat16, in a file of its own: all are compiled at the same time.

#include "tuned_outputs.h"

#include "mtp_launch.cuh"

template void gdn::launch_mtp<__nv_bfloat16, false>(const gdn::MtpArguments&, int64_t, int, cudaStream_t);
