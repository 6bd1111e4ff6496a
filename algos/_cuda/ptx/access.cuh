// Access to elements: indices without a division, and the loads and stores of the state.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace gdn {

// n / d for 0 <= n < 2^31 without a division: umulhi(2 n, multiplier) >> shift.
struct Divisor {
  uint32_t multiplier;
  uint32_t shift;
  explicit Divisor(uint32_t d) : shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((uint64_t{1} << (31 + shift)) / d + 1);
  }
#ifdef __CUDACC__
  __device__ uint32_t divide(uint32_t n) const { return __umulhi(2 * n, multiplier) >> shift; }
#endif
};

#ifdef __CUDACC__

// Registers of one memory access: 16 bytes, 32 from sm_100 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int WIDEST = 32;
#else
constexpr int WIDEST = 16;
#endif

// LOAD_FIRST: strong loads, which ptxas does not move past a later branch; they bypass L1.
enum Load { LOAD_STREAM = 0, LOAD_PLAIN = 1, LOAD_FIRST = 2 };
enum Store { STORE_PLAIN = 0, STORE_STREAM = 1 };

#define GDN_LOAD(how)                                                                                             \
  if constexpr (BYTES == 8)                                                                                       \
    asm volatile("ld" how ".v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));                    \
  if constexpr (BYTES == 16)                                                                                      \
    asm volatile("ld" how ".v4.b32 {%0, %1, %2, %3}, [%4];"                                                \
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));                                       \
  if constexpr (BYTES == 32) /* from sm_100 on */                                                                 \
    asm volatile("ld" how ".v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"                                       \
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]), "=r"(w[4]), "=r"(w[5]), "=r"(w[6]), "=r"(w[7])  \
                 : "l"(p));

// BYTES bytes of state. Not .nc: new_state may be state.
template <int BYTES, int HOW>
__device__ __forceinline__ void load(uint32_t* w, const void* p) {
  if constexpr (HOW == LOAD_STREAM) { GDN_LOAD(".global.cs") }
  if constexpr (HOW == LOAD_PLAIN) { GDN_LOAD(".global") }
  if constexpr (HOW == LOAD_FIRST) { GDN_LOAD(".relaxed.gpu.global.L1::no_allocate") }
}
#undef GDN_LOAD

#define GDN_STORE(how)                                                                                            \
  if constexpr (BYTES == 8)                                                                                       \
    asm volatile("st.global" how ".v2.b32 [%0], {%1, %2};" :: "l"(p), "r"(w[0]), "r"(w[1]) : "memory");           \
  if constexpr (BYTES == 16)                                                                                      \
    asm volatile("st.global" how ".v4.b32 [%0], {%1, %2, %3, %4};"                                                \
                 :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");                               \
  if constexpr (BYTES == 32)                                                                                      \
    asm volatile("st.global" how ".v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};"                                \
                 :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(w[4]), "r"(w[5]), "r"(w[6]), "r"(w[7]) \
                 : "memory");

template <int BYTES, int HOW>
__device__ __forceinline__ void store(void* p, const uint32_t* w) {
  if constexpr (HOW == STORE_PLAIN) { GDN_STORE("") }
  if constexpr (HOW == STORE_STREAM) { GDN_STORE(".cs") }
}
#undef GDN_STORE

__device__ __forceinline__ float low(uint32_t w) { return __uint_as_float(w << 16); }  // bf16 is the upper half of a float
__device__ __forceinline__ float high(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }

#endif  // __CUDACC__

}  // namespace gdn
