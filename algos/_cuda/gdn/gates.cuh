// The gates of a token: g = exp(-exp(A_log) * softplus(a + dt_bias)), beta = sigmoid(b), in few instructions. Or they are given: a is
// log g, b is beta.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__

namespace gdn {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float LOG2E = 1.4426950408889634f;

// log(1 + e) / e on [0, 1]: a polynomial of degree 7, relative error below 3.3e-7 in float (fitted to float64).
__device__ __forceinline__ float log1p_over(float e) {
  float p = -0.008539202623069286f;
  p = fmaf(p, e, 0.04408960044384003f);
  p = fmaf(p, e, -0.10768165439367294f);
  p = fmaf(p, e, 0.17745235562324524f);
  p = fmaf(p, e, -0.24495460093021393f);
  p = fmaf(p, e, 0.33275479078292847f);
  p = fmaf(p, e, -0.4999740421772003f);
  return fmaf(p, e, 0.9999998211860657f);
}

// log2 of exp(-exp(A_log) * softplus(x)); exp(-|x|) keeps softplus from overflowing at either end.
__device__ __forceinline__ float log2_decay(float A_log, float x) {
  const float e = exp2_approx(-fabsf(x) * LOG2E);
  const float softplus = fmaf(e, log1p_over(e), fmaxf(x, 0.f));
  return -LOG2E * exp2_approx(A_log * LOG2E) * softplus;
}
__device__ __forceinline__ float decay(float A_log, float x) { return exp2_approx(log2_decay(A_log, x)); }

// A log of a decay, but no less than `least`. NaN stays: fmaxf would forget it, and the state with it.
__device__ __forceinline__ float at_least(float log, float least) { return log < least ? least : log; }

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + exp2_approx(-x * LOG2E)); }

// What tokens are of: __nv_bfloat16 or __half. A value from its bits, and back.
template <typename Token>
__device__ __forceinline__ float token_value(uint32_t bits) {
  if constexpr (std::is_same_v<Token, __half>) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  else return __uint_as_float(bits << 16);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <typename Token>
__device__ __forceinline__ Token to_token(float x) {
  if constexpr (std::is_same_v<Token, __half>) return __float2half_rn(x);
  else return __float2bfloat16(x);
}
// Two floats as tokens in one register, x in the lower half; and number i, 0 or 1, of such a register.
template <typename Token>
__device__ __forceinline__ uint32_t token_pair(float x, float y) {
  if constexpr (std::is_same_v<Token, __half>) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}
template <typename Token>
__device__ __forceinline__ float token_of(uint32_t pair, int i) {
  if constexpr (std::is_same_v<Token, __half>) return token_value<Token>(pair >> 16 * i);
  else return __uint_as_float(i ? pair & 0xffff0000u : pair << 16);
}

// Element i of a or b, as its bits: of float if `wide`, else of 16 bits.
__device__ __forceinline__ uint32_t gate_bits(const void* of, int64_t i, bool wide) {
  return wide ? static_cast<const uint32_t*>(of)[i] : static_cast<const uint16_t*>(of)[i];
}
template <typename Token = __nv_bfloat16>
__device__ __forceinline__ float gate_value(uint32_t bits, bool wide) {
  if constexpr (std::is_same_v<Token, __half>) return wide ? __uint_as_float(bits) : token_value<Token>(bits);
  else return __uint_as_float(wide ? bits : bits << 16);
}
// log2 g and beta of these: of a in float if it is given.
template <typename Token = __nv_bfloat16>
__device__ __forceinline__ float log2_gate(uint32_t a, bool given, float A_log, float dt_bias) {
  const float x = gate_value<Token>(a, given);
  return given ? x * LOG2E : log2_decay(A_log, x + dt_bias);
}
template <typename Token = __nv_bfloat16>
__device__ __forceinline__ float beta_gate(uint32_t b, bool given, bool wide) {
  const float x = gate_value<Token>(b, wide);
  return given ? x : sigmoid(x);
}

}  // namespace gdn

#endif  // __CUDACC__
