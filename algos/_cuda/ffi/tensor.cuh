// Checks of a tensor before its pointer is used, for every compiled rung.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <initializer_list>

namespace gdn {

namespace ffi = tvm::ffi;

// Required alignment on a GPU, in bytes, of what wide loads, cp.async or TMA read or write. What a kernel reads one
// element at a time needs no more than an element's.
constexpr size_t ALIGNMENT = 16;

// The pointer of a contiguous tensor of this dtype and shape on this device. It is aligned to its element, and on a GPU to
// `align` bytes. Throws ValueError if the tensor is different.
template <typename T>
T* data(const ffi::TensorView& t, const char* name, DLDataType dtype, std::initializer_list<int64_t> shape,
        DLDevice device, size_t align = 1) {
  if (t.dtype() != dtype) {
    TVM_FFI_THROW(ValueError) << name << ": expected " << ffi::DLDataTypeToString(dtype) << ", got "
                              << ffi::DLDataTypeToString(t.dtype());
  }
  bool same = t.ndim() == static_cast<int>(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) same = t.shape()[i] == shape.begin()[i];
  if (!same) TVM_FFI_THROW(ValueError) << name << ": expected shape " << ffi::ShapeView(shape) << ", got " << t.shape();
  if (t.device().device_type != device.device_type || t.device().device_id != device.device_id) {
    TVM_FFI_THROW(ValueError) << name << ": expected on the device of state";
  }
  if (!t.IsContiguous()) TVM_FFI_THROW(ValueError) << name << ": expected contiguous; call .contiguous() on it";
  char* p = static_cast<char*>(t.data_ptr()) + t.byte_offset();
  const size_t element = dtype.bits / 8;
  if (device.device_type == kDLCPU || align < element) align = element;
  if (reinterpret_cast<uintptr_t>(p) % align) {
    TVM_FFI_THROW(ValueError) << name << ": expected a pointer aligned to " << align << " bytes; call .clone() on it";
  }
  return reinterpret_cast<T*>(p);
}

// [1, total, ...], as engines give the tokens of all sequences, as [total, ...]: a tensor of `axes` axes. Others unchanged.
inline ffi::TensorView flat(const ffi::TensorView& t, int axes) {
  if (t.ndim() != axes + 1 || t.size(0) != 1) return t;
  const DLTensor inner{t.data_ptr(), t.device(), axes, t.dtype(), const_cast<int64_t*>(t.shape().data()) + 1,
                       const_cast<int64_t*>(t.strides().data()) + 1, t.byte_offset()};
  return ffi::TensorView(&inner);
}

}  // namespace gdn
