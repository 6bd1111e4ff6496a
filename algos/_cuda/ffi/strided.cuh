// Checks of tensors of which the first axes may be strided: rows of a wider tensor, slots of a pool that lie apart.
#pragma once

#include "tensor.cuh"

namespace gdn {

// The pointer of a tensor whose first LEADING axes may have any strides that are multiples of `align` bytes; the others are
// dense. strides[LEADING], of elements. Throws ValueError if the tensor is different.
template <typename T, int LEADING = 1>
T* strided(const ffi::TensorView& t, const char* name, DLDataType dtype, std::initializer_list<int64_t> shape,
           DLDevice device, size_t align, int64_t* strides) {
  bool same = t.ndim() == static_cast<int>(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) same = t.shape()[i] == shape.begin()[i];
  if (t.dtype() != dtype || !same) {
    TVM_FFI_THROW(ValueError) << name << ": expected " << ffi::DLDataTypeToString(dtype) << ' ' << ffi::ShapeView(shape)
                              << ", got " << ffi::DLDataTypeToString(t.dtype()) << ' ' << t.shape();
  }
  if (t.device().device_type != device.device_type || t.device().device_id != device.device_id) {
    TVM_FFI_THROW(ValueError) << name << ": expected on the device of pool";
  }
  char* p = static_cast<char*>(t.data_ptr()) + t.byte_offset();
  bool aligned = reinterpret_cast<uintptr_t>(p) % align == 0;
  int64_t dense = 1;
  for (int i = t.ndim() - 1; i >= 0; --i) {
    if (i < LEADING) {
      strides[i] = t.size(i) == 1 ? dense : t.stride(i);
      aligned = aligned && strides[i] * (dtype.bits / 8) % static_cast<int64_t>(align) == 0;
    } else if (t.size(i) != 1 && t.stride(i) != dense) {
      TVM_FFI_THROW(ValueError) << name << ": expected dense but for its first "
                                << (LEADING == 1 ? "axis" : "two axes") << "; call .contiguous() on it";
    }
    dense *= t.size(i);
  }
  if (!aligned) {
    TVM_FFI_THROW(ValueError) << name << ": expected rows aligned to " << align << " bytes; call .contiguous() on it";
  }
  return reinterpret_cast<T*>(p);
}

// int32 or int64 [B], dense; *shift is log2 of an element's bytes.
inline const void* slots_of(const ffi::TensorView& t, const char* name, int64_t B, DLDevice device, uint8_t* shift) {
  const DLDataType i32{kDLInt, 32, 1}, i64{kDLInt, 64, 1};
  *shift = t.dtype() == i64 ? 3 : 2;
  return data<const char>(t, name, t.dtype() == i64 ? i64 : i32, {B}, device, size_t{1} << *shift);
}

// int32 or int64 [B], with any stride that is not negative: a column of a table. *step is in bytes.
inline const void* strided_slots(const ffi::TensorView& t, const char* name, int64_t B, DLDevice device, uint32_t* step) {
  const DLDataType i32{kDLInt, 32, 1}, i64{kDLInt, 64, 1};
  int64_t stride;
  const bool wide = t.dtype() == i64;
  const void* at = strided<const char>(t, name, wide ? i64 : i32, {B}, device, wide ? 8 : 4, &stride);
  if (stride < 0 || stride >= int64_t{1} << 28) TVM_FFI_THROW(ValueError) << name << ": expected a smaller stride";
  *step = static_cast<uint32_t>(stride * (wide ? 8 : 4));
  return at;
}

// `heads` heads of WIDTH elements, from head `first` on, of packed rows [B, T, any heads * WIDTH], as [B, T, heads, WIDTH].
template <int WIDTH>
struct Heads {
  int64_t shape[4], strides[4];
  DLTensor tensor;

  Heads(const ffi::TensorView& rows, int64_t first, int64_t heads)
      : shape{rows.size(0), rows.size(1), heads, WIDTH},
        strides{rows.stride(0), rows.stride(1), WIDTH, rows.stride(2)},
        tensor{rows.data_ptr(), rows.device(), 4, rows.dtype(), shape, strides,
               rows.byte_offset() + static_cast<uint64_t>(first * WIDTH * rows.dtype().bits / 8)} {}
  Heads(const Heads&) = delete;  // the tensor points into it
  operator ffi::TensorView() const { return ffi::TensorView(&tensor); }
};

}  // namespace gdn
