// A detector of races in the shared memory of one CTA at a time, behind the calls that a compiler inserts with -fsanitize=thread.
// Each thread, asynchronous copy and product has a vector clock; two accesses of which one writes race if neither is before the
// other. All readers of a word are kept, so what it finds does not depend on the order in which threads happen to run. Compiled
// without -fsanitize=thread and not linked with its run-time library.
#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

using Clock = std::vector<uint32_t>;
struct Access {
  int thread;
  uint32_t time;
  uintptr_t code;
};
struct Word {
  Access write{-1, 0, 0};
  std::vector<Access> reads, atomics;
  bool written = false;
};
enum How { READ, WRITE, ATOMIC };
#ifdef EMULATED_THROWS
constexpr size_t WORD = 1;
#else
constexpr size_t WORD = 2;  // the smallest number that kernels here store
#endif

std::vector<Word> words;
std::vector<Clock> clocks;
std::map<std::pair<const void*, unsigned>, Clock> barriers;
struct Example {
  int earlier, later;
  bool write, writes;
  size_t byte;
};
std::map<std::pair<uintptr_t, uintptr_t>, Example> found;  // by the code of two accesses that raced, the earlier one first
std::map<uintptr_t, Example> unwritten;  // by the code of a read of what nobody has written in this CTA
uintptr_t first = 0, last = 0, statics = 0;
int me = -1, ignored = 0;
long checked = 0;

uint32_t time_of(const Clock& clock, int thread) { return size_t(thread) < clock.size() ? clock[thread] : 0; }
void merge(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}
size_t byte_of(uintptr_t at) { return at - (at < statics ? first : statics); }
void check(const Access& before, bool write, const Access& now, bool writes, uintptr_t at) {
  if (before.thread < 0 || before.thread == now.thread) return;
  ++checked;
  if (before.time > time_of(clocks[now.thread], before.thread))
    found.insert({{before.code, now.code}, {before.thread, now.thread, write, writes, byte_of(at)}});
}
void put(std::vector<Access>& all, const Access& now) {
  for (Access& own : all)
    if (own.thread == now.thread) {
      own = now;
      return;
    }
  all.push_back(now);
}
void touch(const void* p, size_t bytes, How how, int thread, void* code) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  if (thread < 0 || at < first || at >= last) return;
  const Access now{thread, clocks[thread][thread], reinterpret_cast<uintptr_t>(code)};
  for (size_t i = (at - first) / WORD; i <= (at + bytes - 1 - first) / WORD; ++i) {
    Word& word = words[i];
    const uintptr_t byte = std::max(at, first + i * WORD);
    check(word.write, true, now, how != READ, byte);
    if (how != READ)
      for (const Access& read : word.reads) check(read, false, now, true, byte);
    if (how != ATOMIC)
      for (const Access& atomic : word.atomics) check(atomic, true, now, how != READ, byte);
    if (how != WRITE && !word.written) unwritten.insert({now.code, {thread, thread, false, false, byte_of(byte)}});
    word.written |= how != READ;
    if (how == READ) put(word.reads, now);
    else if (how == ATOMIC) put(word.atomics, now);
    else word.write = now, word.reads.clear(), word.atomics.clear();
  }
}
int another(Clock clock) {
  const int who = static_cast<int>(clocks.size());
  clock.resize(who + 1);
  clock[who] = 1;
  clocks.push_back(std::move(clock));
  return who;
}

}  // namespace

namespace emulated::races {

void begin(char* memory, size_t bytes, size_t behind, int threads) {
  first = reinterpret_cast<uintptr_t>(memory), last = first + bytes, statics = first + behind;
  words.assign(bytes / WORD + 1, {}), barriers.clear();
  clocks.assign(threads, Clock(threads));
  for (int i = 0; i < threads; ++i) clocks[i][i] = 1;
}
void switch_to(int thread) { me = thread; }

void release(const void* barrier, unsigned generation) {
  if (me < 0) return;
  merge(barriers[{barrier, generation}], clocks[me]);
  ++clocks[me][me];
}
void acquire(const void* barrier, unsigned generation) {
  const auto there = barriers.find({barrier, generation});
  if (me >= 0 && there != barriers.end()) merge(clocks[me], there->second);
}

int start() {
  Clock before = clocks[me];
  ++clocks[me][me];
  return another(std::move(before));
}
int start_of_warp(int lane0) {
  Clock before = clocks[lane0];
  for (int lane = lane0; lane < lane0 + 32; ++lane)
    for (size_t i = 0; i < before.size(); ++i) before[i] = std::min(before[i], time_of(clocks[lane], i));
  for (int lane = lane0; lane < lane0 + 32; ++lane) ++clocks[lane][lane];
  return another(std::move(before));
}
void end(int who) { merge(clocks[me], clocks[who]); }
void end_of_warp(int lane0, int who) {
  for (int lane = lane0; lane < lane0 + 32; ++lane) {
    Clock& clock = clocks[lane];
    if (clock.size() <= size_t(who)) clock.resize(who + 1);
    clock[who] = clocks[who][who];
  }
}

void access(const void* p, size_t bytes, bool write, int thread, void* code) {
  touch(p, bytes, write ? WRITE : READ, thread < 0 ? me : thread, code ? code : __builtin_return_address(0));
}
void atomic(const void* p, size_t bytes, void* code) { touch(p, bytes, ATOMIC, me, code); }

int set_aside() { return std::exchange(ignored, 0); }
void set_back(int before) { ignored = before; }
As::As(int who) : before(me) { me = who, ++ignored; }
As::~As() { me = before, --ignored; }
Ignored::Ignored() { ++ignored; }
Ignored::~Ignored() { --ignored; }

}  // namespace emulated::races

namespace emulated::races {

// A line for each pair that raced and each read of what nobody wrote since the last call. Code is in place()'s form.
std::string told(int threads, std::string (*place)(const void*)) {
  std::ostringstream lines;
  const auto who = [&](int thread) { return thread < threads ? std::to_string(thread) : std::string("(a copy)"); };
  lines << std::hex;
  for (const auto& [code, e] : found)
    lines << "race: threads " << who(e.earlier) << " and " << who(e.later) << (e.write ? " write" : " read")
          << (e.write == e.writes ? "" : e.writes ? " and write" : " and read") << " shared byte 0x" << e.byte
          << " without a barrier, " << place(reinterpret_cast<void*>(code.first)) << " and "
          << place(reinterpret_cast<void*>(code.second)) << "\n";
  for (const auto& [code, e] : unwritten)
    lines << "unwritten: thread " << who(e.later) << " reads shared byte 0x" << e.byte << ", which no thread has written, "
          << place(reinterpret_cast<void*>(code)) << "\n";
  found.clear(), unwritten.clear(), checked = 0;
  return lines.str();
}

}  // namespace emulated::races

// Up to `size` pairs of accesses that raced: where in the library's file their calls are. Returns how many, and begins anew.
extern "C" int races(uintptr_t (*pairs)[2], int size, long* checks) {
  Dl_info library{};
  dladdr(reinterpret_cast<void*>(&races), &library);
  const uintptr_t before = reinterpret_cast<uintptr_t>(library.dli_fbase) + 1;  // the call is before where it returns to
  int n = 0;
  for (const auto& [pair, example] : found)
    if (n++ < size) pairs[n - 1][0] = pair.first - before, pairs[n - 1][1] = pair.second - before;
  *checks = std::exchange(checked, 0), found.clear(), unwritten.clear();
  return n;
}

extern "C" {
#define ACCESS(name, how, bytes) \
  void name(void* p) { if (!ignored) touch(p, bytes, how, me, __builtin_return_address(0)); }
#define OF_SIZE(n) \
  ACCESS(__tsan_read##n, READ, n) ACCESS(__tsan_unaligned_read##n, READ, n) \
  ACCESS(__tsan_write##n, WRITE, n) ACCESS(__tsan_unaligned_write##n, WRITE, n)
OF_SIZE(1) OF_SIZE(2) OF_SIZE(4) OF_SIZE(8) OF_SIZE(16)
void __tsan_read_range(void* p, size_t n) { if (!ignored) touch(p, n, READ, me, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t n) { if (!ignored) touch(p, n, WRITE, me, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
#define OF_ATOMIC(n, T)                                                                                              \
  T __tsan_atomic##n##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }                \
  void __tsan_atomic##n##_store(volatile T* p, T x, int) { __atomic_store_n(p, x, __ATOMIC_SEQ_CST); }                \
  T __tsan_atomic##n##_exchange(volatile T* p, T x, int) { return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST); }      \
  T __tsan_atomic##n##_fetch_add(volatile T* p, T x, int) { return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST); }      \
  T __tsan_atomic##n##_fetch_sub(volatile T* p, T x, int) { return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST); }      \
  T __tsan_atomic##n##_fetch_and(volatile T* p, T x, int) { return __atomic_fetch_and(p, x, __ATOMIC_SEQ_CST); }      \
  T __tsan_atomic##n##_fetch_or(volatile T* p, T x, int) { return __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST); }        \
  T __tsan_atomic##n##_fetch_xor(volatile T* p, T x, int) { return __atomic_fetch_xor(p, x, __ATOMIC_SEQ_CST); }      \
  int __tsan_atomic##n##_compare_exchange_strong(volatile T* p, T* expected, T x, int, int) {                         \
    return __atomic_compare_exchange_n(p, expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                    \
  }                                                                                                                   \
  int __tsan_atomic##n##_compare_exchange_weak(volatile T* p, T* expected, T x, int a, int b) {                       \
    return __tsan_atomic##n##_compare_exchange_strong(p, expected, x, a, b);                                          \
  }
OF_ATOMIC(8, char) OF_ATOMIC(16, short) OF_ATOMIC(32, int) OF_ATOMIC(64, long)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  __tsan_read_range(const_cast<void*>(from), n), __tsan_write_range(to, n);
  return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  __tsan_read_range(const_cast<void*>(from), n), __tsan_write_range(to, n);
  return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int x, size_t n) {
  __tsan_write_range(to, n);
  return std::memset(to, x, n);
}
}
