// What Python would take longer for than a kernel runs: one look at all tensors of a call.
// straight_call.py says which calls go past torch's dispatcher then.
#define PY_SSIZE_T_CLEAN
#include <ATen/PythonTorchFunctionTLS.h>
#include <Python.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr uint64_t ALIGNMENT = 32;  // bytes: no kernel asks for more

// Tensors with memory that a kernel may read as it is: no negative or conjugate bit, not sparse,
// quantized, fake, wrapped.
constexpr DispatchKeySet PLAIN({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
                                DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                                DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});

PyTypeObject *tensor_type, *parameter_type;
PyObject *forward_ad, *current_level;  // the names of torch.autograd.forward_ad, and one of them
Py_ssize_t place;                      // of the TensorImpl in a Python tensor, in bytes

// torch's own header for this takes half a minute to compile; setup() finds the place by `_cdata`.
c10::TensorImpl* unwrapped(PyObject* object) {
  return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(object) + place);
}

// Modes, functorch's transforms and tracers want to see an operator: they announce themselves in
// the thread's keys. Forward differentiation has a level above -1.
bool watched() {
  constexpr DispatchKeySet usual = c10::default_included_set | c10::autocast_dispatch_keyset;
  const DispatchKeySet here = c10::impl::tls_local_dispatch_key_set().included_;
  if (here.raw_repr() & ~usual.raw_repr()) return true;
  if (at::impl::torch_function_mode_enabled()) return true;
  PyObject* const level = PyDict_GetItem(forward_ad, current_level);
  return !level || PyLong_AsLong(level) >= 0;
}

struct Tensor {
  uintptr_t begin, end;  // the addresses that it covers; equal if it is empty
  const c10::TensorImpl* impl;
  size_t argument;
};

// A library's refusal names the dtype, and TVM-FFI ends the process over the name of a complex one.
bool has_name(c10::ScalarType type) {
  return (type >= c10::ScalarType::Byte && type <= c10::ScalarType::Double) ||
         type == c10::ScalarType::Bool || type == c10::ScalarType::BFloat16;
}

// False unless a kernel may use this tensor's memory as it is.
bool add(std::vector<Tensor>& tensors, PyObject* object, size_t argument, bool grad) {
  if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) return false;
  c10::TensorImpl* const x = unwrapped(object);
  if (x->key_set().raw_repr() & ~PLAIN.raw_repr()) return false;
  if (x->has_symbolic_sizes_strides() || !x->has_storage()) return false;
  if (grad && x->requires_grad()) return false;
  if (!has_name(c10::typeMetaToScalarType(x->dtype()))) return false;
  const c10::IntArrayRef sizes = x->sizes(), strides = x->strides();
  int64_t elements = 1;  // from the first to the last
  for (size_t i = 0; i < sizes.size(); ++i) elements += (sizes[i] - 1) * strides[i];
  if (x->numel() == 0) elements = 0;
  const size_t bytes = static_cast<size_t>(elements) * x->itemsize();
  const size_t offset = static_cast<size_t>(x->storage_offset()) * x->itemsize();
  const c10::Storage& storage = x->unsafe_storage();
  if (bytes && (offset + bytes > storage.nbytes() || !storage.data())) return false;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(storage.data()) + offset;
  tensors.push_back({begin, begin + bytes, x, argument});
  return true;
}

bool same(const Tensor& x, const Tensor& y) {
  return x.begin == y.begin && x.impl->dtype() == y.impl->dtype() &&
         x.impl->sizes() == y.impl->sizes() && x.impl->strides() == y.impl->strides();
}

// Whether each element has an address of its own; false also where that takes longer to find out. The last two axes may be
// exchanged: states [K, V] come as [V, K].
bool apart(const c10::TensorImpl& x) {
  const int64_t axes = x.dim();
  const bool exchanged = axes > 1 && x.strides()[axes - 2] < x.strides()[axes - 1];
  int64_t span = 1;
  for (int64_t n = axes - 1; n >= 0; --n) {
    const int64_t i = exchanged && n >= axes - 2 ? 2 * axes - 3 - n : n;
    if (x.sizes()[i] == 1) continue;
    if (x.strides()[i] < span) return false;
    span += (x.sizes()[i] - 1) * x.strides()[i];
  }
  return true;
}

// A call's arguments by their roles, a letter each:
//   r, R  a tensor that is read; R or None         i     a whole number
//   w, W  a tensor that is written; W or None      f, F  a number; F or None
//   a, 0  an input, and the output that may be this input as a whole; so b and 1, up to e and 4
//   -     what is looked at as another argument
struct Arguments {
  const char* roles = nullptr;
  PyObject* const* items = nullptr;
  size_t count = 0;

  bool take(PyObject* of_roles, PyObject* of_items) {
    if (!PyBytes_Check(of_roles) || !PyTuple_Check(of_items)) return false;
    roles = PyBytes_AS_STRING(of_roles), count = static_cast<size_t>(PyTuple_GET_SIZE(of_items));
    items = reinterpret_cast<PyTupleObject*>(of_items)->ob_item;
    return count == static_cast<size_t>(PyBytes_GET_SIZE(of_roles));
  }

  bool written(size_t i) const { return std::strchr("wW01234", roles[i]); }
  bool is_number(size_t i) const { return std::strchr("ifF", roles[i]); }
  bool fits(size_t i) const {
    PyObject* const x = items[i];
    if (x == Py_None) return roles[i] == 'F';
    return PyLong_CheckExact(x) || (roles[i] != 'i' && PyFloat_CheckExact(x));
  }
  bool may_be(size_t output, size_t input) const {
    return roles[output] - '0' == roles[input] - 'a';
  }
};

// The tensors of a call that needs no operator, in `tensors`; false for any other call.
bool fits(std::vector<Tensor>& tensors, const Arguments& call) {
  tensors.clear();
  if (watched()) return false;
  const bool grad = c10::GradMode::is_enabled();
  for (size_t i = 0; i < call.count; ++i) {
    const char role = call.roles[i];
    if (role == '-' || ((role == 'R' || role == 'W') && call.items[i] == Py_None)) continue;
    if (!(call.is_number(i) ? call.fits(i) : add(tensors, call.items[i], i, grad))) return false;
  }
  for (const Tensor& x : tensors) {
    if (!call.written(x.argument)) continue;
    if (!apart(*x.impl)) return false;
    for (const Tensor& y : tensors) {
      const bool overlap = &x != &y && x.begin < y.end && y.begin < x.end;
      if (overlap && !(call.may_be(x.argument, y.argument) && same(x, y))) return false;
    }
  }
  return true;
}

bool taken(Arguments& call, PyObject* const* args, Py_ssize_t count) {
  if (count == 2 && call.take(args[0], args[1])) return true;
  PyErr_SetString(PyExc_TypeError, "expected roles (bytes) and as many arguments (a tuple)");
  return false;
}

thread_local std::vector<Tensor> tensors;
thread_local std::vector<int64_t> words;

// fits(roles, arguments): whether the call needs no operator.
PyObject* py_fits(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments call;
  return taken(call, args, count) ? PyBool_FromLong(fits(tensors, call)) : nullptr;
}

// kind(roles, arguments): bytes that are equal for calls that differ in nothing that a check looks
// at: devices, dtypes, shapes, strides, alignments. None if the call needs its operator.
PyObject* py_kind(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments call;
  if (!taken(call, args, count)) return nullptr;
  if (!fits(tensors, call)) Py_RETURN_NONE;
  words.clear();
  for (const Tensor& t : tensors) {
    const c10::TensorImpl& x = *t.impl;
    const uintptr_t aligned = t.begin & ~(t.begin - 1);  // the lowest bit
    words.push_back(static_cast<int64_t>(x.device().type()));
    words.push_back(x.device().index());
    words.push_back(static_cast<int64_t>(c10::typeMetaToScalarType(x.dtype())));
    words.push_back(static_cast<int64_t>(std::min<uint64_t>(aligned, ALIGNMENT)));
    words.push_back(x.dim());
    words.insert(words.end(), x.sizes().begin(), x.sizes().end());
    words.insert(words.end(), x.strides().begin(), x.strides().end());
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words.data()),
                                   static_cast<Py_ssize_t>(words.size() * sizeof(int64_t)));
}

// wrote(roles, arguments): count up the versions of what is written, as autograd wants to know.
// After fits or kind.
PyObject* py_wrote(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments call;
  if (!taken(call, args, count)) return nullptr;
  try {
    for (size_t i = 0; i < call.count; ++i) {
      if (!call.written(i) || call.items[i] == Py_None) continue;
      c10::TensorImpl* const x = unwrapped(call.items[i]);
      if (!x->is_inference()) x->bump_version();
    }
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// setup(torch.Tensor, torch.nn.Parameter, an instance of each, vars(forward_ad)): whether this file
// understands this torch.
PyObject* py_setup(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 5 || !PyType_Check(args[0]) || !PyType_Check(args[1]) || !PyDict_Check(args[4])) {
    PyErr_SetString(PyExc_TypeError, "expected two types, an instance of each, and names");
    return nullptr;
  }
  tensor_type = reinterpret_cast<PyTypeObject*>(args[0]);
  parameter_type = reinterpret_cast<PyTypeObject*>(args[1]);
  forward_ad = Py_NewRef(args[4]);
  current_level = PyUnicode_InternFromString("_current_level");
  if (!current_level || !PyDict_GetItem(forward_ad, current_level)) Py_RETURN_FALSE;
  for (const size_t at : {sizeof(PyObject), sizeof(PyObject) + sizeof(void*)}) {
    int right = 0;
    for (int i = 2; i < 4; ++i) {
      PyObject* const address = PyObject_GetAttrString(args[i], "_cdata");
      if (!address) return nullptr;
      place = static_cast<Py_ssize_t>(at);
      right += unwrapped(args[i]) == PyLong_AsVoidPtr(address);
      Py_DECREF(address);
    }
    if (right == 2) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

template <typename F>
PyCFunction method(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef METHODS[] = {{"fits", method(py_fits), METH_FASTCALL, nullptr},
                         {"kind", method(py_kind), METH_FASTCALL, nullptr},
                         {"wrote", method(py_wrote), METH_FASTCALL, nullptr},
                         {"setup", method(py_setup), METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "straight_call", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_straight_call() { return PyModule_Create(&MODULE); }
