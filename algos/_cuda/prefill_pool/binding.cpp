// The binding: checks the arguments of a serving engine's call, and calls dispatch.cu. No CUDA here: see cuda-chunk's call.h.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "call.h"
#include "strided.cuh"

namespace gdn {

constexpr double NORM_EPSILON = 1e-6;  // under the root, as in vLLM, SGLang and FlashInfer
constexpr DLDataType BF16{kDLBfloat, 16, 1}, F16{kDLFloat, 16, 1}, F32{kDLFloat, 32, 1}, BOOL{kDLBool, 8, 1};
constexpr DLDataType TOKEN = std::is_same_v<Token, struct __half> ? F16 : BF16;

// The limits of the kernels' integers: tokens and tiles are counted in 32 bits, N and HV in a dimension of a grid.
void check_sizes(int64_t num_tokens, int64_t N, int64_t HV) {
  if (N > 32767 || HV > 65535) TVM_FFI_THROW(ValueError) << "N = " << N << ", HV = " << HV << ": expected at most 32767 and 65535";
  if (N * HV >= int64_t{1} << 25) TVM_FFI_THROW(ValueError) << "N * HV = " << N * HV << ": expected less than 2^25";
  if (num_tokens >= int64_t{1} << 31) TVM_FFI_THROW(ValueError) << num_tokens << " tokens: expected less than 2^31";
}

// A stride from a token of q, k or v to the next: cuda-recurrent's kernel has 32 bits for 16 of them, and TMA takes none of 0.
int64_t row_of(const char* name, int64_t num_tokens, int64_t stride) {
  return num_tokens > 1 ? within(name, stride, 1, (1 << 28) - 1) : stride;
}

// int32 or int64 [count], dense; and which.
const void* numbers(const ffi::TensorView& t, const char* name, int64_t count, DLDevice device, bool& wide) {
  uint8_t shift;
  const void* const p = slots_of(t, name, count, device, &shift);
  wide = shift == 3;
  return p;
}

// Checks all but q, k and v, which `call` has, with H, HV, num_tokens and their rows; and launches.
void checked(Call call, ffi::TensorView a, ffi::TensorView b, ffi::Optional<ffi::TensorView> A_log,
             ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView of_pool, ffi::TensorView state_indices, ffi::Optional<ffi::TensorView> has_initial_state, ffi::TensorView cu_seqlens,
             ffi::Optional<double> scale, ffi::TensorView output, int64_t first_slot, double epsilon) {
  const StatesView states(of_pool);
  const ffi::TensorView pool = states;
  call.k_first = states.k_first;
  const DLDevice device = pool.device();
  const int64_t T = call.num_tokens, H = call.H, HV = call.HV, N = state_indices.size(0), slots = pool.size(0);
  if (H < 1 || HV < 1 || HV % H) TVM_FFI_THROW(ValueError) << "HV = " << HV << " is not a multiple of H = " << H;
  check_sizes(T, N, HV);
  const double s = scale.value_or(0.0);
  const GateTypes gates(A_log, dt_bias, b, TOKEN);
  call.half_pool = pool.dtype() == BF16, call.given = gates.given, call.wide_beta = gates.b == F32;
  call.a = strided<const char>(a, "a", gates.a, {T, HV}, device, gates.a.bits / 8, &call.a_row);
  call.b = strided<const char>(b, "b", gates.b, {T, HV}, device, gates.b.bits / 8, &call.b_row);
  if (gates.given) {  // HV floats that can be read: without tokens those of a state
    call.dt_bias = T ? call.a : pool.data_ptr();
    call.A_log = static_cast<const float*>(call.dt_bias);
  } else {
    const ffi::TensorView bias = dt_bias.value();
    call.A_log = data<const float>(A_log.value(), "A_log", F32, {HV}, device);
    call.half_bias = bias.dtype() == TOKEN;
    call.dt_bias = data<const char>(bias, "dt_bias", call.half_bias ? TOKEN : F32, {HV}, device);
  }
  int64_t strides[2];
  call.pool = strided<char, 2>(pool, "pool", call.half_pool ? BF16 : F32, {slots, HV, HEAD_DIM, HEAD_DIM}, device, ALIGNMENT, strides);
  call.slot_stride = strides[0], call.head_stride = strides[1];
  if (strides[1] % HEAD_DIM || strides[1] < 0 || strides[1] / HEAD_DIM * HV >= int64_t{1} << 31) {  // rows of a slot, for TMA
    TVM_FFI_THROW(ValueError) << "pool: expected heads a multiple of 128 elements apart, and a slot of less than 2^31 such rows, got "
                              << strides[1] << " from one of " << HV << " to the next";
  }
  call.state_indices = strided_slots(state_indices, "state_indices", N, device, &call.indices_step, &call.long_indices);
  call.cu_seqlens = numbers(cu_seqlens, "cu_seqlens", N + 1, device, call.long_lengths);
  if (has_initial_state) call.has_state = data<const bool>(has_initial_state.value(), "has_initial_state", BOOL, {N}, device);
  call.output = data<Token>(output, "output", TOKEN, {T, HV, HEAD_DIM}, device, ALIGNMENT);
  call.slots = slots_end("pool", slots), call.N = static_cast<int>(N), call.first_slot = first_live(first_slot);
  call.scale = static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(HEAD_DIM)) : s), call.epsilon = under_root(epsilon);
  if (N == 0 || (T == 0 && slots == 0)) return;

  // torch's caching allocator if the caller is torch: no synchronisation, and freed as soon as the launches are queued
  std::vector<ffi::Tensor> buffers;
  const Allocate allocate = [&](int64_t bytes) {
    buffers.push_back(ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {bytes}, DLDataType{kDLUInt, 8, 1}, device));
    return buffers.back().data_ptr();
  };
  prefill(call, allocate, device.device_id, TVMFFIEnvGetStream(device.device_type, device.device_id));
}

void check_ranks(const ffi::TensorView& pool, const ffi::TensorView& state_indices) {
  if (pool.ndim() != 4 || state_indices.ndim() != 1)
    TVM_FFI_THROW(ValueError) << "expected pool [slots, HV, 128, 128] and state_indices [N]";
  if (pool.device().device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "pool: expected on a CUDA device";
}

// A call's q, k and v, with H, HV, num_tokens and their rows.
Call of_engine(const ffi::TensorView& q_, const ffi::TensorView& k_, const ffi::TensorView& v_, const ffi::TensorView& pool,
               const ffi::TensorView& state_indices) {
  const ffi::TensorView q = flat(q_, 3), k = flat(k_, 3), v = flat(v_, 3);
  for (const auto& [t, name] : {std::pair{&q, "q"}, {&v, "v"}}) {
    if (t->ndim() != 3) {
      TVM_FFI_THROW(ValueError) << name << ": expected [num_tokens, heads, 128] or [1, num_tokens, heads, 128], got " << t->shape();
    }
  }
  check_ranks(pool, state_indices);
  Call call{};
  const int64_t T = q.size(0), H = q.size(1), HV = v.size(1);
  int64_t k_row;
  call.q = strided<const Token>(q, "q", TOKEN, {T, H, HEAD_DIM}, pool.device(), ALIGNMENT, &call.qk_row);
  call.k = strided<const Token>(k, "k", TOKEN, {T, H, HEAD_DIM}, pool.device(), ALIGNMENT, &k_row);
  call.v = strided<const Token>(v, "v", TOKEN, {T, HV, HEAD_DIM}, pool.device(), ALIGNMENT, &call.v_row);
  if (k_row != call.qk_row) {
    TVM_FFI_THROW(ValueError) << "k: expected the stride of q, " << call.qk_row << ", got " << k_row << "; call .contiguous() on both";
  }
  row_of("q", T, call.qk_row), row_of("v", T, call.v_row);
  call.num_tokens = T, call.H = static_cast<int>(H), call.HV = static_cast<int>(HV);
  return call;
}

// q, k [num_tokens, H, 128], v [num_tokens, HV, 128] and a, b [num_tokens, HV] of Token, each with any stride from a token to the next
// (q's and k's is one), such as views of packed rows; A_log [HV] f32; dt_bias [HV] f32 or of Token, or neither (GateTypes); pool [slots, HV, 128, 128] f32 or
// bf16, k-last, or k-first as a view with strides 1 and 128 at the end, slots with any stride and heads with any multiple of 128 elements, updated in place; state_indices [N] int32 or int64,
// with any stride: the slot of each sequence, distinct; one below first_slot (or 0), or not of the pool, is padding: zeros out, and no
// state is touched; has_initial_state [N] bool: sequences without one start from zeros; cu_seqlens [N + 1] int32 or int64, never
// falling: rows before the first and after the last of these are in no sequence, and their outputs are not written; scale None or 0:
// 1/sqrt(128). epsilon: q and k become x / sqrt(sum x^2 + epsilon); below 0 they stay. Writes output [num_tokens, HV, 128] of Token.
// [num_tokens, ...] may have a leading axis of 1.
void chunk_prefill(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView a, ffi::TensorView b,
                   ffi::Optional<ffi::TensorView> A_log, ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView pool,
                   ffi::TensorView state_indices, ffi::Optional<ffi::TensorView> has_initial_state, ffi::TensorView cu_seqlens,
                   ffi::Optional<double> scale, ffi::TensorView output, int64_t first_slot, double epsilon) {
  const Call call = of_engine(q, k, v, pool, state_indices);
  checked(call, flat(a, 2), flat(b, 2), A_log, dt_bias, pool, state_indices, has_initial_state, cu_seqlens, scale, flat(output, 3), first_slot,
          epsilon);
}

// As chunk_prefill, and keeps states within sequences, for prefix caches: checkpoints [any, HV, 128, 128] like pool, dense; sequence n's
// from row checkpoint_starts[n] on ([N] or [N + 1], int32 or int64), one after each every_n_tokens tokens, a multiple of 64.
void chunk_prefill_checkpoints(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView a, ffi::TensorView b,
                               ffi::Optional<ffi::TensorView> A_log, ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView pool,
                               ffi::TensorView state_indices, ffi::Optional<ffi::TensorView> has_initial_state, ffi::TensorView cu_seqlens,
                               ffi::Optional<double> scale, ffi::TensorView output, int64_t first_slot, double epsilon,
                               ffi::TensorView checkpoints, ffi::TensorView checkpoint_starts, int64_t every_n_tokens) {
  Call call = of_engine(q, k, v, pool, state_indices);
  const bool half = pool.dtype() == BF16;
  if (every_n_tokens < 64 || every_n_tokens % 64) TVM_FFI_THROW(ValueError) << "every_n_tokens: expected a multiple of 64, got " << every_n_tokens;
  if (checkpoints.ndim() != 4 || checkpoint_starts.ndim() != 1) {
    TVM_FFI_THROW(ValueError) << "expected checkpoints [any, HV, 128, 128] and checkpoint_starts [N]";
  }
  call.num_checkpoints = checkpoints.size(0), call.checkpoint_chunks = static_cast<int>(every_n_tokens / 64);
  const StatesView kept(checkpoints);
  if (kept.k_first != StatesView(pool).k_first) TVM_FFI_THROW(ValueError) << "checkpoints: expected the layout of pool";
  call.checkpoints = data<char>(kept, "checkpoints", half ? BF16 : F32, {call.num_checkpoints, call.HV, HEAD_DIM, HEAD_DIM},
                                pool.device(), 8);  // written as pairs
  const int64_t N = state_indices.size(0), starts = checkpoint_starts.size(0);
  call.checkpoint_starts = numbers(checkpoint_starts, "checkpoint_starts", starts == N + 1 ? starts : N, pool.device(), call.long_starts);
  checked(call, flat(a, 2), flat(b, 2), A_log, dt_bias, pool, state_indices, has_initial_state, cu_seqlens, scale, flat(output, 3), first_slot,
          epsilon);
}

// The op: mixed_qkv [num_tokens, 2 H 128 + HV 128] of Token, q of all heads, then k, then v; the rest as above. new_pool is pool.
void run(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log, ffi::TensorView dt_bias,
         ffi::TensorView pool, ffi::TensorView state_indices, ffi::TensorView has_initial_state, ffi::TensorView cu_seqlens,
         ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView new_pool) {
  if (new_pool.data_ptr() != pool.data_ptr()) TVM_FFI_THROW(ValueError) << "new_pool: expected pool itself, in place";
  if (mixed_qkv.ndim() != 2) TVM_FFI_THROW(ValueError) << "mixed_qkv: expected [num_tokens, 2 H 128 + HV 128]";
  check_ranks(pool, state_indices);
  Call call{};
  const int64_t T = mixed_qkv.size(0), width = mixed_qkv.size(1), HV = pool.size(1), H = (width - HV * HEAD_DIM) / (2 * HEAD_DIM);
  if (HV < 1 || H < 1 || 2 * H * HEAD_DIM + HV * HEAD_DIM != width) {
    TVM_FFI_THROW(ValueError) << "mixed_qkv: " << width << " columns are not 2 H 128 + HV 128 with HV = " << HV;
  }
  call.q = strided<const Token>(mixed_qkv, "mixed_qkv", TOKEN, {T, width}, pool.device(), ALIGNMENT, &call.qk_row);
  call.k = reinterpret_cast<const Token*>(reinterpret_cast<const char*>(call.q) + H * HEAD_DIM * 2);
  call.v = reinterpret_cast<const Token*>(reinterpret_cast<const char*>(call.q) + H * HEAD_DIM * 4);
  call.v_row = row_of("mixed_qkv", T, call.qk_row), call.num_tokens = T, call.H = static_cast<int>(H), call.HV = static_cast<int>(HV);
  checked(call, a, b, A_log, dt_bias, pool, state_indices, has_initial_state, cu_seqlens, scale, output, 1, NORM_EPSILON);
}

// Called by gdn after the build (Kernel.fallback).
std::string told_fallback() { return fallback(); }

}  // namespace gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(chunk_prefill, gdn::chunk_prefill);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(chunk_prefill_checkpoints, gdn::chunk_prefill_checkpoints);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fallback, gdn::told_fallback);
