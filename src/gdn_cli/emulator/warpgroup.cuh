// _cuda/ptx/warpgroup.cuh without PTX, for the CPU of cuda_runtime.h: written from the PTX ISA's descriptors, swizzles
// and fragments of wgmma.
//
// Each warp computes its 16 rows of a product by itself, as the hardware does: when it issues it (EARLY), or when it waits
// for it, so that operands overwritten meanwhile are found. Until then the registers of d are NaN. A copy is done when it
// is issued (EARLY), or when a thread waits for its barrier.
#pragma once

#include "mma_f16.cuh"

#define FLASHCORE_COPY_ENGINE 1
#define FLASHCORE_WGMMA 1

struct CUtensorMap {  // of elements of 2 bytes; the first dimension is of 64 side by side
  const void* base;
  int64_t sizes[4], strides[4];  // strides in bytes
  int box[4];
};

namespace flashcore {

struct TensorMap : CUtensorMap {  // of [heads, S, 64]; a tile is `rows` of them
  TensorMap(const __half* base, int S, int heads, int rows)
      : CUtensorMap{base, {64, S, heads, 1}, {2, 128, int64_t{S} * 128, 0}, {64, rows, 1, 1}} {}
};

struct Maps {
  TensorMap q, k, v;
};

inline char* tile_memory() { return emulated::me->cta->base; }

// 16 bytes of a swizzled tile: bits 4 to 6 of an address change places by its bits 7 to 9.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline emulated::Transaction& transaction(uint32_t barrier) {
  auto& all = emulated::me->cta->transactions;
  if (!all.count(barrier)) emulated::fail("a barrier that nobody has initialised");
  return all[barrier];
}
inline void check_phase(emulated::Transaction& t) {
  if (t.barrier.arrived > t.barrier.expected) emulated::fail("more threads arrive at a barrier than it counts");
  if (t.barrier.arrived == t.barrier.expected && t.bytes == 0) t.barrier.arrived = t.waiting = 0, ++t.barrier.generation;
}
// What lands at `cta` and counts for its barrier `t`: at once (EARLY), or when a thread waits for the phase that it belongs to.
inline void send(emulated::Cta& cta, emulated::Transaction& t, const std::function<void()>& land) {
  if (emulated::mode & emulated::EARLY || t.waiting) return land();
  ++cta.under_way;
  t.under_way.push_back([&cta, land] { --cta.under_way, land(); });
}
inline void mbarrier_init(uint32_t barrier, int count) {
  if (barrier % 8 || barrier - emulated::FIRST_ADDRESS + 8 > emulated::me->cta->bytes) emulated::fail("a barrier elsewhere");
  emulated::me->cta->transactions[barrier] = {{count}};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  auto& t = transaction(barrier);
  emulated::races::release(&t.barrier, t.barrier.generation);
  t.bytes += bytes;
  ++t.barrier.arrived;
  check_phase(t);
}
inline void mbarrier_arrive(uint32_t barrier) {
  mbarrier_arrive_expect_tx(barrier, 0);
  if (emulated::mode & emulated::TURNS) emulated::end_turn();
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  auto& t = transaction(barrier);
  while ((t.barrier.generation & 1) == parity && !t.under_way.empty()) {
    const auto land = t.under_way.front();
    t.under_way.pop_front();
    land();
  }
  if ((t.barrier.generation & 1) == parity) ++t.waiting, emulated::wait(t.barrier, t.barrier.generation);
  if ((t.barrier.generation & 1) == parity) emulated::fail("a barrier that is two phases ahead of who waits for it");
  emulated::races::acquire(&t.barrier, t.barrier.generation - 1);
}

inline void prefetch_tensor_map(const CUtensorMap&) {}

// What `copy` brings: `bytes` that count for the barrier.
template <typename Copy>
void bring(uint32_t barrier, long bytes, const Copy& copy) {
  emulated::Transaction& t = transaction(barrier);
  const int who = emulated::races::start();
  const auto land = [=, &t] {
    const emulated::races::As by(who);
    copy();
    emulated::races::release(&t.barrier, t.barrier.generation);
    t.bytes -= bytes;
    check_phase(t);
  };
  send(*emulated::me->cta, t, land);
}

// The box of `map` that begins at `first` of its dimensions but the first one; zeros where the tensor ends.
inline void copy_boxes(uint32_t to, const CUtensorMap& map, const std::array<int, 3>& first, uint32_t barrier) {
  if (to % 1024) emulated::fail("a tile that is not aligned");
  if (first[0] < 0 || first[1] < 0 || first[2] < 0 || first[1] >= map.sizes[2] || first[2] >= map.sizes[3])
    emulated::fail("a tile outside of the matrix");
  const int rows = map.box[1] * map.box[2] * map.box[3];
  bring(barrier, rows * 128, [=] {  // the map by value: who asked may have ended
    for (int r = 0; r < rows; ++r) {
      const int64_t at_row = first[0] + r % map.box[1], at_next = first[1] + r / map.box[1] % map.box[2];
      const int64_t at_last = first[2] + r / map.box[1] / map.box[2];
      const bool there = at_row < map.sizes[1] && at_next < map.sizes[2] && at_last < map.sizes[3];
      const char* from = static_cast<const char*>(map.base) + at_row * map.strides[1] + at_next * map.strides[2] +
                         at_last * map.strides[3];
      for (int piece = 0; piece < 8; ++piece) {
        char* place = at(swizzled(to + r * 128 + piece * 16));
        emulated::races::access(place, 16, true);
        if (there) std::memcpy(place, from + piece * 16, 16);
        else std::memset(place, 0, 16);
      }
    }
  });
}
inline void tma_load_tile(uint32_t to, const CUtensorMap& map, int row, int head, uint32_t barrier) {
  copy_boxes(to, map, {row, head, 0}, barrier);
}

inline void warpgroup_sync(int number) {
  if (number < 1 || number > 15) emulated::fail("a barrier that there is not");
  emulated::Barrier& barrier = emulated::me->cta->named[number];
  barrier.expected = 128;
  emulated::wait(barrier, emulated::arrive(barrier));
}

inline int of_warp(int x) { return x; }

inline bool any_lane(bool x) {
  static const char tag = 0;
  emulated::Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  mine.in[0] = x;
  return emulated::together(&tag, [](emulated::Lane* lanes) {
    uint32_t any = 0;
    for (int i = 0; i < 32; ++i) any |= lanes[i].in[0];
    for (int i = 0; i < 32; ++i) lanes[i].out[0] = any;
  }).out[0] != 0;
}

// --- products ---------------------------------------------------------------------------------------------------------

// Eight elements of a matrix, from column x of row y on ("K-major"); of one that is turned, from row x of column y on
// ("MN-major"): columns 64 to 127 stand as far from the first 64 as the leading byte offset says, which has no meaning in
// the other case.
inline void eight_elements(const emulated::Product& p, uint64_t matrix, int row, int column, float* to) {
  const uint32_t start = (matrix & 0x3fff) << 4, eight = (matrix >> 32 & 0x3fff) << 4;
  const uint32_t leading = (matrix >> 16 & 0x3fff) << 4;
  const char* numbers = at(swizzled(start + row / 8 * eight + row % 8 * 128 + column / 64 * leading + column % 64 * 2));
  emulated::races::access(numbers, 16, false);
  uint32_t words[4];
  std::memcpy(words, numbers, sizeof words);
  p.values(words, 8, to);
}
// `rows` rows of 16 elements, K-major.
inline void rows_of_16(const emulated::Product& p, uint64_t matrix, int first, int rows, float* to) {
  for (int y = 0; y < rows; ++y)
    for (int x = 0; x < 16; x += 8) eight_elements(p, matrix, first + y, x, to + y * 16 + x);
}

inline void make(emulated::Warp& warp, int rows, const emulated::Product& p) {
  const emulated::races::As by(p.who);
  emulated::Held& held = warp.held.at(p.d[0]);
  const int N = p.n * 2;                    // columns: 4 registers a lane are 16 x 8
  for (const uint64_t matrix : {p.b_matrix, p.a[0] ? p.b_matrix : p.a_matrix})
    if (matrix >> 62 != 1 || matrix >> 49 & 7)
      emulated::fail("a matrix that is not swizzled by 128 bytes from a multiple of 1024");
  float a[16][16];
  if (!p.a[0]) rows_of_16(p, p.a_matrix, rows, 16, a[0]);
  for (int lane = 0; p.a[0] && lane < 32; ++lane) {
    float of_lane[8];
    p.values(p.a[lane], 8, of_lane);
    for (int e = 0; e < 8; ++e) a[lane / 4 + e / 2 % 2 * 8][lane % 4 * 2 + e % 2 + e / 4 * 8] = of_lane[e];
  }
  std::vector<Four> b(N * 4), d(N * 4);     // of 16 rows
  float* const by_row = reinterpret_cast<float*>(b.data());
  if (p.turned) {
    for (int x = 0; x < 16; ++x)
      for (int y = 0; y < N; y += 8) eight_elements(p, p.b_matrix, x, y, by_row + x * N + y);
  } else {
    std::vector<float> by_column(N * 16);
    rows_of_16(p, p.b_matrix, 0, N, by_column.data());
    for (int y = 0; y < N; ++y)
      for (int x = 0; x < 16; ++x) by_row[x * N + y] = by_column[y * 16 + x];
  }
  sums(16, N / 4, a, b.data(), d.data());
  const float* const sum = reinterpret_cast<const float*>(d.data());
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < p.n; ++i) {
      const int y = lane / 4 + i / 2 % 2 * 8, x = i / 4 * 8 + lane % 4 * 2 + i % 2;
      held.value[lane][i] = (p.add ? held.value[lane][i] : 0.f) + sum[y * N + x];
    }
}

// `value` as in mma_f16.cuh's product. A fence stands in front of it: but for registers of d that products under way add to
// already, with a left side that is in shared memory or has been read before and not written since.
template <float (*value)(const uint32_t*, int)>
void values(const uint32_t* words, int n, float* to) {
  for (int i = 0; i < n; ++i) to[i] = value(words, i);
}
template <float (*value)(const uint32_t*, int)>
void ask(float* d, int n, const uint32_t* a, uint64_t a_matrix, uint64_t b_matrix, bool add, bool turned) {
  static const char tag = 0;
  using emulated::Lane;
  Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  const uint64_t words[] = {reinterpret_cast<uint64_t>(d), reinterpret_cast<uint64_t>(a), a_matrix, b_matrix};
  std::memcpy(mine.in, words, sizeof words);
  const int rows = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  emulated::together(&tag, [&](Lane* lanes) {
    emulated::Warp& warp = *emulated::me->warp;
    emulated::Product p{{}, {}, a_matrix, b_matrix, n, add, turned, values<value>};
    p.who = emulated::races::start_of_warp(emulated::first_lane());
    std::vector<uint32_t> left;
    for (int lane = 0; lane < 32; ++lane) {
      uint64_t of[4];
      std::memcpy(of, lanes[lane].in, sizeof of);
      p.d[lane] = reinterpret_cast<float*>(of[0]), p.a[lane] = reinterpret_cast<const uint32_t*>(of[1]);
      if (of[2] != a_matrix || of[3] != b_matrix) emulated::fail("lanes do not agree on a matrix");
      if (a) left.insert(left.end(), p.a[lane], p.a[lane] + 4);
    }
    const auto d_before = warp.held.find(p.d[0]);
    const bool going_on = d_before != warp.held.end() && d_before->second.n == n && add;
    if (!warp.open && !(going_on && (!a || warp.left[p.a[0]] == left)))
      emulated::fail("a product without a fence before it");
    if (a) warp.left[p.a[0]] = left;
    emulated::Held& held = warp.held[p.d[0]];
    if (held.products++ == 0) {
      held.n = n;
      for (int lane = 0; lane < 32; ++lane) {
        held.value[lane].assign(p.d[lane], p.d[lane] + n);
        for (int i = 0; i < n; ++i) p.d[lane][i] = NAN;
      }
    }
    if (emulated::mode & emulated::EARLY) make(warp, rows, p);
    warp.products.back().push_back(p);
  });
}

inline void warpgroup_arrive() {
  static const char tag = 0;
  emulated::together(&tag, [](emulated::Lane*) { emulated::me->warp->open = true; });
}
inline void warpgroup_commit() {
  static const char tag = 0;
  emulated::together(&tag, [](emulated::Lane*) {
    emulated::me->warp->products.push_back({});
    emulated::me->warp->open = false;
  });
}
template <int N>
void warpgroup_wait() {
  static const char tag = 0;
  const int rows = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  emulated::together(&tag, [&](emulated::Lane*) {
    emulated::Warp& warp = *emulated::me->warp;
    while (warp.products.size() > N + 1) {  // the last one is not ended
      for (const emulated::Product& p : warp.products.front()) {
        if (!(emulated::mode & emulated::EARLY)) make(warp, rows, p);
        emulated::races::end_of_warp(emulated::first_lane(), p.who);
        emulated::Held& held = warp.held.at(p.d[0]);
        if (--held.products > 0) continue;
        for (int lane = 0; lane < 32; ++lane) {
          for (int i = 0; i < held.n; ++i)
            if (!std::isnan(p.d[lane][i])) emulated::fail("a register that a product under way writes was written");
          std::copy(held.value[lane].begin(), held.value[lane].end(), p.d[lane]);
        }
        warp.held.erase(p.d[0]);
      }
      warp.products.erase(warp.products.begin());
    }
  });
}

template <typename T>
void warpgroup_fence_operand(T&) {}
inline void fence_proxy_async() {}

template <int N>
void multiply(float (&d)[N][4], uint64_t a, uint64_t b, bool add) {
  ask<half_at>(&d[0][0], N * 4, nullptr, a, b, add, false);
}
// Two products: of columns 0 to 63, and of 64 to 71.
inline void multiply_add(float (&d)[8][4], float (&more)[4], const uint32_t (&a)[4], uint64_t b) {
  ask<half_at>(&d[0][0], 32, a, 0, b, true, true);
  const uint64_t field = 0x3fff;
  ask<half_at>(more, 4, a, 0, (b & ~field) | ((b & field) + (b >> 16 & field) & field), true, true);
}

}  // namespace flashcore
