// _cuda/ptx/cluster.cuh without PTX, for the CPU of cuda_runtime.h.
#pragma once

#include "cuda_runtime.h"

namespace flashcore {

template <typename T>
T* peer(T* p, int rank) {
  emulated::Cta& there = emulated::ctas.at(rank);
  if (there.running == 0) emulated::fail("a peer that has ended");
  ++there.under_way;
  emulated::me->reached.push_back(&there);
  return reinterpret_cast<T*>(there.base + (reinterpret_cast<char*>(p) - emulated::me->cta->base));
}

inline void cluster_arrive_only() { emulated::me->cluster_generation = emulated::arrive(emulated::cluster_barrier); }
inline void cluster_arrive() {
  for (emulated::Cta* there : emulated::me->reached) --there->under_way;
  emulated::me->reached.clear();
  cluster_arrive_only();
}
inline void cluster_wait() { emulated::wait(emulated::cluster_barrier, emulated::me->cluster_generation); }

}  // namespace flashcore
