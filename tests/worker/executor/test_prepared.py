"""`setup` of algo.toml: done once for the inputs, in no time; said wherever a time is;
without a score.
"""

from __future__ import annotations

import json
import sys
import textwrap
from types import SimpleNamespace

import helpers
import pytest

from gdn_cli.catalog import pack, registry
from gdn_cli.worker.executor import prepared
from gdn_cli.worker.executor.build import BuildFailedError

REGISTRY = helpers.REGISTRY
READY = [a for a in REGISTRY.algos if a.setup]

# the entry point gets the setup's results: the inputs in one tuple
SETUP = f"""
from .right import run as right
def ready({helpers.DECODE_ARGS}):
    return (({helpers.DECODE_ARGS}),)
def run(given):
    return right(*given)
"""


def test_the_peers_that_get_their_gates_ready_made_are_marked_as_such():
    assert {a.full_name for a in READY} == {
        f"gdn_prefill/{name}"
        for name in ("fi-ready", "fi-ready-cp", "fla-ready", "flashqla-ready")
    }
    assert all(
        "setup not timed" in a.summary and a.packages and a.after is None for a in READY
    )


@pytest.mark.parametrize(
    "setup",
    ["main.py", "other.py::ready", "main.py::not a name", "../main.py::ready", 3],
)
def test_an_invalid_setup_is_refused(setup, tmp_path):
    helpers.write_algo(tmp_path, "mine", SETUP, setup=setup)
    (broken,) = registry.load(str(tmp_path)).broken
    message = str(broken.error)
    assert "setup: expected" in message or "`$.setup`" in message


def test_it_belongs_to_python(tmp_path):
    helpers.write_algo(tmp_path, "mine", {"kernel.cpp": "//", "main.py": SETUP}, language="cpp",
                       entry_point="kernel.cpp::run", setup="main.py::ready")  # fmt: skip
    assert "a Python algo's file" in str(registry.load(str(tmp_path)).broken[0].error)


# --- the call


def prepared_of(
    monkeypatch, ready, run, entry_point="calls_for_test.py::run", passing=False
) -> prepared.Prepared:
    """The builder's result for a setup, with the module of the entry point."""
    here = SimpleNamespace(__package__="solution")
    monkeypatch.setitem(sys.modules, "setup_for_test", here)
    monkeypatch.setitem(
        sys.modules, "solution.calls_for_test", SimpleNamespace(run=run)
    )
    misc = {"module_name": "setup_for_test", "binary": None}
    metadata = SimpleNamespace(destination_passing_style=False, misc=misc)
    kernel = SimpleNamespace(
        runnable=SimpleNamespace(_callable=ready, metadata=metadata)
    )
    return prepared.Prepared(kernel, entry_point, passing)


def test_bound_to_its_inputs_it_runs_once_and_else_at_each_call(monkeypatch):
    made, seen = [], []

    def ready(x):
        made.append(x)
        return x, 10 * x

    found = prepared_of(monkeypatch, ready, lambda *given: seen.append(given))
    call = found.bind([2], [])
    assert made == [2] and seen == []
    call(), call()
    assert made == [2] and seen == [(2, 20)] * 2
    found([3], []), found.returns([4])
    assert made == [2, 3, 4] and seen[2:] == [(3, 30), (4, 40)]


def test_outputs_come_after_the_setups_results(monkeypatch):
    seen = []
    found = prepared_of(
        monkeypatch, lambda x: (x,), lambda *given: seen.append(given), passing=True
    )
    found([3], ["out"])
    assert seen == [(3, "out")] and found.destination_passing


def test_an_entry_point_that_is_not_there_does_not_build_and_a_setup_that_returns_no_tuple_fails(
    monkeypatch,
):
    for entry_point, says in (
        ("calls_for_test.py::go", "has no function go"),
        ("none.py::run", "No module named"),
    ):
        with pytest.raises(BuildFailedError, match=says):
            prepared_of(monkeypatch, None, None, entry_point)
    with pytest.raises(TypeError, match="returned int, expected a tuple"):
        prepared_of(monkeypatch, lambda x: 3, print).bind([1], [])


@pytest.mark.slow
def test_a_bench_says_that_the_setup_is_not_timed(tmp_path, gdn):
    helpers.write_algo(tmp_path, "ready", SETUP, setup="main.py::ready")
    words = "bench --algo ready --tier wall --seconds 0.05 -w 901e --algos"
    done = gdn(*words.split(), tmp_path)
    said = " ".join(done.out.split())
    assert done.code == 0 and "note ready at B=1 (wall): setup not timed" in said, (
        done.out + done.err
    )
    file = done.out.split("records: ")[1].strip()
    with open(file) as f:
        found = {r["algo"]: r for r in json.load(f)["records"] if r["workload"]}
    assert found["ready"]["setup"] == "main.py::ready" and found["ready"]["timing"][
        "note"
    ].startswith(prepared.NOTE)
    assert "setup" not in found["pt-reference"] and found["ready"]["probes"]


# --- where it has no place


def test_it_cannot_be_packed(tmp_path, gdn):
    words = "pack --algo fi-ready --op gdn_prefill -o"
    done = gdn(*words.split(), tmp_path / "solution.json")
    assert done.code == 2 and not (tmp_path / "solution.json").exists()
    first, second = done.err.splitlines()
    assert (
        "gdn_prefill/fi-ready does work that is not timed (ready.py::decay)" in first
        and "drop `setup`" in second
    )


# --- the peers' calls, by stand-ins

STAND_IN = textwrap.dedent("""
    import sys; sys.path.insert(0, {tests!r})
    import oracle, torch

    def right(q, k, v, log_g, beta, state, cu_seqlens, scale):
        assert log_g.dtype == beta.dtype == torch.float32 and isinstance(scale, float)
        a, b = (-log_g.double()).expm1().log(), (beta.double() / (1 - beta.double())).log()
        none = torch.zeros(v.shape[1])
        out, state = oracle.gdn_prefill(q, k, v, state, none, a, none, b, cu_seqlens, scale)
        return torch.tensor(out).to(v.dtype), torch.tensor(state).float()

    class gdn_prefill:
        def chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, output,
                                   output_state, use_cp, use_qk_l2norm_in_kernel, max_seqlen=None):
            assert max_seqlen == (3 if use_cp else None) and output_final_state and not use_qk_l2norm_in_kernel
            for x, y in zip((output, output_state), right(q, k, v, g.log(), beta, initial_state, cu_seqlens, scale)):
                x.copy_(y)

    def chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
        assert q.shape[0] == g.shape[0] == 1 and output_final_state and initial_state.is_contiguous()
        out, state = right(q[0], k[0], v[0], g[0], beta[0], initial_state.mT, cu_seqlens, scale)
        return out[None], state.mT
""")
ASK = textwrap.dedent("""
    import importlib, json, sys, types; sys.path[:0] = [{folder!r}, {tests!r}]
    import oracle, stand_in, torch
    for name in ("flashinfer", "fla", "fla.ops"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["flashinfer.gdn_prefill"] = stand_in.gdn_prefill
    sys.modules["fla.ops.gated_delta_rule"] = sys.modules["flash_qla"] = stand_in
    found = {{}}
    for name, entry, setup, passing in {asked!r}:
        file, entry = entry.split("::")
        run = getattr(importlib.import_module(f"{{name}}.{{file[:-3]}}"), entry)
        file, setup = setup.split("::")
        ready = getattr(importlib.import_module(f"{{name}}.{{file[:-3]}}"), setup)
        inputs = oracle.inputs("gdn_prefill", lengths=(3, 2))
        exact = oracle.gdn_prefill(*inputs)
        results = [torch.empty_like(inputs[2]), torch.empty_like(inputs[3])]
        given = ready(*inputs)
        results = (run(*given, *results), results)[1] if passing else run(*given)
        found[name] = [oracle.error(x, y) for x, y in zip(results, exact)]
    print(json.dumps(found))
""")


@pytest.mark.slow
def test_the_calls_match_the_packages_signatures(tmp_path):
    asked = []
    for algo in READY:
        name = algo.name.replace("-", "_")
        (tmp_path / name).mkdir()
        for source in pack.pack(algo, REGISTRY.ops[algo.op])["sources"]:
            (tmp_path / name / source["path"]).write_text(
                source["content"], encoding="utf-8"
            )
        asked.append((name, algo.entry_point, algo.setup, algo.destination_passing))
    names = dict(tests=str(helpers.TESTS), folder=str(tmp_path), asked=asked)
    (tmp_path / "stand_in.py").write_text(STAND_IN.format(**names), encoding="utf-8")
    done = helpers.python("-c", ASK.format(**names), env={"TRITON_INTERPRET": "1"})
    assert done.code == 0, done.err[-2000:]
    found = json.loads(done.out)
    assert len(found) == 4 and all(
        output < 5e-3 and state < 1e-5 for output, state in found.values()
    ), found
