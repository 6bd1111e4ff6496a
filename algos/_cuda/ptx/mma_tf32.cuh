// The tensor cores' product of tf32, sm_80 on: floats of which the upper 19 bits count. With g = lane / 4, c = lane % 4 a lane
// has
//   a[0..3]  rows g, g + 8, g, g + 8; column c, the last two column c + 4      (16 x 8)
//   b0, b1   rows c and c + 4; column g                                        (8 x 8)
//   d[0..3]  row g, columns 2c, 2c + 1, then row g + 8                         (16 x 8, f32)
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace gdn {

// d += a b, summed in f32.
__device__ __forceinline__ void multiply_add_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace gdn
