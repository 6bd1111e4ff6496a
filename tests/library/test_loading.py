"""gdn.load: an algo as a function for other programs: eager, compiled, in CUDA
graphs; and its refusals.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

import helpers
import numpy as np
import oracle
import pytest
import torch

import gdn_cli
from gdn import load, loading
from gdn_cli import errors
from gdn_cli.machine import inventory

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]
README = helpers.TESTS.parent / "README.md"
ON_CPU = ["cpp-v1", "pt-reference"]
# written here and one launch: these must live in CUDA graphs and on any stream
ON_GPU = [
    a.name
    for a in REGISTRY.algos_of("gdn_decode")
    if "cuda" in a.modes and a.language in ("cuda", "triton") and not a.packages
]


@pytest.fixture
def counted():
    """counted("inductor"): this backend from a clean start, counting its compilations
    as `frame_count`.
    """
    # takes a second or two to import
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    return CompileCounterWithBackend


@pytest.fixture
def needs_cxx():
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")


def loaded(name: str):
    algo = REGISTRY.find(name)
    if (place := inventory.HERE.place(algo)).mode not in ("cuda", "cpu"):
        pytest.skip(f"{name}: {place.reason or 'no GPU here'}")
    return load(name)


def agree(outputs, inputs: list, op: str = "gdn_decode") -> None:
    exact = getattr(oracle, op)(*inputs)
    exact = exact if isinstance(exact, tuple) else (exact,)
    assert isinstance(outputs, tuple)
    for (name, bound), x, ref in zip(
        REGISTRY.ops[op].tolerance.items(), outputs, exact, strict=True
    ):
        assert (
            str(x.dtype) == f"torch.{REGISTRY.ops[op].outputs[name].dtype}"
            and x.is_contiguous()
        )
        assert oracle.error(x, ref) <= bound, name  # NaN is not


def on(device: str, inputs: list) -> list:
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]


# --- importing


@pytest.mark.slow
def test_an_eager_call_imports_no_compiler():
    """torch.library.custom_op would import torch._dynamo at the first call: 3 to 6 s
    that a server has to wait.
    """
    seen = (
        "import sys, gdn, oracle; inputs = oracle.inputs('gdn_decode', batch_size=1); "
        "gdn.load('pt-reference')(*inputs); print('torch._dynamo' in sys.modules)"
    )
    done = helpers.python(
        "-c", seen, env={"PYTHONPATH": os.pathsep.join([str(helpers.TESTS), *sys.path])}
    )
    assert (done.code, done.out) == (0, "False\n"), done.err


def test_the_old_name_warns_and_another_is_no_name():
    with pytest.warns(DeprecationWarning, match="gdn_cli.load is gdn.load now"):
        assert gdn_cli.load is load
    with pytest.raises(
        AttributeError, match="^module 'gdn_cli' has no attribute 'unload'$"
    ):
        gdn_cli.unload  # noqa: B018


# --- values


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize(
    "case",
    [dict(batch_size=1), dict(batch_size=3, scale=0.0), dict(batch_size=5, scale=0.3)],
)
def test_a_call_agrees_with_the_oracle(name, case):
    inputs = oracle.inputs("gdn_decode", **case)
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    decode = loaded(name)
    outputs = decode(*inputs)
    agree(outputs, inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs[:8], before[:8], strict=True))
    first = [x.clone() for x in outputs]
    again = decode(*inputs)
    assert not {x.data_ptr() for x in outputs} & {x.data_ptr() for x in again}, (
        "outputs are new tensors"
    )
    assert all(torch.equal(x, y) for x, y in zip(first, outputs, strict=True))


def test_inputs_by_name_and_a_scale_left_out(needs_cxx):
    inputs = oracle.inputs("gdn_decode", batch_size=2)
    named = dict(zip(DECODE.inputs, inputs, strict=True))
    del named["scale"]
    agree(load("cpp-v1")(**named), inputs)
    agree(load("cpp-v1")(*inputs[:3], **dict(list(named.items())[3:])), inputs)
    agree(load("cpp-v1")(*inputs[:8]), inputs)


def test_an_empty_batch(needs_cxx):
    inputs = oracle.inputs("gdn_decode", batch_size=0)
    output, new_state = load("cpp-v1")(*inputs)
    assert (output.shape, new_state.shape) == ((0, 1, 8, 128), (0, 8, 128, 128))


@pytest.mark.parametrize("name", ON_CPU)
def test_other_head_counts(name):
    inputs = oracle.inputs("gdn_decode", batch_size=2, heads=3)
    agree(loaded(name)(*inputs), inputs)


def test_an_op_with_one_output_gives_a_tuple_of_one():
    inputs = oracle.inputs("attention_fwd", batch_size=2, seq_len=5)
    agree(load("sdpa")(*inputs), inputs, "attention_fwd")
    assert list(inspect.signature(load("sdpa")).parameters) == ["q", "k", "v", "out"]


@pytest.mark.parametrize(
    ("ends", "what"),
    [
        ([0, 5, 4, 8], "falls from 5 to 4 at sequence 1"),
        ([0, 5, 5, 9], "goes from 0 to 9"),
        ([1, 5, 5, 8], "goes from 1 to 8"),
    ],
)
def test_cu_seqlens_on_the_cpu_are_checked_before_anything_runs(ends, what):
    inputs = oracle.inputs("gdn_prefill", lengths=(5, 0, 3))
    inputs[8] = torch.tensor(ends)
    prefill, message = (
        load("gdn_prefill/pt-reference"),
        f"^cu_seqlens: must rise from 0 to total_seq_len=8, it {what}$",
    )
    out = (
        torch.full_like(inputs[2], float("nan")),
        torch.full_like(inputs[3], float("nan")),
    )
    with pytest.raises(ValueError, match=message):
        prefill(*inputs)
    with pytest.raises(ValueError, match=message):
        prefill(*inputs, out=out)
    assert all(x.isnan().all() for x in out)


# --- out=


@pytest.mark.parametrize("name", ON_CPU)
def test_out_is_written_and_returned(name):
    inputs = oracle.inputs("gdn_decode", batch_size=3)
    out = (
        torch.full((3, 1, 8, 128), float("nan")).bfloat16(),
        torch.full((3, 8, 128, 128), float("nan")),
    )
    before = [x._version for x in out]
    outputs = loaded(name)(*inputs, out=out)
    assert outputs[0] is out[0] and outputs[1] is out[1]
    agree(out, inputs)
    # autograd wants to know
    assert all(x._version > version for x, version in zip(out, before, strict=True))


@pytest.fixture
def checks(monkeypatch):
    """How often the inputs of a call were checked."""
    seen, check = [], loading.Contract.inputs
    monkeypatch.setattr(
        loading.Contract,
        "inputs",
        lambda self, inputs: (seen.append(1), check(self, inputs)),
    )
    return seen


def outs(inputs: list) -> tuple:
    return torch.empty_like(inputs[2]), torch.empty_like(inputs[3])


def test_tensors_like_those_of_a_checked_call_go_straight_to_the_library(
    needs_cxx, checks
):
    decode = loaded("cpp-v1")
    for number, (batch_size, due) in enumerate(
        [(6, 1), (6, 1), (6, 1), (7, 2), (6, 2), (7, 2)]
    ):
        inputs = oracle.inputs("gdn_decode", batch_size=batch_size, seed=number)
        out = outs(inputs)
        before = [x._version for x in out]
        assert decode(*inputs, out=out) is out
        agree(out, inputs)
        assert len(checks) == due and [x._version for x in out] == [
            v + 1 for v in before
        ]


def test_changed_tensors_are_checked_again(needs_cxx, checks):
    decode, inputs = loaded("cpp-v1"), oracle.inputs("gdn_decode", batch_size=2)
    decode(*inputs, out=outs(inputs))
    across = inputs[0].transpose(0, 2).contiguous().transpose(0, 2)
    wanting = inputs[3].clone().requires_grad_()
    for at, x, error in ((0, across, ValueError), (0, inputs[0].half(), TypeError), (3, wanting, RuntimeError),
                         (1, inputs[1][:1], ValueError), (8, "1", TypeError), (2, None, TypeError)):  # fmt: skip
        changed = [*inputs[:at], x, *inputs[at + 1 :]]
        with pytest.raises(error):
            decode(*changed, out=outs(inputs))
    with pytest.raises(ValueError, match="out: expected a tuple"):
        decode(*inputs, out=outs(inputs)[:1])
    with torch.no_grad():
        decode(*inputs[:3], wanting, *inputs[4:], out=outs(inputs))
    # NumPy's: the operator's, and right
    decode(*inputs[:8], np.float64(0.5), out=(out := outs(inputs)))
    agree(out, [*inputs[:8], 0.5])


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_state_is_updated_in_place(name, compiled):
    decode = loaded(name)

    def step(q, k, v, state, *rest):
        output, same = decode(q, k, v, state, *rest, out=(torch.empty_like(v), state))
        return output * 2

    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    inputs = oracle.inputs("gdn_decode", batch_size=3)
    exact = oracle.gdn_decode(*inputs)
    state = inputs[3].clone()
    twice = run(*inputs[:3], state, *inputs[4:])
    assert oracle.error(state, exact[1]) <= DECODE.tolerance["new_state"]
    assert oracle.error(twice, 2 * exact[0]) <= DECODE.tolerance["output"]


# --- compiled


@pytest.mark.parametrize(
    ("name", "backend"),
    [("cpp-v1", "aot_eager"), ("pt-reference", "aot_eager"), ("cpp-v1", "inductor")],
)
@pytest.mark.slow
def test_compiled_in_one_graph_for_all_batch_sizes(name, backend, counted):
    decode = loaded(name)

    def layer(q, *rest):  # something of torch's own on both sides
        output, new_state = decode(-q, *rest)
        return -output, new_state

    counter = counted(backend)
    run = torch.compile(layer, fullgraph=True, backend=counter)
    for batch_size in (3, 2, 7, 17):
        inputs = oracle.inputs("gdn_decode", batch_size=batch_size)
        for i in (0, 1, 2, 3, 5, 7):
            torch._dynamo.mark_dynamic(inputs[i], 0)
        agree(run(*inputs), inputs)
    assert counter.frame_count == 1, "one compilation has to do for every size"


def test_compiled_with_another_scale(needs_cxx, counted):
    run = torch.compile(load("cpp-v1"), fullgraph=True, backend=counted("aot_eager"))
    for scale in (None, 0.5, 0.25):
        inputs = oracle.inputs("gdn_decode", batch_size=2, scale=scale)
        agree(run(*inputs), inputs)


@pytest.mark.parametrize("name", ON_CPU)
def test_torch_finds_the_operators_sound(name):
    """torch.library.opcheck: schema, fake implementation, autograd registration, static
    and dynamic shapes.
    """
    operator = getattr(torch.ops.gdn, loaded(name).__name__)
    inputs = oracle.inputs("gdn_decode", batch_size=3, scale=0.5)
    torch.library.opcheck(operator.default, tuple(inputs))
    into = getattr(torch.ops.gdn, f"{loaded(name).__name__}_out")
    out = [torch.zeros(3, 1, 8, 128).bfloat16(), torch.zeros(3, 8, 128, 128)]
    torch.library.opcheck(into.default, (*inputs, *out))


# --- refusals


@pytest.fixture(scope="module")
def never(tmp_path_factory):
    """A decode that must not be called."""
    own = tmp_path_factory.mktemp("never")
    source = f"def run({helpers.DECODE_ARGS}):\n    raise AssertionError('the algo was called')\n"
    helpers.write_algo(own, "never", source)
    return load("never", algos=own)


def wrong(**changes):
    """The inputs by name, some of them replaced by what `changes` makes of them."""
    inputs = dict(
        zip(DECODE.inputs, oracle.inputs("gdn_decode", batch_size=2), strict=True)
    )
    return inputs | {name: change(inputs[name]) for name, change in changes.items()}


WRONG = {
    "dtype": (dict(q=lambda x: x.float()), TypeError, "q: expected bfloat16, got float32"),
    "rank": (
        dict(q=lambda x: x[:, 0]), ValueError,
        "q: expected 4 dimensions [batch_size, seq_len, num_q_heads, head_size], got [2, 4, 128]",
    ),
    "one on another device": (
        dict(v=lambda x: x.to("meta")), ValueError, "v: expected on cpu, where q is, got meta"
    ),
    "not contiguous": (
        dict(v=lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)), ValueError,
        "v: expected contiguous; call .contiguous() on it",
    ),
    "batch": (dict(state=lambda x: x[:1]), ValueError, "state: expected batch_size = 2, as q has it, got 1"),
    "heads": (dict(A_log=lambda x: x[:7]), ValueError, "A_log: expected num_v_heads = 8, as v has it, got 7"),
    "two tokens": (
        dict(q=lambda x: torch.cat([x, x], dim=1)), ValueError, "q: expected seq_len = 1, got 2"
    ),
    "groups of heads": (
        {n: lambda x: x[:, :, :3].contiguous() for n in "qk"}, ValueError,
        "expected num_v_heads % num_q_heads == 0, got num_q_heads = 3, num_v_heads = 8",
    ),
    "no heads": (
        {n: lambda x: x[:, :, :0].contiguous() for n in "qk"}, ValueError,
        "expected num_v_heads % num_q_heads == 0, got num_q_heads = 0, num_v_heads = 8",
    ),
    "no tensor": (dict(q=lambda x: 1), TypeError, "q: expected a tensor, got int"),
    "none": (dict(b=lambda x: None), TypeError, "b: expected a tensor, got NoneType"),
    "grad": (
        dict(A_log=lambda x: x.requires_grad_()), RuntimeError,
        "A_log: requires grad, and never has no backward; call it under torch.no_grad()",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_inputs_are_refused_before_anything_runs(never, changes, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        never(**wrong(**changes))
    if kind is ValueError:  # the operator itself is as strict
        with pytest.raises(kind, match=f"^{re.escape(message)}$"):
            getattr(torch.ops.gdn, never.__name__)(*wrong(**changes).values())


def test_sizes_are_checked_at_every_call():
    decode, inputs = load("pt-reference"), wrong()
    agree(decode(**inputs), list(inputs.values()))
    with pytest.raises(
        ValueError, match="^state: expected batch_size = 2, as q has it, got 1$"
    ):
        decode(**wrong(state=lambda x: x[:1]))


def test_a_wrong_rank_is_refused_while_compiling(never):
    run = torch.compile(never, fullgraph=True, backend="aot_eager")
    with pytest.raises(
        Exception,
        match=re.escape("q: expected 4 dimensions [batch_size, seq_len, num_q_heads"),
    ):
        run(**wrong(q=lambda x: x[:, 0]))


def test_wrong_calls_are_refused(never):
    inputs = list(wrong().values())
    takes = "never takes q, k, v, state, A_log, a, dt_bias, b, scale: "
    for args, named, message in (
        (inputs[:5], {}, "missing a required argument: 'a'"),
        ([*inputs, 1], {}, "too many positional arguments"),
        (inputs[:8], {"beta": 1}, "got an unexpected keyword argument 'beta'"),
        (inputs, {"q": inputs[0]}, "multiple values for argument 'q'"),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(takes + message)}$"):
            never(*args, **named)


def test_wrong_outs_are_refused(never):
    inputs = list(wrong().values())
    output, state = (
        torch.empty(2, 1, 8, 128, dtype=torch.bfloat16),
        torch.empty(2, 8, 128, 128),
    )
    strided = torch.empty(2, 8, 128, 256)[..., ::2]
    for out, kind, message in (
        (output, TypeError, "out: expected a tuple of tensors (output, new_state)"),
        (
            (output, None),
            TypeError,
            "out: expected a tuple of tensors (output, new_state)",
        ),
        (
            (output,),
            ValueError,
            "out: expected a tuple of tensors (output, new_state), got 1",
        ),
        (
            (output.float(), state),
            TypeError,
            "out: output: expected bfloat16, got float32",
        ),
        (
            (output, state[:1]),
            ValueError,
            "out: new_state: expected shape [2, 8, 128, 128], got [1, 8, 128, 128]",
        ),
        ((output, strided), ValueError, "out: new_state: expected contiguous"),
    ):
        with pytest.raises(kind, match=f"^{re.escape(message)}$"):
            never(*inputs, out=out)


def test_tensors_where_the_algo_does_not_run(tmp_path):
    """A GPU's algo, loaded as if there were a GPU, and given CPU tensors."""
    source = f"def run({helpers.DECODE_ARGS}):\n    raise AssertionError('the algo was called')\n"
    helpers.write_algo(tmp_path, "gpu-only", source, devices=["cuda"])
    machine = inventory.Machine(gpus=lambda: (inventory.Gpu("a GPU", "9.0", "1"),))
    with pytest.raises(ValueError, match="^gpu-only runs on cuda, got tensors on cpu$"):
        loading.load_for(machine, "gpu-only", algos=tmp_path)(*wrong().values())


def test_an_algo_that_returns_something_else(tmp_path):
    source = (
        f"from .right import run as right\ndef run({helpers.DECODE_ARGS}):\n    o, s ="
        f" right({helpers.DECODE_ARGS})\n"
    )
    helpers.write_algo(tmp_path, "flat", source + "    return o[:, 0], s\n")
    helpers.write_algo(tmp_path, "alone", source + "    return o\n")
    inputs = oracle.inputs("gdn_decode", batch_size=2)
    message = (
        "flat is at fault: output: expected 4 dimensions [batch_size, seq_len, num_v_heads,"
        " head_size], got [2, 8"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load("flat", algos=tmp_path)(*inputs)
    with pytest.raises(
        ValueError, match="^alone is at fault: expected 2 outputs, got 1$"
    ):
        load("alone", algos=tmp_path)(*inputs)


# --- names and builds


def test_algos_that_cannot_run_here(tmp_path, monkeypatch):
    machine = inventory.Machine(gpus=tuple)
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(errors.MissingError, match="^gdn_decode/cuda-v4: no GPU here; "):
        loading.load_for(machine, "cuda-v4")
    message = (
        "^gdn_decode/fla-recurrent: no GPU here; TRITON_INTERPRET=1, set before Triton is"
        " imported, "
    )
    with pytest.raises(errors.MissingError, match=message):
        loading.load_for(machine, "fla-recurrent")
    helpers.write_algo(
        tmp_path, "needs", "import torch\n", extra='[packages]\nnot_there = "not-there"'
    )
    with pytest.raises(
        errors.MissingError,
        match="^gdn_decode/needs: package not-there missing; pip install not-there",
    ):
        loading.load_for(machine, "needs", algos=tmp_path)


def test_algos_that_do_not_build(tmp_path):
    helpers.write_algo(tmp_path, "broken", "raise RuntimeError('not today')\n")
    with pytest.raises(
        errors.GdnError, match="(?s)^gdn_decode/broken does not build: .*not today"
    ) as e:
        load("broken", algos=tmp_path)
    assert not isinstance(e.value, errors.MissingError)
    helpers.write_algo(tmp_path, "lacking", "import not_there_either\n")
    with pytest.raises(
        errors.MissingError, match="package 'not_there_either' is missing"
    ):
        load("lacking", algos=tmp_path)


def test_the_same_algo_is_the_same_function_and_another_is_not(tmp_path, monkeypatch):
    ours = load("pt-reference")
    assert load("pt-reference") is ours and load("gdn_decode/pt-reference") is ours
    assert ours.__name__ == "gdn_decode__pt_reference"

    times = (
        "from .right import run as right\ndef run({args}):\n    o, s = right({args})\n    return"
        " o * {n}, s\n"
    )
    mine = helpers.write_algo(
        tmp_path, "pt-reference", times.format(args=helpers.DECODE_ARGS, n=2)
    )
    twice = load("pt-reference", algos=tmp_path)
    monkeypatch.setenv("GDN_ALGOS", str(tmp_path))
    assert load("pt-reference") is twice is not ours
    (mine / "main.py").write_text(times.format(args=helpers.DECODE_ARGS, n=4))
    fourfold = load("pt-reference")
    assert re.fullmatch("gdn_decode__pt_reference__[0-9a-f]{12}", twice.__name__)
    assert len({ours.__name__, twice.__name__, fourfold.__name__}) == 3

    inputs = oracle.inputs("gdn_decode", batch_size=2)
    agree(ours(*inputs), inputs)
    exact = ours(*inputs)[0]
    assert torch.equal(twice(*inputs)[0], 2 * exact) and torch.equal(
        fourfold(*inputs)[0], 4 * exact
    )


def test_names_that_torch_writes_alike(tmp_path):
    source = (
        f"from .right import run as right\ndef run({helpers.DECODE_ARGS}):\n    return"
        f" right({helpers.DECODE_ARGS})\n"
    )
    for name in ("a-b", "a_b", "a.b-out", "a.b"):
        helpers.write_algo(tmp_path, name, source)
    names = [
        load(name, algos=tmp_path).__name__ for name in ("a-b", "a_b", "a.b-out", "a.b")
    ]
    operators = {name for n in names for name in (n, f"{n}_out")}
    assert len(operators) == 8, names


def test_the_builders_environment_ends_with_the_build(tmp_path, monkeypatch):
    monkeypatch.delenv("FIB_CACHE_PATH")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    machine = inventory.Machine(cuda_home=lambda: tmp_path / "cuda")
    build, seen = loading.build.build, []

    def spy(*args, **more):
        seen.append(
            {
                name: os.environ.get(name)
                for name in ("PATH", "CUDA_HOME", "FIB_CACHE_PATH")
            }
        )
        return build(*args, **more)

    monkeypatch.setattr(loading.build, "build", spy)
    helpers.write_algo(
        tmp_path, "builds", f"def run({helpers.DECODE_ARGS}):\n    pass\n"
    )
    helpers.write_algo(tmp_path, "fails", "raise RuntimeError('no')\n")
    before = dict(os.environ)
    loading.load_for(machine, "builds", algos=tmp_path)
    assert dict(os.environ) == before
    with pytest.raises(errors.GdnError):
        loading.load_for(machine, "fails", algos=tmp_path)
    assert dict(os.environ) == before
    assert len(seen) == 2
    for env in seen:
        assert env["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
        assert env["CUDA_HOME"] == str(tmp_path / "cuda")
        assert Path(env["FIB_CACHE_PATH"]).is_relative_to(os.environ["GDN_HOME"])


# --- documentation


def test_signature_and_docstring_tell_the_inputs(needs_cxx):
    decode = load("cpp-v1")
    parameters = inspect.signature(decode).parameters
    assert list(parameters) == [*DECODE.inputs, "out"]
    assert (
        parameters["scale"].default is None
        and parameters["b"].default is inspect.Parameter.empty
    )
    assert parameters["out"].kind is inspect.Parameter.KEYWORD_ONLY
    lines = [" ".join(line.split()) for line in decode.__doc__.splitlines()]
    assert "state float32 [batch_size, num_v_heads, head_size, head_size]" in lines
    assert "scale float32 a number, or None for the default" in lines
    assert "output bfloat16 [batch_size, seq_len, num_v_heads, head_size]" in lines
    assert (
        "Runs on cpu; all tensors contiguous and on one device. No backward." in lines
    )


def test_the_lines_in_the_readme_run(needs_cxx):
    section = (
        README.read_text(encoding="utf-8")
        .split("\n## From Python\n")[1]
        .split("\n## ")[0]
    )
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 6
    names: dict = {}
    exec(code, names)
    zeros = torch.zeros(3, 8, 128, 128), torch.zeros(8)
    inputs = [
        names["q"],
        names["k"],
        names["v"],
        zeros[0],
        zeros[1],
        names["a"],
        zeros[1],
        names["b"],
        None,
    ]
    agree((names["output"], names["state"]), inputs)
    assert f"torch.ops.gdn.{load('cpp-v1').__name__}" in section


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_gpu_opcheck_and_no_synchronisation(name):
    decode = loaded(name)
    inputs = on("cuda", oracle.inputs("gdn_decode", batch_size=3, scale=0.5))
    torch.library.opcheck(
        getattr(torch.ops.gdn, decode.__name__).default, tuple(inputs)
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_a_cuda_graph_computes_from_what_its_buffers_hold(name, compiled):
    decode = loaded(name)
    run = torch.compile(decode, fullgraph=True) if compiled else decode
    buffers = on("cuda", oracle.inputs("gdn_decode", seed=0, batch_size=3))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles, loads the kernel
        run(*buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(*buffers)
    for seed in (1, 2):
        inputs = oracle.inputs("gdn_decode", seed=seed, batch_size=3)
        for buffer, x in zip(buffers[:8], inputs[:8], strict=True):
            buffer.copy_(x)
        for x in outputs:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        agree(tuple(outputs), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_gpu_the_kernel_runs_on_the_current_stream(name):
    """Inputs become right only late on that stream: a kernel on any other stream reads
    them too early.
    """
    decode = loaded(name)
    inputs = oracle.inputs("gdn_decode", batch_size=5)
    right = on("cuda", inputs)
    decode(*right)
    late = [torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for x in right]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles: about 50 ms
        for x, value in zip(late[:8], right[:8], strict=True):
            x.copy_(value)
        outputs = decode(*late)
    side.synchronize()
    agree(outputs, inputs)
