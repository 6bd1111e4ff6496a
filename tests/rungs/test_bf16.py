"""gdn_decode_bf16: one rounding of the state, errors that the tolerances find, its
workloads, FlashInfer's call.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
import types

import cheats
import helpers
import oracle
import pytest
import torch

from gdn_cli.catalog import pack, presets, registry
from gdn_cli.catalog.workloads import embedded, select
from gdn_cli.run import planning
from gdn_cli.worker.executor import build
from gdn_cli.worker.judge import check, dataset, probes, synthetic
from gdn_cli.worker.judge.probes import async_work, caching
from gdn_cli.worker.judge.probes.harness import FACTOR
from gdn_cli.worker.timing import floor

REGISTRY = helpers.REGISTRY
OP, DECODE = REGISTRY.ops["gdn_decode_bf16"], REGISTRY.ops["gdn_decode"]
FI = REGISTRY.find("fi-baseline", OP.name)


class Work:
    """A twin of the op, with its oracle's results."""

    def __init__(self, batch_size):
        workload = select(OP, embedded(OP), chosen=[f"batch_size={batch_size}"])[0]
        self.axes, self.inputs = workload.axes, dataset.load_inputs(OP, workload)
        self.expected = check.oracle(
            build.reference(pack.definition(OP, REGISTRY)), self.inputs
        )
        self.given: list[list] = []

    def check(self, kernel):
        """On copies of the inputs, so that a kernel's changes to them do not affect the
        next one. They stay, as in a runner: a probe counts on addresses that are new.
        """
        inputs = check.cloned(self.inputs)
        self.given.append(inputs)
        problem = check.Problem(OP, self.axes, inputs, self.expected)
        return check.check(helpers.local(kernel), problem)

    def probe(self, kernel, name: str) -> str | None:
        problem = check.Problem(OP, self.axes, self.inputs, self.expected)
        return probes.run(helpers.local(kernel), problem, [name])[name]


@pytest.fixture(scope="module")
def work():
    return Work(3)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """make(sources, **keys of algo.toml) -> the kernel that flashinfer-bench builds of it."""
    # a solution that was built before comes back with all that it remembers
    numbers = itertools.count()

    def make(sources, **keys):
        folder = tmp_path_factory.mktemp("bf16")
        here = helpers.write_algo(
            folder, f"throw-away-{next(numbers)}", sources, op=OP.name, **keys
        )
        solution = pack.pack(registry.read_algo(here / "algo.toml", OP.name), OP)
        return build.build(pack.definition(OP, REGISTRY), solution)

    return make


@pytest.fixture(scope="module")
def reference():
    return helpers.built(f"{OP.name}/pt-reference", "cpu")[1]


# --- the op


@pytest.mark.parametrize(
    ("batch_size", "kib"), [(1, 518.1), (8, 4144.3), (64, 33154.1), (256, 132616.1)]
)
def test_the_bytes_that_it_moves(batch_size, kib):
    axes = {"batch_size": batch_size}
    assert round(floor.bytes_moved(OP, axes) / 1024, 1) == kib
    state = 2 * batch_size * 8 * 128 * 128 * 2  # additional bytes of a float32 state
    assert floor.bytes_moved(DECODE, axes) - floor.bytes_moved(OP, axes) == state


# --- one rounding


def test_the_reference_is_the_oracles_step_rounded_once(reference):
    """Float32 sums may tip a value that lies next to the middle of two; nothing else may differ."""
    inputs = oracle.inputs(OP.name, batch_size=5, scale=0.3)
    assert inputs[3].dtype == torch.bfloat16
    found = reference.returns(inputs)
    for got, exact in zip(found, oracle.gdn_decode_bf16(*inputs), strict=True):
        want = torch.from_numpy(exact).bfloat16()
        off = got != want
        assert off.double().mean() < 2e-3
        steps = got.view(torch.int16).int() - want.view(torch.int16).int()
        assert steps.abs().max() <= 1
        rounding = oracle.error(want, exact)
        assert rounding < oracle.error(got, exact) * (1 + 1e-3) < 1.8e-3


def exact_step():
    """A step without any error: g = 1, beta = 1/2, k = e0, q = e0 - e1, so that column
    0 of the state becomes the mean of it and v, and the output is what column 0 of the
    new state is above column 1, which stays.
    """
    state = torch.ones(1, 8, 128, 128).bfloat16()
    v = torch.full((1, 1, 8, 128), 1 + 2**-7).bfloat16()
    state[..., 1::2, 0], v[..., 1::2] = 1 + 2**-7, 1 + 2**-6
    k, q = (torch.zeros(1, 1, 4, 128).bfloat16() for _ in range(2))
    k[..., 0], q[..., 0], q[..., 1] = 1, 1, -1
    zeros = torch.zeros(1, 1, 8).bfloat16()
    A_log = torch.full((8,), -math.inf)
    return [q, k, v, state, A_log, zeros, torch.zeros(8), zeros, 1.0]


def test_ties_go_to_even_and_the_output_is_made_before(reference):
    output, state = reference.returns(exact_step())
    # of the rounded state it would be 0
    assert output[0, 0, :, 0::2].unique().tolist() == [2**-8]
    assert output[0, 0, :, 1::2].unique().tolist() == [3 * 2**-8]
    # from 1 + 2^-8: to even is down
    assert state[..., 0::2, 0].unique().tolist() == [1.0]
    # from 1 + 3 * 2^-8: to even is up
    assert state[..., 1::2, 0].unique().tolist() == [1 + 2**-6]
    assert state[..., 1:].unique().tolist() == [1.0]


def test_powers_of_two_scale_the_results_exactly(work, reference):
    """An assumption of the probes: a bfloat16 state times a power of two is exact, and
    so are the results.
    """
    once = reference.returns(work.inputs)
    linear = [list(OP.inputs).index(name) for name in OP.linear_in]
    for factor in (FACTOR, *caching._UNSEEN):
        inputs = list(work.inputs)
        for i in linear:
            inputs[i] = inputs[i] * factor
            assert inputs[i].dtype == work.inputs[i].dtype
        scaled = (x * factor for x in once)
        assert all(map(check.same_bits, scaled, reference.returns(inputs)))


# --- errors that the tolerances find

STEP = """\
import torch
from .right import run as right

def narrow(x):
    return x.bfloat16().float()

def cut(x):
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)

def at_random(x):
    noise = torch.randint(0, 65536, x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return cut((x.view(torch.int32) + noise).view(torch.float32))

def summed(S, x):
    total = torch.zeros(S.shape[:-1])
    for i in range(S.shape[-1]):
        total = narrow(total + S[..., i] * x[..., None, i])
    return total

def step(q, k, v, state, A_log, a, dt_bias, b, scale, decayed=lambda S: S, dot=lambda S, x: (S @ x[..., None])[..., 0],
         read=lambda S: S):
    q, k, v, a, b = (x[:, 0].float() for x in (q, k, v, a, b))
    q, k = (x.repeat_interleave(2, dim=1) for x in (q, k))
    g = torch.exp(-torch.exp(A_log) * torch.nn.functional.softplus(a + dt_bias))
    S = decayed(g[..., None, None] * state.float())
    d = torch.sigmoid(b)[..., None] * (v - dot(S, k))
    S = S + d[..., None] * k[..., None, :]
    return (scale * dot(read(S), q))[:, None].bfloat16(), S

def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    out, new = step(q, k, v, state, A_log, a, dt_bias, b, scale)
"""

STEP_BY = "    out, new = step(q, k, v, state, A_log, a, dt_bias, b, scale, {})\n"
NEAREST = "    return out, new.bfloat16()"
# a change of the exact step: the output's error, the state's, the output that shows it
ROUNDINGS = {
    "nearest": (NEAREST, 1.65e-3, 1.66e-3, None),
    "cut": ("    return out, cut(new).bfloat16()", 1.65e-3, 3.3e-3, "new_state"),
    # errors that a tolerance cannot find, see configs/gdn_decode_bf16.toml
    "random": ("    return out, at_random(new).bfloat16()", 1.65e-3, 2.35e-3, None),
    "twice": (STEP_BY.format("decayed=narrow") + NEAREST, 2.3e-3, 2.3e-3, None),
    "output-after": (STEP_BY.format("read=narrow") + NEAREST, 2.4e-3, 1.66e-3, None),
    "bfloat16-sums": (STEP_BY.format("dot=summed") + NEAREST, 1.3e-2, 1.8e-3, "output"),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_which_roundings_are_seen(name, work, make):
    body, output, new_state, caught = ROUNDINGS[name]
    verdict = work.check(make(STEP + body))
    assert verdict.errors == {
        "output": pytest.approx(output, rel=0.05),
        "new_state": pytest.approx(new_state, rel=0.03),
    }
    # the contest's rule sees no rounding of the state at all
    assert verdict.official or caught == "output"
    assert verdict.passed == (caught is None)
    assert caught is None or f"{caught}: " in verdict.reason


def test_no_rounding_to_nearest_is_over_the_tolerance():
    """The least favourable values lie just above a power of two: 2^-7 / sqrt(12) of them."""
    draw = torch.Generator().manual_seed(0)
    x = 1 + torch.rand(1 << 18, generator=draw, dtype=torch.float64) / 16
    worst = 2**-7 / math.sqrt(12)
    assert 0.95 * worst < oracle.error(x.bfloat16(), x) < worst
    assert worst < OP.tolerance["new_state"]


# --- probes

# of each probe the first that is Python; the one of decode that moves by 2e-6 would be
# lost in bfloat16
CAUGHT = {
    c.probe: c for c in reversed(cheats.CHEATS.values()) if c.language == "python"
}
CAUGHT["nondeterminism"] = cheats.returns(
    "nondeterminism",
    "new_state differs between equal calls by 0.0",
    "out, new = CALL\nreturn out, new * (1 + (torch.rand(new.shape) < 0.02) / 128).bfloat16()",
)


@pytest.mark.parametrize("probe", probes.USUAL)
def test_every_probe_catches_its_cheat_on_a_bfloat16_state(probe, make, monkeypatch):
    cheat = CAUGHT[probe]
    monkeypatch.setattr(async_work, "_LATE_S", 60.0 if probe == "late-work" else 0.1)
    small, kernel = Work(1), make(**cheat.keys())
    assert not cheat.checked or small.check(kernel).passed
    assert cheat.says in (small.probe(kernel, probe) or "")


def test_a_write_of_one_element_after_the_state_is_seen(make):
    body = """
        fill(output, new_state, CALL)
        end = new_state.storage_offset() + new_state.numel()
        new_state.as_strided((1,), (1,), end).zero_()
    """
    kernel = make(cheats.source(body, True), destination_passing=True)
    says = "new_state: 2 bytes written, 1 to 2 after its last"
    assert Work(1).probe(kernel, "out-of-bounds") == says


# --- workloads, names


def test_its_workloads_are_twins_of_the_sweeps_sizes():
    found = embedded(OP)
    sizes = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256)
    numbered = [(i, {"batch_size": n}) for i, n in enumerate(sizes)]
    assert [(w.index, w.axes) for w in found] == numbered
    sweep, quick = map(presets.load_preset, ("sweep", "quick"))
    assert select(OP, found, preset=sweep) == found
    assert [w.index for w in select(OP, found, preset=quick)] == [0, 3, 7]
    # results are filed under these: a change here orphans every record there is
    assert found[0].uuid == "21e747f7-8acf-57cd-a9b8-3f85481769ae"
    assert select(OP, found, chosen=["batch_size=5"])[0].origin == "twin"


def test_a_twins_state_has_the_size_that_the_recurrence_settles_at():
    state = synthetic.draw(OP, embedded(OP)[3], "state")
    assert state.dtype == torch.bfloat16
    assert state.shape == (8, 8, 128, 128)
    size = float(state.double().square().mean().sqrt())
    assert size == pytest.approx(0.17, rel=0.005)


@pytest.mark.parametrize("op", ["gdn_decode", "gdn_decode_bf16", "attention_fwd"])
def test_the_contests_preset_has_all_workloads_and_its_iterations(op):
    entries = [planning.Entry(a, None) for a in REGISTRY.algos_of(op)]
    contest = presets.load_preset("contest")
    (part,) = planning.select(REGISTRY, entries, planning.Selected(), contest)
    assert part.workloads == embedded(REGISTRY.ops[op])
    assert part.plan == {"warmup": 10, "iterations": 50, "trials": 3}


def test_short_names_still_mean_decodes(tmp_path, write_algo):
    write_algo(tmp_path, "only-bf16", "def run(): ...", op=OP.name)
    known = registry.load(str(tmp_path))
    for name in ("pt-reference", "fi-baseline"):
        assert known.find(name).full_name == f"gdn_decode/{name}"
        assert known.find(name, OP.name).full_name == f"gdn_decode_bf16/{name}"
    assert known.find("only-bf16").full_name == "gdn_decode_bf16/only-bf16"
    assert known.algos_of(OP.name)[0].name == "pt-reference"


# --- FlashInfer's call, without FlashInfer: test_peers.py reads its signature


def test_fi_baseline_hands_over_what_flashinfer_updates_in_place(
    monkeypatch, work, reference
):
    """Against a stand-in with FlashInfer's parameters and documented behaviour; the
    kernel itself needs a GPU.
    """
    seen = []

    def stand_in(q, k, v, state, *gates, scale, output, use_qk_l2norm):
        assert not use_qk_l2norm
        assert isinstance(scale, float)
        assert state.dtype == torch.bfloat16
        seen.append((state.data_ptr(), scale))
        out, new = reference.returns([q, k, v, state, *gates, scale])
        output.copy_(out)
        state.copy_(new)
        return output, state

    for name in ("flashinfer", "flashinfer.gdn_decode"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["flashinfer.gdn_decode"].gated_delta_rule_decode_pretranspose = stand_in
    spec = importlib.util.spec_from_file_location("fi_bf16", FI.shares[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = check.cloned(work.inputs)
    for scale in (work.inputs[-1], None, 0):
        outputs = check.allocate(OP, work.axes, "cpu")
        module.run(*work.inputs[:-1], scale, *outputs)
        assert seen.pop() == (outputs[1].data_ptr(), pytest.approx(128**-0.5))
        for out, exact in zip(outputs, work.expected, strict=True):
            assert oracle.error(out, exact) < 1.8e-3
    for x, was in zip(work.inputs[:-1], before[:-1], strict=True):
        assert check.same_bits(x, was)
