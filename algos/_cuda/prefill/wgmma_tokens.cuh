// For gdn's prefill, in addition to flashcore-v4's warpgroup.cuh: products of tokens with the left operand in registers, boxes of
// four dimensions, plain copies by TMA, and a few more instructions. The products only if that file has wgmma, all else if it has TMA.
#pragma once

#include <cuda_bf16.h>

#include "token.h"
#include "warpgroup.cuh"

namespace gdn {

#if FLASHCORE_COPY_ENGINE

using flashcore::mbarrier_arrive;
using flashcore::mbarrier_arrive_expect_tx;
using flashcore::mbarrier_init_fence;
using flashcore::mbarrier_init;
using flashcore::prefetch_tensor_map;
using flashcore::tile_memory;
using flashcore::mbarrier_wait;

#endif  // FLASHCORE_COPY_ENGINE

#if FLASHCORE_WGMMA

using flashcore::warpgroup_commit;
using flashcore::warpgroup_fence_operand;
using flashcore::warpgroup_sync;
using flashcore::warpgroup_arrive;
using flashcore::warpgroup_wait;

// --- products ---------------------------------------------------------------------------------------------------------

// The descriptor of B, in two words of which the second, HIGH, is a constant: 128-byte swizzle, and 1024 bytes
// from eight rows to the next eight. KMajor: B's k runs along the rows of the tile from `at` on, one row for each n.
struct KMajor {
  uint32_t word;
  static constexpr uint32_t HIGH = 1u << 30 | 1024 / 16;
  __device__ __forceinline__ explicit KMajor(uint32_t at) : word((at >> 4 & 0x3fff) | 1u << 16) {}
};
// MNMajor: one row for each k, n along it; n from 64 on is in the tile NEXT bytes further.
template <uint32_t NEXT>
struct MNMajor {
  uint32_t word;
  static constexpr uint32_t HIGH = 1u << 30 | 1024 / 16;
  __device__ __forceinline__ explicit MNMajor(uint32_t at) : word((at >> 4 & 0x3fff) | NEXT / 16 << 16) {}
};
// The same, `bytes` further.
template <typename Descriptor>
__device__ __forceinline__ uint64_t advance(const Descriptor& b, uint32_t bytes) {
  return static_cast<uint64_t>(Descriptor::HIGH) << 32 | (b.word + bytes / 16);
}

#define GDN_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define GDN_D4(i) GDN_D(i), GDN_D(i + 1), GDN_D(i + 2), GDN_D(i + 3)
#define GDN_D8(i) GDN_D4(i), GDN_D4(i + 4)
#define GDN_A_B "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)
#define GDN_R8_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define GDN_R8_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define GDN_R8_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define GDN_R8_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define GDN_R8_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define GDN_R8_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define GDN_R8_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define GDN_R8_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define GDN_PRODUCT(N, REGISTERS, A, B, ADD, ACROSS)                                                        \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                                            \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." GDN_TOKEN_PTX "." GDN_TOKEN_PTX " {" REGISTERS "}, {" A "}, " B ", p, 1, 1, " #ACROSS ";\n}"

// d = A B, or d += A B if `add`; b from KMajor, product_mn from MNMajor. d is under way until warpgroup_wait.
__device__ __forceinline__ void product(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(GDN_PRODUCT(32, GDN_R8_0 ", " GDN_R8_1, "%16, %17, %18, %19", "%20", "%21", 0) : GDN_D4(0) : GDN_A_B);
}
__device__ __forceinline__ void product(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(GDN_PRODUCT(64, GDN_R8_0 ", " GDN_R8_1 ", " GDN_R8_2 ", " GDN_R8_3, "%32, %33, %34, %35", "%36", "%37", 0)
               : GDN_D8(0)
               : GDN_A_B);
}
__device__ __forceinline__ void product_mn(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(GDN_PRODUCT(128, GDN_R8_0 ", " GDN_R8_1 ", " GDN_R8_2 ", " GDN_R8_3 ", " GDN_R8_4 ", " GDN_R8_5 ", " GDN_R8_6 ", "
                           GDN_R8_7, "%64, %65, %66, %67", "%68", "%69", 1)
               : GDN_D8(0), GDN_D8(8)
               : GDN_A_B);
}

// d = A B^T or d += A B^T, both KMajor.
__device__ __forceinline__ void product(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." GDN_TOKEN_PTX "." GDN_TOKEN_PTX " {" GDN_R8_0 ", " GDN_R8_1 ", " GDN_R8_2 ", " GDN_R8_3
               "}, %32, %33, p, 1, 1, 0, 0;\n}"
               : GDN_D8(0)
               : "l"(a), "l"(b), "r"(add));
}

#undef GDN_PRODUCT
#undef GDN_R8_7
#undef GDN_R8_6
#undef GDN_R8_5
#undef GDN_R8_4
#undef GDN_R8_3
#undef GDN_R8_2
#undef GDN_R8_1
#undef GDN_R8_0
#undef GDN_A_B
#undef GDN_D8
#undef GDN_D4
#undef GDN_D

// Sets the registers of each thread of a warpgroup from here on; warpgroup_reg_alloc waits until other warpgroups of the CTA have
// released as many.
template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif  // FLASHCORE_WGMMA

#if FLASHCORE_COPY_ENGINE

// --- copies -----------------------------------------------------------------------------------------------------------

// `bytes` from global to shared memory, addresses and size multiples of 16; they count for the barrier.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// One box of `map` (make_map in launch_sm90.cu), [1 or 2 halves][64 tokens][64 columns] of `head` from `half` and `token` on; zeros
// from token num_tokens on.
__device__ __forceinline__ void tma_load_box(uint32_t to, const CUtensorMap& map, int token, int half, int head, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(0), "r"(token), "r"(half), "r"(head), "r"(barrier)
      : "memory");
}
// One box of `map` (make_state_map), [4 blocks][64 or 128 rows][32 columns] of float, from `row` of all states' rows on.
__device__ __forceinline__ void tma_load_state(uint32_t to, const CUtensorMap& map, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(0), "r"(row), "r"(0), "r"(barrier)
      : "memory");
}
// The opposite way: see bulk_store for the wait.
__device__ __forceinline__ void tma_store_box(const CUtensorMap& map, int row, int half, int head, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
               "cp.async.bulk.commit_group;" ::"l"(&map), "r"(0), "r"(row), "r"(half), "r"(head), "r"(from)
               : "memory");
}
__device__ __forceinline__ void tma_store_state(const CUtensorMap& map, int row, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n"
               "cp.async.bulk.commit_group;" ::"l"(&map), "r"(0), "r"(row), "r"(0), "r"(from)
               : "memory");
}
// Tells L2 to fetch `bytes`; size and address are multiples of 16.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// `bytes` from shared to global memory by TMA; and a wait until TMA has read the source of all of this thread's stores.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// --- clusters ---------------------------------------------------------------------------------------------------------

// This CTA's number in its cluster; and a shared memory address of it, in the memory of CTA number `rank`.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ uint32_t at_peer(uint32_t at, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
// Tells the peer that the stage it writes next is not read here any more. With .release.cluster this would compile to two GPU-wide fences.
__device__ __forceinline__ void mbarrier_arrive_at_peer(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// `bytes` from this CTA's shared memory to a peer's; they count for the peer's barrier.
__device__ __forceinline__ void copy_to_peer(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// A number to a peer's shared memory; its 4 bytes count for the peer's barrier.
__device__ __forceinline__ void store_at_peer(uint32_t to, uint32_t x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(x), "r"(barrier)
               : "memory");
}
// A barrier of all threads of the cluster. It orders no accesses but those to barriers (mbarrier_init_fence): a release of all
// would wait for stores to memory.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- others -----------------------------------------------------------------------------------------------------------

// Elects one lane of a converged warp, the same one each time.
__device__ __forceinline__ bool elect_one() {
  uint32_t one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
  return one;
}
// Orders this thread's accesses to shared memory before those of products and TMA.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores four 8 x 8 matrices of 16-bit numbers, transposed: the inverse of load_transposed from these addresses.
__device__ __forceinline__ void store_transposed(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
// The same without the transposition.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}
// 16 bytes in one store; the compiler would split it into four.
__device__ __forceinline__ void store16(void* to, const uint4& words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

#endif  // FLASHCORE_COPY_ENGINE

}  // namespace gdn
