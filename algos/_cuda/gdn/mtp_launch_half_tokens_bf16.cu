// The kernels for tokens of float16 and a pool of bfloat16, in a file of its own: all are compiled at the same time.

#include "tuned.h"

#include "mtp_launch.cuh"

template void gdn::launch_mtp<__nv_bfloat16, false, __half>(const gdn::MtpArguments&, int64_t, int, cudaStream_t);
template void gdn::launch_mtp<__nv_bfloat16, true, __half>(const gdn::MtpArguments&, int64_t, int, cudaStream_t);
