// A CUDA that runs on a CPU: enough of the language and its intrinsics to check a kernel.
//
// Each thread is a fiber; all threads of a cluster are alive together and run one after the other until they wait:
// for their warp (shuffles, matrix instructions, __syncwarp), their CTA (__syncthreads) or their cluster. An instruction
// of a whole warp is done by the lane that arrives last. A warp runs as far ahead of the others as it can, so one that
// waits too little reads data that is not written yet, or overwrites data that is still needed: shared memory is NaN at
// first, and `mode` varies which warp is ahead and when asynchronous copies are done. Threads that do not
// all reach a barrier, lanes that meet in different instructions and writes after the end of shared memory end the
// process with a message, or with EMULATED_THROWS the launch with an exception.
#pragma once

#include <dlfcn.h>
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
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "races.h"

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__
#define __constant__ static
#define __align__(n) alignas(n)
#define __shared__ static  // of fixed size: one CTA at a time, then; `gdn run --emulate` puts it where the dynamic one is

#define EMULATED_VECTORS(T, name)                                                              \
  struct name##1 { T x; };                                                                     \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                           \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };           \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                   \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTORS(int8_t, char) EMULATED_VECTORS(uint8_t, uchar) EMULATED_VECTORS(int16_t, short)
EMULATED_VECTORS(uint16_t, ushort) EMULATED_VECTORS(int32_t, int) EMULATED_VECTORS(uint32_t, uint)
EMULATED_VECTORS(float, float) EMULATED_VECTORS(double, double) EMULATED_VECTORS(long long, longlong)
struct int3 { int32_t x, y, z; };
struct float3 { float x, y, z; };
struct uint3 { uint32_t x, y, z; };
using dim = uint3;
struct dim3 {
  uint32_t x, y, z;
  constexpr dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
  operator uint3() const { return {x, y, z}; }
};

namespace emulated {

// EARLY: copies land when they are asked for, else when waited for. TURNS: no warp runs ahead, each gives way to the next
// one at each instruction that its lanes do together, and a lane to all other warps when it arrives at a barrier of bytes.
// n * BEHIND: each CTA's warpgroup number n, from 1 on, runs only while no other can.
enum Mode { PLAIN = 0, EARLY = 1, REVERSED = 2, TURNS = 4, BEHIND = 8 };
inline int mode = PLAIN;

[[noreturn]] void fail(const std::string& what);

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
  void (*values)(const uint32_t* words, int n, float* to);  // the first n numbers of words of two
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
  size_t used = 0;       // of the static shared memory, which stands behind the guard
  std::map<const void*, size_t> statics;  // where each variable begins in it
  int running = 0;       // threads
  int under_way = 0;     // accesses to its memory that nothing orders before its end
  Barrier barrier{0};
  std::map<uint32_t, Transaction> transactions;  // by address
  std::map<int, Barrier> named;
  int votes = 0, voters = 0;  // of __syncthreads_count and its like
  int spare = 0;         // registers that warps have given up
  Barrier given_up{0};   // turns with each time that they do
};

struct Lane {  // what a lane brings to its warp's instruction, and takes from it
  const void* instruction;
  uint32_t in[10], out[4];
  int from;
};

struct Meeting {  // of lanes in an instruction that they do together
  Barrier barrier{32};
  const void* instruction = nullptr;
  std::function<void(Lane*)> work;
};

struct Warp {
  uint32_t live = ~0u;                           // lanes that have not ended
  std::map<uint32_t, Meeting> meetings;          // by the lanes that take part
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
  std::unique_ptr<char[]> stack;  // not cleared: pages that no thread uses are not there
  size_t stack_bytes = 0;         // libraries of one process share the fibers, also those with and without races
  bool started, done;
  int number = 0;          // in its CTA
  void* at = nullptr;      // where its code called what it does with others
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

inline size_t static_bytes = 0;  // of static shared memory in each CTA, for sources that `gdn run --emulate` has read

inline dim grid, block;
inline int registers = 0;  // per thread at launch; warps may exchange some later
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<Cta> ctas;  // of the running cluster
inline Barrier cluster_barrier{0};
inline Fiber* me;
inline jmp_buf scheduler;
inline int first_lane() { return me->number / 32 * 32; }  // of the running warp
inline bool turn_over = false;  // of the warp that runs
inline std::function<void()> body;

__attribute__((noinline)) inline void yield() {
  const int kept = races::set_aside();
  races::switch_to(-1);
  if (_setjmp(me->here) == 0) _longjmp(scheduler, 1);
  races::switch_to(me->number);
  races::set_back(kept);
}

// "thread 3 of block (0, 0, 0)", and where code is, in the form that gdn turns into a file and a line.
inline std::string here() {
  const auto three = [](dim d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
  };
  return "thread " + (block.y * block.z > 1 ? three(me->thread) : std::to_string(me->number)) + " of block " + three(me->block);
}
inline std::string place(const void* code) {
  Dl_info library{};
  if (!code || !dladdr(code, &library)) return "";
  std::ostringstream text;
  text << library.dli_fname << "+0x" << std::hex
       << static_cast<const char*>(code) - static_cast<const char*>(library.dli_fbase) - 1;  // the call is before where it returns to
  return text.str();
}
inline std::string failure;
[[noreturn]] inline void fail(const std::string& what) {
#ifdef EMULATED_THROWS
  if (!me) throw std::runtime_error("emulated: " + what);
  failure = "emulated: " + what;  // thrown where the launch is: no exception leaves a fiber
  races::switch_to(-1);
  _longjmp(scheduler, 1);
#else
  std::fprintf(stderr, "emulated: %s\n", what.c_str());
  std::abort();
#endif
}

// What the lanes do together, once all are there that have not ended.
template <typename Work>
void hold(Warp& warp, uint32_t lanes, Meeting& meeting, const Work& work) {
  const races::Ignored own;
  for (int i = 0; i < 32; ++i)
    if (!(lanes & warp.live & 1u << i)) warp.lanes[i].in[0] = 0, warp.lanes[i].from = i;
  work(warp.lanes);
  meeting.barrier.arrived = 0, ++meeting.barrier.generation;
}

// On a GPU an access to a CTA that has ended is an "unspecified launch failure" and the end of the context. It may arrive
// late, even if its thread ran long before: so it must have been waited for in that CTA, or be released to the cluster.
inline void end_thread() {
  me->done = true;
  Barrier& all = me->cta->barrier;  // on a GPU, too, a thread that has ended keeps no other from going on
  if (--me->cta->running == 0 && me->cta->under_way) fail("a CTA that ends while accesses to it are under way");
  if (--all.expected == all.arrived && all.arrived) all.arrived = 0, ++all.generation;
  Warp& warp = *me->warp;
  warp.live &= ~(1u << me->lane);
  for (auto& [lanes, meeting] : warp.meetings)
    if (meeting.barrier.arrived && meeting.barrier.arrived == __builtin_popcount(lanes & warp.live))
      hold(warp, lanes, meeting, meeting.work);
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
  if (_setjmp(scheduler) != 0) {
    if (!failure.empty()) {
      me = nullptr;
      throw std::runtime_error(std::exchange(failure, {}));
    }
    return;
  }
  if (me->started) _longjmp(me->here, 1);
  me->started = true;
  races::switch_to(me->number);
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
// `orders`: the lanes' accesses to memory, as __syncwarp does. `mask`: the lanes that take part.
template <typename Work>
Lane& together(const void* instruction, const Work& work, bool orders = false, uint32_t mask = ~0u) {
  Warp& warp = *me->warp;
  if (!(mask >> me->lane & 1)) fail("a lane that is not in the mask of its own instruction");
  Meeting& meeting = warp.meetings[mask];
  Barrier& barrier = meeting.barrier;
  if (barrier.arrived == 0) meeting.instruction = instruction, meeting.work = work;
  else if (meeting.instruction != instruction) fail("lanes of a warp meet in different instructions");
  const unsigned generation = barrier.generation;
  if (orders) races::release(&barrier, generation);
  if (++barrier.arrived == __builtin_popcount(mask & warp.live)) hold(warp, mask, meeting, work);
  wait_only(barrier, generation);
  if (orders) races::acquire(&barrier, generation);
  return warp.lanes[me->lane];
}

inline uint32_t exchange(uint32_t value, int from, uint32_t mask = ~0u) {
  static const char tag = 0;
  Lane& mine = me->warp->lanes[me->lane];
  mine.in[0] = value, mine.from = from;
  return together(&tag, [](Lane* lanes) {
    for (int i = 0; i < 32; ++i) lanes[i].out[0] = lanes[lanes[i].from & 31].in[0];
  }, false, mask).out[0];
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
  size_t left = 0;
  for (const auto& fiber : fibers) left += !fiber->done;
  while (left > 0) {
    bool any = false;
    for (int i = 0; i < warps; ++i) {
      const int warp = mode & REVERSED ? warps - 1 - i : i;
      if (!held_back(warp)) any |= run_warp(warp, left);
    }
    for (int warp = 0; warp < warps && !any; ++warp)
      if (held_back(warp)) any = run_warp(warp, left);
    if (!any) {
      me = nullptr;
      for (const auto& fiber : fibers)
        if (!me && fiber->waits && fiber->waits->generation == fiber->generation) me = fiber.get();
      const std::string who = me ? ": " + here() + " waits, " + place(me->at) : "";
      me = nullptr;
      fail("a barrier that not all threads reach" + who);
    }
  }
}

// Runs `kernel` for every thread of the grid, cluster after cluster; a cluster is `cluster` CTAs that differ in x. Of
// the clusters, by their first CTA, those that `wanted` takes.
inline void launch(dim grid_, dim block_, size_t shared, uint32_t cluster, const std::function<void()>& kernel,
                   const std::function<bool(dim)>& wanted = [](dim) { return true; }) {
  grid = grid_, block = block_, body = kernel;
  const uint32_t threads = block.x * block.y * block.z, places = (threads + 31) / 32 * 32;  // of whole warps
  const size_t behind = (shared + GUARD + 127) / 128 * 128;  // where static shared memory begins
  ctas.resize(cluster);
  std::vector<Warp> warps(cluster * places / 32);
  while (fibers.size() < cluster * places) fibers.push_back(std::make_unique<Fiber>());
  fibers.resize(cluster * places);
  for (uint32_t z = 0; z < grid.z; ++z)
    for (uint32_t y = 0; y < grid.y; ++y)
      for (uint32_t x = 0; x < grid.x; x += cluster) {
        if (!wanted({x, y, z})) continue;
        cluster_barrier = {static_cast<int>(cluster * threads)};
        for (Warp& warp : warps) warp.live = ~0u, warp.meetings.clear(), warp.products.assign(1, {}), warp.held.clear();
        for (Warp& warp : warps) warp.left.clear(), warp.open = false, warp.registers = registers;
        for (Cta& cta : ctas) {
          cta.memory.assign(behind + static_bytes + 128, '\xff');  // NaN in every format
          cta.base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(cta.memory.data()) + 127) / 128 * 128);
          cta.bytes = shared, cta.running = static_cast<int>(threads), cta.under_way = 0;
          cta.barrier = {static_cast<int>(threads)};
          cta.transactions.clear(), cta.named.clear(), cta.spare = 0;
          cta.statics.clear(), cta.used = behind;
        }
        for (uint32_t i = 0; i < cluster * places; ++i) {
          Fiber& f = *fibers[i];
          const uint32_t number = i % places;
          f.warp = &warps[i / 32], f.cta = &ctas[i / places];
          f.number = static_cast<int>(number), f.lane = static_cast<int>(i % 32);
          f.started = false, f.waits = nullptr, f.at = nullptr;
          if ((f.done = number >= threads)) {
            f.warp->live &= ~(1u << f.lane);
            continue;
          }
          if (f.stack_bytes < STACK) f.stack.reset(new char[STACK]), f.stack_bytes = STACK;
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = f.stack_bytes;
          f.context.uc_link = nullptr;
          makecontext(&f.context, enter, 0);
          f.thread = {number % block.x, number / block.x % block.y, number / block.x / block.y};
          f.block = {x + i / places, y, z};
          f.copies.assign(1, {}), f.reached.clear();
        }
        races::begin(ctas[0].base, cluster > 1 ? 0 : behind + static_bytes, behind, static_cast<int>(places));
        run_cluster();
        me = nullptr;
        for (const Cta& cta : ctas)
          for (size_t i = cta.bytes; i < behind; ++i)
            if (cta.base[i] != '\xff') fail("a write behind the end of shared memory");
      }
}
inline void launch(dim grid_, uint32_t threads, size_t shared, uint32_t cluster, const std::function<void()>& kernel,
                   const std::function<bool(dim)>& wanted = [](dim) { return true; }) {
  launch(grid_, dim{threads, 1, 1}, shared, cluster, kernel, wanted);
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
inline dim &blockDim = emulated::block, &gridDim = emulated::grid;  // no macros: cudaLaunchConfig_t has such members
constexpr int warpSize = 32;

// What threads do with others is not inlined: where it returns to is the kernel's own line.
#define EMULATED_CALL __attribute__((noinline)) inline
namespace emulated {
EMULATED_CALL void sync_threads(void* at) {
  me->at = at;
  wait(me->cta->barrier, arrive(me->cta->barrier));
}
}  // namespace emulated
EMULATED_CALL void __syncthreads() { emulated::sync_threads(__builtin_return_address(0)); }
EMULATED_CALL void __syncwarp(uint32_t mask = ~0u) {
  static const char tag = 0;
  emulated::me->at = __builtin_return_address(0);
  emulated::together(&tag, [](emulated::Lane*) {}, true, mask);
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

// From another lane of the same `width`: the own value where there is none. Of 4 bytes, or 8 in two parts.
namespace emulated {
template <typename T>
T shuffled(uint32_t mask, T x, int from, void* at) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2, "a shuffle of 2, 4 or 8 bytes");
  me->at = at;
  uint32_t words[2] = {};
  std::memcpy(words, &x, sizeof x);
  for (size_t i = 0; i < (sizeof x + 3) / 4; ++i) words[i] = exchange(words[i], from, mask);
  std::memcpy(&x, words, sizeof x);
  return x;
}
inline int within(int from, int width) { return from / width == me->lane / width && from >= 0 ? from : me->lane; }
}  // namespace emulated
template <typename T>
EMULATED_CALL T __shfl_sync(uint32_t mask, T x, int from, int width = 32) {
  const int there = emulated::me->lane / width * width + (from & (width - 1));
  return emulated::shuffled(mask, x, there, __builtin_return_address(0));
}
#define EMULATED_SHUFFLE(name, there)                                                                          \
  template <typename T>                                                                                        \
  EMULATED_CALL T name(uint32_t mask, T x, int by, int width = 32) {                                           \
    const int lane = emulated::me->lane;                                                                       \
    return emulated::shuffled(mask, x, emulated::within(there, width), __builtin_return_address(0));           \
  }
EMULATED_SHUFFLE(__shfl_xor_sync, lane ^ by)
EMULATED_SHUFFLE(__shfl_up_sync, lane - by)
EMULATED_SHUFFLE(__shfl_down_sync, lane + by)

// Threads run one after the other, CTAs too. Each returns what was there before.
template <typename T, typename Next>
T atomically(T* p, void* at, const Next& next) {
  emulated::races::atomic(p, sizeof *p, at);
  const emulated::races::Ignored own;
  const T before = *p;
  *p = next(before);
  return before;
}
#define EMULATED_ATOMIC(name, T, after)                                                                \
  EMULATED_CALL T name(T* p, T x) {                                                                    \
    return atomically(p, __builtin_return_address(0), [=](T before) -> T { return after; });           \
  }
#define EMULATED_ATOMIC_INT(T)                                                                                 \
  EMULATED_ATOMIC(atomicAdd, T, before + x) EMULATED_ATOMIC(atomicExch, T, x)                                  \
  EMULATED_ATOMIC(atomicMax, T, x > before ? x : before) EMULATED_ATOMIC(atomicMin, T, x < before ? x : before) \
  EMULATED_ATOMIC(atomicAnd, T, before & x) EMULATED_ATOMIC(atomicOr, T, before | x)                           \
  EMULATED_ATOMIC(atomicXor, T, before ^ x) EMULATED_ATOMIC(atomicSub, T, before - x)                          \
  EMULATED_CALL T atomicCAS(T* p, T expected, T x) {                                                           \
    return atomically(p, __builtin_return_address(0), [=](T before) { return before == expected ? x : before; }); \
  }
EMULATED_ATOMIC_INT(int)
EMULATED_ATOMIC_INT(uint32_t)
EMULATED_ATOMIC_INT(unsigned long long)
EMULATED_ATOMIC(atomicAdd, float, before + x)
EMULATED_ATOMIC(atomicAdd, double, before + x)
EMULATED_ATOMIC(atomicExch, float, x)
EMULATED_CALL uint32_t __ballot_sync(uint32_t mask, bool x) {
  static const char tag = 0;
  emulated::me->at = __builtin_return_address(0);
  emulated::Lane& mine = emulated::me->warp->lanes[emulated::me->lane];
  mine.in[0] = x;
  return emulated::together(&tag, [](emulated::Lane* lanes) {
    uint32_t all = 0;
    for (int i = 0; i < 32; ++i) all |= lanes[i].in[0] << i;
    for (int i = 0; i < 32; ++i) lanes[i].out[0] = all;
  }, false, mask).out[0];
}
inline bool __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x); }
inline bool __all_sync(uint32_t mask, bool x) { return !__ballot_sync(mask, !x); }
inline uint32_t __activemask() { return emulated::me->warp->live; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }

// --- arithmetic: as C++ has it, so not with the errors of a GPU's approximations

inline float __logf(float x) { return std::log(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __exp10f(float x) { return std::pow(10.f, x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1. / std::sqrt(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(std::ceil(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(uint32_t x) { return static_cast<float>(x); }
inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<int64_t>(x) * y >> 32); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline uint32_t __brev(uint32_t x) {
  uint32_t y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
  return y;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t chosen) {
  const uint64_t all = static_cast<uint64_t>(y) << 32 | x;
  uint32_t z = 0;
  for (int i = 0; i < 4; ++i) z |= static_cast<uint32_t>(all >> (chosen >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return z;
}
inline uint32_t min(uint32_t x, uint32_t y) { return x < y ? x : y; }
inline uint32_t max(uint32_t x, uint32_t y) { return x > y ? x : y; }
inline int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t max(int64_t x, int64_t y) { return x > y ? x : y; }
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }

// --- memory: which cache a value is kept in is a matter of speed alone

#define EMULATED_LOAD(name) \
  template <typename T>     \
  T name(const T* p) { return *p; }
#define EMULATED_STORE(name) \
  template <typename T>      \
  void name(T* p, T x) { *p = x; }
EMULATED_LOAD(__ldcg) EMULATED_LOAD(__ldca) EMULATED_LOAD(__ldcs) EMULATED_LOAD(__ldlu) EMULATED_LOAD(__ldcv)
EMULATED_STORE(__stcg) EMULATED_STORE(__stwb) EMULATED_STORE(__stcs) EMULATED_STORE(__stwt)
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(uint32_t) { emulated::end_turn(); }
inline long long clock64() { return 0; }
inline void __trap() { emulated::fail("__trap() was called"); }
inline size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<size_t>(static_cast<const char*>(p) - emulated::me->cta->base) + emulated::FIRST_ADDRESS;
}
template <typename Get>
int emulated_count(bool x, void* at, const Get& get) {
  emulated::Cta& cta = *emulated::me->cta;
  emulated::sync_threads(at);
  cta.votes += x, ++cta.voters;
  emulated::sync_threads(at);
  const int result = get(cta.votes, cta.voters);
  emulated::sync_threads(at);
  cta.votes = cta.voters = 0;
  return result;
}
EMULATED_CALL int __syncthreads_count(int x) {
  return emulated_count(x, __builtin_return_address(0), [](int votes, int) { return votes; });
}
EMULATED_CALL int __syncthreads_or(int x) {
  return emulated_count(x, __builtin_return_address(0), [](int votes, int) { return votes > 0; });
}
EMULATED_CALL int __syncthreads_and(int x) {
  return emulated_count(x, __builtin_return_address(0), [](int votes, int voters) { return votes == voters; });
}
