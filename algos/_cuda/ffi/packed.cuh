// Packed rows of q, k and v, as engines have them after their convolution.
#pragma once

#include "strided.cuh"

namespace gdn {

// Packed rows [B, T, 2 H WIDTH + HV WIDTH] or [total, ..] of bfloat16 as q, k and v; [total, ..] as [1, total, ..]. Throws ValueError if
// they are different.
template <int WIDTH>
struct Packed {
 private:
  int64_t shape[3], strides[3];
  DLTensor rows;

  // `axis` of the rows [B, T, columns].
  static int64_t size(const ffi::TensorView& t, int axis) { return t.ndim() == 3 ? t.size(axis) : axis == 0 ? 1 : t.size(axis - 1); }
  static int64_t stride(const ffi::TensorView& t, int axis) {
    return t.ndim() == 3 ? t.stride(axis) : axis == 0 ? t.size(0) * t.stride(0) : t.stride(axis - 1);
  }
  static int64_t heads(const ffi::TensorView& mixed_qkv, const ffi::TensorView& pool, size_t align) {
    const int axes = mixed_qkv.ndim();
    if ((axes != 2 && axes != 3) || pool.ndim() != 4) TVM_FFI_THROW(ValueError) << "expected mixed_qkv of 2 or 3 axes, pool of 4";
    const int64_t width = mixed_qkv.size(-1), HV = pool.size(1), H = (width - HV * WIDTH) / (2 * WIDTH);
    if (HV < 1 || H < 1 || (2 * H + HV) * WIDTH != width || HV % H) {
      TVM_FFI_THROW(ValueError) << "mixed_qkv: " << width << " columns are not (2 H + HV) " << WIDTH << " with HV = " << HV
                                << ", a multiple of H";
    }
    // here, where it has its own name: the call knows its parts alone
    const DLDataType bf16{kDLBfloat, 16, 1};
    int64_t strides[2];
    if (axes == 2) strided<const char>(mixed_qkv, "mixed_qkv", bf16, {mixed_qkv.size(0), width}, pool.device(), align, strides);
    else strided<const char, 2>(mixed_qkv, "mixed_qkv", bf16, {mixed_qkv.size(0), mixed_qkv.size(1), width}, pool.device(), align, strides);
    return H;
  }

 public:
  Heads<WIDTH> q, k, v;

  // align: of rows, in bytes
  Packed(const ffi::TensorView& mixed_qkv, const ffi::TensorView& pool, size_t align)
      : Packed(mixed_qkv, heads(mixed_qkv, pool, align), pool.size(1)) {}
  Packed(const ffi::TensorView& t, int64_t H, int64_t HV)
      : shape{size(t, 0), size(t, 1), size(t, 2)},
        strides{stride(t, 0), stride(t, 1), stride(t, 2)},
        rows{t.data_ptr(), t.device(), 3, t.dtype(), shape, strides, t.byte_offset()},
        q(ffi::TensorView(&rows), 0, H), k(ffi::TensorView(&rows), H, H), v(ffi::TensorView(&rows), 2 * H, HV) {}
};

}  // namespace gdn
