"""Our functions in place of an engine's: signatures, what is replaced and given back,
what falls back, and when.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import threading
import types
from pathlib import Path

import helpers
import pytest
import serving_steps as steps
import torch

from gdn import serving
from gdn.serving import library, sglang, vllm
from gdn.serving.engine import Engine, _kind
from gdn_cli.errors import GdnError, MissingError
from gdn_cli.machine import inventory

SIGNATURES = json.loads(
    (Path(__file__).parent / "signatures.json").read_text(encoding="utf-8")
)
ENGINES = {"vllm 0.33.0": vllm.ENGINE, "sglang 0.5.23": sglang.ENGINE}
BOTH = pytest.mark.parametrize("release", ENGINES)
KIND = (torch.float32, False)  # of a pool: on a CPU


def functions(release: str) -> dict[str, str]:
    """Where a function is -> its signature, as they were in this release."""
    return SIGNATURES[release]


@pytest.fixture
def engine(release, monkeypatch):
    """(Engine, calls of its own functions): the release's functions in modules of their
    names, which another module imports by name and a third one under another. The
    Engine is a fresh one of ours.
    """
    of, calls = ENGINES[release], []
    package = of.package
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    layer, other = (
        types.ModuleType(f"{package}.layer"),
        types.ModuleType(f"{package}.other"),
    )
    foreign = types.ModuleType("someone_else")
    for i, (where, signature) in enumerate(functions(release).items()):
        module, _, name = where.partition(":")
        home = sys.modules.get(module) or types.ModuleType(module)
        monkeypatch.setitem(sys.modules, module, home)
        names = [part.partition("=")[0] for part in signature.split(", ")]
        body = (
            f"def {name}({signature}):\n    calls.append(({name!r}, [{', '.join(names)}]))\n   "
            " return 'own'\n"
        )
        exec(body, space := {"calls": calls})
        for each, attribute in (
            (home, name),
            (layer, name),
            (other, f"_{i}"),
            (foreign, name),
        ):
            setattr(each, attribute, space[name])
    for each in (layer, other, foreign):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    fresh = Engine(package, of.functions)
    yield fresh, calls
    fresh.uninstall()


@pytest.fixture
def stub(monkeypatch):
    """The calls that the libraries get, for pools on a CPU."""
    got = []
    for exported in (serving._decode, serving._verify, serving._prefill):
        monkeypatch.setitem(
            exported, KIND, lambda *args, name=exported.name: got.append((name, args))
        )
    return got


def held(package: str) -> dict[tuple[str, str], object]:
    """All that the engine's modules hold."""
    modules = {
        name: m
        for name, m in sys.modules.items()
        if name.split(".")[0] in (package, "someone_else")
    }
    return {
        (name, key): value
        for name, m in modules.items()
        for key, value in vars(m).items()
    }


def decode_call(device: str = "cpu", **changed) -> dict:
    x = steps.tokens(3, 2, 6, device)
    mixed_qkv = torch.cat([x.pop(name).flatten(1) for name in "qkv"], dim=1)
    return x | dict(
        mixed_qkv=mixed_qkv, scale=0.1, initial_state=steps.pool(5, 6, device),
        out=torch.empty(3, 1, 6, 128, device=device, dtype=torch.bfloat16),
        ssm_state_indices=torch.tensor([1, 0, 3], dtype=torch.int32, device=device),
    ) | changed  # fmt: skip


# --- signatures


@BOTH
def test_signatures_are_those_of_the_release(release, engine, capsys):
    of, _ = engine
    assert set(functions(release)) == set(of.functions)
    assert set(of.check().values()) == {None}
    assert of.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(functions(release)) and all(
        "has the signature" in line for line in lines
    )


@pytest.mark.parametrize("release", ["vllm 0.33.0"])
@pytest.mark.parametrize(
    "change",
    [
        ("scale", "scale, rows"),
        ("a, b", "b, a"),
        ("kernel=False", "kernel=True"),
        ("ssm_", ""),
    ],
)
def test_another_signature_is_told_and_not_replaced(engine, change, capsys, caplog):
    of, _ = engine
    where, signature = next(iter(functions("vllm 0.33.0").items()))
    module, _, name = where.partition(":")
    exec(f"def {name}({signature.replace(*change)}): ...", vars(sys.modules[module]))
    own = getattr(sys.modules[module], name)
    assert of.main() == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert (
        name in line
        and f"takes ({signature.replace(*change)}), expected ({signature})" in line
    )
    with caplog.at_level(logging.WARNING, "gdn.serving"):
        assert name not in of.install() and len(of.install()) == 1
    assert getattr(sys.modules[module], name) is own
    assert f"{name} is not replaced: takes (" in caplog.text


@BOTH
def test_without_the_engine(release, monkeypatch, capsys):
    of = Engine(
        "no_such_engine",
        {f"no_such_engine.{w}": f for w, f in ENGINES[release].functions.items()},
    )
    assert of.main() == 1
    line = capsys.readouterr().out
    assert (
        line.count("\n") == 1
        and "is no_such_engine installed in this environment?" in line
    )
    with pytest.raises(MissingError, match="No module named 'no_such_engine'"):
        of.install()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert of.main() == 1
    folded = capsys.readouterr().out
    assert folded.split() == line.split() and folded.count("\n") > 2


# --- install and uninstall


@BOTH
def test_install_replaces_every_reference_and_uninstall_gives_all_back(release, engine):
    of, _ = engine
    before = held(of.package)
    names = of.install()
    during = held(of.package)
    assert names == [where.partition(":")[2] for where in functions(release)]
    assert of.install() == names and held(of.package) == during  # again: nothing more
    own = {before[tuple(where.split(":"))] for where in functions(release)}
    changed = {place for place in before if during[place] is not before[place]}
    assert changed == {
        p
        for p, x in before.items()
        if callable(x) and x in own and p[0] != "someone_else"
    }
    assert set(of.check().values()) == {None}
    # imported while ours were there
    late = sys.modules[f"{of.package}.late"] = types.ModuleType("late")
    late.function = during[tuple(next(iter(functions(release))).split(":"))]
    of.uninstall()
    assert late.function is before[tuple(next(iter(functions(release))).split(":"))]
    del sys.modules[f"{of.package}.late"]
    assert held(of.package) == before
    of.uninstall()


@BOTH
def test_a_call_goes_to_the_library_and_else_to_the_engine(
    release, engine, stub, caplog
):
    of, calls = engine
    of.install()
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    replaced = getattr(sys.modules[f"{of.package}.layer"], name)
    x = decode_call()
    out, pool = replaced(**x, use_qk_l2norm_in_kernel=True)
    assert out is x["out"] and pool is x["initial_state"] and not calls
    assert [n for n, _ in stub] == ["packed_decode"]
    assert stub[0][1][12:] == (1 if of.package == "vllm" else 0, 1e-6)
    with caplog.at_level(logging.WARNING, "gdn.serving"):
        for _ in range(3):
            assert (
                replaced(
                    **decode_call(initial_state=torch.zeros(5, 6, 128, 128).double())
                )
                == "own"
            )
    assert len(calls) == of.fallbacks[name] == 3 and len(stub) == 1
    assert [r.getMessage() for r in caplog.records] == [
        f"{name} falls back to {of.package}'s own (1 call so far): packed_decode: no function for"
        " a pool of torch.float64; use float32, bfloat16 or float16"
    ]


# --- fallbacks


class Calls:
    """An engine of one function, in whose place ours is called: what each of the two got."""

    def __init__(self) -> None:
        self.own: list[tuple] = []
        self.ours: list[tuple] = []
        self.refuses = lambda *args: None  # the error that ours raises
        self.engine = Engine("some_engine", {"some_engine:update": self.our_update})

    def own_update(self, x, initial_state, slots=None):
        self.own.append((x, initial_state, slots))
        return "own"

    def our_update(self, x, initial_state, slots=None):
        self.ours.append((x, initial_state, slots))
        if error := self.refuses(x, initial_state, slots):
            raise error
        return "ours"

    def __call__(self, *args, **named) -> str:
        return sys.modules["some_engine"].update(*args, **named)

    @property
    def counted(self) -> int:
        return self.engine.fallbacks["update"]


@pytest.fixture
def calls(monkeypatch, caplog):
    """Fallbacks are in the log."""
    made = Calls()
    module = types.ModuleType("some_engine")
    module.update = made.own_update
    monkeypatch.setitem(sys.modules, "some_engine", module)
    caplog.set_level(logging.WARNING, "gdn.serving")
    assert made.engine.install() == ["update"]
    yield made
    made.engine.uninstall()


def lines(caplog) -> list[str]:
    prefix = "update falls back to some_engine's own "
    return [record.getMessage().removeprefix(prefix) for record in caplog.records]


def meta(*shape: int, **options) -> torch.Tensor:
    """A tensor that is not on a CPU, where nothing is remembered."""
    return torch.empty(*shape, device="meta", **options)


POOL = meta(5, 2, 128, 128)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_call_with_a_pool_of_two_axes_is_the_engine_s_own_and_not_counted(
    calls, caplog, by_name
):
    """vLLM's warm-up."""
    calls.refuses = lambda *args: ValueError("pool: expected four axes")
    x, pool = meta(3), meta(4, 128)
    assert (calls(x, initial_state=pool) if by_name else calls(x, pool)) == "own"
    assert calls.own == [(x, pool, None)] and calls.ours == []
    assert (
        calls.counted == 0
        and "update" not in calls.engine.fallbacks
        and lines(caplog) == []
    )
    assert calls(x, meta(4, 128, 128)) == "own" and calls.counted == 1


def test_fallbacks_are_told_each_time_they_have_grown_tenfold(calls, caplog):
    calls.refuses = lambda x, pool, slots: ValueError(
        f"x: expected [2], got [{x.shape[0]}]"
    )
    for n in range(1, 1001):
        assert calls(meta(2 + n % 7), POOL) == "own"
    assert calls.counted == len(calls.own) == 1000
    assert lines(caplog) == [
        "(1 call so far): x: expected [2], got [3]",
        "(10 calls so far): x: expected [2], got [5]",
        "(100 calls so far): x: expected [2], got [4]",
        "(1000 calls so far): x: expected [2], got [8]",
    ]
    assert len(calls.ours) == 7  # each kind once


def test_each_reason_is_told_for_itself(calls, caplog):
    reasons = {None: "slots: expected some", 1: "x: expected more"}
    calls.refuses = lambda x, pool, slots: ValueError(reasons[slots])
    for slots in (None, 1, None, 1):
        calls(meta(2), POOL, slots)
    assert lines(caplog) == [
        f"(1 call so far): {reason}" for reason in reasons.values()
    ]
    assert calls.counted == 4


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_what_is_refused_is_not_tried_again(calls, error):
    calls.refuses = lambda x, *_: (
        None if x.is_contiguous() else error("x: expected contiguous")
    )
    for _ in range(3):
        assert calls(meta(4, 3).T, POOL) == "own"
    assert len(calls.ours) == 1 and len(calls.own) == calls.counted == 3
    assert calls(meta(3, 4), POOL) == "ours"


def test_a_library_that_does_not_build_is_asked_for_again(calls):
    """Not for good: `prepare` may have built it."""
    calls.refuses = lambda *args: GdnError("it does not build")
    for _ in range(2):
        assert calls(meta(2), POOL) == "own"
    assert len(calls.ours) == calls.counted == 2


KINDS = {
    "a gradient": lambda: meta(4, requires_grad=True),
    "another dtype": lambda: meta(4, dtype=torch.bfloat16),
    "another length": lambda: meta(5),
    "a list": lambda: [1, 2],
    "nothing": lambda: None,
}


@pytest.mark.parametrize("refused", KINDS)
def test_a_refusal_is_of_one_kind_of_call(calls, refused):
    """Others of the same strides are tried; an argument that has no hash is no fault."""
    other = KINDS[refused]()
    calls.refuses = lambda x, pool, slots: ValueError("x: no") if x is other else None
    assert calls(other, POOL) == "own"
    assert calls(meta(4), POOL) == "ours"
    assert calls(other, POOL) == "own" and len(calls.ours) == 2


def test_tensors_that_share_memory_are_another_kind_of_call():
    """As an output is that lies in the pool."""
    pool, apart = torch.zeros(2, 1, 128, 128), torch.zeros(128)
    shared, other, again = (
        _kind(x, {}) for x in ((pool[0, 0, 0], pool), (apart, pool), (apart, pool))
    )
    assert shared != other == again


def test_a_gradient_is_refused_only_where_gradients_are_taken(calls):
    refusal = ValueError("x: requires grad")
    calls.refuses = lambda *args: refusal if torch.is_grad_enabled() else None
    x = meta(4, requires_grad=True)
    assert calls(x, POOL) == "own"
    with torch.no_grad():
        assert calls(x, POOL) == "ours"


def test_on_a_cpu_a_refusal_may_be_of_values_and_is_not_remembered(calls):
    calls.refuses = lambda x, *_: ValueError("x: never falls") if x[0] > x[1] else None
    pool = torch.zeros(2, 1, 128, 128)
    assert calls(torch.tensor([2, 1]), pool) == "own"
    assert calls(torch.tensor([1, 2]), pool) == "ours"


def test_errors_that_may_come_after_a_launch_are_raised(calls, caplog):
    """The pool may have changed: the engine's function must not run on top of that."""
    calls.refuses = lambda *args: RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        calls(meta(2), POOL)
    assert calls.own == [] and calls.counted == 0 and lines(caplog) == []


# --- what the library gets


def verify_call(N: int, T: int, **changed) -> dict:
    """vLLM's: N sequences of T tokens, flat."""
    x = steps.tokens(N * T, 2, 6, "cpu")
    x |= {name: x[name][None] for name in "qkv"}
    return x | dict(
        initial_state=steps.pool(N * T + 1, 6, "cpu"), cu_seqlens=torch.arange(0, N * T + 1, T, dtype=torch.int32),
        ssm_state_indices=torch.arange(1, N * T + 1, dtype=torch.int32).view(N, T),
        num_accepted_tokens=torch.ones(N, dtype=torch.int32), use_qk_l2norm_in_kernel=True,
    ) | changed  # fmt: skip


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"is_kda": True}, "scalar gates"),
        ({"beta": 2.0}, "beta 1"),
        ({"threshold": 10.0}, "threshold 20"),
        ({"inplace_final_state": False}, "states in place"),
        ({"initial_state": None}, "expected a pool"),
        ({"ssm_state_indices": None}, "its slots"),
        (
            {"ssm_state_indices": torch.ones(2, dtype=torch.int32)},
            "sequences of one token",
        ),
    ],
)
def test_mtp_verify_refuses(stub, changed, says):
    with pytest.raises(ValueError, match=says):
        serving.mtp_verify(**verify_call(2, 2, **changed))
    assert stub == []


def sglang_call(N: int, T: int, **changed) -> dict:
    """SGLang's target_verify: the slots keep their states, the buffer gets one after each token."""
    x = steps.tokens(N * T, 2, 6, "cpu")
    x |= {name: x[name][None] for name in "qkv"}
    return x | dict(
        softplus_beta=1.0, softplus_threshold=20.0, initial_state_source=steps.pool(N + 2, 6, "cpu"),
        initial_state_indices=torch.arange(N, 0, -1).int(), use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(0, N * T + 1, T, dtype=torch.int32), disable_state_update=True,
        intermediate_states_buffer=torch.zeros(N + 1, T + 1, 6, 128, 128),
        intermediate_state_indices=torch.arange(N).int() + 1, cache_steps=T + 1,
    ) | changed  # fmt: skip


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"is_kda": True}, "scalar gates"),
        ({"lower_bound": -5.0}, "without a lower bound"),
        ({"cache_ring": True}, "without rings"),
        ({"retrieve_parent_token": torch.zeros(2, 2)}, "chain of drafts"),
        ({"disable_state_update": False}, "only with disable_state_update"),
    ],
)
def test_sglang_s_update_refuses(stub, changed, says):
    with pytest.raises(ValueError, match=says):
        sglang.update(**sglang_call(2, 2, **changed))
    assert stub == []


def test_chunk_prefill_s_arguments(stub):
    x = steps.tokens(5, 2, 6, "cpu")
    x |= {name: x[name][None] for name in "qkv"}
    x |= {
        "initial_state": steps.pool(4, 6, "cpu"),
        "ssm_state_indices": torch.tensor([3, 1]),
        "has_initial_state": torch.tensor([True, False]),
        "cu_seqlens": torch.tensor([0, 2, 5]),
    }
    out, _ = serving.chunk_prefill(**x, first_slot=0)
    ((_, args),) = stub
    assert [arg.shape for arg in args[:3]] == [(5, 2, 128), (5, 2, 128), (5, 6, 128)]
    rest = "initial_state", "ssm_state_indices", "has_initial_state", "cu_seqlens"
    for i, name in enumerate(rest, 7):
        assert args[i] is x[name]
    assert args[12] is out and out.shape == (5, 6, 128)
    assert (args[11], *args[13:]) == (None, 0, 1e-6)


# --- the library


class Built:
    """A kernel whose library has these functions."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def exported(self, name: str):
        return (lambda *_: name) if name in self.names else None


def test_threads_load_a_library_once(monkeypatch):
    loads, results, ready = [], [], threading.Barrier(8)

    def slow(name):
        loads.append(name)
        threading.Event().wait(0.05)
        return Built("f")

    monkeypatch.setattr(library, "_kernel", slow)
    exported = library.Exported("f", "op/rung")

    def call():
        ready.wait(10)
        results.append(exported[torch.float32, True]())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert loads == ["op/rung"] and results == ["f"] * 8


def test_names_by_dtype(monkeypatch):
    monkeypatch.setattr(library, "_kernel", lambda name: Built("f", "f_bf16"))
    exported = library.Exported("f", "op/rung")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    assert [exported[dtype, True]() for dtype in dtypes] == ["f", "f_bf16", "f"]


def test_a_missing_function_is_one_line_and_a_failed_build_is_not_repeated(monkeypatch):
    tries = []

    def fails(name):
        tries.append(name)
        raise GdnError("it does not build")

    monkeypatch.setattr(library, "_kernel", fails)
    exported = library.Exported("mtp_verify", "op/rung")
    monkeypatch.setattr(serving, "_verify", exported)
    for _ in range(3):
        with pytest.raises(GdnError, match="it does not build"):
            exported[torch.float32, True]
    assert len(tries) == 1
    monkeypatch.setattr(library, "_kernel", lambda name: Built())
    with pytest.raises(MissingError) as e:
        serving.prepare(serving.mtp_verify)  # it does try again
    assert str(e.value) == "op/rung: its library has no function mtp_verify; update gdn"


def test_no_library_is_loaded_during_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    exported = library.Exported("f", "op/rung")
    with pytest.raises(
        GdnError,
        match=r"while a CUDA graph is captured; call gdn.serving.prepare\(\)",
    ):
        exported[torch.float32, True]
    assert not exported.failed
    exported[torch.float32, True] = found = object()
    assert exported[torch.float32, True] is found


def test_what_a_cpu_has_no_function_for():
    with pytest.raises(
        MissingError, match="f: no function for .*CPU; move .* to a GPU"
    ):
        library.Exported("f", "op/rung")[KIND]


# --- beside the engines' own functions


def beside(release: str, of: str, device: str) -> str | list[str]:
    """Why it cannot be, or what differs. On a CPU this is for the process of the
    fixture `interpreter`.
    """
    engine = ENGINES[release]
    try:
        own, ours = next(
            (engine._own(w), f)
            for w, f in engine.functions.items()
            if ("packed" in w) == (of == "decode")
        )
    except MissingError as e:
        return str(e)
    if device == "cuda" and not any(
        algo.full_name == serving._verify.cuda for algo in helpers.REGISTRY.algos
    ):
        return f"no {serving._verify.cuda} yet"
    # Triton's own, which the interpreter replaces only as tl.exp
    if device == "cpu" and "exp" in own.__globals__:
        own.__globals__["exp"] = lambda x: importlib.import_module(
            "triton.language"
        ).exp(x)
    if of == "decode":
        slots = torch.tensor([1, -1, 3], dtype=torch.int32)
        x = decode_call(use_qk_l2norm_in_kernel=True, ssm_state_indices=slots)
        if device == "cpu":  # the rung there takes slot 0 for padding
            ours = serving.packed_decode
    else:
        x = (
            verify_call(2, 2)
            if engine.package == "vllm"
            else sglang_call(2, 2, cache_steps=3)
        )
    x = {
        name: v.to(device) if isinstance(v, torch.Tensor) else v
        for name, v in x.items()
    }
    y = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in x.items()}
    result, expected = (
        z if isinstance(z, tuple) else (z,) for z in (ours(**y), own(**x))
    )
    names = ("initial_state", "initial_state_source", "intermediate_states_buffer")
    states = [(name, y[name], x[name]) for name in names if name in x]
    # outputs are rounded to bfloat16; SGLang's packed decode rounds beta to it
    limits = {"out": 8e-3} | dict.fromkeys(
        names, 1e-3 if release.startswith("sglang") and of == "decode" else 1e-5
    )
    found = [
        f"{name}: {e:.2g}"
        for name, got, right in [("out", result[0], expected[0]), *states]
        if got.shape != right.shape
        or not (e := steps.error(got, right.cpu().double())) <= limits[name]
    ]
    if of == "decode" and not steps.same(y["out"][1], x["out"][1]):
        found.append("padding")
    return found


@BOTH
@pytest.mark.parametrize("of", ["decode", "verify"])
def test_the_engine_s_own_function_says_the_same(release, of, interpreter):
    """With the engine's files (shared/gpu/engines.sh) on PYTHONPATH."""
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    # before a process is started
    if importlib.util.find_spec(ENGINES[release].package) is None:
        pytest.skip(f"no {ENGINES[release].package} here")
    found = interpreter(beside, release, of, "cpu")
    if isinstance(found, str):
        pytest.skip(found)
    assert found == []


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("of", ["decode", "verify"])
def test_the_engine_s_own_function_says_the_same_on_a_gpu(release, of):
    if isinstance(found := beside(release, of, "cuda"), str):
        pytest.skip(found)
    assert found == []
