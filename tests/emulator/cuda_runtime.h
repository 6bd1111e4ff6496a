// A CUDA that runs on a CPU, for tests: enough of the language and its intrinsics for the kernels here.
//
// Each thread is a fiber; all threads of a cluster are alive together and run one after the other until they wait:
// for their warp (shuffles, matrix instructions, __syncwarp), their CTA (__syncthreads) or their cluster. An instruction
// of a whole warp is done by the lane that arrives last. A warp runs as far ahead of the others as it can, so one that
// waits too little reads data that is not written yet, or overwrites data that is still needed: shared memory is NaN at
// first, and `mode` varies which warp is ahead and when asynchronous copies are done. Threads that do not
// all reach a barrier, lanes that meet in different instructions and writes after the end of shared memory end the
// process with a message.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "races.h"

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // of fixed size: one CTA at a time, then

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim { uint32_t x, y, z; };
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulated {

// EARLY: copies land when they are asked for, else when waited for. TURNS: no warp runs ahead, each gives way to the next
// one at each instruction that its lanes do together, and a lane to all other warps when it arrives at a barrier of bytes.
// n * BEHIND: each CTA's warpgroup number n, from 1 on, runs only while no other can.
enum Mode { PLAIN = 0, EARLY = 1, REVERSED = 2, TURNS = 4, BEHIND = 8 };
inline int mode = PLAIN;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated: %s\n", what);
  std::abort();
}

struct Barrier {
  int expected, arrived = 0;
  unsigned generation = 0;
};

// What warpgroup.cuh works with: barriers that count bytes too, and products that are under way.
struct Transaction {
  Barrier barrier;
  long bytes = 0;                              // announced, and not there yet
  int waiting = 0;                             // threads, for the phase that is not complete
  std::deque<std::function<void()>> under_way;  // copies, and arrivals from another CTA
};
struct Product {
  float* d[32];             // each lane's registers
  const uint32_t* a[32];    // its left side, read when the product is made; null: in shared memory
  uint64_t a_matrix, b_matrix;
  int n;                    // registers of d
  bool add, turned;
  float (*value)(const uint32_t* words, int i);  // number i of words of two
  int who = 0;              // its number in races.h
};
struct Held {               // d of products under way: its value so far; the registers themselves are NaN
  int n = 0, products = 0;
  std::vector<float> value[32];
};

struct Cta {
  std::vector<char> memory;
  char* base = nullptr;  // 128-byte aligned, in memory; GUARD bytes stand behind its `bytes`
  size_t bytes = 0;
  int running = 0;       // threads
  int under_way = 0;     // accesses to its memory that nothing orders before its end
  Barrier barrier{0};
  std::map<uint32_t, Transaction> transactions;  // by address
  std::map<int, Barrier> named;
  int spare = 0;         // registers that warps have given up
  Barrier given_up{0};   // turns with each time that they do
};

struct Lane {  // what a lane brings to its warp's instruction, and takes from it
  const void* instruction;
  uint32_t in[10], out[4];
  int from;
};

struct Warp {
  Barrier barrier{32};
  Lane lanes[32];
  std::vector<std::vector<Product>> products;    // groups; the last is the open one
  std::map<float*, Held> held;                   // by lane 0's registers
  std::map<const uint32_t*, std::vector<uint32_t>> left;  // what products have read on their left, by the same
  bool open = false;
  int registers = 0;                             // of each lane
};

struct Copy { void* to; const void* from; int bytes = 16; };  // without `from`: zeros

struct Fiber {
  jmp_buf here;
  ucontext_t context;
  std::vector<char> stack;
  bool started, done;
  Barrier* waits;
  unsigned generation, cluster_generation;
  dim thread, block;
  int lane;
  Warp* warp;
  Cta* cta;
  std::vector<std::vector<Copy>> copies;  // the last is the open group
  std::vector<Cta*> reached;              // through pointers, since its last release to the cluster
};

#ifdef EMULATED_RACES
constexpr size_t STACK = 1 << 20;  // code that calls for each access needs more of it
#else
constexpr size_t STACK = 64 * 1024;
#endif
constexpr size_t GUARD = 64;
constexpr uint32_t FIRST_ADDRESS = 1024;  // of shared memory, as on sm_90

inline dim grid;
inline int registers = 0;  // of a thread at its launch: for kernels that share them out anew
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<Cta> ctas;  // of the running cluster
inline Barrier cluster_barrier{0};
inline Fiber* me;
inline jmp_buf scheduler;
inline int first_lane() { return static_cast<int>(me->thread.x) / 32 * 32; }  // of the running warp
inline bool turn_over = false;  // of the warp that runs
inline std::function<void()> body;

__attribute__((noinline)) inline void yield() {
  const int kept = races::set_aside();
  races::switch_to(-1);
  if (_setjmp(me->here) == 0) _longjmp(scheduler, 1);
  races::switch_to(static_cast<int>(me->thread.x));
  races::set_back(kept);
}

// On a GPU an access to a CTA that has ended is an "unspecified launch failure" and the end of the context. It may arrive
// late, even if its thread ran long before: so it must have been waited for in that CTA, or be released to the cluster.
inline void end_thread() {
  me->done = true;
  if (--me->cta->running == 0 && me->cta->under_way) fail("a CTA that ends while accesses to it are under way");
}

inline void enter() {
  body();
  end_thread();
  races::switch_to(-1);
  _longjmp(scheduler, 1);
}

inline void end_turn() {
  turn_over = true;
  yield();
}

__attribute__((noinline)) inline void resume(Fiber* fiber) {
  me = fiber;
  if (_setjmp(scheduler) != 0) return;
  if (me->started) _longjmp(me->here, 1);
  me->started = true;
  races::switch_to(static_cast<int>(me->thread.x));
  setcontext(&me->context);
}

// The two of a warp's instruction, which orders no memory, and of a barrier.
inline unsigned arrive_only(Barrier& barrier) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) barrier.arrived = 0, ++barrier.generation;
  return generation;
}
inline void wait_only(Barrier& barrier, unsigned generation) {
  if (barrier.generation != generation) return;
  me->waits = &barrier, me->generation = generation;
  yield();
}
inline unsigned arrive(Barrier& barrier) {
  races::release(&barrier, barrier.generation);
  return arrive_only(barrier);
}
inline void wait(Barrier& barrier, unsigned generation) {
  wait_only(barrier, generation);
  races::acquire(&barrier, generation);
}

// `work(lanes)` once for the warp, by its last lane, from every Lane::in to every Lane::out. `instruction` tells which.
// `orders`: the lanes' accesses to memory, as __syncwarp does.
template <typename Work>
Lane& together(const void* instruction, const Work& work, bool orders = false) {
  Warp& warp = *me->warp;
  Lane& mine = warp.lanes[me->lane];
  mine.instruction = instruction;
  if (warp.barrier.arrived == 31) {
    for (const Lane& lane : warp.lanes)
      if (lane.instruction != instruction) fail("lanes of a warp meet in different instructions");
    const races::Ignored own;
    work(warp.lanes);
  }
  if (orders) wait(warp.barrier, arrive(warp.barrier));
  else wait_only(warp.barrier, arrive_only(warp.barrier));
  return mine;
}

inline uint32_t exchange(uint32_t value, int from) {
  static const char tag = 0;
  Lane& mine = me->warp->lanes[me->lane];
  mine.in[0] = value, mine.from = from;
  return together(&tag, [](Lane* lanes) {
    for (int i = 0; i < 32; ++i) lanes[i].out[0] = lanes[lanes[i].from].in[0];
  }).out[0];
}

// A warp runs until all of its lanes wait for others, then the next: as far ahead of them as it can be, but for TURNS.
inline bool run_warp(int warp, size_t& left) {
  bool any = false;
  for (bool again = true; again;) {
    again = false;
    for (int lane = 0; lane < 32; ++lane) {
      Fiber* fiber = fibers[warp * 32 + (mode & REVERSED ? 31 - lane : lane)].get();
      if (fiber->done || (fiber->waits && fiber->waits->generation == fiber->generation)) continue;
      fiber->waits = nullptr, again = any = true;
      resume(fiber);
      left -= fiber->done;
      if (turn_over) break;
    }
    if (mode & TURNS) again = turn_over = false;
  }
  return any;
}
inline void run_cluster() {
  const int warps = static_cast<int>(fibers.size()) / 32, each = warps / static_cast<int>(ctas.size());
  const auto held_back = [&](int warp) { return warp % each / 4 == mode / BEHIND - 1; };
  for (size_t left = fibers.size(); left > 0;) {
    bool any = false;
    for (int i = 0; i < warps; ++i) {
      const int warp = mode & REVERSED ? warps - 1 - i : i;
      if (!held_back(warp)) any |= run_warp(warp, left);
    }
    for (int warp = 0; warp < warps && !any; ++warp)
      if (held_back(warp)) any = run_warp(warp, left);
    if (!any) fail("a barrier that not all threads reach");
  }
}

// Runs `kernel` for every thread of the grid, cluster after cluster; a cluster is `cluster` CTAs that differ in x. Of
// the clusters, by their first CTA, those that `wanted` takes.
inline void launch(dim grid_, uint32_t threads, size_t shared, uint32_t cluster, const std::function<void()>& kernel,
                   const std::function<bool(dim)>& wanted = [](dim) { return true; }) {
  grid = grid_, body = kernel;
  ctas.resize(cluster);
  std::vector<Warp> warps(cluster * threads / 32);
  while (fibers.size() < cluster * threads) {
    fibers.push_back(std::make_unique<Fiber>());
    fibers.back()->stack.resize(STACK);
  }
  fibers.resize(cluster * threads);
  for (uint32_t z = 0; z < grid.z; ++z)
    for (uint32_t y = 0; y < grid.y; ++y)
      for (uint32_t x = 0; x < grid.x; x += cluster) {
        if (!wanted({x, y, z})) continue;
        cluster_barrier = {static_cast<int>(cluster * threads)};
        for (Warp& warp : warps) warp.barrier = {32}, warp.products.assign(1, {}), warp.held.clear();
        for (Warp& warp : warps) warp.left.clear(), warp.open = false, warp.registers = registers;
        for (Cta& cta : ctas) {
          cta.memory.assign(shared + GUARD + 128, '\xff');  // NaN in every format
          cta.base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(cta.memory.data()) + 127) / 128 * 128);
          cta.bytes = shared, cta.running = static_cast<int>(threads), cta.under_way = 0;
          cta.barrier = {static_cast<int>(threads)};
          cta.transactions.clear(), cta.named.clear(), cta.spare = 0;
        }
        for (uint32_t i = 0; i < cluster * threads; ++i) {
          Fiber& f = *fibers[i];
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
          f.context.uc_link = nullptr;
          makecontext(&f.context, enter, 0);
          f.started = f.done = false, f.waits = nullptr;
          f.thread = {i % threads, 0, 0}, f.block = {x + i / threads, y, z}, f.lane = static_cast<int>(i % 32);
          f.warp = &warps[i / 32], f.cta = &ctas[i / threads];
          f.copies.assign(1, {}), f.reached.clear();
        }
        if (races::SEARCHED && cluster > 1) fail("races are not looked for in clusters");
        races::begin(ctas[0].base, shared, static_cast<int>(threads));
        run_cluster();
        for (const Cta& cta : ctas)
          for (size_t i = 0; i < GUARD; ++i)
            if (cta.base[cta.bytes + i] != '\xff') fail("a write behind the end of shared memory");
      }
}
inline void launch(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel) {
  launch({blocks, 1, 1}, threads, 0, 1, kernel);
}

// Asynchronous copies of a thread (cp.async), in groups.
inline void land(const Copy& copy) {
  races::access(copy.to, copy.bytes, true);  // its thread's, when it waits for the copy
  if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
  else std::memset(copy.to, 0, copy.bytes);
}
inline void ask(const Copy& copy) {
  if (mode & EARLY) land(copy);
  else me->copies.back().push_back(copy);
}
inline void commit_copies() { me->copies.push_back({}); }
inline void wait_for_copies(size_t pending) {
  auto& groups = me->copies;
  while (groups.size() > pending + 1) {  // the last one is not ended
    for (const Copy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

}  // namespace emulated

#define threadIdx emulated::me->thread
#define blockIdx emulated::me->block
#define gridDim emulated::grid

inline void __syncthreads() {
  emulated::Barrier& barrier = emulated::me->cta->barrier;
  emulated::wait(barrier, emulated::arrive(barrier));
}
inline void __syncwarp() {
  static const char tag = 0;
  emulated::together(&tag, [](emulated::Lane*) {}, true);
}

template <typename A, typename B>
B bits(A a) {
  static_assert(sizeof(A) == sizeof(B));
  B b;
  std::memcpy(&b, &a, sizeof b);
  return b;
}
inline float __uint_as_float(uint32_t x) { return bits<uint32_t, float>(x); }
inline uint32_t __float_as_uint(float x) { return bits<float, uint32_t>(x); }
inline float __int_as_float(int x) { return bits<int, float>(x); }
inline int __float_as_int(float x) { return bits<float, int>(x); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return static_cast<uint32_t>(static_cast<uint64_t>(x) * y >> 32); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float x, float y) { return std::isinf(y) ? 0.f : x / y; }
inline float __expf(float x) { return expf(x); }
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
inline int __vimax3_s32(int x, int y, int z) { return max(x, max(y, z)); }
template <typename T>
T __ldg(const T* p) { return *p; }

inline float __shfl_xor_sync(uint32_t, float x, int mask) {
  return __uint_as_float(emulated::exchange(__float_as_uint(x), emulated::me->lane ^ mask));
}
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int mask) {
  return emulated::exchange(x, emulated::me->lane ^ mask);
}
inline int __shfl_xor_sync(uint32_t, int x, int mask) {
  return static_cast<int>(emulated::exchange(static_cast<uint32_t>(x), emulated::me->lane ^ mask));
}
inline uint32_t __shfl_sync(uint32_t, uint32_t x, int from, int width = 32) {
  return emulated::exchange(x, emulated::me->lane / width * width + from % width);
}
inline int __shfl_sync(uint32_t, int x, int from, int width = 32) {
  return static_cast<int>(__shfl_sync(0, static_cast<uint32_t>(x), from, width));
}
// Threads run one after the other, CTAs too. Each returns what was there before.
template <typename T, typename Next>
T atomically(T* p, const Next& next) {
  emulated::races::atomic(p, sizeof *p);
  const emulated::races::Ignored own;
  const T before = *p;
  *p = next(before);
  return before;
}
inline uint32_t atomicAdd(uint32_t* p, uint32_t x) {
  return atomically(p, [=](uint32_t before) { return before + x; });
}
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) {
  return atomically(p, [=](unsigned long long before) { return before + x; });
}
inline unsigned long long atomicCAS(unsigned long long* p, unsigned long long expected, unsigned long long x) {
  return atomically(p, [=](unsigned long long before) { return before == expected ? x : before; });
}
inline uint32_t atomicMax(uint32_t* p, uint32_t x) {
  return atomically(p, [=](uint32_t before) { return x > before ? x : before; });
}
inline uint32_t atomicMin(uint32_t* p, uint32_t x) {
  return atomically(p, [=](uint32_t before) { return x < before ? x : before; });
}
inline uint32_t __ballot_sync(uint32_t, bool x) {
  static const char tag = 0;
  emulated::Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  mine.in[0] = x;
  return emulated::together(&tag, [](emulated::Lane* lanes) {
    uint32_t all = 0;
    for (int i = 0; i < 32; ++i) all |= lanes[i].in[0] << i;
    for (int i = 0; i < 32; ++i) lanes[i].out[0] = all;
  }).out[0];
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline float __shfl_sync(uint32_t, float x, int from, int width = 32) {
  return __uint_as_float(emulated::exchange(__float_as_uint(x), emulated::me->lane / width * width + from % width));
}
