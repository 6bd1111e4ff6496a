"""serving's functions as operators of torch: traced, compiled, exported; and what a
library cannot see is refused.

On a CPU. A call as every test has it works on both ways: past torch's dispatcher, and
through the operator.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import serving_steps as steps
import torch
from serving_steps import D, same
from torch.autograd import forward_ad

from gdn import serving, straight_call
from gdn.tensor_checks import NoBackwardError
from gdn_cli.errors import UsageError
from gdn_cli.machine import inventory

pytestmark = pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler here")
KIND = (torch.float32, False)  # of a pool: on a CPU
H, HV = 2, 6


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode_call() -> dict:
    x = steps.tokens(3, H, HV, "cpu")
    mixed_qkv = torch.cat([x.pop(name).flatten(1) for name in "qkv"], dim=1)
    return x | dict(
        mixed_qkv=mixed_qkv,
        scale=0.1,
        initial_state=steps.pool(5, HV, "cpu"),
        out=torch.full((3, 1, HV, D), torch.nan).bfloat16(),
        ssm_state_indices=whole(4, 0, 2),
        use_qk_l2norm_in_kernel=True,
    )


def verify_call() -> dict:
    x = steps.tokens(4, H, HV, "cpu")
    x |= {name: x[name][None] for name in "qkv"}
    return x | dict(
        scale=0.1,
        initial_state=steps.pool(6, HV, "cpu"),
        out=torch.full((1, 4, HV, D), torch.nan).bfloat16(),
        ssm_state_indices=whole(4, 1, 2, 3).view(2, 2),
        num_accepted_tokens=whole(1, 2),
        cu_seqlens=whole(0, 2, 4),
        use_qk_l2norm_in_kernel=True,
    )


def prefill_call() -> dict:
    return steps.tokens(7, H, HV, "cpu") | dict(
        scale=0.1,
        initial_state=steps.pool(5, HV, "cpu"),
        out=torch.full((7, HV, D), torch.nan).bfloat16(),
        ssm_state_indices=whole(3, 1),
        cu_seqlens=whole(0, 5, 7),
        has_initial_state=torch.tensor([True, False]),
    )


CALLS = {
    "packed_decode": decode_call,
    "mtp_verify": verify_call,
    "chunk_prefill": prefill_call,
}
EXPORTED = {
    "packed_decode": serving._decode,
    "mtp_verify": serving._verify,
    "chunk_prefill": serving._prefill_bf16.function,
}
everything = pytest.mark.parametrize("name", CALLS)
everything_and_each_tensor = pytest.mark.parametrize(
    ("name", "tensor"),
    [
        pytest.param(name, tensor, id=f"{name}-{tensor}")
        for name, made in CALLS.items()
        for tensor, x in made().items()
        if isinstance(x, torch.Tensor)
    ],
)


@functools.cache
def expected(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, pool) of the call as it is. Its values: test_conformance.py,
    test_verify.py, test_prefill.py.
    """
    serving.prepare(getattr(serving, name), device="cpu")
    return getattr(serving, name)(**CALLS[name]())


def agree(name: str, x: dict, out: torch.Tensor) -> None:
    assert same(out, expected(name)[0]) and same(x["initial_state"], expected(name)[1])


@pytest.fixture(params=["past the dispatcher", "operator"], autouse=True)
def way(request, monkeypatch):
    """Both ways that an eager call has."""
    if request.param == "operator":
        monkeypatch.setattr(straight_call, "module", None)
    elif straight_call.native() is None:
        pytest.skip("straight_call.cpp does not build here")
    return request.param


once = pytest.mark.parametrize("way", ["past the dispatcher"], indirect=True)


def refused(name: str, x: dict, error: type[Exception], match: str) -> None:
    """Before anything is written, also after a call that was right."""
    call = getattr(serving, name)
    expected(name)
    for _ in range(2):
        versions = x["initial_state"]._version, x["out"]._version
        with pytest.raises(error, match=match):
            call(**x)
        assert (x["initial_state"]._version, x["out"]._version) == versions


# --- traced


@everything
@pytest.mark.parametrize("device", ["fake", "meta"])
def test_fake_and_meta_tensors_load_no_library(name, device, monkeypatch):
    from torch._subclasses import FakeTensorMode

    def never(*kind):
        raise AssertionError("a library was loaded")

    monkeypatch.setattr(type(EXPORTED[name]), "_function", never)
    monkeypatch.delitem(EXPORTED[name], KIND, raising=False)
    mode = FakeTensorMode() if device == "fake" else contextlib.nullcontext()
    move = mode.from_tensor if device == "fake" else lambda x: x.to("meta")
    x = {
        key: move(v) if isinstance(v, torch.Tensor) else v
        for key, v in CALLS[name]().items()
    }
    with mode:
        out, pool = getattr(serving, name)(**x)
        fresh, _ = getattr(serving, name)(**x | {"out": None})
    assert out is x["out"] and pool is x["initial_state"] and type(fresh) is type(out)
    assert fresh.shape == out.shape and fresh.dtype == torch.bfloat16


@everything
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "library", ["cold", pytest.param("warm", marks=pytest.mark.slow)]
)
@pytest.mark.sampled(6)
def test_compiled_in_one_graph(name, backend, library, monkeypatch):
    def layer(x):  # something of torch's own on both sides
        out, _ = getattr(serving, name)(**x | {"a": -x["a"], "out": None})
        return -out

    expected(name)
    if library == "cold":
        monkeypatch.delitem(EXPORTED[name], KIND)
    torch._dynamo.reset()
    x = CALLS[name]()
    got = torch.compile(layer, fullgraph=True, backend=backend)(x | {"a": -x["a"]})
    agree(name, x, -got)


@once
def test_compiled_once_for_all_batch_sizes(way):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(serving.packed_decode, fullgraph=True, backend=counter)
    rows = ("mixed_qkv", "a", "b", "out", "ssm_state_indices")
    for count in (3, 2):
        x = decode_call()
        x |= {name: x[name][:count].clone() for name in rows}
        for name in rows:
            torch._dynamo.mark_dynamic(x[name], 0)
        out, _ = run(**x)
        assert same(out, expected("packed_decode")[0][:count])
    assert counter.frame_count == 1


@once
@everything
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.sampled(3)
def test_exported(name, strict, way):
    class Layer(torch.nn.Module):
        def forward(self, x):
            return getattr(serving, name)(**x)

    expected(name)
    program = torch.export.export(Layer(), (CALLS[name](),), strict=strict)
    assert f"gdn.{name}" in str(program.graph)
    x = CALLS[name]()
    out, _ = program.module()(x)
    agree(name, x, out)


@once
@everything
def test_torch_finds_the_operators_sound(name, way):
    """torch.library.opcheck: schema, fake implementation, autograd registration, static
    and dynamic shapes.
    """
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    expected(name)
    x = CALLS[name]()
    with Watch():  # whoever watches gets the operator
        out, _ = getattr(serving, name)(**x)
    agree(name, x, out)
    operator = getattr(torch.ops.gdn, name).default
    ((_, args),) = [call for call in seen if call[0] is operator]
    torch.library.opcheck(operator, args)


@everything
def test_versions_are_counted(name):
    expected(name)
    x = CALLS[name]()
    before = {key: v._version for key, v in x.items() if isinstance(v, torch.Tensor)}
    out, _ = getattr(serving, name)(**x)
    agree(name, x, out)
    changed = {key for key, version in before.items() if x[key]._version != version}
    assert changed == {"initial_state", "out"}
    with torch.inference_mode():
        out, _ = getattr(serving, name)(**CALLS[name]())
    assert same(out, expected(name)[0])


# --- refused


@everything_and_each_tensor
def test_a_negative_bit_is_refused(name, tensor):
    x = CALLS[name]()
    if not x[tensor].is_floating_point():
        pytest.skip("torch has no negative bit for whole numbers")
    x[tensor] = torch._neg_view(-x[tensor])
    refused(name, x, ValueError, f"^{tensor}: has the negative bit; call .resolve_neg")


@everything_and_each_tensor
@pytest.mark.parametrize("left", ["nothing", "all but a byte"])
def test_a_storage_that_was_freed_or_shrunk_is_refused(name, tensor, left):
    x = CALLS[name]()
    storage = x[tensor].untyped_storage()
    storage.resize_(0 if left == "nothing" else storage.nbytes() - 1)
    refused(name, x, ValueError, f"^{tensor}: expected a storage of .* freed or shrunk")


@everything_and_each_tensor
def test_an_output_in_another_tensor_s_memory_is_refused(name, tensor):
    x = CALLS[name]()
    if tensor == "out":
        x["out"] = x["out"][..., :1].expand(x["out"].shape)
        return refused(name, x, ValueError, "^out: several elements have one address")
    at, shape = x[tensor].flatten().view(torch.uint8), x["out"].shape
    # its first bytes are the tensor's, its last ones too
    wide = at.new_zeros(len(at) + x["out"].nbytes)
    x[tensor] = (
        wide[: len(at)].view(x[tensor].dtype).view(x[tensor].shape).copy_(x[tensor])
    )
    begin = (len(at) - 1) // 4 * 4
    x["out"] = wide[begin : begin + x["out"].nbytes].view(torch.bfloat16).view(shape)
    refused(name, x, ValueError, f"^out: overlaps {tensor}")


@everything
def test_slots_of_a_pool_on_top_of_each_other_are_refused(name):
    x = CALLS[name]()
    x["initial_state"] = x["initial_state"].as_strided(
        x["initial_state"].shape, (D * D, D * D, D, 1)
    )
    refused(name, x, ValueError, "^initial_state: several elements have one address")


def test_two_pools_in_one_page_do_not_overlap():
    """SGLang's buffer of intermediate states between the slots of the pool."""
    x = verify_call()
    page = torch.zeros(6, 3, HV, D, D)
    pool, states = page[:, 0].copy_(x["initial_state"]), page[:, 1:]
    tokens = [x[key] for key in (*"qkvab", "A_log", "dt_bias")]
    out = torch.full_like(x["v"], torch.nan)
    slots = (x["ssm_state_indices"], None, x["cu_seqlens"], 0.1, out)
    rest = (whole(5, 2), serving.BUFFER, 1, 1e-6)
    serving.run_verify(*tokens, pool, *slots, states, *rest)
    assert same(pool, x["initial_state"]) and out.isfinite().all()
    assert [i for i, row in enumerate(states) if row.any()] == [2, 5]
    with pytest.raises(ValueError, match="^states: overlaps initial_state"):
        serving.run_verify(*tokens, pool, *slots, page[:, :2], *rest)


@everything
def test_gradients_are_refused(name):
    call = getattr(serving, name)
    x = CALLS[name]()
    refused(
        name,
        x | {"A_log": torch.nn.Parameter(x["A_log"])},
        NoBackwardError,
        "^A_log: requires grad, and",
    )
    for guard in (torch.no_grad, torch.inference_mode):
        x = CALLS[name]()
        with guard():
            out, _ = call(**x | {"A_log": torch.nn.Parameter(x["A_log"])})
        agree(name, x, out)

    def total(A_log):
        return call(**CALLS[name]() | {"A_log": A_log})[0].float().sum()

    x = CALLS[name]()
    with pytest.raises(NoBackwardError, match="^A_log: requires grad"):
        torch.func.grad(total)(x["A_log"])
    with pytest.raises(NoBackwardError, match="^A_log: has a tangent"):
        torch.func.jvp(total, (x["A_log"],), (x["A_log"],))
    with (
        forward_ad.dual_level(),
        pytest.raises(NoBackwardError, match="^A_log: has a tangent"),
    ):
        total(forward_ad.make_dual(x["A_log"], x["A_log"]))
    assert issubclass(NoBackwardError, ValueError) and issubclass(
        NoBackwardError, RuntimeError
    )


ODD = {
    "sparse": (lambda x: x.to_sparse(), ValueError, "a: expected a dense tensor, got a sparse_coo one"),
    "mkldnn": (lambda x: x.to_mkldnn(), ValueError, "a: expected a dense tensor, got a _mkldnn one"),
    "nested": (
        lambda x: torch.nested.nested_tensor(list(x)), ValueError, "a: expected a dense tensor, got a nested one"
    ),
    "zero": (
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), ValueError, "a: has no memory; call .clone"
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.quint8), TypeError, "a: expected bfloat16.* or float32, got qu"
    ),
    "complex": (lambda x: x.to(torch.complex64).conj(), ValueError, "a: has the conjugate bit; call .resolve_conj"),
    "complex without the bit": (
        lambda x: x.to(torch.complex64), TypeError, "a: expected bfloat16.* or float32, got complex64"
    ),
    "of 8 bits": (lambda x: x.to(torch.float8_e4m3fn), TypeError, "a: expected bfloat16.* or float32, got float8"),
    "on another device": (
        lambda x: x.to("meta"), ValueError, "a: expected on cpu, where initial_state is, got meta"
    ),
    "none": (lambda x: None, TypeError, "a: expected a tensor, got NoneType"),
    "a number": (lambda x: 1.0, TypeError, "a: expected a tensor, got float"),
}  # fmt: skip


@everything
@pytest.mark.parametrize(("change", "error", "says"), ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore")
def test_odd_tensors_are_refused(name, change, error, says):
    x = CALLS[name]()
    refused(name, x | {"a": change(x["a"])}, error, f"^{says}")


@everything
def test_numbers(name):
    x = CALLS[name]()
    refused(
        name,
        x | {"scale": torch.ones(())},
        TypeError,
        "^scale: .*got Tensor; call .item",
    )
    refused(
        name,
        x | {"scale": "1"},
        TypeError,
        "^scale: expected a number or None, got str",
    )
    refused(
        name,
        x | {"first_slot": None},
        TypeError,
        "^first_slot: expected a number, got NoneType",
    )
    refused(
        name,
        x | {"first_slot": 0.5},
        TypeError,
        "^first_slot: expected a whole number, got 0.5",
    )


@everything
@pytest.mark.parametrize("given", [True, False], ids=["out", "no out"])
def test_a_pool_of_two_axes_is_refused(name, given):
    x = CALLS[name]() | {"initial_state": torch.zeros(3, 4)}
    call = getattr(serving, name)
    with pytest.raises(ValueError, match="pool|initial_state: expected 4 dim"):
        call(**x if given else x | {"out": None})
    x |= {"initial_state": None, "out": x["out"] if given else None}
    with pytest.raises(
        (TypeError, ValueError),
        match="initial_state: expected a tensor|expected a pool",
    ):
        call(**x)


# --- what callers give


def test_more_rows_of_slots_than_sequences():
    """vLLM's step with prompts: the slots of the whole batch, decodes first, and
    cu_seqlens of the decodes alone.
    """
    x = verify_call()
    more = x | {
        "ssm_state_indices": torch.cat(
            [x["ssm_state_indices"], whole(5, 5).view(1, 2)]
        ),
        "num_accepted_tokens": torch.cat([x["num_accepted_tokens"], whole(2)]),
    }
    out, _ = serving.mtp_verify(**more)
    agree("mtp_verify", x, out)


def test_nine_draft_tokens_are_refused():
    x = steps.tokens(9, H, HV, "cpu")
    x |= {name: x[name][None] for name in "qkv"}
    pool = steps.pool(11, HV, "cpu")
    x |= {"initial_state": pool, "ssm_state_indices": whole(*range(1, 10))[None]}
    with pytest.raises(
        ValueError, match="^ssm_state_indices: expected at most 8 tokens, got 9"
    ):
        serving.mtp_verify(**x, cu_seqlens=whole(0, 9))


def test_prefill_takes_a_leading_axis_of_one_and_no_other():
    x = prefill_call()
    flat = {key: x[key][None] for key in ("q", "k", "v", "a", "b", "out")}
    out, _ = serving.chunk_prefill(**x | flat)
    assert out is flat["out"]
    agree("chunk_prefill", x, out[0])
    assert serving.chunk_prefill(**prefill_call() | flat | {"out": None})[0].shape == (
        7,
        HV,
        D,
    )
    for key, one in flat.items():
        two = torch.cat([one, one])
        with pytest.raises(ValueError, match=rf"^{key}: expected \[1, total, ...\]"):
            serving.chunk_prefill(**prefill_call() | {key: two})


def test_prepare_refuses_what_it_does_not_know():
    for functions, more, says in (
        (
            [print],
            {},
            "prepare: expected packed_decode, mtp_verify, chunk_prefill, gates, layer_post_conv or layer_decode, got",
        ),
        ([], {"device": "meta"}, "prepare: device: expected 'cuda' or 'cpu', got meta"),
    ):
        with pytest.raises(UsageError, match=f"^{says}"):
            serving.prepare(*functions, **more)


# --- on a GPU


@pytest.mark.gpu
@once
@everything
def test_on_a_gpu_a_call_goes_past_the_dispatcher_also_in_a_capture(
    name, way, monkeypatch
):
    def made() -> dict:
        x = CALLS[name]()
        return {
            key: v.cuda() if isinstance(v, torch.Tensor) else v for key, v in x.items()
        }

    def never(*args):
        raise AssertionError("the operator was called")

    call, through, x, captured = getattr(serving, name), made(), made(), made()
    serving.prepare(call)
    with monkeypatch.context() as patch:
        patch.setattr(straight_call, "module", None)
        out, pool = call(**through)
    run = {
        "packed_decode": serving._run_decode,
        "mtp_verify": serving.run_verify,
        "chunk_prefill": serving._prefill_bf16.run,
    }[name]
    monkeypatch.setattr(run, "operator", never)
    versions = x["initial_state"]._version, x["out"]._version
    call(**x)
    assert same(x["out"], out) and same(x["initial_state"], pool)
    assert (x["initial_state"]._version, x["out"]._version) == (
        versions[0] + 1,
        versions[1] + 1,
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**captured)
    graph.replay()
    assert same(captured["out"], out) and same(captured["initial_state"], pool)
    x["a"] = x["a"].cpu()
    with pytest.raises(ValueError, match="device"):
        call(**x)
