// The launch of cuda-recurrent's kernel for short sequences (dispatch_rule.h: use_recurrent).
#include "tuned.h"

#include "recurrent_launch.cuh"
#include "dispatch.h"

namespace gdn {

namespace recurrent {
#include "recurrent.h"
struct Table { static constexpr const auto& rows = TUNED; };
}  // namespace recurrent

void launch_recurrent(const Prefill& p, int device, cudaStream_t stream) {
  const uint32_t H = p.H, HV = p.HV;
  launch_recurrent<recurrent::Table>({p.state, p.cu_seqlens, p.k, p.q, p.v, p.a, p.b, p.A_log, p.dt_bias, p.new_state, p.output,
                                      p.scale, H, HV, p.num_tokens, p.num_tokens / p.N, Divisor(HV), Divisor(HV / H)},
                                     int64_t{p.N} * p.HV, device, stream);
}

}  // namespace gdn
