// A serving engine's call for cuda-recurrent's kernel (recurrent.cuh).
#pragma once

#include "recurrent.cuh"
#include "tensors.cuh"

namespace gdn {

struct PackedCall : Tensors {
  using Token = gdn::Token;
  static constexpr bool POOL = true;
  int64_t average;             // tokens of a sequence, rounded down
  Divisor by_HV, by_group;     // group: value heads of one query/key head

  // Sequence n has the tokens from its border to the next. Clamped: wrong values in cu_seqlens cause no access outside.
  __device__ __forceinline__ int64_t border(uint32_t n) const {
    const int64_t x = ends_at(static_cast<int>(n));
    return x < 0 ? 0 : x < num_tokens ? x : num_tokens;
  }
  __device__ __forceinline__ const void* border_at(uint32_t n) const {
    return static_cast<const char*>(cu_seqlens) + (long_lengths ? 8 : 4) * static_cast<int64_t>(n);
  }
};

// K_FIRST: of a pool whose states are [K, V].
template <bool K_FIRST>
struct PackedArguments : PackedCall {
  template <int N>
  __device__ __forceinline__ static void load(float (&S)[N][4], const StateRows& state, int row, int j, int lane) {
    load_state<K_FIRST>(S, state, row, j, lane);
  }
  template <int N>
  __device__ __forceinline__ static void store(const NewStateRows& state, const float (&S)[N][4], int row, int j, int lane) {
    store_state<K_FIRST>(state, S, row, j, lane);
  }
};

inline PackedCall packed_call(const Tensors& p) {
  const uint32_t H = p.H, HV = p.HV;
  return {p, p.num_tokens / p.N, Divisor(HV), Divisor(HV / H)};
}

}  // namespace gdn
