// For gdn's prefill, in addition to mma_f16.cuh: products of bf16, barriers and a few instructions. The layout of fragments
// is the same, with bf16 instead of f16; a pair of accumulators d, packed column by column, is an operand a of the next
// product, without an exchange between lanes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "mma_f16.cuh"

namespace gdn {

using flashcore::commit_copies;
using flashcore::copy16;
using flashcore::load_matrices;
using flashcore::load_transposed;
using flashcore::shared_address;
using flashcore::shared_memory;
using flashcore::wait_for_copies;

// d += a b, products of bf16 summed in f32.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of tokens, which are __nv_bfloat16 or __half.
template <typename Token>
__device__ __forceinline__ void multiply_tokens(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Token, __half>) flashcore::multiply_add(d, a, b0, b1);
  else multiply_add(d, a, b0, b1);
}

// Fetches a line of global memory into L2.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// threadIdx.x, read again: values computed from it need no register before.
__device__ __forceinline__ uint32_t thread_again() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// An address in shared memory that the compiler keeps in a register instead of computing it again at every use.
__device__ __forceinline__ char* pinned(char* p) {
  uint32_t address = shared_address(p);
  asm volatile("" : "+r"(address));
  return static_cast<char*>(__cvta_shared_to_generic(address));
}

// Barrier of THREADS threads of the CTA; `barrier` is 1 to 15.
template <int THREADS>
__device__ __forceinline__ void named_barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
// The same without waiting: what this warp wrote before is there for those that wait.
template <int THREADS>
__device__ __forceinline__ void named_barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// How many lanes of a warp arrive at a barrier for the whole warp, after a __syncwarp, which orders the other lanes' accesses.
// Use 32 for compute-sanitizer: its racecheck counts a lane's arrival for that lane only.
constexpr int ARRIVALS = 1;

// A barrier in shared memory, 8 bytes aligned to 8, that counts warps. Producers only arrive and consumers only wait. A phase
// ends with the last of its arrivals. Phases count from 0; a wait for one must not begin after the next one has ended.
class Barrier {
  uint32_t address;

 public:
  __device__ __forceinline__ explicit Barrier(uint32_t address) : address(address) {}

  // Called by one thread, before a __syncthreads.
  __device__ __forceinline__ void init(int warps) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(warps * ARRIVALS) : "memory");
  }
  // Reads and writes of all lanes before `arrive` are ordered before those of warps that have waited.
  __device__ __forceinline__ void arrive(uint32_t lane) const {
    __syncwarp();
    if (lane < ARRIVALS)
      asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(address) : "memory");
  }
  // All lanes continue together. The vote tells ptxas so: without it ptxas adds code to reconverge again and again.
  __device__ __forceinline__ void wait(uint32_t phase) const {
#if __CUDA_ARCH__ >= 900
#define GDN_WAIT "mbarrier.try_wait"  // sleeps a while
#else
#define GDN_WAIT "mbarrier.test_wait"
#endif
    uint32_t ended;
    do {
      asm volatile("{\n.reg .pred ended;\n" GDN_WAIT ".parity.shared.b64 ended, [%1], %2;\nselp.u32 %0, 1, 0, ended;\n}"
                   : "=r"(ended) : "r"(address), "r"(phase % 2) : "memory");
    } while (!__all_sync(0xffffffffu, ended));
#undef GDN_WAIT
  }
};

// Barrier of the two warps that share a tile of rows; `pair` is their number in the CTA.
__device__ __forceinline__ void named_barrier_sync_partner(uint32_t pair) {
  asm volatile("bar.sync %0, 64;" ::"r"(pair + 2) : "memory");
}

}  // namespace gdn
