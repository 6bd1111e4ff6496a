"""Other values before each call: all results change, nothing is rounded, and the last
ones follow from a seed.
"""

from __future__ import annotations

import os
import subprocess
import sys

import helpers
import oracle
import pytest
import torch

from gdn_cli.worker.judge import check
from gdn_cli.worker.timing import Plan, Subject, measure
from gdn_cli.worker.timing.flips import Flips, _Ahead, part
from gdn_cli.worker.timing.subject import Values, values

WHERE = [(0, None, None), (1, 8, 24)]


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 2, 16).bfloat16(), torch.randn(5, 32)]


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def ahead(request, monkeypatch):
    """Whether values are made for many calls together, as on a GPU."""
    monkeypatch.setattr(_Ahead, "takes", lambda x: request.param)


@pytest.mark.usefixtures("ahead")
def test_each_call_has_values_that_no_other_has():
    given = inputs()
    before = [x.clone() for x in given]
    flips = Flips(given, WHERE, seed=1)
    seen = set()
    for _ in range(50):
        flips()
        seen.add(given[0].float().numpy().tobytes())
        for x, old in zip(given, before, strict=True):
            assert torch.equal(x.abs(), old.abs())
    assert len(seen) == 50
    flips.restore()
    assert all(map(torch.equal, given, before))


@pytest.mark.usefixtures("ahead")
def test_a_call_changes_every_row_and_only_the_part_that_may_change():
    given = inputs()
    before = given[1].clone()
    Flips(given, WHERE, seed=1)()
    changed = given[1] != before
    assert changed[:, 8:24].any(1).all()
    assert not changed[:, :8].any() and not changed[:, 24:].any()


@pytest.mark.usefixtures("ahead")
def test_the_last_values_follow_from_the_seed_whatever_came_before():
    one, two, three = inputs(), inputs(), inputs()
    flips = Flips(one, WHERE, seed=7)
    copies = flips.copy(two)
    for _ in range(3):
        flips()
    flips.last()
    copies.last()
    Flips(three, WHERE, seed=7).last()
    for x, y, z in zip(one, two, three, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)
    Flips(three, WHERE, seed=8).last()
    assert not torch.equal(one[0], three[0])


LINEAR = [op for op in helpers.REGISTRY.ops.values() if op.linear_in]
EVERY_OP = pytest.mark.parametrize(
    "op", helpers.REGISTRY.ops.values(), ids=lambda op: op.name
)


def outputs(op, change) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each output's name, and the oracle's values for inputs before and after a change."""
    size = {"batch_size": 2}
    if op.name == "gdn_prefill":
        size = {"lengths": [3, 5]}
    elif op.name.startswith("attention"):
        size = {"seq_len": 5}
    given = oracle.inputs(op.name, seed=1, **size)
    changed = check.cloned(given)
    change(changed)
    right = getattr(oracle, op.name)
    found = []
    for results in (right(*given), right(*changed)):
        found.append(results if isinstance(results, tuple) else (results,))
    olds, news = ([torch.as_tensor(x) for x in results] for results in found)
    return list(zip(op.outputs, olds, news, strict=True))


@EVERY_OP
def test_what_an_op_lets_change_changes_every_output(op):
    for name, old, new in outputs(op, lambda x: Flips(x, op.flipped, seed=3)()):
        off = float((new - old).norm() / old.norm())
        least = 0 if op.outputs[name].moves == () else 2 * op.tolerance[name]
        assert off > least or off == least == 0, name


@pytest.mark.parametrize("op", LINEAR, ids=lambda op: op.name)
def test_negating_what_an_op_is_linear_in_negates_its_outputs(op):
    """The linearity that the second check uses, for every op, against the independent oracle."""

    def negate(inputs):
        for i, *ends in op.linear:
            part(inputs[i], *ends).neg_()

    for _, old, new in outputs(op, negate):
        assert abs(old + new).max() < 1e-12 and abs(old).max() > 1e-3


TRITON = """
import torch
from gdn_cli.worker.timing import kernels
from gdn_cli.worker.timing.flips import _Signs

blocks = (1, 9), (1, 3), (5, 20)
for x in (torch.randn(6, 2, 40).bfloat16(), torch.randn(5, 64)[:, 16:48], torch.randn(3, 1500).half()):
    signs = _Signs(x)
    signs.flip(*blocks)
    right = x.clone()
    signs.restore()
    kernels.flip(torch.from_numpy(signs.bits), *blocks)
    assert torch.equal(x, right)
"""


@pytest.mark.slow
def test_the_kernel_for_a_gpu_does_the_same():
    done = subprocess.run(
        [sys.executable, "-c", TRITON], env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0


# --- the call that is checked


class Adds:
    """A kernel that adds one to its input, or that only says so after some calls."""

    destination_passing = True

    def __init__(self, honest: int = 10**6) -> None:
        self.left = honest

    def __call__(self, inputs: list, outputs: list) -> None:
        self.left -= 1
        if self.left >= 0:
            outputs[0].copy_(inputs[0] + 1)


@pytest.mark.parametrize("plan", [Plan(iterations=20, in_a_row=True), Plan(seconds=0)])
def test_the_last_call_is_made_on_values_that_are_known(plan):
    x, out = torch.randn(4, 32), torch.zeros(4, 32)
    known = x.clone()
    Flips([known], [(0, None, None)], seed=5).last()
    results = []
    refresh = values([x], [out], Flips([x], [(0, None, None)], seed=5))
    subject = Subject.from_kernel(Adds(), [x], [out], refresh)
    measure("wall", subject, plan, last=results.append)
    ((last,),) = results
    assert torch.equal(last, known + 1) and last.data_ptr() != out.data_ptr()
    cheat = Subject.from_kernel(Adds(honest=10), [x], [out], refresh)
    measure("wall", cheat, Plan(iterations=20, in_a_row=True), last=results.append)
    assert not torch.equal(results[-1][0], known + 1)


def test_values_that_are_held_stay():
    x = torch.randn(4, 32)
    values = Values([x], [], Flips([x], [(0, None, None)], seed=5))
    values.hold(True)
    held = x.clone()
    values()
    assert torch.equal(x, held)
    values.hold(False)
    values()
    assert not torch.equal(x, held)
