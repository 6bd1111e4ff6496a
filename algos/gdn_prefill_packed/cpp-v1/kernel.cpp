// GDN prefill on the CPU as servers call it: packed sequences, states in a pool, in place.
//
//   q, k = q / sqrt(q.q + epsilon), k / sqrt(k.k + epsilon)     not if epsilon < 0
//   g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
//   S = g S;  d = beta (v - S k);  S = S + d k^T;  o = scale * S q          token after token
//
// The recurrence itself, not chunks of tokens: gdn_mtp_packed/cpp-v1's walk (walk.h) with as many
// tokens as a sequence has. The state stays in the thread's scratch until the last token.
//
// Grid: N * HV value heads, each in one chunk or, when there are few, in up to eight chunks of 16
// rows of the state.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464). Written here.

#include <tvm/ffi/function.h>

#include "walk.h"

namespace gdn {

struct Prefill : Walk {
  States pool;
  Whole slots;
  const bool* has_state;  // null: all have one
  int64_t first_slot;
  States checkpoints;     // by row; without data: none
  Whole checkpoint_starts;
  int64_t every;          // tokens from one checkpoint to the next

  bool padding(int64_t n) const { return slots[n] < first_slot || slots[n] >= pool.slots; }
  const char* origin(int64_t n, int64_t i_hv) const {
    return !has_state || has_state[n] ? pool.at(slots[n], i_hv) : nullptr;
  }
  char* target(int64_t n, int64_t t, int64_t i_hv) const {
    return t == count(n) - 1 ? pool.at(slots[n], i_hv) : nullptr;
  }
  char* kept(int64_t n, int64_t t, int64_t i_hv) const {
    if (!checkpoints.data || (t + 1) % every) return nullptr;
    const int64_t row = checkpoint_starts[n] + (t + 1) / every - 1;
    return row < 0 || row >= checkpoints.slots ? nullptr : checkpoints.at(row, i_hv);
  }
};

// Checks all but q, k and v, which j has, with H and HV; and runs.
void checked(Prefill& j, int64_t total, ffi::TensorView a, ffi::TensorView b,
             ffi::Optional<ffi::TensorView> A_log, ffi::Optional<ffi::TensorView> dt_bias,
             ffi::TensorView pool, ffi::TensorView state_indices,
             ffi::Optional<ffi::TensorView> has_initial_state, ffi::TensorView cu_seqlens,
             ffi::Optional<double> scale, ffi::TensorView output, int64_t first_slot,
             double epsilon) {
  const int64_t N = state_indices.size(0), HV = j.HV;
  j.pool = states_of(pool, "pool"), j.type = j.pool.type, j.k_first = j.pool.k_first;
  const GateTypes gates = take_gates(j, A_log, dt_bias, b);
  j.a = rows_of(a, "a", {total, HV}, gates.a), j.b = rows_of(b, "b", {total, HV}, gates.b);
  take_constants(j, scale, epsilon);
  j.slots = whole(state_indices, "state_indices", {N});
  if (has_initial_state) {
    j.has_state = data<const bool>(has_initial_state.value(), "has_initial_state", BOOL, {N}, CPU);
  }
  j.output = data<uint16_t>(output, "output", j.token, {total, HV, V}, CPU);
  j.first_slot = std::max<int64_t>(first_slot, 0);
  take_lengths(j, cu_seqlens, N, total, -1);
  walk(j, N);
}

void check_ranks(const ffi::TensorView& pool, const ffi::TensorView& state_indices) {
  if (pool.ndim() != 4 || state_indices.ndim() != 1) {
    TVM_FFI_THROW(ValueError) << "expected pool [slots, HV, 128, 128] and state_indices [N], got "
                              << pool.shape() << " and " << state_indices.shape();
  }
}

// A call's q, k and v, with H and HV.
Prefill of_engine(const ffi::TensorView& q, const ffi::TensorView& k, const ffi::TensorView& v,
                  const ffi::TensorView& pool, const ffi::TensorView& state_indices) {
  if (q.ndim() != 3) TVM_FFI_THROW(ValueError) << "q: expected [total, H, 128], got " << q.shape();
  check_ranks(pool, state_indices);
  Prefill j{};
  const int64_t total = q.size(0);
  j.H = q.size(1), j.HV = pool.size(1);
  check_heads(j.H, j.HV);
  j.token = token_type(q);
  j.q = rows_of(q, "q", {total, j.H, K}, j.token), j.k = rows_of(k, "k", {total, j.H, K}, j.token);
  j.v = rows_of(v, "v", {total, j.HV, V}, j.token);
  return j;
}

// The call of a serving engine; the CUDA rungs export the same one.
//
// q, k [total, H, 128], v [total, HV, 128] and a, b [total, HV] bf16, or all f16, each with any stride from a
// token to the next; A_log [HV] f32; dt_bias [HV] f32 or like q, or neither (GateTypes); pool [slots, HV, 128, 128] f32 or
// bf16, k-last, or k-first as states_of, slots and heads may lie apart, updated in place; state_indices [N] int32 or int64,
// with any stride that is not negative: the slot of each sequence, distinct. One below first_slot
// (at least 0), or not below the pool's size, is padding: zeros out, and no state is touched.
// has_initial_state [N] bool: sequences without one start from zeros. cu_seqlens [N + 1] int32 or
// int64, never falling; tokens before the first and after the last sequence belong to none, and
// their outputs are not written. scale None or 0: 1/sqrt(128). epsilon: q and k are divided by
// sqrt(sum(x^2) + epsilon); below 0: taken as they are. Writes output [total, HV, 128] like q.
// ValueError before anything is written.
void chunk_prefill(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView a,
                   ffi::TensorView b, ffi::Optional<ffi::TensorView> A_log,
                   ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView pool,
                   ffi::TensorView state_indices, ffi::Optional<ffi::TensorView> has_initial_state,
                   ffi::TensorView cu_seqlens,
                   ffi::Optional<double> scale, ffi::TensorView output, int64_t first_slot,
                   double epsilon) {
  Prefill j = of_engine(q, k, v, pool, state_indices);
  checked(j, q.size(0), a, b, A_log, dt_bias, pool, state_indices, has_initial_state, cu_seqlens, scale,
          output, first_slot, epsilon);
}

// As chunk_prefill, and keeps states within sequences, for prefix caches: checkpoints [any, HV,
// 128, 128] like pool, dense; sequence n's from row checkpoint_starts[n] on ([N] or [N + 1], int32
// or int64), one after each every_n_tokens tokens, a multiple of 64. A row that there is not is
// left out.
void chunk_prefill_checkpoints(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v,
                               ffi::TensorView a, ffi::TensorView b,
                               ffi::Optional<ffi::TensorView> A_log,
                               ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView pool,
                               ffi::TensorView state_indices,
                               ffi::Optional<ffi::TensorView> has_initial_state,
                               ffi::TensorView cu_seqlens, ffi::Optional<double> scale,
                               ffi::TensorView output, int64_t first_slot, double epsilon,
                               ffi::TensorView checkpoints, ffi::TensorView checkpoint_starts,
                               int64_t every_n_tokens) {
  Prefill j = of_engine(q, k, v, pool, state_indices);
  if (every_n_tokens < 64 || every_n_tokens % 64) {
    TVM_FFI_THROW(ValueError) << "every_n_tokens: expected a multiple of 64, got "
                              << every_n_tokens;
  }
  if (checkpoints.ndim() != 4 || checkpoint_starts.ndim() != 1) {
    TVM_FFI_THROW(ValueError) << "expected checkpoints [any, HV, 128, 128] and "
                              << "checkpoint_starts [N], got " << checkpoints.shape() << " and "
                              << checkpoint_starts.shape();
  }
  const int64_t N = state_indices.size(0), starts = checkpoint_starts.size(0);
  const int64_t rows = checkpoints.size(0), state = V * K;
  const StatesView kept(checkpoints);
  if (kept.k_first != StatesView(pool).k_first) {
    TVM_FFI_THROW(ValueError) << "checkpoints: expected the layout of pool";
  }
  j.checkpoints.data = data<char>(kept, "checkpoints", pool.dtype(), {rows, j.HV, V, K}, CPU);
  j.checkpoints.type = pool.dtype() == F32 ? Float::F32 : Float::BF16;
  j.checkpoints.slots = rows, j.checkpoints.slot = j.HV * state, j.checkpoints.head = state;
  j.checkpoint_starts =
      whole(checkpoint_starts, "checkpoint_starts", {starts == N + 1 ? starts : N});
  j.every = every_n_tokens;
  checked(j, q.size(0), a, b, A_log, dt_bias, pool, state_indices, has_initial_state, cu_seqlens,
          scale, output, first_slot, epsilon);
}

// The op: mixed_qkv [total, 2 H 128 + HV 128] bf16 or f16, q of all heads, then k, then v; the rest as
// above. new_pool is pool.
void run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
         ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
         ffi::TensorView has_initial_state, ffi::TensorView cu_seqlens, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView new_pool) {
  check_in_place(pool, new_pool);
  check_ranks(pool, state_indices);
  if (mixed_qkv.ndim() != 2) {
    TVM_FFI_THROW(ValueError) << "mixed_qkv: expected [total, 2 H 128 + HV 128], got "
                              << mixed_qkv.shape();
  }
  Prefill j{};
  j.HV = pool.size(1), j.H = query_heads(mixed_qkv.size(1), j.HV), j.token = token_type(mixed_qkv);
  take_rows(j, mixed_qkv);
  checked(j, mixed_qkv.size(0), a, b, A_log, dt_bias, pool, state_indices, has_initial_state,
          cu_seqlens, scale, output, 1, NORM_EPSILON);
}

}  // namespace gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(chunk_prefill, gdn::chunk_prefill);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(chunk_prefill_checkpoints, gdn::chunk_prefill_checkpoints);
