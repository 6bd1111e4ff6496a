// What a CUDA algo that `gdn run --emulate` compiles as C++ is given in front of each of its files: CUDA's runtime as far as
// one needs it that only launches, launches themselves, static shared memory, inline PTX, and tensors that say that they are
// on a GPU. executor/emulation.py writes `emulated::launched`, `emulated::shared`, `emulated::Ptx` and EMULATED_EXPORT into
// the sources.
#pragma once

#include "cuda_runtime.h"

#include <tvm/ffi/c_api.h>

#include <fstream>

#include "cuda_bf16.h"
#include "mma_f16.cuh"

// --- CUDA's runtime

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9,
                         cudaFuncAttributeNonPortableClusterSizeAllowed = 12 };
enum cudaDeviceAttr { cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMultiProcessorCount = 16, cudaDevAttrComputeCapabilityMajor = 75,
                      cudaDevAttrComputeCapabilityMinor = 76, cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
                      cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
struct cudaDeviceProp {
  char name[256] = "emulated";
  int multiProcessorCount = 132, major = 9, minor = 0, warpSize = 32, maxThreadsPerBlock = 1024;
  size_t sharedMemPerBlock = 48 << 10, sharedMemPerBlockOptin = 227 << 10;
};
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4, cudaLaunchAttributeProgrammaticStreamSerialization = 6,
                             cudaLaunchAttributePriority = 8 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct { uint32_t x, y, z; } clusterDim;
    int programmaticStreamSerializationAllowed, priority;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "the emulator does not do this"; }
inline const char* cudaGetErrorName(cudaError_t e) { return e == cudaSuccess ? "cudaSuccess" : "cudaErrorNotSupported"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) { return *p = {}, cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {  // an H200's
  switch (what) {
    case cudaDevAttrMaxThreadsPerBlock: return *value = 1024, cudaSuccess;
    case cudaDevAttrMultiProcessorCount: return *value = 132, cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: return *value = 9, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: return *value = 0, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return *value = 228 << 10, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = 227 << 10, cudaSuccess;
  }
  return cudaErrorNotSupported;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, Kernel, int, size_t) { return *n = 1, cudaSuccess; }
template <typename T>
cudaError_t cudaMalloc(T** p, size_t n) { return *p = static_cast<T*>(std::malloc(n)), cudaSuccess; }
template <typename T>
cudaError_t cudaMallocAsync(T** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
inline cudaError_t cudaFree(void* p) { return std::free(p), cudaSuccess; }
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
inline cudaError_t cudaMemset(void* p, int x, size_t n) { return std::memset(p, x, n), cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* p, int x, size_t n, cudaStream_t = nullptr) { return cudaMemset(p, x, n); }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) { return std::memmove(to, from, n), cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind how, cudaStream_t = nullptr) {
  return cudaMemcpy(to, from, n, how);
}
template <typename T>
cudaError_t cudaMemcpyToSymbol(T& to, const void* from, size_t n, size_t at = 0, cudaMemcpyKind = cudaMemcpyHostToDevice) {
  return std::memcpy(reinterpret_cast<char*>(&to) + at, from, n), cudaSuccess;
}

namespace emulated {

// --- launches

constexpr size_t STATIC_BYTES = 48 << 10;  // CUDA's limit

inline void launched(const std::function<void()>& kernel, dim3 grid_, dim3 block_, size_t shared = 0, cudaStream_t = nullptr,
                     uint32_t cluster = 1) {
  const uint64_t threads = uint64_t{block_.x} * block_.y * block_.z;
  if (threads < 1 || threads > 1024) fail("a launch with " + std::to_string(threads) + " threads in a block");
  if (grid_.x < 1 || grid_.y < 1 || grid_.y > 65535 || grid_.z < 1 || grid_.z > 65535) fail("a launch of a grid that CUDA refuses");
  if (shared > 227 << 10) fail("a launch with " + std::to_string(shared) + " bytes of shared memory: 232448 at most");
  static_bytes = STATIC_BYTES;
  launch(grid_, static_cast<dim>(block_), shared, cluster, kernel);
}

// --- static shared memory

template <typename Tag>
inline char variable = 0;

template <typename Tag>
struct Static {  // of the variable that is declared where `Tag` is
  template <typename T>
  operator T&() const {
    if (!me) fail("a variable in shared memory outside of a kernel");
    const races::Ignored own;
    Cta& cta = *me->cta;
    const auto [at, isnew] = cta.statics.try_emplace(&variable<Tag>, cta.used);
    if (isnew) cta.used += (sizeof(T) + 127) / 128 * 128;
    if (cta.used > (cta.bytes + GUARD + 127) / 128 * 128 + STATIC_BYTES) fail("more than 48 KiB of static shared memory");
    return *reinterpret_cast<T*>(cta.base + at->second);
  }
};
template <typename Tag>
Static<Tag> shared(Tag) { return {}; }

// --- memcpy and its like, which a compiler may turn into code that the detector does not see

inline void copied(void* to, const void* from, size_t n, void* at) {
  if (n) races::access(from, n, false, -1, at), races::access(to, n, true, -1, at);
}
EMULATED_CALL void* memcpy(void* to, const void* from, size_t n) {
  copied(to, from, n, __builtin_return_address(0));
  return std::memcpy(to, from, n);
}
EMULATED_CALL void* memmove(void* to, const void* from, size_t n) {
  copied(to, from, n, __builtin_return_address(0));
  return std::memmove(to, from, n);
}
EMULATED_CALL void* memset(void* to, int x, size_t n) {
  if (n) races::access(to, n, true, -1, __builtin_return_address(0));
  return std::memset(to, x, n);
}

// --- PTX

inline float bf16_of(const uint32_t* words, int i) { return __uint_as_float(words[i / 2] >> i % 2 * 16 << 16); }

class Ptx {  // an asm statement, whose instructions `run` carries out
 public:
  Ptx(const char* file, int line, const char* text) : file(file), line(line), text(text) {}
  template <typename T>
  Ptx&& operand(const char* how, T&& x) && {
    Operand o;
    o.written = *how == '=' || *how == '+';
    o.bytes = sizeof x;
    std::memcpy(&o.value, &x, sizeof x);
    if constexpr (std::is_lvalue_reference_v<T>) o.place = const_cast<void*>(static_cast<const volatile void*>(&x));
    operands.push_back(o);
    return std::move(*this);
  }
  void run() && {
    std::string rest = text + ";";
    for (char& c : rest)
      if (c == '\n' || c == '\t' || c == '\r') c = ' ';
    for (size_t end; (end = rest.find(';')) != std::string::npos; rest.erase(0, end + 1)) {
      const std::string one = trimmed(rest.substr(0, end));
      if (!one.empty() && one != "{" && one != "}") step(one);
    }
    for (const Operand& o : operands)
      if (o.written && o.place) std::memcpy(o.place, &o.value, o.bytes);
  }

 private:
  struct Operand {
    uint64_t value = 0;
    size_t bytes = 0;
    bool written = false;
    void* place = nullptr;
  };
  const char* file;
  int line;
  std::string text;
  std::vector<Operand> operands;

  static std::string trimmed(const std::string& s) {
    const size_t from = s.find_first_not_of(" "), to = s.find_last_not_of(" ");
    return from == std::string::npos ? "" : s.substr(from, to - from + 1);
  }
  static std::vector<std::string> split(const std::string& s) {  // at commas outside of brackets
    std::vector<std::string> parts(1);
    int depth = 0;
    for (const char c : s) {
      depth += (c == '{' || c == '[') - (c == '}' || c == ']');
      if (c == ',' && depth == 0) parts.emplace_back();
      else parts.back() += c;
    }
    for (std::string& part : parts) part = trimmed(part);
    return parts;
  }
  [[noreturn]] void unknown(const std::string& what) const {
    fail("unknown PTX `" + what + "`, " + file + ":" + std::to_string(line));
  }
  Operand& named(const std::string& name) {
    if (name[0] != '%' || name.size() < 2 || !std::isdigit(name[1])) unknown(name);
    return operands.at(std::stoul(name.substr(1)));
  }
  uint64_t get(const std::string& name) {
    if (name == "%%laneid") return me->lane;
    if (name == "%%smid") return 0;
    if (name[0] == '%') return named(name).value;
    if (name.rfind("0f", 0) == 0 || name.rfind("0F", 0) == 0) return std::stoul(name.substr(2), nullptr, 16);
    char* end;
    const uint64_t value = std::strtoull(name.c_str(), &end, 0);
    if (end == name.c_str() || *end) unknown(name);
    return value;
  }
  float real(const std::string& name) { return __uint_as_float(static_cast<uint32_t>(get(name))); }
  std::vector<std::string> list(const std::string& braces) {
    return braces[0] == '{' ? split(braces.substr(1, braces.size() - 2)) : std::vector<std::string>{braces};
  }
  char* memory(const std::string& brackets, bool in_shared, size_t bytes) {
    if (brackets.size() < 3 || brackets[0] != '[') unknown(brackets);
    const std::string inner = brackets.substr(1, brackets.size() - 2);
    const size_t plus = inner.find('+');
    uint64_t at = get(trimmed(inner.substr(0, plus)));
    if (plus != std::string::npos) at += get(trimmed(inner.substr(plus + 1)));
    if (at % bytes) fail("an address of " + std::to_string(bytes) + " bytes that is not aligned");
    if (!in_shared) return reinterpret_cast<char*>(at);
    const uint64_t offset = (at & 0xffffffff) - FIRST_ADDRESS;
    const size_t end = (me->cta->bytes + GUARD + 127) / 128 * 128 + STATIC_BYTES;
    if (offset > end || offset + bytes > end) fail("an address outside of shared memory");
    return me->cta->base + offset;
  }
  template <size_t N>
  void words(const std::string& braces, uint32_t (&w)[N]) {
    const auto names = list(braces);
    for (size_t i = 0; i < N; ++i) w[i] = static_cast<uint32_t>(get(names.at(i)));
  }
  template <size_t N>
  void floats(const std::string& braces, float (&x)[N]) {
    const auto names = list(braces);
    for (size_t i = 0; i < N; ++i) x[i] = real(names.at(i));
  }
  template <typename T, size_t N>
  void put(const std::string& braces, const T (&x)[N]) {
    const auto names = list(braces);
    for (size_t i = 0; i < N && i < names.size(); ++i) {
      Operand& o = named(names[i]);
      o.value = 0;
      std::memcpy(&o.value, &x[i], sizeof(T));
    }
  }
  void step(const std::string& one) {
    const size_t blank = one.find(' ');
    const std::string code = one.substr(0, blank), head = code.substr(0, code.find('.'));
    const auto has = [&](const char* part) { return (code + ".").find(part + std::string(".")) != std::string::npos; };
    const auto args = split(blank == std::string::npos ? "" : one.substr(blank));
    const std::string last = code.substr(code.rfind('.') + 1);
    const size_t bits = std::strtoul(last.c_str() + 1, nullptr, 10);
    if (head == "fence" || head == "membar" || head == "prefetch" || head == "prefetchu" || head == "griddepcontrol") return;
    if ((head == "ld" || head == "st") && bits >= 8 && bits <= 64) {
      const bool loads = head == "ld";
      const auto names = list(args.at(loads ? 0 : 1));
      char* const p = memory(args.at(loads ? 1 : 0), has(".shared"), bits / 8 * names.size());
      races::access(p, bits / 8 * names.size(), !loads);
      for (size_t i = 0; i < names.size(); ++i) {
        if (!loads) {
          const uint64_t value = get(names[i]);
          std::memcpy(p + i * bits / 8, &value, bits / 8);
          continue;
        }
        Operand& o = named(names[i]);
        o.value = 0;
        std::memcpy(&o.value, p + i * bits / 8, bits / 8);
      }
      return;
    }
    if (last == "f32" && args.size() > 1) {
      const float x = real(args[1]), y = args.size() > 2 ? real(args[2]) : 0.f, z = args.size() > 3 ? real(args[3]) : 0.f;
      const std::map<std::string, float> results = {
          {"ex2", exp2f(x)}, {"lg2", std::log2(x)}, {"rcp", 1.f / x}, {"sqrt", std::sqrt(x)}, {"rsqrt", rsqrtf(x)},
          {"sin", std::sin(x)}, {"cos", std::cos(x)}, {"tanh", std::tanh(x)}, {"neg", -x}, {"abs", std::fabs(x)},
          {"add", x + y}, {"sub", x - y}, {"mul", x * y}, {"div", x / y}, {"min", fminf(x, y)}, {"max", fmaxf(x, y)},
          {"fma", std::fma(x, y, z)}, {"mov", x}};
      const auto found = results.find(head);
      if (found != results.end()) return put(args[0], {found->second});
    }
    if (head == "mov" && (bits == 32 || bits == 64)) return put(args.at(0), {get(args.at(1))});
    if (code == "cp.async.commit_group") return commit_copies();
    if (code == "cp.async.wait_all") return commit_copies(), wait_for_copies(0);
    if (code == "cp.async.wait_group") return wait_for_copies(get(args.at(0)));
    if ((code.rfind("cp.async.ca.", 0) == 0 || code.rfind("cp.async.cg.", 0) == 0) && (args.size() == 3 || args.size() == 4)) {
      const size_t bytes = get(args[2]), given = args.size() == 4 ? get(args[3]) : bytes;
      if (given && given != bytes) unknown(one);
      return ask({memory(args[0], true, bytes), given ? memory(args[1], false, bytes) : nullptr, static_cast<int>(bytes)});
    }
    if ((head == "bar" || head == "barrier") && has(".sync") && !has(".warp")) {
      Barrier& b = me->cta->named[static_cast<int>(get(args.at(0)))];
      b.expected = args.size() > 1 ? static_cast<int>(get(args[1])) : me->cta->running;
      return wait(b, arrive(b));
    }
    if (code.rfind("ldmatrix.sync.aligned.m8n8.x4.", 0) == 0) {
      uint32_t r[4];
      const uint32_t at = static_cast<uint32_t>(memory(args.at(1), true, 16) - me->cta->base) + FIRST_ADDRESS;
      has(".trans") ? flashcore::load_transposed(r, at) : flashcore::load_matrices(r, at);
      return put(args[0], r);
    }
    const bool f16 = code == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32";
    if (f16 || code == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") {
      float d[4];
      uint32_t a[4], b[2];
      floats(args.at(3), d), words(args.at(1), a), words(args.at(2), b);
      f16 ? flashcore::multiply_add(d, a, b[0], b[1]) : flashcore::product<bf16_of>(d, a, b[0], b[1]);
      return put(args[0], d);
    }
    unknown(one);
  }
};

// --- calls

// A call's tensors say that they are on a GPU while it lasts. What was found in it goes to the file that gdn reads.
template <typename Call>
int called(const TVMFFIAny* args, int32_t count, const Call& call) {
  std::vector<DLTensor*> tensors;
  for (int32_t i = 0; i < count; ++i) {
    DLTensor* t = nullptr;
    if (args[i].type_index == kTVMFFIDLTensorPtr) t = static_cast<DLTensor*>(args[i].v_ptr);
    if (args[i].type_index == kTVMFFITensor) t = TVMFFITensorGetDLTensorPtr(args[i].v_obj);
    if (t && t->device.device_type == kDLCPU) tensors.push_back(t);
  }
  for (DLTensor* t : tensors) t->device = {kDLCUDA, 0};
  const int result = call();
  for (DLTensor* t : tensors) t->device = {kDLCPU, 0};
  me = nullptr;
  const int threads = static_cast<int>((block.x * block.y * block.z + 31) / 32 * 32);
  const std::string lines = races::told(threads, place);
  if (!lines.empty()) std::ofstream("faults.emulated", std::ios::app) << lines;
  return result;
}

}  // namespace emulated

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(P...), A&&... a) {
  uint32_t cluster = 1;
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = c->attrs[i].val.clusterDim.x;
  emulated::launched([&] { kernel(a...); }, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream, cluster);
  return cudaSuccess;
}

#define EMULATED_EXPORT(name, ...)                                                                                  \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulated_##name, __VA_ARGS__)                                                       \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) { \
    return emulated::called(args, n, [=] { return __tvm_ffi_emulated_##name(self, args, n, result); });             \
  }
