// Where the kernels find a call's tensors: rows of q, k, v, a and b are strided, states are in slots of a pool. cuda-chunk has a
// dense file of this name; all other files of kernels are shared.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "call.h"
#include "gates.cuh"

namespace gdn {

// Whether states are in a pool, and q and k are normalised in the kernels.
constexpr bool POOL = true;

// What a kernel needs to find a sequence's state: its slot; or ~slot if it starts from zeros; or PADDING, for zeros as outputs and
// no state at all.
using StateOf = int;
constexpr StateOf PADDING = -0x7fffffff - 1;

// A state [128, 128], of float or of bf16; k-last, but those of a pool in kernels with K_FIRST. No address: zeros, or nowhere.
struct StateRows {
  const char* at;
  bool half;
  __device__ __forceinline__ StateRows(const char* at_, bool half_) : at(at_), half(half_) {}
  __device__ __forceinline__ explicit StateRows(const float* at_) : at(reinterpret_cast<const char*>(at_)), half(false) {}
};
struct NewStateRows {
  char* at;
  bool half;
};

struct Tensors : Call {
  __device__ __forceinline__ int64_t ends_at(int n) const { return number(cu_seqlens, long_lengths, n); }
  // Elements of q and k: to a token's row of a head, and from a token to the next. The same for v.
  __device__ __forceinline__ int64_t qk_at(int64_t token, int h) const { return token * qk_row + h * HEAD_DIM; }
  __device__ __forceinline__ int64_t v_at(int64_t token, int hv) const { return token * v_row + hv * HEAD_DIM; }
  __host__ __device__ __forceinline__ int64_t qk_stride() const { return qk_row; }
  __host__ __device__ __forceinline__ int64_t v_stride() const { return v_row; }
  // The bits of a token's a and b, `token` in 64 bits; and the gates of these.
  __device__ __forceinline__ uint32_t a_of(int64_t token, int hv) const { return gate_bits(a, token * a_row + hv, given); }
  __device__ __forceinline__ uint32_t b_of(int64_t token, int hv) const { return gate_bits(b, token * b_row + hv, wide_beta); }
  __device__ __forceinline__ float log2_g(uint32_t bits, float A_log, float dt_bias) const {
    return log2_gate<Token>(bits, given, A_log, dt_bias);
  }
  __device__ __forceinline__ float beta(uint32_t bits) const { return beta_gate<Token>(bits, given, wide_beta); }
  __device__ __forceinline__ const void* bias_at(int hv) const {
    return static_cast<const char*>(dt_bias) + (half_bias ? 2 : 4) * hv;
  }
  __device__ __forceinline__ float bias(int hv) const {
    return half_bias ? to_float(static_cast<const Token*>(dt_bias)[hv]) : static_cast<const float*>(dt_bias)[hv];
  }

  __device__ __forceinline__ StateOf state_of(int n) const {
    const int64_t slot = number(static_cast<const char*>(state_indices) + static_cast<int64_t>(n) * indices_step, long_indices, 0);
    const bool there = !has_state || has_state[n];
    if (slot < first_slot || slot >= slots) return PADDING;  // first_slot is 0 or more
    return there ? static_cast<int>(slot) : ~static_cast<int>(slot);
  }
  // Whether outputs are zeros and no state is touched.
  __device__ __forceinline__ static bool padding(StateOf of) { return of == PADDING; }
  // The state before and after a sequence.
  __device__ __forceinline__ StateRows original(StateOf of, int hv) const { return {of < 0 ? nullptr : at(of, hv), half_pool}; }
  __device__ __forceinline__ NewStateRows final(StateOf of, int hv) const {
    return {padding(of) ? nullptr : at(of < 0 ? ~of : of, hv), half_pool};
  }
  // Where a head's rows begin among those of a slot, for TMA (make_state_map).
  __host__ __device__ __forceinline__ int state_row(int hv) const { return hv * static_cast<int>(head_stride / HEAD_DIM); }
  // Only a dense call has all states side by side.
  __host__ __device__ __forceinline__ static const float* rows(int64_t) { return nullptr; }
  __host__ __device__ __forceinline__ static float* new_rows(int64_t) { return nullptr; }

  // States within a sequence, for prefix caches: whether there are any; whether there is one after so many of a sequence's chunks; and
  // where it goes.
  __host__ __device__ __forceinline__ bool has_checkpoints() const { return checkpoints; }
  __device__ __forceinline__ bool is_checkpoint(int chunks) const { return chunks % checkpoint_chunks == 0; }
  __device__ __forceinline__ NewStateRows checkpoint(int n, int hv, int chunks) const {
    const int64_t row = number(checkpoint_starts, long_starts, n) + chunks / checkpoint_chunks - 1;
    if (row < 0 || row >= num_checkpoints) return {nullptr, half_pool};
    return {static_cast<char*>(checkpoints) + (row * HV + hv) * (HEAD_DIM * HEAD_DIM) * (half_pool ? 2 : 4), half_pool};
  }

  // Whether the pool's states are [K, V], which kernels know as K_FIRST.
  bool is_k_first() const { return k_first; }
  // How many blocks of 128 bytes side by side TMA brings of a state's rows.
  __host__ __device__ __forceinline__ int state_blocks() const { return half_pool ? 2 : 4; }
  // The factor of a row of q or k whose elements have this sum of squares. Without norms 1 / sqrt(0 * squares + 1): ptxas would make
  // two branches of a condition around rsqrtf, each of which waits for the other rows' norms.
  __device__ __forceinline__ float inverse_norm(float squares) const {
    const bool plain = epsilon < 0.f;
    return rsqrtf(fmaf(squares, plain ? 0.f : 1.f, plain ? 1.f : epsilon));
  }

 private:
  __device__ __forceinline__ char* at(int slot, int hv) const {
    return static_cast<char*>(pool) + (slot * slot_stride + hv * head_stride) * (half_pool ? 2 : 4);
  }
  __device__ __forceinline__ static int64_t number(const void* of, bool wide, int n) {
    return wide ? static_cast<const int64_t*>(of)[n] : static_cast<const int32_t*>(of)[n];
  }
};

// The accumulators of 8 N columns from 8 j on, from or to a state: rows g and g + 8 after `row`. One branch for all loads. K_FIRST: of a
// state [K, V] eight lanes have elements side by side, a sector of floats.
template <bool K_FIRST = false, int N>
__device__ __forceinline__ void load_state(float (&S)[N][4], const StateRows& state, int row, int j, int lane) {
  if constexpr (K_FIRST) {
    if (state.at) {
      const int first = (8 * j + 2 * (lane % 4)) * HEAD_DIM + row + lane / 4;
      const auto place = [&](int i, int c) { return first + (8 * i + c % 2) * HEAD_DIM + c / 2 * 8; };
      if (state.half) {
        const uint16_t* const from = reinterpret_cast<const uint16_t*>(state.at);
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) S[i][c] = __uint_as_float(from[place(i, c)]);
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) S[i][c] = __uint_as_float(__float_as_uint(S[i][c]) << 16);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) S[i][c] = reinterpret_cast<const float*>(state.at)[place(i, c)];
      }
      return;
    }
  }
  const int at = (row + lane / 4) * HEAD_DIM + 8 * j + 2 * (lane % 4);
  if (state.half && state.at) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(state.at) + at / 2;
#pragma unroll
    for (int i = 0; i < N; ++i)  // all loads first, into the registers of S: others would spill
      S[i][1] = __uint_as_float(words[4 * i]), S[i][3] = __uint_as_float(words[4 * i + 4 * HEAD_DIM]);
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int c = 1; c < 4; c += 2) {
        const uint32_t word = __float_as_uint(S[i][c]);
        S[i][c - 1] = __uint_as_float(word << 16), S[i][c] = __uint_as_float(word & 0xffff0000u);
      }
  } else if (state.at) {
    const float* const from = reinterpret_cast<const float*>(state.at) + at;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float2 x = *reinterpret_cast<const float2*>(from + 8 * i);
      const float2 y = *reinterpret_cast<const float2*>(from + 8 * i + 8 * HEAD_DIM);
      S[i][0] = x.x, S[i][1] = x.y, S[i][2] = y.x, S[i][3] = y.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[i][c] = 0.f;
  }
}
template <bool K_FIRST = false, int N>
__device__ __forceinline__ void store_state(const NewStateRows& state, const float (&S)[N][4], int row, int j, int lane) {
  const int at = (row + lane / 4) * HEAD_DIM + 8 * j + 2 * (lane % 4);
  if (!state.at) return;
  if constexpr (K_FIRST) {
    const int first = (8 * j + 2 * (lane % 4)) * HEAD_DIM + row + lane / 4;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int to = first + (8 * i + c % 2) * HEAD_DIM + c / 2 * 8;
        if (state.half) reinterpret_cast<__nv_bfloat16*>(state.at)[to] = __float2bfloat16(S[i][c]);
        else reinterpret_cast<float*>(state.at)[to] = S[i][c];
      }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = S[i][2 * h], y = S[i][2 * h + 1];
      const int to = at + 8 * i + h * 8 * HEAD_DIM;
      if (state.half) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
        reinterpret_cast<uint32_t*>(state.at)[to / 2] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        *reinterpret_cast<float2*>(state.at + to * 4) = make_float2(x, y);
      }
    }
}

}  // namespace gdn
