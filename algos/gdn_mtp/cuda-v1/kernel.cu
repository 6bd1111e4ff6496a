// GDN verify, outputs alone: the kernel is in mtp.cuh, the calls are in mtp_run.cuh, its instances in mtp_launch_*.cu.

#include "mtp_run.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run_outputs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mtp_verify, gdn::mtp_verify<false>);
