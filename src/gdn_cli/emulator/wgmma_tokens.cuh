// _cuda/prefill/wgmma_tokens.cuh without PTX, for the CPU of cuda_runtime.h: written from the PTX ISA. The descriptors are not PTX:
// the test copies them from the original. fence_proxy_async, which orders generic accesses with those of products and of TMA,
// does nothing here, where all are in order.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "mma_bf16.cuh"
#include "token.h"
#include "warpgroup.cuh"

namespace gdn {

using flashcore::mbarrier_arrive;
using flashcore::mbarrier_arrive_expect_tx;
using flashcore::mbarrier_init_fence;
using flashcore::warpgroup_commit;
using flashcore::warpgroup_fence_operand;
using flashcore::mbarrier_init;
using flashcore::warpgroup_sync;
using flashcore::warpgroup_arrive;
using flashcore::prefetch_tensor_map;
using flashcore::tile_memory;
using flashcore::mbarrier_wait;
using flashcore::warpgroup_wait;

#if __has_include("descriptors.cuh")  // a kernel without products has none
#include "descriptors.cuh"
#endif

inline float token_at(const uint32_t* words, int i) {
  if constexpr (std::is_same_v<Token, __half>) return flashcore::half_at(words, i);
  else return bf16_at(words, i);
}

template <int N>
void product(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b, int add) {
  static_assert(N == 4 || N == 8);
  flashcore::ask<token_at>(&d[0][0], N * 4, a, 0, b, add, false);
}
inline void product(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
  flashcore::ask<token_at>(&d[0][0], 32, nullptr, a, b, add, false);
}
inline void product_mn(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, int add) {
  flashcore::ask<token_at>(&d[0][0], 64, a, 0, b, add, true);
}

// A warp that wants more registers waits until others have given up as many.
template <int N>
void warpgroup_reg_dealloc() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
  static const char tag = 0;
  emulated::together(&tag, [](emulated::Lane*) {
    emulated::Cta& cta = *emulated::me->cta;
    int& own = emulated::me->warp->registers;
    if (N > own) emulated::fail("fewer registers that are more");
    cta.spare += (own - N) * 32, own = N;
    ++cta.given_up.generation;
  });
}
template <int N>
void warpgroup_reg_alloc() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
  static const char tag = 0;
  emulated::together(&tag, [](emulated::Lane*) {
    emulated::Cta& cta = *emulated::me->cta;
    int& own = emulated::me->warp->registers;
    if (N < own) emulated::fail("more registers that are fewer");
    while (cta.spare < (N - own) * 32) emulated::wait(cta.given_up, cta.given_up.generation);
    cta.spare -= (N - own) * 32, own = N;
  });
}

inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulated::fail("a copy of odd bytes");
  flashcore::bring(barrier, bytes, [=] {
    for (uint32_t i = 0; i < bytes; i += 16) std::memcpy(flashcore::at(to + i), static_cast<const char*>(from) + i, 16);
  });
}
inline void prefetch_l2(const void* from, uint32_t bytes) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulated::fail("a copy of odd bytes");
}
inline void tma_load_box(uint32_t to, const CUtensorMap& map, int token, int half, int head, uint32_t barrier) {
  flashcore::copy_boxes(to, map, {token, half, head}, barrier);
}

inline std::vector<int> states_asked;  // their rows, for tests of the order
inline void tma_load_state(uint32_t to, const CUtensorMap& map, int row, uint32_t barrier) {
  states_asked.push_back(row);
  flashcore::copy_boxes(to, map, {row, 0, 0}, barrier);
}

// A cluster's CTAs differ in x. An address of a peer has its number, plus one, in its upper bits.
inline int cluster_rank() { return static_cast<int>(emulated::me->block.x % emulated::ctas.size()); }
inline uint32_t at_peer(uint32_t at, int rank) { return at | uint32_t(rank + 1) << 24; }
inline emulated::Cta& cta_of(uint32_t at) {
  emulated::Cta& there = emulated::ctas.at((at >> 24) - 1);
  if (there.running == 0) emulated::fail("a peer that has ended");
  return there;
}
inline emulated::Transaction& peer_transaction(uint32_t barrier) {
  auto& all = cta_of(barrier).transactions;
  if (!all.count(barrier & 0xffffff)) emulated::fail("a barrier that nobody has initialised");
  return all[barrier & 0xffffff];
}
inline void mbarrier_arrive_at_peer(uint32_t barrier) {
  emulated::Transaction& t = peer_transaction(barrier);
  flashcore::send(cta_of(barrier), t, [&t] {
    ++t.barrier.arrived;
    flashcore::check_phase(t);
  });
}
inline void write_to_peer(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  emulated::Transaction& t = peer_transaction(barrier);
  emulated::Cta& there = cta_of(to);
  const uint32_t offset = (to & 0xffffff) - emulated::FIRST_ADDRESS;
  if (offset + bytes > there.bytes) emulated::fail("an address outside of a peer's memory");
  std::memcpy(there.base + offset, from, bytes);
  t.bytes -= bytes;
  flashcore::check_phase(t);
}
inline void store_at_peer(uint32_t to, uint32_t x, uint32_t barrier) {
  flashcore::send(cta_of(to), peer_transaction(barrier), [=] { write_to_peer(to, &x, 4, barrier); });
}
inline void copy_to_peer(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  if (bytes % 16 || to % 16 || from % 16) emulated::fail("a copy of odd bytes");
  const emulated::Cta* const sender = emulated::me->cta;
  const char* const source = static_cast<const char*>(flashcore::at(from));
  flashcore::send(cta_of(to), peer_transaction(barrier), [=] {
    if (sender->running == 0) emulated::fail("a copy from a CTA that has ended");
    write_to_peer(to, source, bytes, barrier);
  });
}
inline void cluster_sync() {
  const unsigned generation = emulated::arrive(emulated::cluster_barrier);
  emulated::wait(emulated::cluster_barrier, generation);
}

inline bool elect_one() {
  static const char tag = 0;
  emulated::together(&tag, [](emulated::Lane*) {});
  return emulated::me->lane == (emulated::mode & emulated::REVERSED ? 31 : 0);
}
inline void fence_proxy_async() {}

// Rows of a matrix to the addresses of eight lanes; a lane has columns 2t and 2t + 1 of row g, or, TRANSPOSED, the other way
// round.
template <bool TRANSPOSED>
void store_to(uint32_t row, const uint32_t (&r)[4]) {
  static const char tag = 0;
  emulated::Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  flashcore::at(row);
  mine.in[4] = row;
  for (int i = 0; i < 4; ++i) mine.in[i] = r[i];
  emulated::together(&tag, [](emulated::Lane* lanes) {
    for (int matrix = 0; matrix < 4; ++matrix)
      for (int i = 0; i < 8; ++i) {
        uint16_t x[8];
        for (int j = 0; j < 8; ++j) {
          const int g = TRANSPOSED ? j : i, of = TRANSPOSED ? i : j;
          x[j] = static_cast<uint16_t>(lanes[g * 4 + of / 2].in[matrix] >> of % 2 * 16);
        }
        const int lane = matrix * 8 + i;
        char* const to = flashcore::at(lanes[lane].in[4]);
        emulated::races::access(to, 16, true, emulated::first_lane() + lane);
        std::memcpy(to, x, 16);
      }
  });
}
inline void store_transposed(uint32_t row, const uint32_t (&r)[4]) { store_to<true>(row, r); }
inline void store_matrices(uint32_t row, const uint32_t (&r)[4]) { store_to<false>(row, r); }
// TMA reads when it is asked (EARLY), or when its thread waits for that: who writes there before shows.
struct BulkStore {
  std::function<void()> read;
  int who;  // its number in races.h
};
inline std::map<const void*, std::vector<BulkStore>> stores;  // of each thread
inline void store(const std::function<void()>& copy) {
  const int who = emulated::races::start();
  const auto read = [=] {
    const emulated::races::As by(who);
    copy();
  };
  if (emulated::mode & emulated::EARLY) read();
  stores[emulated::me].push_back({emulated::mode & emulated::EARLY ? [] {} : std::function<void()>(read), who});
}
// 16 bytes of shared memory.
inline void store_piece(char* to, uint32_t from) {
  const char* const piece = flashcore::at(from);
  emulated::races::access(piece, 16, false);
  std::memcpy(to, piece, 16);
}
inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16) emulated::fail("a copy of odd bytes");
  store([=] {
    for (uint32_t i = 0; i < bytes; i += 16) store_piece(static_cast<char*>(to) + i, from + i);
  });
}
inline void tma_store_box(const CUtensorMap& map, int row, int half, int head, uint32_t from) {
  if (from % 1024) emulated::fail("a tile that is not aligned");
  const std::array<int, 3> first{row, half, head};
  for (int i = 0; i < 3; ++i)
    if (first[i] < 0 || first[i] + map.box[i + 1] > map.sizes[i + 1]) emulated::fail("a tile outside of the matrix");
  store([=] {
    for (int r = 0; r < map.box[1] * map.box[2] * map.box[3]; ++r) {
      char* const to = static_cast<char*>(const_cast<void*>(map.base)) + (row + r % map.box[1]) * map.strides[1] +
                       (half + r / map.box[1] % map.box[2]) * map.strides[2] +
                       (head + r / map.box[1] / map.box[2]) * map.strides[3];
      for (int piece = 0; piece < 8; ++piece)
        store_piece(to + piece * 16, flashcore::swizzled(from + r * 128 + piece * 16));
    }
  });
}
inline void tma_store_state(const CUtensorMap& map, int row, uint32_t from) { tma_store_box(map, row, 0, 0, from); }
inline void bulk_stores_read() {
  for (const BulkStore& store : stores[emulated::me]) store.read(), emulated::races::end(store.who);
  stores.erase(emulated::me);
}

inline void store16(void* to, const uint4& words) { *static_cast<uint4*>(to) = words; }

}  // namespace gdn
