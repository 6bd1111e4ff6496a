// _cuda/ptx/mma_bf16.cuh without PTX, for the CPU of cuda_runtime.h: mma_f16.cuh has all but products of bf16, warpgroup.cuh
// has the barriers.
#pragma once

#include <map>
#include <type_traits>

#include "cuda_bf16.h"
#include "mma_f16.cuh"
#include "warpgroup.cuh"

namespace gdn {

using flashcore::commit_copies;
using flashcore::copy16;
using flashcore::load_matrices;
using flashcore::load_transposed;
using flashcore::shared_address;
using flashcore::shared_memory;
using flashcore::wait_for_copies;

inline float bf16_at(const uint32_t* words, int i) { return __uint_as_float(words[i / 2] >> i % 2 * 16 << 16); }

inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  flashcore::product<bf16_at>(d, a, b0, b1);
}

template <typename Token>
void multiply_tokens(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Token, __half>) flashcore::multiply_add(d, a, b0, b1);
  else multiply_add(d, a, b0, b1);
}

// An 8 x 8 matrix of 16-bit numbers turned: _cuda/prefill/chunk.cuh has it.
inline uint32_t transposed(uint32_t x) {
  static const char tag = 0;
  emulated::Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  mine.in[0] = x;
  emulated::together(&tag, [](emulated::Lane* lanes) {
    for (int i = 0; i < 32; ++i) {
      const auto element = [&](int row, int column) {
        return lanes[row * 4 + column / 2].in[0] >> column % 2 * 16 & 0xffff;
      };
      lanes[i].out[0] = element(i % 4 * 2, i / 4) | element(i % 4 * 2 + 1, i / 4) << 16;
    }
  });
  return mine.out[0];
}

inline void prefetch(const void*) {}
inline uint32_t thread_again() { return threadIdx.x; }
inline char* pinned(char* p) { return p; }

template <int THREADS>
void named_barrier_sync(int barrier) {
  emulated::Barrier& b = emulated::me->cta->named[barrier];
  b.expected = THREADS;
  emulated::wait(b, emulated::arrive(b));
}

template <int THREADS>
void named_barrier_arrive(int barrier) {
  emulated::Barrier& b = emulated::me->cta->named[barrier];
  b.expected = THREADS;
  emulated::arrive(b);
}

constexpr int ARRIVALS = 1;

class Barrier {
  uint32_t address;

 public:
  explicit Barrier(uint32_t address) : address(address) {}
  void init(int warps) const { flashcore::mbarrier_init(address, warps); }
  void arrive(uint32_t lane) const {
    __syncwarp();
    if (lane == 0) flashcore::mbarrier_arrive(address);
  }
  void wait(uint32_t phase) const { flashcore::mbarrier_wait(address, phase % 2); }
};

inline void named_barrier_sync_partner(uint32_t pair) {
  static std::map<uint32_t, emulated::Barrier> barriers;  // one CTA at a time
  emulated::Barrier& barrier = barriers.try_emplace(pair, emulated::Barrier{64}).first->second;
  emulated::wait(barrier, emulated::arrive(barrier));
}

}  // namespace gdn
