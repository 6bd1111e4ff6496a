// GDN decode on the CPU: every element of the state is read once and written once.
//
//   g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)        one pair per (batch, value head)
//   S = g S;  d = beta (v - S k);  S = S + d k^T;  o = scale * S q          S [V, K], k-last, K = V = 128
//
// Changed from pt-compiled: one pass. Both dots are taken on the old state, so that S' is written while the rows are
// still in L1 (rows.h); a thread pool distributes chunks of rows (pool.h); if the state does not fit in the
// cache, the stores bypass it, which saves reading the lines that they overwrite.
//
// Grid: B * HV value heads, each in one chunk or, when there are few, in up to eight chunks of 16 rows.
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464). Written here.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>

#include "pool.h"
#include "rows.h"
#include "tensor.cuh"

namespace ffi = tvm::ffi;
using gdn::data;

namespace {

constexpr int K = gdn::K, V = 128;

struct Job {
  const uint16_t *q, *k, *v;
  const float *state, *A_log;
  const uint16_t* a;
  const float* dt_bias;
  const uint16_t* b;
  float scale;
  uint16_t* output;
  float* new_state;
  int64_t HV, group;  // group: value heads per query/key head
  int chunk_rows;     // divides V
  gdn::Rows rows;
};

// Does not overflow for large |x|.
float softplus(float x) { return std::fmax(x, 0.f) + std::log1p(std::exp(-std::fabs(x))); }

void run_chunk(const void* p, int64_t chunk) {
  const Job& j = *static_cast<const Job*>(p);
  const int64_t row = chunk * j.chunk_rows;  // of all B * HV * V rows
  const int64_t i_bh = row / V;              // batch * HV + value head
  const int64_t i_h = i_bh / j.group;        // batch * H + query/key head, as HV = H * group
  const int64_t i_hv = i_bh % j.HV;

  gdn::Head h;
  float kq[8] = {};
  for (int c = 0; c < K; ++c) {
    h.k[c] = gdn::from_bf16(j.k[i_h * K + c]);
    h.q[c] = gdn::from_bf16(j.q[i_h * K + c]);
    kq[c % 8] += h.k[c] * h.q[c];
  }
  h.kq = ((kq[0] + kq[1]) + (kq[2] + kq[3])) + ((kq[4] + kq[5]) + (kq[6] + kq[7]));
  h.g = std::exp(-std::exp(j.A_log[i_hv]) * softplus(gdn::from_bf16(j.a[i_bh]) + j.dt_bias[i_hv]));
  h.beta = 1.f / (1.f + std::exp(-gdn::from_bf16(j.b[i_bh])));
  h.scale = j.scale;
  j.rows(h, j.state + row * K, j.v + row, j.new_state + row * K, j.output + row, j.chunk_rows);
}

// The size of the last-level cache, to know whether a state stays in it. Linux's sysfs has the part that one CPU can
// use; sysconf may not: glibc 2.36 gives 384 MiB for a virtual AMD EPYC whose CPUs can use 32.
int64_t cache_bytes() {
  static const int64_t bytes = [] {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    int64_t n = 0;
    char unit = 'K';
    if (file >> n >> unit && n > 0) return n << (unit == 'M' ? 20 : 10);
#ifdef _SC_LEVEL3_CACHE_SIZE
    n = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return n > 0 ? n : int64_t{32} << 20;
  }();
  return bytes;
}

}  // namespace

// q, k [B,1,H,128] bf16; v [B,1,HV,128] bf16; state [B,HV,128,128] f32; A_log, dt_bias [HV] f32; a, b [B,1,HV] bf16;
// scale None or 0: 1/sqrt(128). Writes output [B,1,HV,128] bf16 and new_state [B,HV,128,128] f32.
void Run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView new_state) {
  if (q.ndim() != 4 || v.ndim() != 4) TVM_FFI_THROW(ValueError) << "q and v: expected 4 dimensions [B, 1, heads, 128]";
  const int64_t B = q.size(0), H = q.size(2), HV = v.size(2);
  if (H < 1 || HV < 1 || HV % H) TVM_FFI_THROW(ValueError) << "HV = " << HV << " is not a multiple of H = " << H;
  const DLDevice device = state.device();
  if (device.device_type != kDLCPU) TVM_FFI_THROW(ValueError) << "state: expected on the CPU";
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1};
  const double s = scale.value_or(0.0);
  Job j{};
  j.q = data<uint16_t>(q, "q", bf16, {B, 1, H, K}, device);
  j.k = data<uint16_t>(k, "k", bf16, {B, 1, H, K}, device);
  j.v = data<uint16_t>(v, "v", bf16, {B, 1, HV, V}, device);
  j.state = data<float>(state, "state", f32, {B, HV, V, K}, device);
  j.A_log = data<float>(A_log, "A_log", f32, {HV}, device);
  j.a = data<uint16_t>(a, "a", bf16, {B, 1, HV}, device);
  j.dt_bias = data<float>(dt_bias, "dt_bias", f32, {HV}, device);
  j.b = data<uint16_t>(b, "b", bf16, {B, 1, HV}, device);
  j.scale = static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K)) : s);
  j.output = data<uint16_t>(output, "output", bf16, {B, 1, HV, V}, device);
  j.new_state = data<float>(new_state, "new_state", f32, {B, HV, V, K}, device);
  j.HV = HV;
  j.group = HV / H;

  const int64_t rows = B * HV * V, bytes = rows * K * 4;
  gdn::Pool& pool = gdn::Pool::get();
  j.chunk_rows = V;
  while (j.chunk_rows > 16 && rows / j.chunk_rows < 4 * pool.threads()) j.chunk_rows /= 2;
  // Wall, 2 cores of an AMD EPYC (family 26), 32 MiB of L3: streaming wins from B=48 (24 MiB) on, both with one state
  // read at every call and with new_state as the next call's state; at B=32 it loses 3 to 39 %, at B=8 it doubles the
  // time.
  const bool stream = bytes >= cache_bytes() / 4 * 3 && reinterpret_cast<uintptr_t>(j.new_state) % 64 == 0;
  j.rows = gdn::pick_rows(stream);
  pool.run(rows / j.chunk_rows, run_chunk, &j);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
