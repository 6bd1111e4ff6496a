// Several tokens of the gated delta rule for each sequence, on the CPU: what a server calls to verify draft tokens.
//
//   q, k = q / sqrt(q.q + epsilon), k / sqrt(k.k + epsilon)     not if epsilon < 0
//   g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
//   S = g S;  d = beta (v - S k);  S = S + d k^T;  o = scale * S q           for one token t after the other
//
// A chunk of rows of one head goes through all tokens before the next chunk begins, so that it stays in a core's cache:
// memory is read once, and written once for each state that is kept. Each step is rows.h's, from where the state after
// token t - 1 lies to where that after token t belongs: a slot of the pool, a buffer, or 64 KiB of the thread's own.
//
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464). Written here.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "pool.h"
#include "rows.h"
#include "tensor.cuh"

namespace gdn {

constexpr int V = 128, MOST = 8;  // MOST tokens, where nothing says how many there can be

enum Mode : int64_t { OUTPUTS, LAST, SLOTS, BUFFER };  // which states are written, and where: see mtp_verify

// The bfloat16 values of all tokens; heads and channels lie side by side.
struct Tokens {
  const uint16_t* data;
  int64_t sequence, token;  // elements from one to the next
};

// int32 or int64.
struct Whole {
  const void* data = nullptr;
  bool wide = false;
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct VerifyJob {
  Tokens q, k, v, a, b;
  const float *A_log, *dt_bias;
  float* pool;
  int64_t slot;  // elements from one slot to the next
  Whole slots, accepted, cu_seqlens, states_rows;
  int64_t columns;  // of state_indices; 0: one slot for each sequence
  float scale, epsilon;
  uint16_t* output;
  float* states;
  int64_t states_row, states_token;  // elements
  int64_t mode, first_slot, T, H, HV;
  int chunk_rows;  // divides V
  Rows rows;

  int64_t begin(int64_t i_b) const { return cu_seqlens.data ? cu_seqlens[i_b] : i_b * T; }
  int64_t count(int64_t i_b) const { return cu_seqlens.data ? cu_seqlens[i_b + 1] - cu_seqlens[i_b] : T; }

  // The slot to start from, or -1 for padding.
  int64_t start(int64_t i_b) const {
    const int64_t count = accepted.data ? accepted[i_b] : 1;
    if (count < 1 || count > (columns ? columns : T)) return -1;
    const int64_t found = slots[columns ? i_b * columns + count - 1 : i_b];
    return found < first_slot ? -1 : found;
  }
};

// Without overflow at either end.
inline float softplus(float x) { return std::fmax(x, 0.f) + std::log1p(std::exp(-std::fabs(x))); }

// The dot of two vectors in eight sums, whatever the compiler makes of them.
inline float dot(const float* x, const float* y) {
  float s[8] = {};
  for (int c = 0; c < K; ++c) s[c % 8] += x[c] * y[c];
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

inline void widened(const uint16_t* x, float epsilon, float* to) {
  for (int c = 0; c < K; ++c) to[c] = from_bf16(x[c]);
  if (epsilon < 0) return;
  const float norm = std::sqrt(dot(to, to) + epsilon);
  for (int c = 0; c < K; ++c) to[c] /= norm;
}

inline void verify_chunk(const void* p, int64_t chunk) {
  alignas(64) static thread_local float scratch[V * K];
  const VerifyJob& j = *static_cast<const VerifyJob*>(p);
  const int64_t row = chunk * j.chunk_rows;  // of all B * HV * V rows
  const int64_t i_b = row / V / j.HV, i_hv = row / V % j.HV, i_v = row % V, i_h = i_hv / (j.HV / j.H);
  const int64_t begin = j.begin(i_b), count = j.count(i_b), start = j.start(i_b);
  const int64_t inside = (i_hv * V + i_v) * K;  // a slot
  const auto at = [&](const Tokens& x, int64_t t) {
    return x.data + (j.cu_seqlens.data ? (begin + t) * x.token : i_b * x.sequence + t * x.token);
  };
  const float* from = j.pool + start * j.slot + inside;
  for (int64_t t = 0; t < count; ++t) {
    uint16_t* output = j.output + ((begin + t) * j.HV + i_hv) * V + i_v;
    if (start < 0) {
      std::fill(output, output + j.chunk_rows, uint16_t{0});
      continue;
    }
    float* to = scratch;
    if (j.mode == SLOTS && j.slots[i_b * j.columns + t] >= j.first_slot) {
      to = j.pool + j.slots[i_b * j.columns + t] * j.slot + inside;
    } else if (j.mode == LAST && t == count - 1) {
      to = j.pool + start * j.slot + inside;
    } else if (j.mode == BUFFER) {
      to = j.states + (j.states_rows.data ? j.states_rows[i_b] : i_b) * j.states_row + t * j.states_token + inside;
    }
    Head h;
    widened(at(j.q, t) + i_h * K, j.epsilon, h.q);
    widened(at(j.k, t) + i_h * K, j.epsilon, h.k);
    h.kq = dot(h.k, h.q);
    h.g = std::exp(-std::exp(j.A_log[i_hv]) * softplus(from_bf16(at(j.a, t)[i_hv]) + j.dt_bias[i_hv]));
    h.beta = 1.f / (1.f + std::exp(-from_bf16(at(j.b, t)[i_hv])));
    h.scale = j.scale;
    j.rows(h, from, at(j.v, t) + i_hv * V + i_v, to, output, j.chunk_rows);
    from = to;
  }
}

// bfloat16 [B, T, heads, 128], or [total, heads, 128] with cu_seqlens (without the 128 for gates): the axes of `inner` are
// dense, those before may have any stride.
inline Tokens tokens(const ffi::TensorView& t, const char* name, std::initializer_list<int64_t> outer,
                     std::initializer_list<int64_t> inner) {
  const int before = static_cast<int>(outer.size()), axes = before + static_cast<int>(inner.size());
  bool same = t.ndim() == axes;
  for (int i = 0; same && i < axes; ++i) same = t.size(i) == (i < before ? outer.begin()[i] : inner.begin()[i - before]);
  if (t.dtype() != DLDataType{kDLBfloat, 16, 1} || !same) {
    TVM_FFI_THROW(ValueError) << name << ": expected bfloat16 " << ffi::ShapeView(outer) << " and "
                              << ffi::ShapeView(inner) << " inside, got " << ffi::DLDataTypeToString(t.dtype()) << ' '
                              << t.shape();
  }
  if (t.device().device_type != kDLCPU) TVM_FFI_THROW(ValueError) << name << ": expected on the CPU";
  int64_t dense = 1;
  for (int i = axes - 1; i >= before; --i) {
    if (t.size(i) > 1 && t.stride(i) != dense) TVM_FFI_THROW(ValueError) << name << ": expected rows without gaps";
    dense *= t.size(i);
  }
  return {reinterpret_cast<const uint16_t*>(static_cast<char*>(t.data_ptr()) + t.byte_offset()),
          before == 2 ? t.stride(0) : 0, t.stride(before - 1)};
}

// States [.., HV, 128, 128] of float32: the last three axes are dense, those before may have any stride.
inline float* states_of(const ffi::TensorView& t, const char* name, int axes, int64_t HV) {
  bool same = t.ndim() == axes && t.size(axes - 3) == HV && t.size(axes - 2) == V && t.size(axes - 1) == K;
  if (t.dtype() != DLDataType{kDLFloat, 32, 1} || !same || t.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << name << ": expected float32 states [" << HV << ", 128, 128] on the CPU, got "
                              << ffi::DLDataTypeToString(t.dtype()) << ' ' << t.shape();
  }
  if (t.stride(axes - 1) != 1 || t.stride(axes - 2) != K || (HV > 1 && t.stride(axes - 3) != V * K)) {
    TVM_FFI_THROW(ValueError) << name << ": expected slots [HV, 128, 128] without gaps";
  }
  return reinterpret_cast<float*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

inline Whole whole(const ffi::TensorView& t, const char* name, std::initializer_list<int64_t> shape) {
  const DLDataType i32{kDLInt, 32, 1}, i64{kDLInt, 64, 1};
  const bool wide = t.dtype() == i64;
  return {data<char>(t, name, wide ? i64 : i32, shape, DLDevice{kDLCPU, 0}), wide};
}

// The call of a serving engine; the CUDA rungs export the same one.
//
// q, k [B, T, H, 128], v [B, T, HV, 128], a, b [B, T, HV] bf16, the first two axes with any stride; with cu_seqlens [B + 1]
// they are [total, ...], and a sequence has as many tokens as that says, at most T: the columns of state_indices, or 8.
// Without it they may be [total, ...], with total / B tokens for each. [total, ...] may have a leading axis of 1.
// A_log, dt_bias [HV] f32. pool [slots, HV, 128, 128] f32, its slots may lie apart. state_indices [B], or [B, T]: the start is in
// column num_accepted_tokens - 1, or 0 without those. A sequence whose count is not in 1..T, or whose start is below
// first_slot, is padding: outputs 0, no state is touched. scale: none or 0 for 1/sqrt(128). epsilon: below the root of
// the norm of q and k, below 0 for none. output [B, T, HV, 128] bf16 (cu_seqlens: [total, HV, 128]).
// mode 0: no state is written; 1: the one after the last token, to the start slot; 2: the one after token t to slot
// state_indices[b, t], if that is not below first_slot; 3: to states[states_rows[b] or b, t].
inline void mtp_verify(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView a, ffi::TensorView b,
                       ffi::TensorView A_log, ffi::TensorView dt_bias, ffi::TensorView pool,
                       ffi::TensorView state_indices, ffi::Optional<ffi::TensorView> num_accepted_tokens,
                       ffi::Optional<ffi::TensorView> cu_seqlens, ffi::Optional<double> scale, ffi::TensorView output,
                       ffi::Optional<ffi::TensorView> states, ffi::Optional<ffi::TensorView> states_rows, int64_t mode,
                       int64_t first_slot, double epsilon) {
  VerifyJob j{};
  const int64_t B = state_indices.ndim() ? state_indices.size(0) : 0;
  if (cu_seqlens || (q.ndim() == 4 && q.size(0) == 1 && B > 0)) {
    q = flat(q, 3), k = flat(k, 3), v = flat(v, 3), a = flat(a, 2), b = flat(b, 2), output = flat(output, 3);
  }
  const int before = cu_seqlens || q.ndim() == 3 ? 1 : 2;
  if (q.ndim() != before + 2 || pool.ndim() != 4 || state_indices.ndim() < 1 || state_indices.ndim() > 2) {
    TVM_FFI_THROW(ValueError) << "expected q of " << before + 2 << " axes, pool of 4 and state_indices of 1 or 2";
  }
  const int64_t total = q.size(0), H = q.size(before), HV = pool.size(1);
  j.columns = state_indices.ndim() == 2 ? state_indices.size(1) : 0;
  j.T = cu_seqlens ? (j.columns ? j.columns : MOST) : before == 2 ? q.size(1) : B ? total / B : 0;
  if (H < 1 || HV < 1 || HV % H) TVM_FFI_THROW(ValueError) << "v: " << HV << " heads are not a multiple of q's " << H;
  if (!cu_seqlens && total != (before == 2 ? B : B * j.T)) {
    TVM_FFI_THROW(ValueError) << "state_indices: " << B << " rows do not fit q of " << q.shape();
  }
  j.H = H, j.HV = HV, j.mode = mode, j.first_slot = std::max<int64_t>(first_slot, 0);
  const DLDevice cpu{kDLCPU, 0};
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1};
  if (before == 1) {
    j.q = tokens(q, "q", {total}, {H, K}), j.k = tokens(k, "k", {total}, {H, K}), j.v = tokens(v, "v", {total}, {HV, V});
    j.a = tokens(a, "a", {total}, {HV}), j.b = tokens(b, "b", {total}, {HV});
    j.output = data<uint16_t>(output, "output", bf16, {total, HV, V}, cpu);
    for (Tokens* x : {&j.q, &j.k, &j.v, &j.a, &j.b}) x->sequence = j.T * x->token;
    if (cu_seqlens) j.cu_seqlens = whole(cu_seqlens.value(), "cu_seqlens", {B + 1});
  } else {
    const int64_t T = j.T;
    j.q = tokens(q, "q", {B, T}, {H, K}), j.k = tokens(k, "k", {B, T}, {H, K}), j.v = tokens(v, "v", {B, T}, {HV, V});
    j.a = tokens(a, "a", {B, T}, {HV}), j.b = tokens(b, "b", {B, T}, {HV});
    j.output = data<uint16_t>(output, "output", bf16, {B, T, HV, V}, cpu);
  }
  j.A_log = data<float>(A_log, "A_log", f32, {HV}, cpu);
  j.dt_bias = data<float>(dt_bias, "dt_bias", f32, {HV}, cpu);
  j.pool = states_of(pool, "pool", 4, HV), j.slot = pool.stride(0);
  if (pool.size(0) > 1 && j.slot < HV * V * K) TVM_FFI_THROW(ValueError) << "pool: expected slots that lie apart";
  j.slots = j.columns ? whole(state_indices, "state_indices", {B, j.columns}) : whole(state_indices, "state_indices", {B});
  if (num_accepted_tokens) j.accepted = whole(num_accepted_tokens.value(), "num_accepted_tokens", {B});
  if (mode < OUTPUTS || mode > BUFFER) TVM_FFI_THROW(ValueError) << "mode: expected 0 to 3, got " << mode;
  if (mode == SLOTS && (!j.columns || j.columns < j.T)) {
    TVM_FFI_THROW(ValueError) << "state_indices: expected a column for each of " << j.T << " tokens, got " << state_indices.shape();
  }
  if (mode == BUFFER) {
    if (!states) TVM_FFI_THROW(ValueError) << "states: expected a buffer, as the states are to be written there";
    j.states = states_of(states.value(), "states", 5, HV);
    j.states_row = states.value().stride(0), j.states_token = states.value().stride(1);
    if (states_rows) j.states_rows = whole(states_rows.value(), "states_rows", {B});
  }
  for (int64_t i = 0; i < B; ++i) {  // before anything is written
    for (int64_t c = 0; c < std::max<int64_t>(j.columns, 1); ++c) {
      const int64_t slot = j.slots[j.columns ? i * j.columns + c : i];
      if (slot >= pool.size(0)) {
        TVM_FFI_THROW(ValueError) << "state_indices: row " << i << " names slot " << slot << " of a pool of " << pool.size(0);
      }
    }
    const int64_t count = j.count(i), end = j.begin(i) + count, row = j.states_rows.data ? j.states_rows[i] : i;
    if (j.begin(i) < 0 || count < 0 || count > j.T || (cu_seqlens && end > total)) {
      TVM_FFI_THROW(ValueError) << "cu_seqlens: sequence " << i << " has " << count << " tokens to " << end << " of " << total;
    }
    if (mode == BUFFER && (row < 0 || row >= states.value().size(0) || count > states.value().size(1))) {
      TVM_FFI_THROW(ValueError) << "states: no room for " << count << " states of sequence " << i << " in row " << row;
    }
  }
  const double s = scale.value_or(0.0);
  j.scale = static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K)) : s);
  j.epsilon = static_cast<float>(epsilon);
  const int64_t rows = B * HV * V;
  Pool& threads = Pool::get();
  j.chunk_rows = V;
  while (j.chunk_rows > 16 && rows / j.chunk_rows < 4 * threads.threads()) j.chunk_rows /= 2;
  j.rows = pick_rows(false);
  threads.run(rows / j.chunk_rows, verify_chunk, &j);
}

}  // namespace gdn
