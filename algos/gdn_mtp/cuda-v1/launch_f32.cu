// The kernels for a pool of float32, in a file of its own: both are compiled at the same time.

#include "tuned.h"

#include "mtp_launch.cuh"

template void gdn::launch_mtp<float, false>(const gdn::MtpArguments&, int64_t, int, cudaStream_t);
