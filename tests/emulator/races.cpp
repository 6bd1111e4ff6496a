// A detector of races in the shared memory of one CTA at a time, behind the calls that a compiler inserts with -fsanitize=thread.
// Each thread, asynchronous copy and product has a vector clock; two accesses of which one writes race if neither is before the
// other. All readers of a word are kept, so what it finds does not depend on the order in which threads happen to run. Compiled
// without -fsanitize=thread and not linked with its run-time library.
#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
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
};
enum How { READ, WRITE, ATOMIC };
constexpr size_t WORD = 2;  // the smallest number that kernels here store

std::vector<Word> words;
std::vector<Clock> clocks;
std::map<std::pair<const void*, unsigned>, Clock> barriers;
std::set<std::pair<uintptr_t, uintptr_t>> found;  // the code of two accesses that raced, the earlier one first
uintptr_t first = 0, last = 0;
int me = -1, ignored = 0;
long checked = 0;

uint32_t time_of(const Clock& clock, int thread) { return size_t(thread) < clock.size() ? clock[thread] : 0; }
void merge(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}
void check(const Access& before, const Access& now) {
  if (before.thread < 0 || before.thread == now.thread) return;
  ++checked;
  if (before.time > time_of(clocks[now.thread], before.thread)) found.insert({before.code, now.code});
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
    check(word.write, now);
    if (how != READ)
      for (const Access& read : word.reads) check(read, now);
    if (how != ATOMIC)
      for (const Access& atomic : word.atomics) check(atomic, now);
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

void begin(char* memory, size_t bytes, int threads) {
  first = reinterpret_cast<uintptr_t>(memory), last = first + bytes;
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

void access(const void* p, size_t bytes, bool write, int thread) {
  touch(p, bytes, write ? WRITE : READ, thread < 0 ? me : thread, __builtin_return_address(0));
}
void atomic(const void* p, size_t bytes) { touch(p, bytes, ATOMIC, me, __builtin_return_address(0)); }

int set_aside() { return std::exchange(ignored, 0); }
void set_back(int before) { ignored = before; }
As::As(int who) : before(me) { me = who, ++ignored; }
As::~As() { me = before, --ignored; }
Ignored::Ignored() { ++ignored; }
Ignored::~Ignored() { --ignored; }

}  // namespace emulated::races

// Up to `size` pairs of accesses that raced: where in the library's file their calls are. Returns how many, and begins anew.
extern "C" int races(uintptr_t (*pairs)[2], int size, long* checks) {
  Dl_info library{};
  dladdr(reinterpret_cast<void*>(&races), &library);
  const uintptr_t before = reinterpret_cast<uintptr_t>(library.dli_fbase) + 1;  // the call is before where it returns to
  int n = 0;
  for (const auto& [earlier, later] : found)
    if (n++ < size) pairs[n - 1][0] = earlier - before, pairs[n - 1][1] = later - before;
  *checks = std::exchange(checked, 0), found.clear();
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
char __tsan_atomic8_load(const volatile char* p, int) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
}
