"""What the bindings of CUDA kernels take and refuse, without a GPU: compiled as C++ with a launch
that only keeps its arguments. Tensors are a CPU's, which the sources here take for a GPU's."""

import ctypes
import functools
import math
import re

import pytest
import torch
from emulator import emulation

from gdn_cli.machine import inventory

CUDA, D = emulation.CUDA, 128
TINY = torch.finfo(torch.float32).tiny

HEAD = """
#include <map>
#include <string>
std::map<std::string, double> seen;
extern "C" double seen_at(const char* name) { return seen.at(name); }
"""

PREFILL = """
#include "binding.cpp"
namespace gdn {
void prefill(const Call& call, const Allocate&, int, void*) {
  seen = {{"first_slot", call.first_slot}, {"epsilon", call.epsilon},
          {"slots_step", call.indices_step}, {"slots_end", call.slots},
          {"head_bytes", call.head_stride * 4}, {"qk_row", call.qk_row},
          {"num_tokens", call.num_tokens}};
}
const char* fallback() { return ""; }
}  // namespace gdn
"""

DENSE = """
#include "binding.cpp"
namespace gdn {
void prefill(const Call& call, const Allocate&, int, void*) {
  seen = {{"num_tokens", call.num_tokens}};
}
const char* fallback() { return ""; }
}  // namespace gdn
"""

ON_A_GPU = """
#include <cstdlib>
#include "cuda_runtime.h"
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#define TVM_FFI_CHECK_CUDA_ERROR(call) (void)0
using cudaStream_t = void*;
namespace gdn {
struct CurrentDevice { explicit CurrentDevice(int) {} };
template <typename Call> void launched(const Call& p);
}  // namespace gdn
"""

DECODE = (
    ON_A_GPU
    + """
struct Tuned {
  const char* gpu;
  int sms;
  int64_t up_to;
  int lanes, rows, passes, warps, load, store, resident;
};
constexpr Tuned TUNED[] = {{"", 132, INT64_MAX, 16, 2, 1, 4, 0, 0, 1}};
#include "pool_binding.cuh"
namespace gdn {
template <> void launched(const Arguments<float>& p) { seen = {{"HV", p.HV}}; }
template <> void launched(const PoolArguments<float>& p) {
  seen = {{"plain", 0}, {"first_slot", p.first_slot}, {"slots_end", p.slots_end},
          {"new_slots_end", p.new_slots_end}, {"epsilon", p.epsilon}, {"head_bytes", p.head_bytes},
          {"slots_step", p.slots_step}};
}
template <> void launched(const PlainPool<float>& p) {
  launched<PoolArguments<float>>(p);
  seen["plain"] = 1;
}
template <typename Pool> void launched(const GivenGates<Pool>& p) {
  launched<Pool>(p);
  seen["given"] = 1;
}
template <typename Pool> void launched(const HalfTokens<Pool>& p) {
  launched(static_cast<const Pool&>(p));
  seen["half"] = 1;
}
}  // namespace gdn
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, gdn::run<float>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_decode, gdn::packed_decode<float>);
"""
)

VERIFY = (
    ON_A_GPU
    + """
#include "mtp_run.cuh"
namespace gdn {
template <typename T, bool WRITES, typename Token, bool K_FIRST>
void launch_mtp(const MtpArguments& p, int64_t, int, cudaStream_t) {
  seen = {{"k_first", K_FIRST}, {"first_slot", p.first_slot}, {"slots_end", p.slots_end}, {"epsilon", p.epsilon},
          {"slots_step", p.slots_step}, {"head_bytes", p.head_bytes}};
}
}  // namespace gdn
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mtp_verify, gdn::mtp_verify<true>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_slots, gdn::run_slots);
"""
)


def without_a_gpu(text):
    """A source that takes a CPU's tensors for a GPU's, and hands its arguments to `launched`."""
    text = text.replace("device.device_type == kDLCPU", "false")
    text = text.replace("kDLCUDA", "kDLCPU")
    checked = r"TVM_FFI_CHECK_CUDA_ERROR\(cuda"
    for pattern, to in (
        # without a number of SMs its tuned rows are divided by 0
        (checked + r"DeviceGetAttribute\(&count, .*?\)\);", "count = 132;"),
        (r'#include (<tvm/ffi/extra/cuda/base.h>|"device.cuh")\n', ""),
        (
            r"  constexpr auto kernel = .*?;\n  kernel<<<.*?>>>\(p\);\n",
            "  launched(p);\n",
        ),
        ("  " + checked + r"\w+\(.*?\)\);\n", ""),
    ):
        text = re.sub(pattern, to, text, flags=re.S)
    return text


class Binding:
    """The functions of a library, by name; seen(name): an argument of its last launch."""

    def __init__(self, folder, driver, *sources):
        import tvm_ffi

        names = "packed.cuh", "strided.cuh", "tensor.cuh"
        shared = [CUDA / "ffi" / name for name in names]
        for path in (*shared, *sources):
            (folder / path.name).write_text(without_a_gpu(path.read_text()))
        for file in ("access.cuh", "gates.cuh"):
            source = next(CUDA.glob(f"*/{file}")).read_text()
            (folder / file).write_text(emulation.without_ptx(source))
        (folder / "driver.cpp").write_text(HEAD + driver)
        includes = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
        self.library = emulation.compiled(folder, "-O0", *includes)
        self.library.seen_at.restype = ctypes.c_double
        self.module = tvm_ffi.load_module(self.library._name)

    def __getitem__(self, name):
        return self.module[name]

    def seen(self, name):
        return self.library.seen_at(name.encode())


@pytest.fixture(scope="module")
def binding(tmp_path_factory):
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    pool, chunk = CUDA / "prefill_pool", CUDA.parent / "gdn_prefill" / "cuda-chunk"
    gdn = CUDA / "gdn"

    def of_gdn(*names):
        return tuple(gdn / f"{name}.cuh" for name in names)

    decode = *of_gdn("pool_binding", "decode_binding"), CUDA / "ffi" / "tuned_row.cuh"
    verify = of_gdn("mtp_run", "mtp_binding", "mtp", "decode")
    folders = {
        "prefill": (PREFILL, pool / "binding.cpp", pool / "call.h"),
        "dense": (DENSE, chunk / "binding.cpp", chunk / "call.h"),
        "decode": (DECODE, *decode, *of_gdn("decode")),
        "verify": (VERIFY, *verify),
    }

    @functools.cache
    def get(name):
        return Binding(tmp_path_factory.mktemp(name), *folders[name])

    return get


def bf(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def refused(says):
    return pytest.raises(ValueError, match=f"^{says}")


# The arguments of each function, and the bytes that the address of each tensor is a multiple of:
# those of an element where a kernel reads one element at a time.


def decode(B=3, HV=2):
    return dict(
        q=bf(B, 1, 1, D),
        k=bf(B, 1, 1, D),
        v=bf(B, 1, HV, D),
        state=torch.zeros(B, HV, D, D),
        A_log=torch.zeros(HV),
        a=bf(B, 1, HV),
        dt_bias=torch.zeros(HV),
        b=bf(B, 1, HV),
        scale=None,
        output=bf(B, 1, HV, D),
        new_state=torch.zeros(B, HV, D, D),
    )


def packed_decode(B=3, HV=2):
    pool = torch.zeros(4, HV, D, D)
    return dict(
        mixed_qkv=bf(B, (2 + HV) * D),
        a=bf(B, HV),
        b=bf(B, HV),
        A_log=torch.zeros(HV),
        dt_bias=torch.zeros(HV),
        pool=pool,
        state_indices=ints(B),
        scale=None,
        output=bf(B, HV, D),
        new_pool=pool,
        new_indices=None,
        has_initial_state=ints(B).bool(),
        first_slot=1,
        epsilon=1e-6,
    )


def verify(N=3, T=2, HV=2):
    return dict(
        q=bf(N, T, 1, D),
        k=bf(N, T, 1, D),
        v=bf(N, T, HV, D),
        a=bf(N, T, HV),
        b=bf(N, T, HV),
        A_log=torch.zeros(HV),
        dt_bias=torch.zeros(HV),
        pool=torch.zeros(4, HV, D, D),
        state_indices=ints(N),
        num_accepted_tokens=None,
        cu_seqlens=None,
        scale=None,
        output=bf(N, T, HV, D),
        states=None,
        states_rows=None,
        mode=1,
        first_slot=1,
        epsilon=1e-6,
    )


def dense(T=9, HV=2):
    return dict(
        q=bf(T, 1, D),
        k=bf(T, 1, D),
        v=bf(T, HV, D),
        state=torch.zeros(2, HV, D, D),
        A_log=torch.zeros(HV),
        a=bf(T, HV),
        dt_bias=torch.zeros(HV),
        b=bf(T, HV),
        cu_seqlens=torch.tensor([0, 4, T]),
        scale=None,
        output=bf(T, HV, D),
        new_state=torch.zeros(2, HV, D, D),
    )


def prefill(T=9, HV=2, N=3):
    return dict(
        q=bf(T, 1, D),
        k=bf(T, 1, D),
        v=bf(T, HV, D),
        a=bf(T, HV),
        b=bf(T, HV),
        A_log=torch.zeros(HV),
        dt_bias=torch.zeros(HV),
        pool=torch.zeros(4, HV, D, D),
        state_indices=ints(N),
        has_initial_state=ints(N).bool(),
        cu_seqlens=ints(N + 1),
        scale=None,
        output=bf(T, HV, D),
        first_slot=1,
        epsilon=1e-6,
    )


@pytest.fixture(scope="module")
def call(binding):
    """call(arguments) -> the binding, after a call of the function of these."""

    def call(args):
        kinds = {
            "mixed_qkv": ("decode", "packed_decode"),
            "num_accepted_tokens": ("verify", "mtp_verify"),
            "has_initial_state": ("prefill", "chunk_prefill"),
            "cu_seqlens": ("dense", "run"),
            "q": ("decode", "run"),
        }
        library, name = next(kinds[key] for key in kinds if key in args)
        binding(library)[name](*args.values())
        return binding(library)

    return call


GATES = dict(a=2, b=2, A_log=4, dt_bias=4)
ENGINE = GATES | dict(state_indices=4)
WIDE = dict(q=16, k=16)
POOLS = {
    "decode-packed_decode": packed_decode,
    "verify-mtp_verify": verify,
    "prefill-chunk_prefill": prefill,
}
FUNCTIONS = POOLS | {"decode-run": decode, "dense-run": dense}
ALIGNED = {
    "decode-run": GATES | WIDE | dict(v=2, state=32, output=2, new_state=32),
    "decode-packed_decode": ENGINE
    | dict(mixed_qkv=16, pool=32, output=2, new_pool=32, has_initial_state=1),
    "verify-mtp_verify": ENGINE | WIDE | dict(v=2, pool=16, output=2),
    "dense-run": GATES
    | WIDE
    | dict(v=16, state=16, cu_seqlens=8, output=16, new_state=16),
    "prefill-chunk_prefill": ENGINE
    | WIDE
    | dict(v=16, pool=16, has_initial_state=1, cu_seqlens=4, output=16),
}


def placed(x, at):
    """The same tensor, `at` bytes after a multiple of 64."""
    size = x.numel() * x.element_size()
    memory = torch.zeros(size + 128, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64 + at
    return memory[begin : begin + size].view(x.dtype).view(x.shape)


@pytest.mark.parametrize("which", ALIGNED)
@pytest.mark.slow
def test_an_address_is_aligned_as_its_kernel_needs_it_and_no_more(call, which):
    args = FUNCTIONS[which]()
    tensors = {name for name, x in args.items() if isinstance(x, torch.Tensor)}
    assert tensors == set(ALIGNED[which])
    for name, align in ALIGNED[which].items():
        call(args | {name: placed(args[name], align)})
        if align > args[name].element_size():
            with refused(f"{name}: expected .* aligned to {align} bytes"):
                call(args | {name: placed(args[name], align // 2)})


def test_packed_rows_are_named_as_they_are_given(binding):
    """Not q, k or v, which verify's binding makes of them."""
    run, rows = binding("verify")["run_slots"], bf(2, 3, 4 * D)
    pool = torch.zeros(9, 2, D, D)
    gates = bf(2, 3, 2), bf(2, 3, 2), torch.zeros(2), torch.zeros(2)
    slots, accepted = ints(2, 3) + 1, ints(2) + 1
    rest = (*gates, pool, slots, accepted, None, bf(2, 3, 2, D), pool)
    run(rows, *rest)
    with refused("mixed_qkv: expected rows aligned to 16 bytes"):
        run(placed(rows, 8), *rest)
    with refused("mixed_qkv: expected dense but for its first two axes"):
        run(bf(2, 4 * D, 3).mT, *rest)


# --- a pool


@pytest.fixture(params=POOLS)
def engine(request, call):
    """A function that takes a pool: engine(**changed arguments) -> the binding."""

    def engine(**changed):
        args = POOLS[request.param]() | changed
        if "new_pool" in args and "pool" in changed:
            args["new_pool"] = changed["pool"]
        return call(args)

    engine.takes_far_heads = request.param.startswith("prefill")
    return engine


def test_the_first_slot_is_0_or_more_and_something_is_added_below_the_root(engine):
    found = engine(first_slot=-3, epsilon=0.0)
    assert found.seen("first_slot") == 0
    assert found.seen("epsilon") == TINY
    found = engine(first_slot=2**40, epsilon=-1.0)
    assert found.seen("first_slot") == 2**31 - 1
    assert found.seen("epsilon") == -1
    assert engine(epsilon=1e-6).seen("epsilon") == pytest.approx(1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_a_column_of_a_table(engine, dtype):
    table = torch.zeros(3, 5, dtype=dtype)
    step = engine(state_indices=table[:, 1]).seen("slots_step")
    assert step == 5 * table.element_size()


def heads_apart():
    return torch.zeros(4, 2, D * D + D)[:, :, : D * D].unflatten(2, (D, D))


def test_heads_of_a_slot_may_lie_apart(engine):
    found = engine(pool=heads_apart())
    assert found.seen("head_bytes") == (D * D + D) * 4
    assert found.seen("slots_end") == 4
    with refused("pool: expected dense but for its first two axes, got strides"):
        engine(pool=torch.zeros(4, 2, D, D + 8)[..., :D])


def test_decode_has_a_kernel_of_its_own_for_int32_slots_and_dense_heads(call):
    wide, apart = ints(3).long(), heads_apart()
    for changed, plain in (
        ({}, 1),
        ({"new_indices": ints(3)}, 1),
        ({"state_indices": wide}, 0),
        ({"new_indices": wide}, 0),
        ({"pool": apart, "new_pool": apart}, 0),
    ):
        assert call(packed_decode() | changed).seen("plain") == plain, changed


@pytest.mark.parametrize(
    ("first", "end", "new_end"),
    [(0, 4, 9), (1, 4, 9), (6, 6, 9), (2**40, 2**31 - 1, 2**31 - 1)],
)
def test_a_first_slot_beyond_the_pool_leaves_no_slot(call, first, end, new_end):
    pools = {"new_pool": torch.zeros(9, 2, D, D), "first_slot": first}
    seen = call(packed_decode() | pools).seen
    assert (seen("slots_end"), seen("new_slots_end")) == (end, new_end)


def empty(*shape, dtype=torch.float32):
    """Address space that nothing touches."""
    try:
        return torch.empty(*shape, dtype=dtype)
    except RuntimeError:
        size = math.prod(shape) * dtype.itemsize >> 30
        pytest.skip(f"no {size} GiB of address space")


def test_heads_beyond_what_the_offsets_in_a_slot_count_are_refused_by_name(engine):
    """Decode and verify have 32 bits for bytes, prefill for rows of 128."""
    far = empty(2**31 + D * D).as_strided((1, 2, D, D), (1, 2**31, D, 1))
    if engine.takes_far_heads:
        assert engine(pool=far).seen("head_bytes") == 2**33
        return
    said = "pool: expected the 2 heads of a slot within 4 GiB, got 2147483648 elements"
    with refused(said):
        engine(pool=far)


def test_65536_value_heads_are_refused_by_name(call):
    pool, gates = empty(1, 2**16, D, D), torch.zeros(2**16)
    many = dict(A_log=gates, dt_bias=gates, pool=pool, new_pool=pool)
    many |= dict(mixed_qkv=bf(0, (2 + 2**16) * D), output=bf(0, 2**16, D))
    many |= dict(a=bf(0, 2**16), b=bf(0, 2**16))
    with refused("pool: expected the 65536 heads of a slot within 4 GiB"):
        call(packed_decode(B=0) | many)
    said = "pool: expected at most 1024 heads, a multiple of q's 1, got 1025"
    with refused(said):
        call(verify(1, 1, 1025))
    many = dict(v=bf(0, 2**16, D), a=bf(0, 2**16), b=bf(0, 2**16))
    with refused("N = 3, HV = 65536: expected at most 32767 and 65535"):
        call(prefill(T=0, HV=1) | many)


# --- strides


def test_what_has_one_element_has_no_stride(call):
    """A view of one batch of a wider tensor; and heads of a call with one of them."""
    wide = bf(4, 12, 1, 3 * D)[:, :9]
    q, k = wide[2:3, :, :, :D], wide[2:3, :, :, D : 2 * D]
    assert q.stride(0) != 9 * q.stride(1)
    batch = dict(v=bf(1, 9, 2, D), output=bf(1, 9, 2, D), a=bf(1, 9, 2), b=bf(1, 9, 2))
    seen = call(prefill() | dict(q=q, k=k) | batch).seen
    assert seen("num_tokens") == 9
    assert seen("qk_row") == 3 * D


EXPECTED = r"expected \[num_tokens, heads, 128\] or \[1, num_tokens, heads, 128\], got \[2, 9, "
# what a convolution along the tokens leaves for one batch: its output transposed
TRANSPOSED = bf(1, D, 9).mT.unflatten(2, (1, D))
SAME = bf(1, D).expand(9, 1, D)
REFUSED = [
    ("q", bf(2, 9, 1, D), f"q: {EXPECTED}1, 128"),
    ("v", bf(2, 9, 2, D), f"v: {EXPECTED}2, 128"),
    ("k", bf(2, 9, 1, D), r"k: expected bfloat16 \[9, 1, 128\], got"),
    ("q", TRANSPOSED, "q: expected dense but for its first axis, got"),
    ("q", SAME, "k: expected the stride of q, 0, got 128; call .contiguous"),
]


@pytest.mark.parametrize(("name", "x", "said"), REFUSED, ids=range(5))
def test_prefill_refuses_rows_by_name(call, name, x, said):
    with refused(said):
        call(prefill() | {name: x})


def test_rows_that_no_kernel_or_tma_counts_are_refused_by_name(call):
    said = "expected strides of 1 to 268435455 elements, got"
    with refused(f"q: {said} 0; call .contiguous"):
        call(prefill() | dict(q=SAME, k=SAME))
    far = empty(8 * 2**28 + 2 * D, dtype=torch.bfloat16)
    far = far.as_strided((9, 2, D), (2**28, D, 1))
    with refused(f"v: {said} 268435456"):
        call(prefill() | dict(v=far))
    # decode reads such rows
    call(packed_decode(B=9) | dict(mixed_qkv=bf(4 * D).expand(9, 4 * D)))


def test_slots_far_apart_are_refused_by_name(engine):
    table = empty(2 * 2**28 + 1, dtype=torch.int32)
    said = "state_indices: expected strides of 0 to 268435455 elements, got 268435456"
    with refused(said):
        engine(state_indices=table.as_strided((3,), (2**28,)))


def test_more_tiles_than_a_launch_counts_are_refused_by_name(call):
    many = dict(v=bf(0, 1025, D), a=bf(0, 1025), b=bf(0, 1025))
    with refused(r"N \* HV = 33586175: expected less than 2\^25"):
        call(prefill(T=0, HV=1, N=32767) | many)
    B = 2**24  # rows that are all the same one
    rows = dict(mixed_qkv=bf(1, 4 * D), a=bf(1, 2), b=bf(1, 2))
    many = {name: x.expand(B, -1) for name, x in rows.items()}
    many |= dict(state_indices=ints(1).expand(B), has_initial_state=None)
    output = empty(B, 2, D, dtype=torch.bfloat16)
    with refused(r"B \* HV = 33554432: expected less than 2\^25"):
        call(packed_decode() | many | dict(output=output))
