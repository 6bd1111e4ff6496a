// Instructions without a C++ equivalent. Of sm_90: copies of a tile by TMA, and the barriers that signal their end. Of sm_90a:
// products of a whole warpgroup (wgmma), which read operands from shared memory.
//
// A warpgroup is four warps, and has 64 rows of a product: warp w rows 16 w to 16 w + 15, as fragments of mma_f16.cuh side by
// side: d[n] is the d of mma.m16n8k16 for columns 8 n to 8 n + 7.
//
// A tile in shared memory has rows of 64 f16, 128 bytes, and is aligned to 1024 bytes; the 16-byte piece c of row r is stored
// as piece c ^ (r % 8), which is the 128-byte swizzle of TMA and wgmma.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flashcore {

// Compiled for an architecture without TMA, kernels that use it are empty; the host does not launch them before sm_90.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLASHCORE_COPY_ENGINE 1
#else
#define FLASHCORE_COPY_ENGINE 0
#endif

// sm_90a has these instructions, sm_90 has not: compiled for sm_90 the kernels are empty, which the host detects by
// the number of threads of flashcore_compiled_for (__launch_bounds__, tensor_map.cuh).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FLASHCORE_WGMMA 1
#else
#define FLASHCORE_WGMMA 0
#endif

// For TMA: the address of a matrix [heads, S, 64] of f16, and the number of rows in a tile. Rows after the
// last one are read as zeros.
using TensorMap = CUtensorMap;

// For attention: a tile of q has a block's rows, tiles of k and v as many rows as are copied at a time.
struct Maps {
  TensorMap q, k, v;
};

#if FLASHCORE_COPY_ENGINE

// Tells the compiler that x is the same in all lanes, so that it can use uniform registers.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// 1024-byte aligned dynamic shared memory.
__device__ __forceinline__ char* tile_memory() {
  extern __shared__ __align__(1024) char tiles[];
  return tiles;
}

// A barrier in shared memory, at this address: a phase ends when `count` threads have arrived and all expected
// bytes have been written. Phases count from 0; mbarrier_wait takes the parity of the one to wait for.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers visible to TMA; the CTA's threads also need a __syncthreads.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The tile of `map` that begins at `row` of `head`, to shared memory; its bytes count for the barrier.
__device__ __forceinline__ void tma_load_tile(uint32_t to, const TensorMap& map, int row, int head, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(to), "l"(&map), "r"(0), "r"(row), "r"(head), "r"(barrier)
      : "memory");
}

#endif  // FLASHCORE_COPY_ENGINE

#if FLASHCORE_WGMMA

// Barrier of the threads of one warpgroup; `number` is 1 to 15.
__device__ __forceinline__ void warpgroup_sync(int number) {
  asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// Needed before the first product, and again after writing a register that a product reads or adds to.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products. warpgroup_wait<N> waits until at most the N youngest groups are under way.
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Makes this thread's writes to shared memory visible to products; use it before a barrier of the CTA.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The compiler does not know that products write their registers later: keeps accesses to these from moving across this point.
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[4]) {
  asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}
template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) warpgroup_fence_operand(d[n]);
}
template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(uint32_t (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])::"memory");
}

#define FLASHCORE_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FLASHCORE_D4(n) FLASHCORE_D(n), FLASHCORE_D(n + 1), FLASHCORE_D(n + 2), FLASHCORE_D(n + 3)

// d (64 x 8 N) = or += a b^T: a 64 x 16 and b 8 N x 16, both by rows in tiles.
__device__ __forceinline__ void multiply(float (&d)[8][4], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, add, 1, 1, 0, 0;\n}"
      : FLASHCORE_D4(0), FLASHCORE_D4(4)
      : "l"(a), "l"(b), "r"(int(add)));
}
__device__ __forceinline__ void multiply(float (&d)[16][4], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, add, 1, 1, 0, 0;\n}"
      : FLASHCORE_D4(0), FLASHCORE_D4(4), FLASHCORE_D4(8), FLASHCORE_D4(12)
      : "l"(a), "l"(b), "r"(int(add)));
}

// (d, more) (64 x 64, 64 x 8) += a b: a 64 x 16 in registers, each warp's 16 rows as a left operand; b
// 16 x 72, transposed: 64 columns in one tile and 8 in another one, at the distance of b's leading offset.
__device__ __forceinline__ void multiply_add(float (&d)[8][4], float (&more)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35}, "
      "{%36, %37, %38, %39}, %40, add, 1, 1, 1;\n}"
      : FLASHCORE_D4(0), FLASHCORE_D4(4), "+f"(more[0]), "+f"(more[1]), "+f"(more[2]), "+f"(more[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef FLASHCORE_D4
#undef FLASHCORE_D

#endif  // FLASHCORE_WGMMA

}  // namespace flashcore
