// The kernels for outputs alone and a pool of float32, in a file of its own: all are compiled at the same time.

#include "tuned_outputs.h"

#include "mtp_launch.cuh"

template void gdn::launch_mtp<float, false>(const gdn::MtpArguments&, int64_t, int, cudaStream_t);
