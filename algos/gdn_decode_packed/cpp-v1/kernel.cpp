// GDN decode on the CPU as servers call it: packed rows, states in a pool, in place.
//
//   q, k = q / sqrt(q.q + 1e-6), k / sqrt(k.k + 1e-6)
//   g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)        one pair per (row, value head)
//   S = g S;  d = beta (v - S k);  S = S + d k^T;  o = scale * S q          S = pool[slot] [V, K], k-last, K = V = 128
//
// Changed from gdn_decode/cpp-v1: q, k and v are parts of a row, the state is a slot's, q and k are normalised here, and
// no store goes past the cache: the lines that are written have just been read. Its rows.h and pool.h are shared.
//
// Grid: B * HV value heads, each in one chunk or, when there are few, in up to eight chunks of 16 rows of the state.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464). Written here.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "pool.h"
#include "rows.h"
#include "tensor.cuh"

namespace ffi = tvm::ffi;
using gdn::data;

namespace {

constexpr int K = gdn::K, V = 128;
constexpr float EPS = 1e-6f;  // below the root of the norm

// Rows whose elements lie side by side; the rows themselves may lie apart.
struct Strided {
  const uint16_t* data;
  int64_t stride;  // elements from one row to the next
  const uint16_t* operator[](int64_t i) const { return data + i * stride; }
};

struct Job {
  Strided mixed_qkv, a, b;
  const float *A_log, *dt_bias;
  float* pool;
  int64_t slot;  // elements from one slot to the next
  const int32_t* state_indices;
  float scale;
  uint16_t* output;
  int64_t H, HV;
  int chunk_rows;  // divides V
  gdn::Rows rows;
};

// Without overflow at either end.
float softplus(float x) { return std::fmax(x, 0.f) + std::log1p(std::exp(-std::fabs(x))); }

// The dot of two vectors in eight sums, whatever the compiler makes of them.
float dot(const float* x, const float* y) {
  float s[8] = {};
  for (int c = 0; c < K; ++c) s[c % 8] += x[c] * y[c];
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

void normalised(const uint16_t* x, float* to) {
  for (int c = 0; c < K; ++c) to[c] = gdn::from_bf16(x[c]);
  const float norm = std::sqrt(dot(to, to) + EPS);
  for (int c = 0; c < K; ++c) to[c] /= norm;
}

void run_chunk(const void* p, int64_t chunk) {
  const Job& j = *static_cast<const Job*>(p);
  const int64_t row = chunk * j.chunk_rows;  // of all B * HV * V rows
  const int64_t i_b = row / V / j.HV, i_hv = row / V % j.HV, i_v = row % V;
  const int64_t i_h = i_hv / (j.HV / j.H), slot = j.state_indices[i_b];
  uint16_t* output = j.output + row;
  if (slot <= 0) {
    std::fill(output, output + j.chunk_rows, uint16_t{0});
    return;
  }
  const uint16_t* x = j.mixed_qkv[i_b];
  gdn::Head h;
  normalised(x + i_h * K, h.q);
  normalised(x + (j.H + i_h) * K, h.k);
  h.kq = dot(h.k, h.q);
  h.g = std::exp(-std::exp(j.A_log[i_hv]) * softplus(gdn::from_bf16(j.a[i_b][i_hv]) + j.dt_bias[i_hv]));
  h.beta = 1.f / (1.f + std::exp(-gdn::from_bf16(j.b[i_b][i_hv])));
  h.scale = j.scale;
  float* state = j.pool + slot * j.slot + (i_hv * V + i_v) * K;
  j.rows(h, state, x + 2 * j.H * K + i_hv * V + i_v, state, output, j.chunk_rows);
}

// A [B, columns] bf16 tensor on the CPU whose rows may lie apart.
Strided strided(const ffi::TensorView& t, const char* name, int64_t B, int64_t columns) {
  const DLDataType bf16{kDLBfloat, 16, 1};
  if (t.dtype() != bf16) TVM_FFI_THROW(ValueError) << name << ": expected bfloat16";
  if (t.ndim() != 2 || t.size(0) != B || t.size(1) != columns) {
    TVM_FFI_THROW(ValueError) << name << ": expected shape [" << B << ", " << columns << "], got " << t.shape();
  }
  if (t.device().device_type != kDLCPU) TVM_FFI_THROW(ValueError) << name << ": expected on the CPU";
  if (columns > 1 && t.stride(1) != 1) TVM_FFI_THROW(ValueError) << name << ": expected rows without gaps";
  return {reinterpret_cast<const uint16_t*>(static_cast<char*>(t.data_ptr()) + t.byte_offset()), t.stride(0)};
}

// Where the pool begins; its slots may lie apart, each is [HV, V, K] without gaps.
float* slots(const ffi::TensorView& t, const char* name) {
  const DLDataType f32{kDLFloat, 32, 1};
  if (t.dtype() != f32) TVM_FFI_THROW(ValueError) << name << ": expected float32";
  if (t.ndim() != 4 || t.size(2) != V || t.size(3) != K) {
    TVM_FFI_THROW(ValueError) << name << ": expected shape [slots, HV, 128, 128], got " << t.shape();
  }
  if (t.device().device_type != kDLCPU) TVM_FFI_THROW(ValueError) << name << ": expected on the CPU";
  const bool packed = t.stride(3) == 1 && t.stride(2) == K && (t.size(1) == 1 || t.stride(1) == V * K);
  if (!packed || (t.size(0) > 1 && t.stride(0) < t.size(1) * V * K)) {
    TVM_FFI_THROW(ValueError) << name << ": expected slots [HV, 128, 128] without gaps";
  }
  return reinterpret_cast<float*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

}  // namespace

// mixed_qkv [B, 2 H K + HV V] bf16, a, b [B, HV] bf16, all with rows that may lie apart; A_log, dt_bias [HV] f32; pool
// [P, HV, 128, 128] f32, its slots may lie apart; state_indices [B] int32, 0 or less: padding; scale None or 0:
// 1/sqrt(128). Writes output [B, HV, 128] bf16 and the pool's slots; new_pool is the pool.
void Run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
         ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView new_pool) {
  Job j{};
  j.pool = slots(pool, "pool");
  j.slot = pool.stride(0);
  j.HV = pool.size(1);
  if (slots(new_pool, "new_pool") != j.pool || new_pool.size(0) != pool.size(0) || new_pool.size(1) != j.HV ||
      new_pool.stride(0) != j.slot) {
    TVM_FFI_THROW(ValueError) << "new_pool: expected the pool itself, which is updated in place";
  }
  if (mixed_qkv.ndim() != 2) TVM_FFI_THROW(ValueError) << "mixed_qkv: expected 2 dimensions";
  const int64_t B = mixed_qkv.size(0), columns = mixed_qkv.size(1), qk = columns - j.HV * V;
  j.H = qk / (2 * K);
  if (j.H < 1 || qk % (2 * K) || j.HV % j.H) {
    TVM_FFI_THROW(ValueError) << "mixed_qkv: " << columns << " columns are no rows of q, k and v of 128 for " << j.HV
                              << " value heads";
  }
  const DLDevice device = pool.device();
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1}, i32{kDLInt, 32, 1};
  const double s = scale.value_or(0.0);
  j.mixed_qkv = strided(mixed_qkv, "mixed_qkv", B, columns);
  j.a = strided(a, "a", B, j.HV);
  j.b = strided(b, "b", B, j.HV);
  j.A_log = data<float>(A_log, "A_log", f32, {j.HV}, device);
  j.dt_bias = data<float>(dt_bias, "dt_bias", f32, {j.HV}, device);
  j.state_indices = data<int32_t>(state_indices, "state_indices", i32, {B}, device);
  j.scale = static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K)) : s);
  j.output = data<uint16_t>(output, "output", bf16, {B, j.HV, V}, device);
  for (int64_t i = 0; i < B; ++i) {  // before anything is written
    if (j.state_indices[i] >= pool.size(0)) {
      TVM_FFI_THROW(ValueError) << "state_indices: row " << i << " names slot " << j.state_indices[i] << " of a pool of "
                                << pool.size(0);
    }
  }
  const int64_t rows = B * j.HV * V;
  gdn::Pool& threads = gdn::Pool::get();
  j.chunk_rows = V;
  while (j.chunk_rows > 16 && rows / j.chunk_rows < 4 * threads.threads()) j.chunk_rows /= 2;
  j.rows = gdn::pick_rows(false);
  threads.run(rows / j.chunk_rows, run_chunk, &j);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
