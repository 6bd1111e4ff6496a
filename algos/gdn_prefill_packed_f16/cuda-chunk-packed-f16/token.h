// What tokens are of in all of a library's files: q, k, v, the output, a and b before the gates, and the operands of the kernels'
// products. _cuda/prefill has the other file of this name. No CUDA here, for bindings.
#pragma once

struct __half;

namespace gdn {

using Token = __half;

}  // namespace gdn

#define GDN_TOKEN_PTX "f16"
