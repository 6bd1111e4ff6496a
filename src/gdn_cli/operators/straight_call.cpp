// Repeated calls without Python and torch's dispatcher; straight_call.py says which calls may use it.
//
// straight(run) is a function of (learn, arguments...). With `learn` it remembers this kind of call. Without, it calls
// run(arguments...) and returns true if this kind of call is known; otherwise it does nothing and returns false.
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

namespace {

namespace ffi = tvm::ffi;

constexpr uintptr_t ALIGNMENT = 16;  // bytes: as in call_checks.py
constexpr size_t MOST = 1000;        // kinds: limits the memory of a program with ever new sizes

// The properties that a call's checks depend on: device, dtype and shape of each tensor.
using Kind = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Kind& kind) const {
    uint64_t hash = 14695981039346656037u;  // FNV-1a, by words
    for (const int64_t x : kind) hash = (hash ^ static_cast<uint64_t>(x)) * 1099511628211u;
    return hash ^ hash >> 32;
  }
};

struct Known {
  std::mutex lock;
  std::unordered_set<Kind, Hash> kinds;
};

bool contiguous(const DLTensor& x) {
  if (x.strides == nullptr) return true;
  int64_t stride = 1;
  bool dense = true;
  for (int i = x.ndim - 1; i >= 0; --i) {
    if (x.shape[i] == 0) return true;
    dense = dense && (x.shape[i] == 1 || x.strides[i] == stride);
    stride *= x.shape[i];
  }
  return dense;
}

// Whether this kind of call may be remembered.
bool describe(Kind& kind, ffi::PackedArgs args) {
  kind.clear();
  for (int i = 0; i < args.size(); ++i) {
    const ffi::AnyView view = args[i];
    if (view.type_index() != ffi::TypeIndex::kTVMFFIDLTensorPtr && view.type_index() != ffi::TypeIndex::kTVMFFITensor) {
      kind.push_back(-1);  // a number, or None
      continue;
    }
    const DLTensor& x = *view.cast<DLTensor*>();
    const uintptr_t at = reinterpret_cast<uintptr_t>(x.data) + x.byte_offset;
    if (!contiguous(x) || (x.device.device_type != kDLCPU && at % ALIGNMENT)) return false;
    kind.push_back(static_cast<int64_t>(x.device.device_type) << 32 | static_cast<uint32_t>(x.device.device_id));
    kind.push_back(static_cast<int64_t>(x.dtype.code) << 32 | x.dtype.bits << 16 | x.dtype.lanes);
    kind.push_back(x.ndim);
    kind.insert(kind.end(), x.shape, x.shape + x.ndim);
  }
  return true;
}

ffi::Function straight(ffi::Function run) {
  const auto known = std::make_shared<Known>();
  return ffi::Function::FromPacked([run, known](ffi::PackedArgs all, ffi::Any* result) {
    static thread_local Kind kind;
    const bool learn = all[0].cast<bool>();
    const ffi::PackedArgs args = all.Slice(1);
    bool may = describe(kind, args);
    if (may) {
      const std::lock_guard<std::mutex> held(known->lock);
      if (!learn) may = known->kinds.count(kind) > 0;
      else if (known->kinds.size() < MOST) known->kinds.insert(kind);
    }
    if (may && !learn) {
      ffi::Any ignored;
      run.CallPacked(args, &ignored);
    }
    *result = may && !learn;
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(straight, straight);
