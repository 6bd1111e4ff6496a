// The few instructions of sm_80 that C++ has no words for: matrix loads, tensor core products, asynchronous copies.
// Layouts are those of the PTX ISA, "Matrix fragments for mma.m16n8k16": with g = lane / 4 and t = lane % 4 a lane has
//   a[0..3]  rows g, g + 8, g, g + 8; columns 2t, 2t + 1, the last two 8 columns further     (16 x 16, bf16)
//   b0, b1   rows 2t, 2t + 1, the second 8 rows further; column g                             (16 x 8, bf16)
//   d[0..3]  row g, columns 2t, 2t + 1, then row g + 8                                        (16 x 8, f32)
// so a pair of d, column by column, is an a of the next product: no lane has to ask another for it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace gdn {

// The CTA's dynamic shared memory, and an address in it as the instructions below take it.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices of bf16; lane i has the address of row i % 8 of matrix i / 8, and gets row g, columns 2t and
// 2t + 1 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// The same of the transposed matrices: rows 2t and 2t + 1, column g.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// d += a b, products of bf16 summed in f32.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory, past L1 and past the registers. Where not `there`: zeros, and `from` may point
// anywhere, since nothing is read.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool there) {
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Ends a group of this thread's copies; wait_for_copies<N>: until at most the N youngest groups are under way.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Has a line of global memory fetched into L2.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// threadIdx.x, asked for anew: what is computed from it needs no register until then.
__device__ __forceinline__ uint32_t thread_again() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// All THREADS of the CTA, wherever in the code each warp says so.
template <int THREADS>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

}  // namespace gdn
