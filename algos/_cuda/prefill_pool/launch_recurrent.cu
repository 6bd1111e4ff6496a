// The launch of cuda-recurrent's kernel for short sequences (dispatch_rule.h: use_recurrent).
#include "tuned.h"

#include "recurrent_launch.cuh"
#include "dispatch.h"
#include "recurrent_call.cuh"

namespace gdn {

namespace recurrent {
#include "recurrent.h"
struct Table { static constexpr const auto& rows = TUNED; };
}  // namespace recurrent

void launch_recurrent(const Prefill& p, int device, cudaStream_t stream) {
  const PackedCall call = packed_call(p);
  const int64_t heads = int64_t{p.N} * p.HV;
  if (p.k_first) launch_recurrent<recurrent::Table>(PackedArguments<true>{call}, heads, device, stream);
  else launch_recurrent<recurrent::Table>(PackedArguments<false>{call}, heads, device, stream);
}

}  // namespace gdn
