// The kernel of gates alone, for who has other kernels behind them: the formulas are gates.cuh's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "access.cuh"
#include "gates.cuh"

namespace gdn {

struct GateArguments {
  const void* a;        // [rows, HV], a_row elements from a row to the next
  const void* b;        // the same, b_row
  const float* A_log;   // [HV]
  const void* dt_bias;  // [HV], of float or as tokens
  float* log_g;         // [rows, HV], natural
  float* beta;          // [rows, HV]
  int64_t a_row, b_row;
  Divisor by_HV{1};
  uint32_t HV, elements;
  bool wide, half_bias;  // wide: a and b are of float; half_bias: dt_bias has 16 bits
};

#ifdef __CUDACC__

// A thread has one element.
template <typename Token>
__global__ void gdn_gates(const __grid_constant__ GateArguments p) {
  constexpr float LN2 = 0.6931471805599453f;
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.elements) return;
  const uint32_t row = p.by_HV.divide(i), hv = i - row * p.HV;
  const uint32_t a = gate_bits(p.a, row * p.a_row + hv, p.wide), b = gate_bits(p.b, row * p.b_row + hv, p.wide);
  const float bias = gate_value<Token>(gate_bits(p.dt_bias, hv, !p.half_bias), !p.half_bias);
  p.log_g[i] = LN2 * log2_decay(p.A_log[hv], gate_value<Token>(a, p.wide) + bias);
  p.beta[i] = sigmoid(gate_value<Token>(b, p.wide));
}

#endif  // __CUDACC__

}  // namespace gdn
