// Checks of tensors of which the first axes may be strided: rows of a wider tensor, slots of a pool that lie apart.
#pragma once

#include <algorithm>
#include <cfloat>
#include <utility>

#include <tvm/ffi/optional.h>

#include "tensor.cuh"

namespace gdn {

// The pointer of a tensor whose first LEADING axes may have any strides that are multiples of `align` bytes; the others are
// dense. An axis of one element has no stride: any is taken. strides[LEADING], of elements. Throws ValueError if the tensor
// is different.
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
                                << (LEADING == 1 ? "axis" : LEADING == 2 ? "two axes" : "three axes") << ", got strides " << t.strides()
                                << "; call .contiguous() on it";
    }
    dense *= t.size(i);
  }
  if (!aligned) {
    TVM_FFI_THROW(ValueError) << name << ": expected rows aligned to " << align << " bytes; call .clone() on it";
  }
  return reinterpret_cast<T*>(p);
}

// States [.., K, V] that a caller has as a view [.., V, K], with strides 1 and 128 at the end: as the tensor that their memory is. The
// shape is the same. All others unchanged.
struct StatesView {
  bool k_first;
  int64_t strides[8];
  DLTensor tensor;

  explicit StatesView(const ffi::TensorView& t)
      : k_first(t.ndim() > 1 && t.ndim() <= 8 && t.size(-1) == 128 && t.size(-2) == 128 && t.stride(-1) == 128 && t.stride(-2) == 1),
        tensor{t.data_ptr(), t.device(), t.ndim(), t.dtype(), const_cast<int64_t*>(t.shape().data()),
               const_cast<int64_t*>(t.strides().data()), t.byte_offset()} {
    if (!k_first) return;
    std::copy_n(tensor.strides, t.ndim(), strides);
    std::swap(strides[t.ndim() - 1], strides[t.ndim() - 2]);
    tensor.strides = strides;
  }
  StatesView(const StatesView&) = delete;  // the tensor points into it
  operator ffi::TensorView() const { return ffi::TensorView(&tensor); }
};

// A stride that a kernel takes in fewer bits than 64.
inline int64_t within(const char* name, int64_t stride, int64_t least, int64_t most) {
  if (stride < least || stride > most) {
    TVM_FFI_THROW(ValueError) << name << ": expected strides of " << least << " to " << most << " elements, got " << stride
                              << "; call .contiguous() on it";
  }
  return stride;
}

// The dtypes of a and b: that of the tokens before the gates; without A_log and dt_bias they are log g, in float32, and beta, in
// float32 or like the tokens.
struct GateTypes {
  DLDataType a, b;
  bool given = false;

  GateTypes(const ffi::Optional<ffi::TensorView>& A_log, const ffi::Optional<ffi::TensorView>& dt_bias, const ffi::TensorView& beta,
            DLDataType tokens = {kDLBfloat, 16, 1})
      : a(tokens), b(tokens), given(!A_log) {
    const DLDataType f32{kDLFloat, 32, 1};
    if (given == static_cast<bool>(dt_bias)) {
      TVM_FFI_THROW(ValueError) << "A_log and dt_bias: expected both, or neither: then a is log g, in float32, and b is beta";
    }
    if (given) a = f32;
    if (given && beta.dtype() == f32) b = f32;
  }
};

// int32 or int64 [B], dense; *shift is log2 of an element's bytes.
inline const void* slots_of(const ffi::TensorView& t, const char* name, int64_t B, DLDevice device, uint8_t* shift) {
  const DLDataType i32{kDLInt, 32, 1}, i64{kDLInt, 64, 1};
  *shift = t.dtype() == i64 ? 3 : 2;
  return data<const char>(t, name, t.dtype() == i64 ? i64 : i32, {B}, device, size_t{1} << *shift);
}

// int32 or int64 [B], with any stride that is not negative: a column of a table. *step is in bytes.
inline const void* strided_slots(const ffi::TensorView& t, const char* name, int64_t B, DLDevice device, uint32_t* step,
                                 bool* wide) {
  const DLDataType i32{kDLInt, 32, 1}, i64{kDLInt, 64, 1};
  int64_t stride;
  *wide = t.dtype() == i64;
  const void* at = strided<const char>(t, name, *wide ? i64 : i32, {B}, device, *wide ? 8 : 4, &stride);
  *step = static_cast<uint32_t>(within(name, stride, 0, (1 << 28) - 1) * (*wide ? 8 : 4));
  return at;
}

// A pool's number of slots, and the first one that is not padding, in a kernel's 32 bits. A kernel compares with both: a slot
// that the pool does not have is padding, too.
inline int32_t slots_end(const char* name, int64_t slots) {
  if (slots >= (int64_t{1} << 31) - 1) TVM_FFI_THROW(ValueError) << name << ": expected less than 2^31 - 1 slots";
  return static_cast<int32_t>(slots);
}
inline int32_t first_live(int64_t slot) { return static_cast<int32_t>(std::clamp<int64_t>(slot, 0, INT32_MAX)); }

// The bytes from a head's state to the next one's, for kernels that have 32 bits for an offset in a slot.
inline uint32_t head_bytes(const char* name, int64_t stride, int64_t heads, int64_t element) {
  constexpr int64_t STATE = 128 * 128;
  if (stride < 0 || stride > UINT32_MAX || ((heads - 1) * stride + STATE) * element > UINT32_MAX) {
    TVM_FFI_THROW(ValueError) << name << ": expected the " << heads << " heads of a slot within 4 GiB, got " << stride
                              << " elements from one to the next";
  }
  return static_cast<uint32_t>(stride * element);
}

// What is added below the root of a norm, in float; below 0: no norm. Never 0, so that a row of zeros stays one: it would
// be 0 x inf.
inline float under_root(double epsilon) {
  return epsilon < 0 ? -1.f : std::max(static_cast<float>(epsilon), FLT_MIN);
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
