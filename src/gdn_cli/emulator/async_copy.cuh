// _cuda/ptx/async_copy.cuh without PTX, for the CPU of cuda_runtime.h.
#pragma once

#include "cuda_runtime.h"

namespace ptx {

// The 16 bytes at an address of this CTA's shared memory.
inline char* at(uint32_t address) {
  const uint32_t offset = address - emulated::FIRST_ADDRESS;
  if (offset % 16 || offset + 16 > emulated::me->cta->bytes) emulated::fail("an address outside of shared memory, or odd");
  return emulated::me->cta->base + offset;
}

inline void copy16(uint32_t to, const void* from, bool there) {
  emulated::ask({at(to), there ? from : nullptr});
}
template <int BYTES>
void copy_async(void* to, const void* from) { emulated::ask({to, from, BYTES}); }
inline void commit_copies() { emulated::commit_copies(); }
template <int N>
void wait_for_copies() { emulated::wait_for_copies(N); }

}  // namespace ptx
