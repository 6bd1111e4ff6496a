// gdn_mtp_packed/cuda-v1 for a bfloat16 pool, with constants that are tuned separately.

#include "mtp_run.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run_slots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mtp_verify, gdn::mtp_verify<true>);
