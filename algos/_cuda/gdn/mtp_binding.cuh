// The binding of mtp.cuh's kernel: checks the arguments, and launches on the current stream. No allocation, no
// synchronisation.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "device.cuh"
#include "mtp.cuh"
#include "packed.cuh"
#include "strided.cuh"

namespace gdn {

// In mtp_launch.cuh, whose instances have a file of their own for each T, so that they compile side by side.
template <typename T, bool WRITES, typename Token = __nv_bfloat16, bool K_FIRST = false>
void launch_mtp(const MtpArguments& p, int64_t heads, int device, cudaStream_t stream);

// A stride in the 32 bits that the kernel has for it.
inline int32_t narrow(const char* name, int64_t stride) {
  return static_cast<int32_t>(within(name, stride, 0, INT32_MAX));
}

// A call whose arguments fit.
struct MtpCall {
  int64_t B, total, T, H, HV;
  int axes;        // before the heads: of sequences and their tokens, or of all tokens
  bool lengths;    // cu_seqlens
  DLDevice device;
  DLDataType of_state;
  bool half_tokens;  // f16, else bf16
  bool k_first;      // the pool's states are [K, V]

  bool empty() const { return B == 0 || total == 0; }

  // A tensor of all tokens: vectors [.., heads, 128], or numbers [.., heads].
  const __nv_bfloat16* taken(const ffi::TensorView& t, const char* name, DLDataType dtype, int64_t heads, bool vectors, size_t align,
                             int32_t* batch, int32_t* token) const {
    using bf = __nv_bfloat16;
    int64_t strides[2] = {};
    const bf* at;
    if (axes == 1) {
      at = vectors ? strided<const bf>(t, name, dtype, {total, heads, K}, device, align, strides + 1)
                   : strided<const bf>(t, name, dtype, {total, heads}, device, align, strides + 1);
    } else {
      at = vectors ? strided<const bf, 2>(t, name, dtype, {B, T, heads, K}, device, align, strides)
                   : strided<const bf, 2>(t, name, dtype, {B, T, heads}, device, align, strides);
    }
    *batch = narrow(name, axes == 1 && !lengths ? T * strides[1] : strides[0]), *token = narrow(name, strides[1]);
    return at;
  }
};

// Several tokens of each sequence, for an engine that verifies drafts. The first two axes of q, k, v, a, b and pool, three of
// states and the first one of state_indices may be strided.
//
// q, k [B, T, H, 128], v [B, T, HV, 128], a, b [B, T, HV] bf16, 1 <= T <= 8, HV a multiple of H; with cu_seqlens [B + 1]
// int32 they are [total, ...], and a sequence has up to T tokens, the columns of state_indices (8 if it has one axis). Without
// it they may be [total, ...], with total / B tokens for each sequence. [total, ...] may have a leading axis of 1.
// With STATES q, k, v, a, b, output and dt_bias may be f16 instead of bf16.
// A_log [HV] f32, dt_bias [HV] f32 or bf16, or neither (GateTypes). pool [slots, HV, 128, 128] f32 or bf16, k-last or, with STATES and
// a mode that writes some, k-first as a view with strides 1 and 128 at the end. state_indices
// [B] or [B, T], int32 or int64: a sequence starts from the state in its slot, or in that of column num_accepted_tokens - 1 ([B], int32 or
// int64; none: column 0). If its count is not in 1..T, or its start slot is below first_slot (or 0), or not the pool's, it
// is padding: outputs 0, no state is read or written. Slots that are written are distinct. scale: none or 0 for
// 1/sqrt(128). epsilon: q and k are multiplied by 1/sqrt(sum(x^2) + epsilon); below 0: taken as they are.
// output [B, T, HV, 128] bf16, or [total, HV, 128].
// mode 0: no state is written (without STATES the only one); 1: the one after the last token, to the start slot; 2: the one
// after token t to slot state_indices[b, t], unless that is below first_slot, or not the pool's; 3: to states[states_rows[b]
// or b, t], of states [N, >= T, HV, 128, 128] like the pool, its heads as far apart, unless the row is below 0.
// Throws ValueError if an argument is different. Fills in `p`.
template <bool STATES>
MtpCall take_mtp(MtpArguments& p, ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView a, ffi::TensorView b,
                       ffi::Optional<ffi::TensorView> A_log, ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView of_pool,
                       ffi::TensorView state_indices,
                       ffi::Optional<ffi::TensorView> num_accepted_tokens, ffi::Optional<ffi::TensorView> cu_seqlens,
                       ffi::Optional<double> scale, ffi::TensorView output, ffi::Optional<ffi::TensorView> states,
                       ffi::Optional<ffi::TensorView> states_rows, int64_t mode, int64_t first_slot, double epsilon) {
  const StatesView pool_states(of_pool);
  const ffi::TensorView pool = pool_states;
  const int64_t B = state_indices.ndim() ? state_indices.size(0) : 0;
  if (cu_seqlens || (q.ndim() == 4 && q.size(0) == 1 && B > 0)) {
    q = flat(q, 3), k = flat(k, 3), v = flat(v, 3), a = flat(a, 2), b = flat(b, 2), output = flat(output, 3);
  }
  const int axes = cu_seqlens || q.ndim() == 3 ? 1 : 2;
  if (q.ndim() != axes + 2 || pool.ndim() != 4 || state_indices.ndim() < 1 || state_indices.ndim() > 2) {
    TVM_FFI_THROW(ValueError) << "expected q of " << axes + 2 << " axes, pool of 4 and state_indices of 1 or 2";
  }
  const int64_t total = q.size(0), H = q.size(axes), HV = pool.size(1);
  const bool columns = state_indices.ndim() == 2;
  const int64_t T = cu_seqlens ? (columns ? state_indices.size(1) : MOST_TOKENS) : axes == 2 ? q.size(1) : B ? total / B : 0;
  if (H < 1 || HV < 1 || HV % H || HV > 1024) {
    TVM_FFI_THROW(ValueError) << "pool: expected at most 1024 heads, a multiple of q's " << H << ", got " << HV;
  }
  if (!cu_seqlens && axes == 1 && B * T != total) {
    TVM_FFI_THROW(ValueError) << "q: " << total << " tokens are not the same number for each of " << B << " sequences";
  }
  if (T < 1 || T > MOST_TOKENS) TVM_FFI_THROW(ValueError) << "expected 1 to 8 tokens a sequence, got " << T;
  if (mode < OUTPUTS || mode > (STATES ? BUFFER : OUTPUTS)) {
    TVM_FFI_THROW(ValueError) << "mode: expected 0" << (STATES ? " to 3" : ", as this library writes no states")
                              << ", got " << mode;
  }
  if (pool_states.k_first && mode == OUTPUTS) TVM_FFI_THROW(ValueError) << "pool: expected k-last states, as none is written";
  if (mode == SLOTS && !columns) TVM_FFI_THROW(ValueError) << "state_indices: expected a column for each token, in mode 2";
  if (mode == BUFFER && !states) TVM_FFI_THROW(ValueError) << "states: expected a buffer, in mode 3";
  const ffi::TensorView* buffer = mode == BUFFER ? &states.value() : nullptr;
  if (buffer && StatesView(*buffer).k_first != pool_states.k_first) TVM_FFI_THROW(ValueError) << "states: expected the layout of pool";
  if (buffer && (buffer->ndim() != 5 || buffer->size(1) < T)) {
    TVM_FFI_THROW(ValueError) << "states: expected [rows, " << T << " or more, HV, 128, 128], got " << buffer->shape();
  }
  const DLDevice device = pool.device();
  if (device.device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "pool: expected on a CUDA device";
  const int64_t slots = pool.size(0);
  if (B * HV >= int64_t{1} << 25) TVM_FFI_THROW(ValueError) << "B * HV = " << B * HV << ": expected less than 2^25";
  const DLDataType bf16{kDLBfloat, 16, 1}, f16{kDLFloat, 16, 1}, f32{kDLFloat, 32, 1}, i32{kDLInt, 32, 1}, i64{kDLInt, 64, 1};
  const DLDataType of_state = pool.dtype();
  if (of_state != f32 && of_state != bf16) {
    TVM_FFI_THROW(ValueError) << "pool: expected float32 or bfloat16, got " << ffi::DLDataTypeToString(of_state);
  }

  using bf = __nv_bfloat16;
  const bool half = STATES && q.dtype() == f16;
  const DLDataType of_token = half ? f16 : bf16;
  const MtpCall call{B, total, T, H, HV, axes, static_cast<bool>(cu_seqlens), device, of_state, half, pool_states.k_first};
  const auto vectors = [&](const ffi::TensorView& t, const char* name, int64_t heads, size_t align, int32_t* batch, int32_t* token) {
    return call.taken(t, name, of_token, heads, true, align, batch, token);
  };
  p.q = vectors(q, "q", H, ALIGNMENT, &p.q_batch, &p.q_token), p.k = vectors(k, "k", H, ALIGNMENT, &p.k_batch, &p.k_token);
  p.v = vectors(v, "v", HV, 2, &p.v_batch, &p.v_token);
  const GateTypes gates(A_log, dt_bias, b, of_token);
  p.a = call.taken(a, "a", gates.a, HV, false, gates.a.bits / 8, &p.a_batch, &p.a_token);
  p.b = call.taken(b, "b", gates.b, HV, false, gates.b.bits / 8, &p.b_batch, &p.b_token);
  int64_t strides[2];
  p.pool = p.states = strided<char, 2>(pool, "pool", of_state, {slots, HV, V, K}, device, ALIGNMENT, strides);
  p.slot_stride = p.state_stride = narrow("pool", strides[0]);
  p.head_bytes = head_bytes("pool", strides[1], HV, of_state.bits / 8);
  if (buffer) {
    int64_t buffers[3];
    p.states = strided<char, 3>(StatesView(*buffer), "states", of_state, {buffer->size(0), buffer->size(1), HV, V, K}, device, ALIGNMENT,
                                buffers);
    p.states_stride = narrow("states", buffers[0]), p.state_stride = narrow("states", buffers[1]);
    if (buffers[2] != strides[1]) TVM_FFI_THROW(ValueError) << "states: expected its heads as far apart as pool's, " << strides[1];
  }
  p.output = axes == 1 ? data<bf>(output, "output", of_token, {total, HV, V}, device)
                        : data<bf>(output, "output", of_token, {B, T, HV, V}, device);
  p.wide_beta = gates.b == f32;
  if (!gates.given) {
    const ffi::TensorView bias = dt_bias.value();
    p.A_log = data<const float>(A_log.value(), "A_log", f32, {HV}, device);
    p.dt_bias_half = bias.dtype() == of_token;
    p.dt_bias = data<const char>(bias, "dt_bias", p.dt_bias_half ? of_token : f32, {HV}, device);
  }
  const bool wide = state_indices.dtype() == i64;
  p.slot_shift = wide ? 3 : 2, p.columns = static_cast<uint32_t>(columns ? T : 1);
  const size_t index = wide ? 8 : 4;
  p.slots = columns ? strided<const char>(state_indices, "state_indices", wide ? i64 : i32, {B, T}, device, index, strides)
                    : strided<const char>(state_indices, "state_indices", wide ? i64 : i32, {B}, device, index, strides);
  p.slots_step = static_cast<uint32_t>(within("state_indices", strides[0], 0, (1 << 28) - 1) * index);
  uint8_t shift;
  if (num_accepted_tokens) {
    p.accepted = slots_of(num_accepted_tokens.value(), "num_accepted_tokens", B, device, &shift);
    p.accepted_shift = shift;
  }
  if (cu_seqlens) p.cu_seqlens = data<const int32_t>(cu_seqlens.value(), "cu_seqlens", i32, {B + 1}, device);
  if (buffer && states_rows) {
    p.states_rows = slots_of(states_rows.value(), "states_rows", B, device, &shift);
    p.rows_shift = shift;
  }
  const double s = scale.value_or(0.0);
  p.scale = static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K)) : s), p.epsilon = under_root(epsilon);
  p.HV = static_cast<uint32_t>(HV), p.tokens = static_cast<int32_t>(T), p.mode = static_cast<uint8_t>(mode);
  p.first_slot = first_live(first_slot), p.slots_end = slots_end("pool", slots);
  p.by_HV = Divisor(p.HV), p.by_group = Divisor(static_cast<uint32_t>(HV / H));
  return call;
}

// The same, and its launch.
template <bool STATES>
void mtp_verify(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView a, ffi::TensorView b,
                       ffi::Optional<ffi::TensorView> A_log, ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView pool,
                       ffi::TensorView state_indices,
                       ffi::Optional<ffi::TensorView> num_accepted_tokens, ffi::Optional<ffi::TensorView> cu_seqlens,
                       ffi::Optional<double> scale, ffi::TensorView output, ffi::Optional<ffi::TensorView> states,
                       ffi::Optional<ffi::TensorView> states_rows, int64_t mode, int64_t first_slot, double epsilon) {
  MtpArguments p{};
  const MtpCall call = take_mtp<STATES>(p, q, k, v, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, cu_seqlens, scale, output, states,
                                          states_rows, mode, first_slot, epsilon);
  if (call.empty()) return;
  using bf = __nv_bfloat16;
  const bool f32 = call.of_state.bits == 32;
  const int64_t heads = call.B * call.HV;
  const int device = call.device.device_id;
  const CurrentDevice current(device);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(call.device.device_type, device));
  if constexpr (STATES) {
    if (call.k_first) {
      if (call.half_tokens && f32) launch_mtp<float, true, __half, true>(p, heads, device, stream);
      if (call.half_tokens && !f32) launch_mtp<bf, true, __half, true>(p, heads, device, stream);
      if (!call.half_tokens && f32) launch_mtp<float, true, bf, true>(p, heads, device, stream);
      if (!call.half_tokens && !f32) launch_mtp<bf, true, bf, true>(p, heads, device, stream);
      TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
      return;
    }
    if (call.half_tokens && mode != OUTPUTS && f32) launch_mtp<float, true, __half>(p, heads, device, stream);
    if (call.half_tokens && mode != OUTPUTS && !f32) launch_mtp<bf, true, __half>(p, heads, device, stream);
    if (call.half_tokens && mode == OUTPUTS && f32) launch_mtp<float, false, __half>(p, heads, device, stream);
    if (call.half_tokens && mode == OUTPUTS && !f32) launch_mtp<bf, false, __half>(p, heads, device, stream);
    if (!call.half_tokens && mode != OUTPUTS && f32) launch_mtp<float, true>(p, heads, device, stream);
    if (!call.half_tokens && mode != OUTPUTS && !f32) launch_mtp<bf, true>(p, heads, device, stream);
  }
  if (!call.half_tokens && mode == OUTPUTS && f32) launch_mtp<float, false>(p, heads, device, stream);
  if (!call.half_tokens && mode == OUTPUTS && !f32) launch_mtp<bf, false>(p, heads, device, stream);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

}  // namespace gdn
