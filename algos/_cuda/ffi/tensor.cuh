// Checks of a tensor before its pointer is used, for every compiled rung.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <initializer_list>

namespace gdn {

namespace ffi = tvm::ffi;

// Required alignment on a GPU, in bytes, for wide loads and TMA. gdn_cli.load requires the same.
constexpr size_t ALIGNMENT = 16;

// The pointer of a contiguous tensor of this dtype and shape on this device, aligned to `align` bytes (on a CPU to its element).
// Throws ValueError if the tensor is different.
template <typename T>
T* data(const ffi::TensorView& t, const char* name, DLDataType dtype, std::initializer_list<int64_t> shape,
        DLDevice device, size_t align = ALIGNMENT) {
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
  if (device.device_type == kDLCPU) align = dtype.bits / 8;
  if (reinterpret_cast<uintptr_t>(p) % align) {
    TVM_FFI_THROW(ValueError) << name << ": expected a pointer aligned to " << align << " bytes; call .clone() on it";
  }
  return reinterpret_cast<T*>(p);
}

// The pointer of a tensor whose first axis may have any stride that is a multiple of `align` bytes; the others are dense.
template <typename T>
T* strided(const ffi::TensorView& t, const char* name, DLDataType dtype, std::initializer_list<int64_t> shape,
           DLDevice device, size_t align, int64_t* stride) {
  bool same = t.ndim() == static_cast<int>(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) same = t.shape()[i] == shape.begin()[i];
  if (t.dtype() != dtype || !same) {
    TVM_FFI_THROW(ValueError) << name << ": expected " << ffi::DLDataTypeToString(dtype) << ' ' << ffi::ShapeView(shape)
                              << ", got " << ffi::DLDataTypeToString(t.dtype()) << ' ' << t.shape();
  }
  if (t.device().device_type != device.device_type || t.device().device_id != device.device_id) {
    TVM_FFI_THROW(ValueError) << name << ": expected on the device of pool";
  }
  int64_t dense = 1;
  for (int i = t.ndim() - 1; i > 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != dense) {
      TVM_FFI_THROW(ValueError) << name << ": expected dense but for its first axis; call .contiguous() on it";
    }
    dense *= t.size(i);
  }
  *stride = t.size(0) == 1 ? dense : t.stride(0);
  char* p = static_cast<char*>(t.data_ptr()) + t.byte_offset();
  if (reinterpret_cast<uintptr_t>(p) % align || *stride * (dtype.bits / 8) % static_cast<int64_t>(align)) {
    TVM_FFI_THROW(ValueError) << name << ": expected rows aligned to " << align << " bytes; call .contiguous() on it";
  }
  return reinterpret_cast<T*>(p);
}

}  // namespace gdn
