// GDN decode on the CPU as servers call it: packed rows, states in a pool, in place.
//
//   q, k = q / sqrt(q.q + epsilon), k / sqrt(k.k + epsilon)     not if epsilon < 0
//   g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)    for each row and head
//   S = g S;  d = beta (v - S k);  S = S + d k^T;  o = scale * S q      S = pool[slot]
//
// Changed from gdn_decode/cpp-v1: q, k and v are parts of a row, the state is a slot's, q and k are
// normalised here, and no store goes past the cache: the lines that are written have just been
// read. A row is a sequence of one token (walk.h).
//
// Grid: B * HV value heads, each in one chunk or, when there are few, in up to eight chunks of 16
// rows of the state.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464). Written here.

#include <tvm/ffi/function.h>

#include "walk.h"

namespace gdn {

struct Decode : Walk {
  States pool, new_pool;
  Whole slots, new_slots;
  const bool* has_state;  // null: all have one
  int64_t first_slot;

  bool known(int64_t slot, const States& of) const { return slot >= first_slot && slot < of.slots; }
  bool padding(int64_t n) const { return !known(slots[n], pool); }
  const char* origin(int64_t n, int64_t i_hv) const {
    return !has_state || has_state[n] ? pool.at(slots[n], i_hv) : nullptr;
  }
  char* target(int64_t n, int64_t, int64_t i_hv) const {
    const int64_t slot = new_slots[n];
    return known(slot, new_pool) ? new_pool.at(slot, i_hv) : nullptr;
  }
};

// The call of a serving engine; the CUDA rungs export the same one.
//
// mixed_qkv [B, 2 H 128 + HV 128] bf16 or f16: q of all heads, k, then v; a, b [B, HV] like it;
// rows of these may lie apart. A_log [HV] f32; dt_bias [HV] f32 or like it, or neither (GateTypes). pool [slots, HV, 128, 128] f32, bf16 or
// f16, k-last, or k-first as states_of; slots and heads may lie apart. state_indices [B] int32 or int64, with any stride
// that is not negative. A row whose slot is below first_slot (at least 0), or not below the pool's
// size, is padding: zeros out, and no state is touched. Slots of the other rows are distinct.
// new_pool is pool or like it, new_indices the slots to write (those of state_indices if null);
// has_initial_state [B] bool: rows without one start from zeros. scale: none or 0 for 1/sqrt(128).
// epsilon: q and k are divided by sqrt(sum(x^2) + epsilon); below 0: taken as they are. Writes
// output [B, HV, 128] or [B, 1, HV, 128] like mixed_qkv. ValueError before anything is written.
void packed_decode(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b,
                   ffi::Optional<ffi::TensorView> A_log, ffi::Optional<ffi::TensorView> dt_bias,
                   ffi::TensorView pool, ffi::TensorView state_indices, ffi::Optional<double> scale,
                   ffi::TensorView output, ffi::TensorView new_pool,
                   ffi::Optional<ffi::TensorView> new_indices,
                   ffi::Optional<ffi::TensorView> has_initial_state, int64_t first_slot,
                   double epsilon) {
  if (pool.ndim() != 4 || mixed_qkv.ndim() != 2) {
    TVM_FFI_THROW(ValueError) << "expected mixed_qkv [B, 2 H 128 + HV 128] and pool [slots, HV, "
                              << "128, 128], got " << mixed_qkv.shape() << " and " << pool.shape();
  }
  Decode j{};
  const int64_t B = mixed_qkv.size(0), HV = pool.size(1);
  j.T = 1, j.HV = HV, j.H = query_heads(mixed_qkv.size(1), HV);
  j.pool = states_of(pool, "pool", true), j.type = j.pool.type, j.k_first = j.pool.k_first;
  j.new_pool = states_of(new_pool, "new_pool", true);
  if (j.new_pool.type != j.type || j.new_pool.k_first != j.k_first || new_pool.size(1) != HV) {
    TVM_FFI_THROW(ValueError) << "new_pool: expected the dtype, the layout and the heads of pool";
  }
  j.token = token_type(mixed_qkv);
  take_rows(j, mixed_qkv);
  const GateTypes gates = take_gates(j, A_log, dt_bias, b);
  j.a = rows_of(a, "a", {B, HV}, gates.a), j.b = rows_of(b, "b", {B, HV}, gates.b);
  take_constants(j, scale, epsilon);
  j.slots = j.new_slots = whole(state_indices, "state_indices", {B});
  if (new_indices) j.new_slots = whole(new_indices.value(), "new_indices", {B});
  if (has_initial_state) {
    j.has_state = data<const bool>(has_initial_state.value(), "has_initial_state", BOOL, {B}, CPU);
  }
  j.output = output.ndim() == 4 ? data<uint16_t>(output, "output", j.token, {B, 1, HV, V}, CPU)
                                : data<uint16_t>(output, "output", j.token, {B, HV, V}, CPU);
  j.first_slot = std::max<int64_t>(first_slot, 0);
  walk(j, B);
}

// a, b [rows, HV] bf16, f16 or f32, both the same; rows may lie apart. A_log [HV] f32; dt_bias [HV]
// f32 or, with those of 16 bits, like them. Writes log_g = -exp(A_log) softplus(a + dt_bias) and
// beta = sigmoid(b), [rows, HV] f32.
void gates(ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log, ffi::TensorView dt_bias,
           ffi::TensorView log_g, ffi::TensorView beta) {
  if (a.ndim() != 2) TVM_FFI_THROW(ValueError) << "a: expected [rows, HV], got " << a.shape();
  Walk j{};
  const int64_t rows = a.size(0);
  const bool wide = a.dtype() == F32;
  const DLDataType type = wide ? F32 : token_type(a);
  j.HV = a.size(1), j.token = wide ? BF16 : type;
  j.a = rows_of(a, "a", {rows, j.HV}, type), j.b = rows_of(b, "b", {rows, j.HV}, type);
  j.A_log = data<const float>(A_log, "A_log", F32, {j.HV}, CPU);
  j.half_bias = !wide && dt_bias.dtype() == type;
  j.dt_bias = data<const char>(dt_bias, "dt_bias", j.half_bias ? type : F32, {j.HV}, CPU);
  float* const to_g = data<float>(log_g, "log_g", F32, {rows, j.HV}, CPU);
  float* const to_beta = data<float>(beta, "beta", F32, {rows, j.HV}, CPU);
  for (int64_t i = 0; i < rows * j.HV; ++i) {
    const int64_t row = i / j.HV, i_hv = i % j.HV;
    const float x = j.gate(j.a, wide, row * j.a.token + i_hv) + j.bias(i_hv);
    to_g[i] = log_decay(j.A_log[i_hv], x);
    to_beta[i] = sigmoid(j.gate(j.b, wide, row * j.b.token + i_hv));
  }
}

// The op's call: in place, the norm of q and k inside, slots 0 and below are padding.
void run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
         ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
         ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView new_pool) {
  check_in_place(pool, new_pool);
  packed_decode(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, output, new_pool, {},
                {}, 1, NORM_EPSILON);
}

}  // namespace gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_decode, gdn::packed_decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gates, gdn::gates);
