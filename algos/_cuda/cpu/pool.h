// A small persistent thread pool: the caller works too, idle workers spin briefly and then sleep.
//
// A job is `total` chunks. Each thread has a share of neighbouring ones, the same at every call, so that a small state
// stays in the caches of the same CPUs; it takes them one by one and then takes chunks from other shares. A worker
// that wakes too late finds none left, and the caller waits only for chunks that a worker has taken: a job of a few
// microseconds never waits for a sleeping thread.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

namespace gdn {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// GDN_THREADS, else OMP_NUM_THREADS, else the CPUs this process may run on.
inline int thread_count() {
  for (const char* name : {"GDN_THREADS", "OMP_NUM_THREADS"}) {
    const char* text = std::getenv(name);
    const long n = text ? std::strtol(text, nullptr, 10) : 0;  // OpenMP allows "4,2": use the 4
    if (n > 0) return static_cast<int>(std::min(n, 1024L));
  }
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

class Pool {
 public:
  using Fn = void (*)(const void* job, int64_t chunk);

  // Made at the first call and never destroyed: workers may outlive main's statics. A forked child has no workers, so
  // it makes its own pool. The thread count is read once, then.
  static Pool& get() {
    static std::mutex mutex;
    static std::atomic<Pool*> pool{nullptr};
    Pool* p = pool.load(std::memory_order_acquire);
    if (p && p->pid_ == getpid()) return *p;
    std::lock_guard<std::mutex> lock(mutex);
    p = pool.load(std::memory_order_acquire);
    if (!p || p->pid_ != getpid()) pool.store(p = new Pool(thread_count()), std::memory_order_release);
    return *p;
  }

  int threads() const { return workers_ + 1; }

  void run(int64_t total, Fn fn, const void* job) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);  // two callers at once: the second one works alone
    if (workers_ == 0 || total < 2 || !lock.owns_lock()) {
      for (int64_t i = 0; i < total; ++i) fn(job, i);
      return;
    }
    fn_ = fn, job_ = job, total_ = total;
    done_.store(0, std::memory_order_relaxed);
    for (int t = 0; t < threads(); ++t) {  // from here on workers may take chunks
      shares_[t].left.store(first(t + 1) - first(t), std::memory_order_release);
    }
    epoch_.fetch_add(1);
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> sleep(sleep_);
      wake_.notify_all();
    }
    const int64_t mine = work(0);
    for (int spins = 0; done_.load(std::memory_order_acquire) + mine < total; ++spins) {
      if (spins < 2000) relax();
      else std::this_thread::yield();  // a worker lost its CPU in the middle of a chunk
    }
  }

 private:
  explicit Pool(int threads) : pid_(getpid()), shares_(new Share[threads]) {
    // Keep this library mapped, since workers run in it and the program may unload it at any time.
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(&thread_count), &info) && info.dli_fname) {
      dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    }
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // workers inherit this: signals are for the program's own threads
    try {
      for (int t = 1; t < threads; ++t, ++workers_) std::thread([this, t] { serve(t); }).detach();
    } catch (const std::system_error&) {
      // a limit on threads: continue with those that exist
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  int64_t first(int t) const { return total_ * t / threads(); }  // the first chunk of a thread's share

  // Takes chunks until none is left; returns how many it took. fn_, job_ and total_ are read only while a chunk is
  // held: the job cannot end, and so they cannot change, before that chunk is reported.
  int64_t work(int self) {
    int64_t n = 0;
    for (int i = 0; i < threads(); ++i) {
      const int t = (self + i) % threads();
      std::atomic<int64_t>& left = shares_[t].left;
      if (left.load(std::memory_order_relaxed) <= 0) continue;
      for (int64_t x; (x = left.fetch_sub(1, std::memory_order_acq_rel)) > 0; ++n) fn_(job_, first(t + 1) - x);
    }
    return n;
  }

  void serve(int self) {
    using clock = std::chrono::steady_clock;
    for (uint32_t seen = 0;;) {
      const auto until = clock::now() + std::chrono::microseconds(SPIN_US);
      for (int i = 1; epoch_.load(std::memory_order_acquire) == seen; ++i) {
        relax();
        if (i % 32 == 0 && clock::now() > until) {
          std::unique_lock<std::mutex> lock(sleep_);
          asleep_.fetch_add(1);
          wake_.wait(lock, [&] { return epoch_.load() != seen; });
          asleep_.fetch_sub(1);
          break;
        }
      }
      seen = epoch_.load();
      if (const int64_t n = work(self)) done_.fetch_add(n, std::memory_order_release);
    }
  }

  static constexpr int SPIN_US = 50;  // see algo.toml
  struct alignas(64) Share { std::atomic<int64_t> left{0}; };
  const pid_t pid_;
  Share* const shares_;
  int workers_ = 0;
  std::mutex busy_, sleep_;
  std::condition_variable wake_;
  Fn fn_ = nullptr;
  const void* job_ = nullptr;
  int64_t total_ = 0;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> asleep_{0};
};

}  // namespace gdn
