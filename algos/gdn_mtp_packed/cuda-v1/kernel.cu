// GDN verify on packed rows, the state of each token to its slot: the kernel is in mtp.cuh, the calls are in mtp_run.cuh, its
// instances in mtp_launch_*.cu.

#include "mtp_run.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run_slots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mtp_verify, gdn::mtp_verify<true>);
