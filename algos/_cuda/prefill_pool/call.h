// A serving engine's call that the binding (binding.cpp) has checked: as cuda-chunk's call.h, with strided rows, states in slots of
// a pool, and the norms of q and k.
#pragma once

#include <cstdint>
#include <functional>

#include "token.h"

namespace gdn {

constexpr int HEAD_DIM = 128;    // of q, k and v

struct Call {
  const Token* q;                // [num_tokens, H, 128], qk_row elements from a token to the next
  const Token* k;                // the same
  const Token* v;                // [num_tokens, HV, 128], v_row
  const void* a;                 // [num_tokens, HV], of Token, a_row
  const void* b;                 // [num_tokens, HV], of Token, b_row
  const float* A_log;            // [HV]
  const void* dt_bias;           // [HV], float, or of Token
  void* pool;                    // [slots, HV, 128, 128], k-last unless k_first, float or bf16, slot_stride and head_stride elements from one to the next
  const void* state_indices;     // [N], int32 or int64, indices_step bytes from one to the next
  const bool* has_state;         // [N]; null: all have
  const void* cu_seqlens;        // [N + 1], int32 or int64; the rows before the first and after the last are in no sequence
  Token* output;                 // [num_tokens, HV, 128]
  void* checkpoints;             // [num_checkpoints, HV, 128, 128] like pool, dense; null: none
  const void* checkpoint_starts; // [N], int32 or int64: where a sequence's are, one after each checkpoint_chunks chunks of 64 tokens
  int64_t num_checkpoints;
  int checkpoint_chunks;
  int64_t qk_row, v_row, a_row, b_row, slot_stride, head_stride, slots, num_tokens;
  float scale;
  float epsilon;                 // of the norms, under the root; below 0: q and k are as they should be
  int H, HV, N;
  int first_slot;                // slots below this are padding, and those that the pool does not have
  uint32_t indices_step;
  bool long_indices, long_lengths, long_starts, half_pool, half_bias;
  bool given, wide_beta, k_first;  // the gates are given: a is log g, in float, b is beta, in float if wide_beta; A_log, dt_bias: any
};

// Allocates device memory until the call's launches are queued. It is in the binding, which knows the caller's allocator.
using Allocate = std::function<void*(int64_t bytes)>;

#pragma GCC visibility push(hidden)  // a process may have several builds of this library
void prefill(const Call& call, const Allocate& allocate, int device, void* stream);  // a cudaStream_t
const char* fallback();  // of the current device: see flashcore-v4's ask_for_fallback
#pragma GCC visibility pop

}  // namespace gdn
