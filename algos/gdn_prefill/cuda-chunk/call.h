// A call that the binding (binding.cpp) has checked, for dispatch.cu, which chooses the code path. This file includes neither CUDA's
// headers nor the binding's: both together take longer to compile than any kernel.
#pragma once

#include <cstdint>
#include <functional>

struct __nv_bfloat16;

namespace gdn {

constexpr int HEAD_DIM = 128;    // of q, k and v

struct Call {
  const __nv_bfloat16* q;        // [num_tokens, H, 128]
  const __nv_bfloat16* k;        // [num_tokens, H, 128]
  const __nv_bfloat16* v;        // [num_tokens, HV, 128]
  const float* state;            // [N, HV, 128, 128], k-last
  const float* A_log;            // [HV]
  const __nv_bfloat16* a;        // [num_tokens, HV]
  const float* dt_bias;          // [HV]
  const __nv_bfloat16* b;        // [num_tokens, HV]
  const int64_t* cu_seqlens;     // [N + 1]
  __nv_bfloat16* output;         // [num_tokens, HV, 128]
  float* new_state;              // like state, and may be state itself
  float scale;
  int H, HV, N;
  int64_t num_tokens;
};

// Allocates device memory until the call's launches are queued. It is in the binding, which knows the caller's allocator.
using Allocate = std::function<void*(int64_t bytes)>;

#pragma GCC visibility push(hidden)  // a process may have several builds of this library
void prefill(const Call& call, const Allocate& allocate, int device, void* stream);  // a cudaStream_t
const char* fallback();  // of the current device: see flashcore-v4's ask_for_fallback
#pragma GCC visibility pop

}  // namespace gdn
