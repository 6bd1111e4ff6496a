// A tensor of three axes, the last two the other way round.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <cstdint>

namespace gdn {

namespace ffi = tvm::ffi;

// [slots, 3, channels] as [slots, channels, 3].
struct Transposed {
  int64_t shape[3], strides[3];
  DLTensor tensor;
  explicit Transposed(const ffi::TensorView& t)
      : shape{t.size(0), t.size(2), t.size(1)},
        strides{t.stride(0), t.stride(2), t.stride(1)},
        tensor{t.data_ptr(), t.device(), 3, t.dtype(), shape, strides, t.byte_offset()} {}
  Transposed(const Transposed&) = delete;  // the tensor points into it
};

}  // namespace gdn
