// The kernels for new states and a pool of float32 whose states are [K, V], in a file of its own: all are compiled at the
// same time.

#include "tuned.h"

#include "mtp_launch.cuh"

template void gdn::launch_mtp<float, true, __nv_bfloat16, true>(const gdn::MtpArguments&, int64_t, int, cudaStream_t);
template void gdn::launch_mtp<float, true, __half, true>(const gdn::MtpArguments&, int64_t, int, cudaStream_t);
