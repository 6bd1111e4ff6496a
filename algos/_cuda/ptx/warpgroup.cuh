// Instructions that C++ has no words for. Of sm_90: copies of a tile by TMA, and the barriers that say when they
// are done. Of sm_90a: products of a whole warpgroup (wgmma), which read shared memory by themselves.
//
// A warpgroup is four warps, and has 64 rows of a product: warp w rows 16 w to 16 w + 15, as fragments of mma_f16.cuh side by
// side, so that d[n] is what mma.m16n8k16 has as d for columns 8 n to 8 n + 7.
//
// A tile in shared memory is rows of 64 f16, 128 bytes, at a multiple of 1024 bytes; piece c of row r, 16 bytes, is in
// place c ^ (r % 8): TMA writes it so and wgmma reads it so (128-byte swizzle).
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flashcore {

// Compiled for what has no TMA, kernels that use it are empty; the host launches none before sm_90.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLASHCORE_COPY_ENGINE 1
#else
#define FLASHCORE_COPY_ENGINE 0
#endif

// What is compiled for sm_90a has these instructions, for sm_90 it has not: there the kernels are empty, and say so by
// the number of threads that they can be launched with (__launch_bounds__).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FLASHCORE_WGMMA 1
#else
#define FLASHCORE_WGMMA 0
#endif

// For TMA: where a matrix [heads, S, 64] of f16 lies, and how many rows of it are a tile. Rows behind the
// last one are read as zeros.
using TensorMap = CUtensorMap;

// Attention's: tiles of a block's rows of q, and of as many rows of k and v as are copied at a time.
struct Maps {
  TensorMap q, k, v;
};

#if FLASHCORE_COPY_ENGINE

// What is the same for all lanes, told to the compiler: it goes to the warp's own registers.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// 1024-byte aligned dynamic shared memory.
__device__ __forceinline__ char* tile_memory() {
  extern __shared__ __align__(1024) char tiles[];
  return tiles;
}

// A barrier in shared memory, at this address: a phase ends when `count` threads have arrived and all bytes that were
// announced have landed. Phases count from 0; mbarrier_wait takes the parity of the one to wait for.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Initialised barriers, for TMA; the CTA's threads need a __syncthreads besides.
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

// The threads of one warpgroup meet; `number` is from 1 to 15.
__device__ __forceinline__ void warpgroup_sync(int number) {
  asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// Before the first product, and wherever a register that a product reads or adds to was written since.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products; warpgroup_wait<N>: until at most the N youngest groups are under way.
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// What this thread has written to shared memory, for products of the whole CTA: in front of a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The compiler does not know that products write their registers later: nothing of these moves across this point.
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

// (d, more) (64 x 64, 64 x 8) += a b: a 64 x 16 in registers, each warp's 16 rows as the left side of a fragment; b
// 16 x 72, turned: 64 columns in a tile, and 8 of another one, as far from it as b's leading offset says.
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
