// Sequences of the gated delta rule on the CPU as servers call it: strided tokens, states in slots.
//
//   q, k = q / sqrt(q.q + epsilon), k / sqrt(k.k + epsilon)     not if epsilon < 0
//   g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)        or as given
//   S = g S;  d = beta (v - S k);  S = S + d k^T;  o = scale * S q          token after token
//
// A chunk of rows of one head goes through all tokens of a sequence before the next chunk begins,
// so that it stays in a core's cache: memory is read once, and written once for each state that is
// kept. A step is rows.h's. It reads where the state after token t - 1 lies and writes where that
// after token t belongs: a state of the call's, or 64 KiB of the thread's own. States of bfloat16
// and float16, and those that are [K, V], are brought there first, and back when they are stored.
//
// Here: the walk, and the checks of what all calls have. A call adds where its states are.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464). Written here.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "pool.h"
#include "rows.h"
#include "strided.cuh"

namespace gdn {

constexpr int V = 128;
constexpr double NORM_EPSILON = 1e-6;  // under the root, as in vLLM, SGLang and FlashInfer
constexpr DLDevice CPU{kDLCPU, 0};
constexpr DLDataType BF16{kDLBfloat, 16, 1}, F16{kDLFloat, 16, 1}, F32{kDLFloat, 32, 1};
constexpr DLDataType BOOL{kDLBool, 8, 1}, I32{kDLInt, 32, 1}, I64{kDLInt, 64, 1};

// --- numbers ------------------------------------------------------------------------------------

inline float from_f16(uint16_t x) {
  const uint32_t magnitude = x & 0x7fffu;
  uint32_t u = (magnitude << 13) + (112u << 23);               // another bias of the exponent
  if (magnitude >= 0x7c00u) u = (magnitude << 13) | 0x7f800000u;  // infinite, or NaN
  float f;
  std::memcpy(&f, &u, 4);
  if (magnitude < 0x400u) f = static_cast<float>(magnitude) * 0x1p-24f;  // subnormal
  return x & 0x8000u ? -f : f;
}

inline uint16_t to_f16(float f) {  // to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint16_t sign = u >> 16 & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00u;   // NaN
  if (u >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
  if (u < 0x38800000u) {                        // subnormal: 0.5 has a last place of 2^-24
    float shifted;
    std::memcpy(&shifted, &u, 4);
    shifted += 0.5f;
    std::memcpy(&u, &shifted, 4);
    return sign | static_cast<uint16_t>(u - 0x3f000000u);
  }
  return sign | static_cast<uint16_t>((u - (112u << 23) + 0xfffu + (u >> 13 & 1)) >> 13);
}

struct F16Values {  // as rows.h's Bf16
  static float from(uint16_t x) { return from_f16(x); }
  static uint16_t to(float x) { return to_f16(x); }
};

enum class Float { F32, BF16, F16 };

inline int64_t bytes_of(Float type) { return type == Float::F32 ? 4 : 2; }

inline void widen(const char* from, Float type, int64_t n, float* to) {
  const auto* x = reinterpret_cast<const uint16_t*>(from);
  if (type == Float::F32) {
    std::memcpy(to, from, n * sizeof(float));
  } else if (type == Float::BF16) {
    for (int64_t i = 0; i < n; ++i) to[i] = from_bf16(x[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = from_f16(x[i]);
  }
}

inline void narrow(const float* from, Float type, int64_t n, char* to) {
  auto* x = reinterpret_cast<uint16_t*>(to);
  if (type == Float::F32) {
    std::memcpy(to, from, n * sizeof(float));
  } else if (type == Float::BF16) {
    for (int64_t i = 0; i < n; ++i) x[i] = to_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) x[i] = to_f16(from[i]);
  }
}

// Without overflow at either end.
inline float softplus(float x) {
  return std::fmax(x, 0.f) + std::log1p(std::exp(-std::fabs(x)));
}

inline float log_decay(float A_log, float x) { return -std::exp(A_log) * softplus(x); }
inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// The dot of two vectors in eight sums, whatever the compiler makes of them.
inline float dot(const float* x, const float* y) {
  float s[8] = {};
  for (int c = 0; c < K; ++c) s[c % 8] += x[c] * y[c];
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

// A row of q or k, normalised unless epsilon is below 0.
inline void widened(const uint16_t* x, Float type, float epsilon, float* to) {
  widen(reinterpret_cast<const char*>(x), type, K, to);
  if (epsilon < 0) return;
  const float norm = std::sqrt(dot(to, to) + epsilon);
  for (int c = 0; c < K; ++c) to[c] /= norm;
}

// --- arguments ----------------------------------------------------------------------------------

// The values of all tokens, of 16 bits; heads and channels lie side by side.
struct Tokens {
  const uint16_t* data = nullptr;
  int64_t sequence = 0, token = 0;  // elements from one to the next
};

// int32 or int64; `step` elements from one of the first axis to the next.
struct Whole {
  const void* data = nullptr;
  bool wide = false;
  int64_t step = 1;
  int64_t at(int64_t i, int64_t column) const {
    const int64_t n = i * step + column;
    return wide ? static_cast<const int64_t*>(data)[n] : static_cast<const int32_t*>(data)[n];
  }
  int64_t operator[](int64_t i) const { return at(i, 0); }
};

// States [V, K] or, with k_first, [K, V], each dense, by slot and head.
struct States {
  char* data = nullptr;
  Float type = Float::F32;
  bool k_first = false;
  int64_t slots = 0, slot = 0, head = 0;  // how many, and elements from one to the next
  char* at(int64_t i, int64_t i_hv) const {
    return data + (i * slot + i_hv * head) * bytes_of(type);
  }
};

// int32 or int64 of this shape; the first axis may have any stride that is not negative.
inline Whole whole(const ffi::TensorView& t, const char* name,
                   std::initializer_list<int64_t> shape) {
  const bool wide = t.dtype() == I64;
  if (!wide && t.dtype() != I32) {
    TVM_FFI_THROW(ValueError) << name << ": expected int32 or int64, got "
                              << ffi::DLDataTypeToString(t.dtype());
  }
  Whole x{nullptr, wide, 0};
  x.data = strided<const char>(t, name, t.dtype(), shape, CPU, wide ? 8 : 4, &x.step);
  if (x.step < 0) {
    TVM_FFI_THROW(ValueError) << name << ": expected a stride of 0 or more, got " << x.step
                              << "; call .contiguous() on it";
  }
  return x;
}

// The pool [slots, HV, 128, 128], k-last, or k-first as a view with strides 1 and 128 at the end. Slots
// and heads may lie apart, but may not overlap.
inline States states_of(const ffi::TensorView& of_pool, const char* name, bool f16 = false) {
  const StatesView view(of_pool);
  const ffi::TensorView pool = view;
  States s;
  s.k_first = view.k_first;
  if (pool.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << name << ": expected on the CPU; call .cpu() on it";
  }
  if (pool.dtype() != F32 && pool.dtype() != BF16 && !(f16 && pool.dtype() == F16)) {
    TVM_FFI_THROW(ValueError) << name << ": expected float32"
                              << (f16 ? ", bfloat16 or float16" : " or bfloat16") << ", got "
                              << ffi::DLDataTypeToString(pool.dtype());
  }
  s.type = pool.dtype() == F32 ? Float::F32 : pool.dtype() == BF16 ? Float::BF16 : Float::F16;
  if (pool.ndim() != 4) {
    TVM_FFI_THROW(ValueError) << name << ": expected [slots, HV, 128, 128], got " << pool.shape();
  }
  const int64_t slots = pool.size(0), HV = pool.size(1);
  int64_t strides[2];
  s.data = strided<char, 2>(pool, name, pool.dtype(), {slots, HV, V, K}, CPU, bytes_of(s.type),
                            strides);
  s.slots = slots, s.slot = strides[0], s.head = HV == 1 ? V * K : strides[1];
  const auto apart = [](int64_t inner, int64_t n_inner, int64_t outer, int64_t n_outer) {
    return (n_inner < 2 || inner >= V * K) &&
           (n_outer < 2 || outer >= V * K + std::max<int64_t>(n_inner - 1, 0) * inner);
  };
  if (!apart(s.head, HV, s.slot, slots) && !apart(s.slot, slots, s.head, HV)) {
    TVM_FFI_THROW(ValueError) << name << ": expected states that do not overlap; call .clone() "
                              << "on it";
  }
  return s;
}

// How many heads of q a row [2 H 128 + HV 128] has.
inline int64_t query_heads(int64_t columns, int64_t HV) {
  const int64_t H = (columns - HV * V) / (2 * K);
  if (HV < 1 || H < 1 || 2 * H * K + HV * V != columns || HV % H) {
    TVM_FFI_THROW(ValueError) << "mixed_qkv: " << columns << " columns are no rows of q, k and v "
                              << "of 128 for " << HV << " value heads: expected 2 H 128 + HV 128, "
                              << "HV a multiple of H";
  }
  return H;
}

inline void check_heads(int64_t H, int64_t HV) {
  if (H < 1 || HV < 1 || HV % H) {
    TVM_FFI_THROW(ValueError) << "pool: expected a multiple of q's " << H << " heads, got " << HV;
  }
}

inline bool same_tensor(const ffi::TensorView& x, const ffi::TensorView& y) {
  bool same = x.data_ptr() == y.data_ptr() && x.byte_offset() == y.byte_offset() &&
              x.ndim() == y.ndim() && x.dtype() == y.dtype();
  for (int i = 0; same && i < x.ndim(); ++i) {
    same = x.size(i) == y.size(i) && x.stride(i) == y.stride(i);
  }
  return same;
}

// An op's call is in place.
inline void check_in_place(const ffi::TensorView& pool, const ffi::TensorView& new_pool) {
  if (!same_tensor(pool, new_pool)) {
    TVM_FFI_THROW(ValueError) << "new_pool: expected the pool itself, which is updated in place";
  }
}

// --- the walk -----------------------------------------------------------------------------------

struct Walk {
  Tokens q, k, v, a, b;
  const float* A_log;  // null: the gates are given, a is log g and b is beta
  const void* dt_bias;
  bool half_bias;  // as the tokens
  bool wide_a, wide_b;  // float
  float scale, epsilon;
  uint16_t* output;  // [all tokens, HV, V]
  Whole cu_seqlens;  // null: T tokens for each sequence
  int64_t T, H, HV;
  Float type;  // of the states
  bool k_first = false;  // they are [K, V]
  DLDataType token = BF16;  // what q, k, v and the output are of; a, b and dt_bias unless wide
  int chunk_rows;  // divides V
  Rows rows;

  int64_t begin(int64_t n) const { return cu_seqlens.data ? cu_seqlens[n] : n * T; }
  int64_t count(int64_t n) const { return cu_seqlens.data ? cu_seqlens[n + 1] - cu_seqlens[n] : T; }
  int64_t place(const Tokens& x, int64_t n, int64_t t) const {
    return cu_seqlens.data ? (begin(n) + t) * x.token : n * x.sequence + t * x.token;
  }
  const uint16_t* at(const Tokens& x, int64_t n, int64_t t) const { return x.data + place(x, n, t); }
  bool half() const { return token == F16; }
  float value(uint16_t x) const { return half() ? from_f16(x) : from_bf16(x); }
  float gate(const Tokens& x, bool wide, int64_t i) const {
    return wide ? reinterpret_cast<const float*>(x.data)[i] : value(x.data[i]);
  }
  // Where a call keeps the state after token t of sequence n as well; null: nowhere.
  char* kept(int64_t, int64_t, int64_t) const { return nullptr; }
  float bias(int64_t i_hv) const {
    return half_bias ? value(static_cast<const uint16_t*>(dt_bias)[i_hv])
                     : static_cast<const float*>(dt_bias)[i_hv];
  }
};

// float16 or, for any other, bfloat16: what tokens are expected to be of.
inline DLDataType token_type(const ffi::TensorView& t) { return t.dtype() == F16 ? F16 : BF16; }

// A packed row's q, k and v of j.token; rows may lie apart, and are those of sequences as well as of tokens.
inline void take_rows(Walk& j, const ffi::TensorView& mixed_qkv) {
  int64_t stride;
  const int64_t rows = mixed_qkv.size(0), width = mixed_qkv.size(1);
  const auto* x =
      strided<const uint16_t>(mixed_qkv, "mixed_qkv", j.token, {rows, width}, CPU, 2, &stride);
  j.q = {x, stride, stride};
  j.k = {x + j.H * K, stride, stride};
  j.v = {x + 2 * j.H * K, stride, stride};
}

// [T, heads, 128] or [T, heads]; tokens, or rows of one token, may lie apart.
inline Tokens rows_of(const ffi::TensorView& t, const char* name,
                      std::initializer_list<int64_t> shape, DLDataType dtype = BF16) {
  Tokens x;
  x.data = strided<const uint16_t>(t, name, dtype, shape, CPU, dtype.bits / 8, &x.token);
  x.sequence = x.token;
  return x;
}

// Of all calls: what the gates are computed with, or that they are given. HV is known.
inline GateTypes take_gates(Walk& j, const ffi::Optional<ffi::TensorView>& A_log,
                            const ffi::Optional<ffi::TensorView>& dt_bias,
                            const ffi::TensorView& b) {
  const GateTypes types(A_log, dt_bias, b, j.token);
  j.wide_a = types.a == F32, j.wide_b = types.b == F32;
  if (types.given) return types;
  const ffi::TensorView bias = dt_bias.value();
  j.A_log = data<const float>(A_log.value(), "A_log", F32, {j.HV}, CPU);
  j.half_bias = bias.dtype() == j.token;
  j.dt_bias = data<const char>(bias, "dt_bias", j.half_bias ? j.token : F32, {j.HV}, CPU);
  return types;
}

inline void take_constants(Walk& j, ffi::Optional<double> scale, double epsilon) {
  const double s = scale.value_or(0.0);
  j.scale = static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K)) : s);
  j.epsilon = static_cast<float>(epsilon);
}

// cu_seqlens [N + 1] never falls, and may end before the tokens do. most: tokens of a sequence, or
// -1.
inline void take_lengths(Walk& j, const ffi::TensorView& cu_seqlens, int64_t N, int64_t total,
                         int64_t most) {
  j.cu_seqlens = whole(cu_seqlens, "cu_seqlens", {N + 1});
  for (int64_t n = 0; n < N; ++n) {
    const int64_t begin = j.begin(n), count = j.count(n);
    if (begin < 0 || count < 0 || begin + count > total || (most >= 0 && count > most)) {
      const std::string up_to = most >= 0 ? "up to " + std::to_string(most) + " of " : "some of ";
      TVM_FFI_THROW(ValueError) << "cu_seqlens: sequence " << n << " has " << count
                                << " tokens from " << begin << ": expected " << up_to << total;
    }
  }
}

// `rows` rows of a state from row i_v on, to a thread's [rows, K], and back.
inline void bring(const Walk& j, const char* state, int64_t i_v, int64_t rows, float* to) {
  const int64_t size = bytes_of(j.type);
  if (!j.k_first) return widen(state + i_v * K * size, j.type, rows * K, to);
  float line[V];
  for (int k = 0; k < K; ++k) {
    widen(state + (k * V + i_v) * size, j.type, rows, line);
    for (int64_t r = 0; r < rows; ++r) to[r * K + k] = line[r];
  }
}
inline void put(const Walk& j, const float* from, int64_t i_v, int64_t rows, char* state) {
  const int64_t size = bytes_of(j.type);
  if (!j.k_first) return narrow(from, j.type, rows * K, state + i_v * K * size);
  float line[V];
  for (int k = 0; k < K; ++k) {
    for (int64_t r = 0; r < rows; ++r) line[r] = from[r * K + k];
    narrow(line, j.type, rows, state + (k * V + i_v) * size);
  }
}

// Call: a Walk with
//   bool padding(n)                 outputs 0, and no state is touched
//   const char* origin(n, i_hv)     the state to start from; null: zeros
//   char* kept(n, t, i_hv)          the same, besides target; Walk's is nowhere
//   char* target(n, t, i_hv)        where the state after token t goes; null: nowhere. t = -1: of a
//                                   sequence of no tokens, asked only if it starts from zeros
template <typename Call>
void walk_chunk(const void* p, int64_t chunk) {
  alignas(64) static thread_local float scratch[V * K];
  const Call& j = *static_cast<const Call*>(p);
  const int64_t row = chunk * j.chunk_rows;  // of all N * HV * V rows
  const int64_t n = row / V / j.HV, i_hv = row / V % j.HV, i_v = row % V, i_h = i_hv / (j.HV / j.H);
  const int64_t begin = j.begin(n), count = j.count(n), elements = j.chunk_rows * K;
  const int64_t inside = i_v * K * bytes_of(j.type);  // a state, in bytes
  uint16_t* output = j.output + (begin * j.HV + i_hv) * V + i_v;
  if (j.padding(n)) {
    for (int64_t t = 0; t < count; ++t, output += j.HV * V) {
      std::fill(output, output + j.chunk_rows, uint16_t{0});
    }
    return;
  }
  const char* const origin = j.origin(n, i_hv);
  if (count == 0) {
    char* const to = origin ? nullptr : j.target(n, -1, i_hv);
    if (!to) return;
    std::memset(scratch, 0, elements * sizeof(float));
    return put(j, scratch, i_v, j.chunk_rows, to);
  }
  const bool direct = j.type == Float::F32 && !j.k_first;  // states are read and written where they are
  const float* from = scratch;
  if (!origin) std::memset(scratch, 0, elements * sizeof(float));
  else if (direct) from = reinterpret_cast<const float*>(origin + inside);
  else bring(j, origin, i_v, j.chunk_rows, scratch);
  for (int64_t t = 0; t < count; ++t, output += j.HV * V) {
    char* const target = j.target(n, t, i_hv);
    float* const to = direct && target ? reinterpret_cast<float*>(target + inside) : scratch;
    Head h;
    const Float token = j.half() ? Float::F16 : Float::BF16;
    widened(j.at(j.q, n, t) + i_h * K, token, j.epsilon, h.q);
    widened(j.at(j.k, n, t) + i_h * K, token, j.epsilon, h.k);
    h.kq = dot(h.k, h.q);
    const float a = j.gate(j.a, j.wide_a, j.place(j.a, n, t) + i_hv);
    const float b = j.gate(j.b, j.wide_b, j.place(j.b, n, t) + i_hv);
    h.g = std::exp(j.A_log ? log_decay(j.A_log[i_hv], a + j.bias(i_hv)) : a);
    h.beta = j.A_log ? sigmoid(b) : b;
    h.scale = j.scale;
    j.rows(h, from, j.at(j.v, n, t) + i_hv * V + i_v, to, output, j.chunk_rows);
    if (!direct && target) put(j, scratch, i_v, j.chunk_rows, target);
    char* const kept = j.kept(n, t, i_hv);
    if (kept) put(j, to, i_v, j.chunk_rows, kept);
    from = to;
  }
}

template <typename Call>
void walk(Call& j, int64_t sequences) {
  const int64_t rows = sequences * j.HV * V;
  Pool& threads = Pool::get();
  j.chunk_rows = V;
  while (j.chunk_rows > 16 && rows / j.chunk_rows < 4 * threads.threads()) j.chunk_rows /= 2;
  j.rows = j.half() ? rows_portable<F16Values> : pick_rows(false);
  threads.run(rows / j.chunk_rows, walk_chunk<Call>, &j);
}

}  // namespace gdn
