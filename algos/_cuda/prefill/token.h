// What tokens are of in all of a library's files: q, k, v, the output, a and b before the gates, and the operands of the kernels'
// products. gdn_prefill_packed_f16/cuda-chunk-packed-f16 has the other file of this name. No CUDA here, for bindings.
#pragma once

struct __nv_bfloat16;

namespace gdn {

using Token = __nv_bfloat16;

}  // namespace gdn

#define GDN_TOKEN_PTX "bf16"
