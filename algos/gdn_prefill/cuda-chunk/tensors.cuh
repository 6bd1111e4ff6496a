// Where the kernels find a call's tensors, dense. gdn_prefill_packed/cuda-chunk-packed has a file of this name too, for strided
// rows and for states in slots of a pool; all other files of kernels are shared, and their machine code here does not change.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "call.h"
#include "gates.cuh"

namespace gdn {

// Whether states are in a pool, and q and k are normalised in the kernels.
constexpr bool POOL = false;

// What a kernel needs to find sequence n's state: here its number.
using StateOf = int;

struct Tensors : Call {
  __device__ __forceinline__ int64_t ends_at(int n) const { return cu_seqlens[n]; }
  // Elements of q and k: to a token's row of a head, and from a token to the next. The same for v.
  __device__ __forceinline__ int64_t qk_at(int64_t token, int h) const { return (token * H + h) * HEAD_DIM; }
  __device__ __forceinline__ int64_t v_at(int64_t token, int hv) const { return (token * HV + hv) * HEAD_DIM; }
  __host__ __device__ __forceinline__ int64_t qk_stride() const { return static_cast<int64_t>(H) * HEAD_DIM; }
  __host__ __device__ __forceinline__ int64_t v_stride() const { return static_cast<int64_t>(HV) * HEAD_DIM; }
  // The bits of a token's a and b, `token` in 64 bits; and the gates of these.
  __device__ __forceinline__ uint32_t a_of(int64_t token, int hv) const { return gate_bits(a, token * HV + hv, false); }
  __device__ __forceinline__ uint32_t b_of(int64_t token, int hv) const { return gate_bits(b, token * HV + hv, false); }
  __device__ __forceinline__ static float log2_g(uint32_t bits, float A_log, float dt_bias) {
    return log2_gate(bits, false, A_log, dt_bias);
  }
  __device__ __forceinline__ static float beta(uint32_t bits) { return beta_gate(bits, false, false); }
  __device__ __forceinline__ const void* bias_at(int hv) const { return dt_bias + hv; }
  __device__ __forceinline__ float bias(int hv) const { return dt_bias[hv]; }

  __device__ __forceinline__ StateOf state_of(int n) const { return n; }
  // Whether outputs are zeros and no state is touched.
  __device__ __forceinline__ static bool padding(StateOf) { return false; }
  // The state before and after a sequence.
  __device__ __forceinline__ const float* original(StateOf of, int hv) const { return state + at(of, hv); }
  __device__ __forceinline__ float* final(StateOf of, int hv) const { return new_state + at(of, hv); }
  // Where a head's rows begin among a sequence's.
  __host__ __device__ __forceinline__ static int state_row(int hv) { return hv * HEAD_DIM; }
  // All of them, rows of 128.
  __host__ __device__ __forceinline__ const float* rows(int64_t row) const { return state + row * HEAD_DIM; }
  __host__ __device__ __forceinline__ float* new_rows(int64_t row) const { return new_state + row * HEAD_DIM; }

  // States within a sequence, for prefix caches: only of a pool.
  __host__ __device__ __forceinline__ static bool has_checkpoints() { return false; }
  __device__ __forceinline__ static bool is_checkpoint(int) { return false; }
  __device__ __forceinline__ static float* checkpoint(int, int, int) { return nullptr; }
  static bool is_k_first() { return false; }
  // How many blocks of 128 bytes side by side TMA brings of a state's rows.
  __host__ __device__ __forceinline__ static int state_blocks() { return 4; }
  // The factor of a row of q or k whose elements have this sum of squares.
  __device__ __forceinline__ static float inverse_norm(float) { return 1.f; }

 private:
  __device__ __forceinline__ int64_t at(int n, int hv) const { return (static_cast<int64_t>(n) * HV + hv) * HEAD_DIM * HEAD_DIM; }
};
using StateRows = const float*;  // [128, 128], k-last
using NewStateRows = float*;

}  // namespace gdn
