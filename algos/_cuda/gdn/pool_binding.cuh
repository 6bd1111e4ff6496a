// The binding of cuda-v5-packed: a serving engine's call of decode.cuh's kernel. Checks what it is given; rows of mixed_qkv,
// a and b, and slots of the pool, may be strided. No allocation, no synchronisation.
#pragma once

#include <algorithm>

#include "decode_binding.cuh"
#include "strided.cuh"

namespace gdn {

constexpr double NORM_EPSILON = 1e-6;  // under the root, as in vLLM, SGLang and FlashInfer

// The launch for states [K, V], with the same constants for all sizes.
template <typename Call>
void launch_k_first(const Call& p, int64_t heads, DLDevice device) {
  constexpr int LANES = sizeof(typename Call::State) == 4 ? 8 : 16, WARPS = 2, RESIDENT = LANES == 8 ? 16 : 20;
  constexpr int TILES = V / (WARPS * (32 / LANES) * (16 / sizeof(typename Call::State)));
  const CurrentDevice current(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  check_heads(heads);
  constexpr auto kernel = gdn_decode_k_first<Call, LANES, WARPS, RESIDENT>;
  kernel<<<static_cast<uint32_t>(heads * TILES), WARPS * 32, 0, stream>>>(p);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// A call whose arguments fit.
struct PackedCall {
  int64_t B, H, HV;
  DLDevice device;
  bool half, given, k_first;  // tokens of f16, else bf16; gates that are given; states [K, V]
};

// mixed_qkv [B, 2 H 128 + HV 128] bf16 or f16: q of all heads, k, then v; a, b [B, HV] like it; A_log [HV] f32; dt_bias [HV] f32 or
// like it, or neither (GateTypes); pool [slots, HV, 128, 128] of T, slots and heads with any strides, k-last, or k-first as a view
// with strides 1 and 128 at the end; state_indices [B] int32 or int64. A row whose slot is below first_slot (or 0), or that the pool
// does not have, is padding: zeros out, and no state is touched. Slots of the other rows are distinct. new_pool is pool or like it, of
// the same layout, with its heads as far apart; new_indices the slots to write (those of state_indices if null); has_initial_state [B]
// bool: rows without one start from zeros. epsilon below 0: q and k are taken as they are. output [B, HV, 128] or [B, 1, HV, 128] like
// mixed_qkv. Throws ValueError if an argument is different. Fills in `p`.
template <typename T>
PackedCall take_packed(GivenGates<PlainPool<T>>& p, ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b,
                       ffi::Optional<ffi::TensorView> A_log, ffi::Optional<ffi::TensorView> dt_bias,
                       ffi::TensorView of_pool, ffi::TensorView state_indices, ffi::Optional<double> scale, ffi::TensorView output,
                       ffi::TensorView of_new_pool, ffi::Optional<ffi::TensorView> new_indices,
                       ffi::Optional<ffi::TensorView> has_initial_state, int64_t first_slot, double epsilon) {
  const StatesView states(of_pool), new_states(of_new_pool);
  const ffi::TensorView pool = states, new_pool = new_states;
  if (pool.ndim() != 4 || new_pool.ndim() != 4 || mixed_qkv.ndim() != 2) {
    TVM_FFI_THROW(ValueError) << "expected mixed_qkv [B, 2 H 128 + HV 128] and pool [slots, HV, 128, 128]";
  }
  const int64_t B = mixed_qkv.size(0), width = mixed_qkv.size(1), HV = pool.size(1), H = (width - HV * V) / (2 * K);
  if (HV < 1 || H < 1 || 2 * H * K + HV * V != width || HV % H) {
    TVM_FFI_THROW(ValueError) << "mixed_qkv: " << width << " columns are not 2 H 128 + HV 128 with HV = " << HV
                              << ", a multiple of H";
  }
  const DLDevice device = pool.device();
  if (device.device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "pool: expected on a CUDA device";
  const int64_t slots = pool.size(0), new_slots = new_pool.size(0);
  const DLDataType bf16{kDLBfloat, 16, 1}, f32{kDLFloat, 32, 1}, f16{kDLFloat, 16, 1}, boolean{kDLBool, 8, 1};
  const DLDataType of_state = sizeof(T) == 4 ? f32 : std::is_same_v<T, __half> ? f16 : bf16;
  using bf = __nv_bfloat16;
  const double s = scale.value_or(0.0);
  const bool half = mixed_qkv.dtype() == f16;
  const DLDataType of_token = half ? f16 : bf16;
  const GateTypes gates(A_log, dt_bias, b, of_token);
  p.slots = strided_slots(state_indices, "state_indices", B, device, &p.slots_step, &p.slots_wide);
  p.new_slots = p.slots, p.new_slots_step = p.slots_step, p.new_slots_wide = p.slots_wide;
  if (new_indices)
    p.new_slots = strided_slots(new_indices.value(), "new_indices", B, device, &p.new_slots_step, &p.new_slots_wide);
  if (has_initial_state) p.has_state = data<const bool>(has_initial_state.value(), "has_initial_state", boolean, {B}, device);
  p.qkv = strided<const bf>(mixed_qkv, "mixed_qkv", of_token, {B, width}, device, ALIGNMENT, &p.qkv_stride);
  p.a = strided<const char>(a, "a", gates.a, {B, HV}, device, gates.a.bits / 8, &p.a_stride);
  p.b = strided<const char>(b, "b", gates.b, {B, HV}, device, gates.b.bits / 8, &p.b_stride);
  p.wide_beta = gates.b == f32;
  if (!gates.given) {
    const ffi::TensorView bias = dt_bias.value();
    p.A_log = data<const float>(A_log.value(), "A_log", f32, {HV}, device);
    p.dt_bias_half = bias.dtype() == of_token;
    p.dt_bias = data<const char>(bias, "dt_bias", p.dt_bias_half ? of_token : f32, {HV}, device);
  }
  int64_t strides[2], new_strides[2];
  p.pool = strided<const T, 2>(pool, "pool", of_state, {slots, HV, V, K}, device, 32, strides);
  p.new_pool = strided<T, 2>(new_pool, "new_pool", of_state, {new_slots, HV, V, K}, device, 32, new_strides);
  p.slot_stride = strides[0], p.new_slot_stride = new_strides[0];
  p.head_bytes = head_bytes("pool", strides[1], HV, sizeof(T));
  if (states.k_first != new_states.k_first) TVM_FFI_THROW(ValueError) << "new_pool: expected the layout of pool";
  if (strides[1] != new_strides[1]) TVM_FFI_THROW(ValueError) << "new_pool: expected its heads as far apart as pool's";
  p.output = output.ndim() == 4 ? data<bf>(output, "output", of_token, {B, 1, HV, V}, device)
                                : data<bf>(output, "output", of_token, {B, HV, V}, device);
  p.scale = static_cast<float>(s == 0.0 ? 1.0 / std::sqrt(double(K)) : s);
  p.epsilon = under_root(epsilon);
  p.HV = static_cast<uint32_t>(HV), p.H = static_cast<uint32_t>(H);
  p.first_slot = first_live(first_slot);
  p.slots_end = std::max(slots_end("pool", slots), p.first_slot);
  p.new_slots_end = std::max(slots_end("new_pool", new_slots), p.first_slot);
  p.by_HV = Divisor(p.HV), p.by_group = Divisor(static_cast<uint32_t>(HV / H));
  return {B, H, HV, device, half, gates.given, states.k_first};
}

// The same, and its launch.
template <typename T>
void packed_decode(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::Optional<ffi::TensorView> A_log,
                   ffi::Optional<ffi::TensorView> dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
                   ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView new_pool,
                   ffi::Optional<ffi::TensorView> new_indices, ffi::Optional<ffi::TensorView> has_initial_state,
                   int64_t first_slot, double epsilon) {
  GivenGates<PlainPool<T>> p{};
  const PackedCall call = take_packed<T>(p, mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, output, new_pool, new_indices,
                                         has_initial_state, first_slot, epsilon);
  if (call.B == 0) return;
  const int64_t heads = call.B * call.HV;
  const DLDevice device = call.device;
  const PlainPool<T>& raw = p;
  const GivenGates<PoolArguments<T>> any{p};
  if (call.k_first) {  // no instances for what is plain() either
    if (call.half && call.given) launch_k_first(HalfTokens<GivenGates<PoolArguments<T>>>{any}, heads, device);
    if (call.half && !call.given) launch_k_first(HalfTokens<PoolArguments<T>>{p}, heads, device);
    if (!call.half && call.given) launch_k_first(any, heads, device);
    if (!call.half && !call.given) launch_k_first<PoolArguments<T>>(p, heads, device);
    return;
  }
  if (call.half && call.given) launch(HalfTokens<GivenGates<PoolArguments<T>>>{any}, heads, device);
  if (call.half && !call.given) launch(HalfTokens<PoolArguments<T>>{p}, heads, device);  // no instances for what is plain()
  if (call.half) return;
  if (call.given && p.plain()) launch(p, heads, device);
  if (call.given && !p.plain()) launch(any, heads, device);
  if (!call.given && p.plain()) launch(raw, heads, device);
  if (!call.given && !p.plain()) launch<PoolArguments<T>>(p, heads, device);
}

// The op's call: in place, the norm of q and k inside, slots 0 and below are padding.
template <typename T>
void run_in_place(ffi::TensorView mixed_qkv, ffi::TensorView a, ffi::TensorView b, ffi::TensorView A_log,
                  ffi::TensorView dt_bias, ffi::TensorView pool, ffi::TensorView state_indices,
                  ffi::Optional<double> scale, ffi::TensorView output, ffi::TensorView new_pool) {
  if (new_pool.data_ptr() != pool.data_ptr()) TVM_FFI_THROW(ValueError) << "new_pool: expected pool itself, in place";
  packed_decode<T>(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, output, new_pool, {}, {}, 1, NORM_EPSILON);
}

}  // namespace gdn
