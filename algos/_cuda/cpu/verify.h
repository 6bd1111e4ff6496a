// Several tokens of the gated delta rule for each sequence, on the CPU: what a server calls to
// verify draft tokens. The walk is walk.h's; here is where its states are.
#pragma once

#include "walk.h"

namespace gdn {

constexpr int MOST = 8;  // tokens of a sequence, as on a GPU

// Which states are written, and where: see mtp_verify.
enum Mode : int64_t { OUTPUTS, LAST, SLOTS, BUFFER };

struct Verify : Walk {
  States pool;
  Whole slots, accepted, states_rows;
  bool columns;  // whether there is a slot for each token, or one for each sequence
  char* states;
  int64_t rows_of_states, states_row, states_token;  // how many, and elements from one to the next
  int64_t mode, first_slot;

  bool known(int64_t slot) const { return slot >= first_slot && slot < pool.slots; }
  int64_t start(int64_t n) const {
    const int64_t tokens = accepted.data ? accepted[n] : 1;
    return tokens < 1 || tokens > T ? -1 : slots.at(n, columns ? tokens - 1 : 0);
  }
  bool padding(int64_t n) const { return !known(start(n)); }
  const char* origin(int64_t n, int64_t i_hv) const { return pool.at(start(n), i_hv); }
  char* target(int64_t n, int64_t t, int64_t i_hv) const {
    if (mode == SLOTS) {
      const int64_t slot = slots.at(n, t);
      return known(slot) ? pool.at(slot, i_hv) : nullptr;
    }
    if (mode == LAST && t == count(n) - 1) return pool.at(start(n), i_hv);
    if (mode != BUFFER) return nullptr;
    const int64_t row = states_rows.data ? states_rows[n] : n;
    if (row < 0 || row >= rows_of_states) return nullptr;
    return states + (row * states_row + t * states_token + i_hv * V * K) * bytes_of(type);
  }
};

// The call of a serving engine; the CUDA rungs export the same one.
//
// q, k [B, T, H, 128], v [B, T, HV, 128], a, b [B, T, HV] bf16, or all f16, 1 <= T <= 8, HV a multiple of H,
// the first two axes with any stride. With cu_seqlens [B + 1] (int32 or int64) they are [total,
// ...], and a sequence has as many tokens as that says, at most T: the columns of state_indices, or
// 8. Tokens after the last sequence belong to none: their outputs are not written. Without
// cu_seqlens they may be [total, ...], with total / B tokens for each. [total, ...] may have a
// leading axis of 1. A_log [HV] f32; dt_bias [HV] f32 or as they are, or neither (GateTypes). pool [slots, HV, 128, 128] f32 or
// bf16, k-last, or k-first as states_of; slots and heads may lie apart. state_indices [B] or [B, T], int32 or int64, rows
// with any stride that is not negative: the start is in column num_accepted_tokens - 1 ([B]), or 0
// without those. A sequence is padding if its count is not in 1..T or its start is below first_slot
// (at least 0) or not below the pool's size: outputs 0, no state is touched. scale: none or 0 for
// 1/sqrt(128). epsilon: q and k are divided by sqrt(sum(x^2) + epsilon); below 0: taken as they
// are. output [B, T, HV, 128] as they are, or [total, HV, 128]; dense.
// mode 0: no state is written; 1: the one after the last token, to the start slot; 2: the one after
// token t to slot state_indices[b, t], if that is a slot and not padding; 3: to
// states[states_rows[b] or b, t] of states [rows, >= T, HV, 128, 128] like the pool, if there is
// that row. ValueError before anything is written. Here: the checks, and what to walk.
inline Verify take_verify(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView a,
                          ffi::TensorView b, ffi::Optional<ffi::TensorView> A_log,
                          ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView pool,
                          ffi::TensorView state_indices,
                          ffi::Optional<ffi::TensorView> num_accepted_tokens,
                          ffi::Optional<ffi::TensorView> cu_seqlens, ffi::Optional<double> scale,
                          ffi::TensorView output, ffi::Optional<ffi::TensorView> states,
                          ffi::Optional<ffi::TensorView> states_rows, int64_t mode, int64_t first_slot,
                          double epsilon) {
  Verify j{};
  const int64_t B = state_indices.ndim() ? state_indices.size(0) : 0;
  if (cu_seqlens || (q.ndim() == 4 && q.size(0) == 1 && B > 0)) {
    q = flat(q, 3), k = flat(k, 3), v = flat(v, 3);
    a = flat(a, 2), b = flat(b, 2), output = flat(output, 3);
  }
  const int axes = cu_seqlens || q.ndim() == 3 ? 1 : 2;
  const bool columns = state_indices.ndim() == 2;
  if (q.ndim() != axes + 2 || pool.ndim() != 4 || (state_indices.ndim() != 1 && !columns)) {
    TVM_FFI_THROW(ValueError) << "expected q of " << axes + 2 << " axes, pool of 4 and "
                              << "state_indices of 1 or 2, got " << q.ndim() << ", " << pool.ndim()
                              << " and " << state_indices.ndim();
  }
  const int64_t total = q.size(0), H = q.size(axes), HV = pool.size(1);
  int64_t T = B ? total / B : 0;
  if (cu_seqlens) T = columns ? state_indices.size(1) : MOST;
  else if (axes == 2) T = q.size(1);
  check_heads(H, HV);
  if (!cu_seqlens && total != (axes == 2 ? B : B * T)) {
    TVM_FFI_THROW(ValueError) << "state_indices: " << B << " rows do not fit q of " << q.shape();
  }
  if ((T < 1 && B > 0) || T > MOST) {
    TVM_FFI_THROW(ValueError) << "expected 1 to " << MOST << " tokens a sequence, got " << T;
  }
  if (mode < OUTPUTS || mode > BUFFER) {
    TVM_FFI_THROW(ValueError) << "mode: expected 0 to 3, got " << mode;
  }
  j.T = T, j.H = H, j.HV = HV, j.columns = columns, j.mode = mode;
  j.first_slot = std::max<int64_t>(first_slot, 0);
  j.pool = states_of(pool, "pool"), j.type = j.pool.type, j.k_first = j.pool.k_first, j.token = token_type(q);
  const GateTypes gates = take_gates(j, A_log, dt_bias, b);
  if (axes == 1) {
    j.q = rows_of(q, "q", {total, H, K}, j.token), j.k = rows_of(k, "k", {total, H, K}, j.token);
    j.v = rows_of(v, "v", {total, HV, V}, j.token);
    j.a = rows_of(a, "a", {total, HV}, gates.a), j.b = rows_of(b, "b", {total, HV}, gates.b);
    for (Tokens* x : {&j.q, &j.k, &j.v, &j.a, &j.b}) x->sequence = T * x->token;
    j.output = data<uint16_t>(output, "output", j.token, {total, HV, V}, CPU);
    if (cu_seqlens) take_lengths(j, cu_seqlens.value(), B, total, T);
  } else {
    const auto tokens = [&](const ffi::TensorView& t, const char* name,
                            std::initializer_list<int64_t> shape, DLDataType dtype) {
      int64_t strides[2];
      const auto* at =
          strided<const uint16_t, 2>(t, name, dtype, shape, CPU, dtype.bits / 8, strides);
      return Tokens{at, strides[0], strides[1]};
    };
    j.q = tokens(q, "q", {B, T, H, K}, j.token), j.k = tokens(k, "k", {B, T, H, K}, j.token);
    j.v = tokens(v, "v", {B, T, HV, V}, j.token);
    j.a = tokens(a, "a", {B, T, HV}, gates.a), j.b = tokens(b, "b", {B, T, HV}, gates.b);
    j.output = data<uint16_t>(output, "output", j.token, {B, T, HV, V}, CPU);
  }
  take_constants(j, scale, epsilon);
  if (mode == SLOTS && !columns) {
    TVM_FFI_THROW(ValueError) << "state_indices: expected a column for each of " << T
                              << " tokens, got " << state_indices.shape();
  }
  j.slots = columns ? whole(state_indices, "state_indices", {B, T})
                    : whole(state_indices, "state_indices", {B});
  if (num_accepted_tokens) {
    j.accepted = whole(num_accepted_tokens.value(), "num_accepted_tokens", {B});
  }
  if (mode == BUFFER) {
    if (!states) TVM_FFI_THROW(ValueError) << "states: expected a buffer, in mode 3";
    const StatesView view(states.value());
    if (view.k_first != j.k_first) TVM_FFI_THROW(ValueError) << "states: expected the layout of pool";
    const ffi::TensorView buffer = view;
    if (buffer.ndim() != 5 || buffer.size(1) < T) {
      TVM_FFI_THROW(ValueError) << "states: expected [rows, " << T
                                << " or more, HV, 128, 128], got " << buffer.shape();
    }
    int64_t strides[2];
    const int64_t rows = buffer.size(0), tokens = buffer.size(1);
    j.states = strided<char, 2>(buffer, "states", pool.dtype(), {rows, tokens, HV, V, K}, CPU,
                                bytes_of(j.type), strides);
    j.rows_of_states = rows, j.states_row = strides[0], j.states_token = strides[1];
    if (states_rows) j.states_rows = whole(states_rows.value(), "states_rows", {B});
  }
  return j;
}

inline void mtp_verify(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView a,
                       ffi::TensorView b, ffi::Optional<ffi::TensorView> A_log,
                       ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView pool,
                       ffi::TensorView state_indices,
                       ffi::Optional<ffi::TensorView> num_accepted_tokens,
                       ffi::Optional<ffi::TensorView> cu_seqlens, ffi::Optional<double> scale,
                       ffi::TensorView output, ffi::Optional<ffi::TensorView> states,
                       ffi::Optional<ffi::TensorView> states_rows, int64_t mode, int64_t first_slot,
                       double epsilon) {
  Verify j = take_verify(q, k, v, a, b, A_log, dt_bias, pool, state_indices,
                         num_accepted_tokens, cu_seqlens, scale, output, states,
                         states_rows, mode, first_slot, epsilon);
  walk(j, state_indices.size(0));
}

}  // namespace gdn
