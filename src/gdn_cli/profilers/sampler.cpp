// Samples of the program counter by CPU time, where there is no perf: the kernel sends SIGPROF to the thread whose time
// it counts, at each tick of each CPU at most, and the handler notes where that thread was.
//
// Preloaded, because a thread that blocks SIGPROF is not seen (its ticks would go to another one): pools block every
// signal in their threads, and here they get all of them but this one.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace {

uint64_t* samples;
size_t room;
std::atomic<size_t> taken;

void take(int, siginfo_t*, void* context) {
  const mcontext_t& at = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  const uint64_t pc = at.gregs[REG_RIP];
#elif defined(__aarch64__)
  const uint64_t pc = at.pc;
#else
#error "where is the program counter?"
#endif
  const size_t i = taken.fetch_add(1, std::memory_order_relaxed);
  if (i < room) samples[i] = pc;
}

void every(long us) {
  const timeval period{us / 1000000, us % 1000000};
  const itimerval timer{period, period};
  setitimer(ITIMER_PROF, &timer, nullptr);
}

}  // namespace

extern "C" int pthread_sigmask(int how, const sigset_t* set, sigset_t* old) {
  using Fn = int (*)(int, const sigset_t*, sigset_t*);
  static const Fn next = reinterpret_cast<Fn>(dlsym(RTLD_NEXT, "pthread_sigmask"));
  sigset_t without;
  if (set && how != SIG_UNBLOCK) {
    without = *set;
    sigdelset(&without, SIGPROF);
    set = &without;
  }
  return next(how, set, old);
}

// Samples go into `buffer`, which has room for n, every `us` microseconds of CPU time.
extern "C" int gdn_sampler_start(uint64_t* buffer, size_t n, long us) {
  samples = buffer, room = n, taken = 0;
  struct sigaction action {};
  action.sa_sigaction = take;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigfillset(&action.sa_mask);
  const int failed = sigaction(SIGPROF, &action, nullptr);
  if (!failed) every(us);
  return failed;
}

// Returns how many samples there were, more than n where the buffer was too small. The handler stays: a last signal may
// be on its way, and without one it would end the process.
extern "C" size_t gdn_sampler_stop() {
  every(0);
  room = 0;
  return taken;
}
