// Instructions of sm_80 without a C++ equivalent: matrix loads, tensor core products, asynchronous copies.
// Layouts are those of the PTX ISA, "Matrix fragments for mma.m16n8k16": with g = lane / 4 and t = lane % 4 a lane has
//   a[0..3]  rows g, g + 8, g, g + 8; columns 2t, 2t + 1, the last two 8 columns further     (16 x 16, f16)
//   b0, b1   rows 2t, 2t + 1, the second 8 rows further; column g                             (16 x 8, f16)
//   d[0..3]  row g, columns 2t, 2t + 1, then row g + 8                                        (16 x 8, f32)
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "async_copy.cuh"

namespace flashcore {

// The CTA's dynamic shared memory, and an address in it in the form that the instructions below take.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices of f16; lane i has the address of row i % 8 of matrix i / 8, and gets row g, columns 2t and
// 2t + 1 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// The same with transposed matrices: rows 2t and 2t + 1, column g.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// d += a b, products of f16 summed in f32.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

using ptx::commit_copies;
using ptx::copy16;
using ptx::wait_for_copies;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as f16, x in the lower half: a register of a fragment.
__device__ __forceinline__ uint32_t pack(float x, float y) {
  const __half2 h = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&h);
}

}  // namespace flashcore
