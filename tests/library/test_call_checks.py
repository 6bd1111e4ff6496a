"""Arguments that a call accepts and refuses: numbers, dtypes, autocast, addresses; and
warnings of a slower way.

What only a GPU can show is in rungs/test_gpu_calls.py.
"""

from __future__ import annotations

import importlib.util
import re
import warnings

import helpers
import numpy as np
import oracle
import pytest
import torch
from library.test_loading import agree, loaded, needs_cxx  # noqa: F401  a fixture

from gdn import load
from gdn.call_checks import Contract
from gdn_cli.catalog import registry

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]
ALIGNED = "expected a pointer aligned to 16 bytes; call .clone() on it"


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element after the start of an allocation."""
    y = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return y.copy_(x)


# --- numbers


@pytest.mark.parametrize(
    "kind",
    [np.float32, np.float64, np.float16, np.int64],
    ids=lambda kind: kind.__name__,
)
def test_a_number_of_numpys_as_scale(kind):
    inputs = oracle.inputs("gdn_decode", batch_size=2, scale=float(kind(2)))
    agree(loaded("pt-reference")(*inputs[:8], kind(2)), inputs)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(()), "got Tensor; call .item() on it"),
        (np.array(0.5), "got ndarray; call .item() on it"),
        (torch.ones(1), "got Tensor"),
        ("1", "got str"),
        (1j, "got complex"),
    ],
)
def test_a_value_that_is_not_a_number_is_refused_with_the_fix(scale, message):
    with pytest.raises(
        TypeError, match=f"^scale: expected a number or None, {re.escape(message)}$"
    ):
        loaded("pt-reference")(*oracle.inputs("gdn_decode", batch_size=2)[:8], scale)


# --- dtypes


def test_cu_seqlens_of_32_bits_are_refused_with_the_cure():
    inputs = oracle.inputs("gdn_prefill", lengths=(5, 3))
    message = re.escape(
        "cu_seqlens: expected int64, got int32; call .to(torch.int64) on it"
    )
    inputs[8] = inputs[8].int()
    with pytest.raises(TypeError, match=f"^{message}$"):
        load("gdn_prefill/pt-reference")(*inputs)


def test_another_dtype_is_refused():
    inputs = oracle.inputs("gdn_decode", batch_size=2)
    inputs[3] = inputs[3].double()
    with pytest.raises(TypeError, match="^state: expected float32, got float64$"):
        load("pt-reference")(*inputs)


# --- autocast


def case(op: str) -> list:
    sizes = {"gdn_prefill": dict(lengths=(5, 0, 3))}.get(op) or dict(batch_size=2)
    if op.startswith(("attention", "gdn_mtp", "gdn_layer_post_conv")):
        sizes |= dict(seq_len=33 if op.startswith("attention") else 3)
    return oracle.inputs(op, **sizes)


EAGER = [
    pytest.param(a, id=a.full_name)
    for a in REGISTRY.algos
    # compiles for a minute
    if "cpu" in a.modes and a.language == "python" and a.name != "pt-compiled"
]


@pytest.mark.parametrize("algo", EAGER)
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.sampled(11)
def test_autocast_around_a_call_changes_nothing_in_it(algo, into):
    inputs, call = case(algo.op), load(algo.full_name)
    plain = call(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = (
            call(*inputs, out=tuple(torch.empty_like(x) for x in plain))
            if into
            else call(*inputs)
        )
        assert torch.is_autocast_enabled("cpu")
        # it goes on behind the call
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


# --- addresses


@pytest.mark.parametrize("name", ["cpp-v1", "pt-reference"])
def test_a_cpus_tensors_may_begin_at_any_element(name, needs_cxx):  # noqa: F811
    inputs = oracle.inputs("gdn_decode", batch_size=3)
    odd = [shifted(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    assert all(x.data_ptr() % 16 for x in odd[:8])
    out = tuple(shifted(torch.zeros_like(x)) for x in (odd[2], odd[3]))
    agree(loaded(name)(*odd, out=out), inputs)


class There:
    """A GPU's tensor, as far as its address goes."""

    is_cuda = True

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return True


@pytest.mark.parametrize("address", [1, 2, 4, 8, 24])
def test_a_gpus_tensors_begin_at_multiples_of_16_bytes_where_no_binding_checks(address):
    of_triton = Contract(DECODE, REGISTRY.find("triton-v2"))
    of_triton.aligned("q", There(32), "call .clone() on it")
    with pytest.raises(ValueError, match=f"^q: {re.escape(ALIGNED)}$"):
        of_triton.aligned("q", There(address), "call .clone() on it")
    Contract(DECODE, REGISTRY.find("cuda-v5")).aligned("q", There(address), "")


def test_triton_rungs_ask_for_the_same():
    path = helpers.OURS / "gdn_decode" / "fla-recurrent" / "tensors.py"
    spec = importlib.util.spec_from_file_location("tensors", path)
    tensors = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tensors)
    tensors.check(q=There(16), a=torch.ones(5)[1:])
    with pytest.raises(ValueError, match=f"^a: {re.escape(ALIGNED)}$"):
        tensors.check(q=There(16), a=There(24))
    with pytest.raises(
        ValueError, match=r"^a: expected contiguous; call .contiguous\(\) on it$"
    ):
        tensors.check(a=torch.ones(4)[::2])
    for algo in REGISTRY.algos:
        if algo.language == "triton":
            assert path in (algo.folder / "tensors.py", *algo.shares), algo.full_name


# --- documentation


# --- a slower way

CPP = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <string>
using T = tvm::ffi::TensorView;
void run(T q, T k, T v, T state, T A_log, T a, T dt_bias, T b, tvm::ffi::Optional<double> scale, T o, T new_state) {}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
"""
TOLD = 'std::string told() {{ return "{}"; }}\nTVM_FFI_DLL_EXPORT_TYPED_FUNC(fallback, told);\n'


@pytest.mark.parametrize(
    ("told", "slower"),
    [(TOLD.format("walks"), "walks"), (TOLD.format(""), None), ("", None)],
)
@pytest.mark.sampled(3)
def test_load_warns_once_of_a_slower_way(told, slower, tmp_path, needs_cxx):  # noqa: F811
    from gdn_cli.catalog import pack
    from gdn_cli.worker.executor import build

    keys = dict(language="cpp", entry_point="main.cpp::run", destination_passing=True)
    helpers.write_algo(tmp_path, "walker", {"main.cpp": CPP + told}, **keys)
    known = registry.load(str(tmp_path))
    kernel = build.build(
        pack.definition(DECODE, known), pack.pack(known.find("walker"), DECODE)
    )
    assert (
        kernel.fallback()
        == kernel.backend(oracle.inputs("gdn_decode", batch_size=1))
        == slower
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert load("walker", algos=tmp_path) is load("walker", algos=tmp_path)
    assert [
        (str(w.message), w.filename) for w in seen if w.category is UserWarning
    ] == ([("gdn_decode/walker: walks", __file__)] if slower else [])
