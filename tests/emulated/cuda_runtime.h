// A CUDA that runs on a CPU, for tests: enough of the language and its intrinsics for kernels without shared memory.
//
// Each lane of a warp is a fiber. A shuffle is the only place where lanes wait for each other: a lane leaves its value
// and lets the next one run, and reads its partner's once all have been there. Lanes that shuffle in a different order
// therefore read nonsense here, as they would on a GPU.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __CUDACC__ 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct dim { uint32_t x, y, z; };

namespace emulated {

inline thread_local dim thread, block;
inline ucontext_t scheduler, fibers[32];
inline uint32_t slots[2][32];
inline int lane, shuffles[32];
inline std::function<void()> body;

inline void enter() { body(); }

inline uint32_t exchange(uint32_t value, int from) {
  const int me = lane, turn = shuffles[me]++ % 2;
  slots[turn][me] = value;
  swapcontext(&fibers[me], &scheduler);  // the others leave theirs
  return slots[turn][from];
}

// Runs `kernel` for every thread of the grid, warp after warp.
inline void launch(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel) {
  static std::vector<std::vector<char>> stacks(32, std::vector<char>(256 * 1024));
  body = kernel;
  for (block.x = 0; block.x < blocks; ++block.x) {
    for (uint32_t warp = 0; warp < threads / 32; ++warp) {
      bool running[32];
      for (int i = 0; i < 32; ++i) {
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks[i].data(), fibers[i].uc_stack.ss_size = stacks[i].size();
        fibers[i].uc_link = &scheduler;
        makecontext(&fibers[i], enter, 0);
        running[i] = true, shuffles[i] = 0;
      }
      for (bool any = true; any;) {
        any = false;
        for (lane = 0; lane < 32; ++lane) {
          if (!running[lane]) continue;
          const int before = shuffles[lane];
          thread.x = warp * 32 + lane;
          swapcontext(&scheduler, &fibers[lane]);
          running[lane] = shuffles[lane] != before;  // it came back from a shuffle; else it is at its end
          any |= running[lane];
        }
      }
    }
  }
}

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block

template <typename A, typename B>
B bits(A a) {
  static_assert(sizeof(A) == sizeof(B));
  B b;
  std::memcpy(&b, &a, sizeof b);
  return b;
}
inline float __uint_as_float(uint32_t x) { return bits<uint32_t, float>(x); }
inline uint32_t __float_as_uint(float x) { return bits<float, uint32_t>(x); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return static_cast<uint32_t>(static_cast<uint64_t>(x) * y >> 32); }
inline float __fdividef(float x, float y) { return std::isinf(y) ? 0.f : x / y; }
template <typename T>
T __ldg(const T* p) { return *p; }

inline float __shfl_xor_sync(uint32_t, float x, int mask) {
  return __uint_as_float(emulated::exchange(__float_as_uint(x), emulated::lane ^ mask));
}
inline float __shfl_sync(uint32_t, float x, int from, int width = 32) {
  return __uint_as_float(emulated::exchange(__float_as_uint(x), emulated::lane / width * width + from % width));
}
