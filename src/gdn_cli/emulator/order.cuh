// _cuda/ptx/order.cuh for the CPU of cuda_runtime.h: the order of instructions is a matter of speed alone.
#pragma once

#include "cuda_runtime.h"

namespace ptx {

template <int BYTES>
void load_now(uint32_t* w, const void* p) {
  if (BYTES == 2) w[0] = 0;
  std::memcpy(w, p, BYTES);
}
inline uint32_t load_now_if(bool there, const void* p) {
  uint32_t w = 0;
  if (there) load_now<4>(&w, p);
  return w;
}
inline void pin(const char*&) {}

}  // namespace ptx
