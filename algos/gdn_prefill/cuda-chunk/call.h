// A call as the binding (binding.cpp) has checked it, for kernel.cu, which chooses the way. Here are neither CUDA's headers nor the
// binding's: those two together take a compiler longer than any kernel.
#pragma once

#include <cstdint>
#include <functional>

#pragma GCC visibility push(hidden)  // a process may have several builds of this library
namespace gdn {

struct Call {  // see chunk.cuh's Prefill
  const void *q, *k, *v, *state, *A_log, *a, *dt_bias, *b;
  const int64_t* cu_seqlens;
  void *output, *new_state;
  float scale;
  int H, HV, N;
  int64_t T;
  int device;
  void* stream;  // a cudaStream_t
};

// Memory of the device until the call's launches are queued, by the binding, which knows the caller's allocator.
using Allocate = std::function<void*(int64_t bytes)>;

void prefill(const Call& call, const Allocate& allocate);

}  // namespace gdn
#pragma GCC visibility pop
