"""gdn_decode_packed in the worker: what is drawn, what counts as moved, slots that must
stay, calls always in place.
"""

from __future__ import annotations

import re

import helpers
import problems
import pytest
import torch
from problems import caught

from gdn_cli.catalog.workloads import stressed, twin
from gdn_cli.errors import UsageError
from gdn_cli.machine import inventory
from gdn_cli.run import eligibility, planning
from gdn_cli.run.jobs import Job
from gdn_cli.worker.judge import check, dataset, probes
from gdn_cli.worker.timing import floor

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode_packed"]
SMALL = REGISTRY.op("gdn_decode_packed_qk1_v2")
ARGS = ", ".join(OP.inputs)
RIGHT = (helpers.OURS / OP.name / "pt-reference" / "main.py").read_text(
    encoding="utf-8"
)
# in place, and right: what the throw-away algos below do but for one thing
HONEST = f"""
import torch
from .reference import run as right
kept = {{}}
def run({ARGS}, output, new_pool):
    y, s = right({ARGS})
    output.copy_(y); new_pool.copy_(s)
"""


def drawn(op, **axes) -> dict:
    return dict(zip(op.inputs, dataset.load_inputs(op, twin(op, axes)), strict=True))


# --- tensors


def test_parts_are_drawn_each_by_itself_and_slots_without_repeats():
    x = drawn(OP, batch_size=40)
    q, k, v = (
        x["mixed_qkv"][:, i:j].float() for i, j in OP.parts("mixed_qkv").values()
    )
    assert [piece.shape[1] for piece in (q, k, v)] == [512, 512, 1024]
    for piece in (q, k, v):
        assert abs(float(piece.mean())) < 0.03 and abs(float(piece.std()) - 1) < 0.03
    assert not torch.equal(q, k)
    assert float(x["pool"].std()) == pytest.approx(0.17, rel=0.01)
    slots = x["state_indices"].tolist()
    assert len(set(slots)) == 40 and slots != sorted(slots)
    assert 1 <= min(slots) and max(slots) <= 80
    full = drawn(SMALL, batch_size=6, pool_size=7)["state_indices"]
    assert sorted(full.tolist()) == [1, 2, 3, 4, 5, 6] and full.dtype == torch.int32


def test_the_hard_inputs_are_what_they_say():
    found = {name: dict(zip(OP.inputs, dataset.load_inputs(OP, stressed(OP, [name])[0]), strict=True))
             for name in ("padding", "zero-keys", "large-state", "odd-batch", "strong-decay")}  # fmt: skip
    slots = found["padding"]["state_indices"].tolist()
    assert slots[0] == slots[4] == 0 and slots[-1] == -1
    assert len({s for s in slots if s > 0}) == 5
    row = found["zero-keys"]["mixed_qkv"]
    assert not row[:, :1024].any() and row[:, 1024:].all(1).any()
    squares = found["large-state"]["pool"].double().square()
    assert float(squares.mean().sqrt()) == pytest.approx(1e6, rel=0.01)
    assert set(range(1, 34)) == set(found["odd-batch"]["state_indices"].tolist())
    assert found["strong-decay"]["a"].float().mean() == pytest.approx(60, rel=0.05)


def test_a_call_moves_the_slots_in_use_and_a_file_holds_the_pool():
    small, large = ({"batch_size": 8, "pool_size": n} for n in (17, 1000))
    slots = 8 * 8 * 128 * 128 * 4
    rest = 2 * 8 * (2048 + 8 + 8 + 8 * 128) + 4 * (8 + 8 + 8 + 1)
    moved = [floor.bytes_moved(OP, axes) for axes in (small, large)]
    assert moved == [2 * slots + rest] * 2
    assert check.wanted(OP, large)[1][0] == (1000, 8, 128, 128)


# --- checks and probes


def work_of(batch: int = 3) -> problems.Work:
    """One query/key head and two value heads; slots 1 and up are in use."""
    axes = {"batch_size": batch, "pool_size": 2 * batch + 1}
    return problems.Work(SMALL, twin(SMALL, axes))


@pytest.fixture(scope="module")
def work():
    return work_of()


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """make(old, new) -> HONEST with that change, built."""

    def make(old: str = "", new: str = "", passing: bool = True):
        assert old in HONEST
        main = HONEST.replace(old, new, 1) if old else HONEST
        sources = {"main.py": main, "reference.py": RIGHT}
        folder = tmp_path_factory.mktemp("algos")
        return problems.kernel(folder, SMALL, sources, destination_passing=passing)

    return make


END = "new_pool.copy_(s)"
UNUSED = "slot = next(i for i in range(1, len(s)) if i not in state_indices.tolist())"


@pytest.mark.parametrize(("end", "says"), [
    (f"{END}; new_pool[0] = 0.5", "new_pool: slot 0 changed, and no row of state_indices names it"),
    (f"{UNUSED}; s[slot, 1, 2, 3] *= 1 + 1e-6; {END}", "new_pool: slot [1-6] changed, and no row"),
    (f"s[[i for i in range(len(s)) if i not in state_indices]] = -s[0]; {END}",
     "new_pool: slot 0 changed, and no"),
    (f"s[int(state_indices[0])] += 1e-3; {END}", "new_pool: relative error 0.00"),
    (f"s[0, 0, 0, 0] = float('nan'); {END}", "new_pool: slot 0 changed"),
])  # fmt: skip
def test_a_slot_that_no_row_names_must_keep_its_bits(end, says, make, work):
    verdict = work.check(make(END, end))
    assert not verdict.passed and re.match(says, verdict.reason), verdict.reason
    assert torch.equal(work.inputs[5], work.before[5])


def test_padding_names_no_slot(make):
    work = work_of()
    work.inputs[6][:] = torch.tensor([-1, 2, 0])
    work.expected = work.right()
    assert work.check(make()).passed
    late = f"{END}; new_pool[len(new_pool) - 1] += 1"  # what -1 is to Python
    assert work.check(make(END, late)).reason.startswith("new_pool: slot 6 changed")
    first = make(END, f"{END}; new_pool[0] += 1")
    assert work.check(first).reason.startswith("new_pool: slot 0 changed")


def test_who_returns_a_new_pool_is_judged_by_that(make, work):
    returning = HONEST.replace(", output, new_pool", "").replace(
        "output.copy_(y); new_pool.copy_(s)", "return y, s"
    )
    kernel = make(HONEST, returning, passing=False)
    assert work.check(kernel).passed
    returning = returning.replace("return y, s", "s[0] = 1; return y, s")
    kernel = make(HONEST, returning, passing=False)
    assert work.check(kernel).reason.startswith("new_pool: slot 0 changed")


def test_an_honest_algo_is_not_caught_in_place(make, work):
    kernel = make()
    assert work.check(kernel).passed and caught(work.probe(kernel, probes.PROBES)) == {}


@pytest.mark.parametrize(("probe", "old", "new", "says"), [
    ("inputs-changed", END, f"{END}; a.add_(1)", "changed a in call 1 of 3"),
    ("out-of-bounds", END, f"{END}; new_pool.as_strided((1,), (1,), new_pool.storage_offset() - 1).zero_()",
     "new_pool: 4 bytes written, 1 to 4 before its first"),
    ("pointer-cache", "    y, s = right", """
    if mixed_qkv.data_ptr() in kept:
        y, s = kept[mixed_qkv.data_ptr()]
        output.copy_(y); new_pool.copy_(s)
        return
    y, s = kept[mixed_qkv.data_ptr()] = right""", "output stayed the same when the same buffers got new values"),
    ("zero-outputs", "output.copy_(y)", "output.copy_(y * output.isnan().any())", "output is all zeros if"),
    ("nondeterminism", END, f"kept[0] = kept.get(0, 0) + 1; s *= 1 + 1e-5 * kept[0]; {END}",
     "new_pool differs between equal calls"),
    ("neighbours", END, f"s[state_indices.long()] *= 1 + 1e-7 * len(state_indices); {END}",
     "new_pool of sequence 0 has other bits alone than among 3"),
])  # fmt: skip
def test_a_cheat_is_caught_in_place(probe, old, new, says, make, work):
    found = work.probe(make(old, new), [probe])
    assert str(found[probe]).startswith(says), found


# --- which calls there are


def test_every_job_is_in_place_but_of_who_returns():
    def in_place(op, *names: str) -> bool:
        algos = [(REGISTRY.find(f"{op.name}/{name}"), {}) for name in names]
        return Job.of("bench", op, {}, "cpu", (), algos).request.in_place

    assert in_place(OP, "cpp-v1") and in_place(OP) and not in_place(OP, "pt-reference")
    assert not in_place(REGISTRY.ops["gdn_decode"], "cpp-v1")


def test_what_is_timed_takes_no_new_pool():
    entries = [
        planning.Entry(a, inventory.Place("cpu"))
        for a in REGISTRY.algos_of(OP.name)
        if "cpu" in a.modes
    ]
    assert [e.algo.name for e in entries] == ["pt-reference", "cpp-v1"]
    judged = eligibility.overwriting(
        REGISTRY, entries, named=True, in_place=False, timed=False
    )
    assert judged == entries
    timed = eligibility.overwriting(REGISTRY, entries, named=False, in_place=False)
    assert [e.place.mode for e in timed] == [None, "cpu"]
    with pytest.raises(
        UsageError,
        match="gdn_decode_packed is timed in place: gdn_decode_packed/pt-reference returns",
    ):
        eligibility.overwriting(REGISTRY, entries, named=True, in_place=False)
    (part,) = planning.select(REGISTRY, timed, planning.Selected(["0"]))
    plan = planning.prepare(REGISTRY, [part], planning.Settings("bench"))
    assert [(job.command, job.algo and job.algo.name, job.request.in_place) for job in plan.jobs] == [
        ("floor", None, True), ("bench", "cpp-v1", True),
    ]  # fmt: skip


@pytest.mark.slow
def test_two_take_turns_in_place(tmp_path, gdn):
    """Who is right at first and remembers the values of v is found out behind the turns."""
    remembers = HONEST.replace(
        "    y, s = right",
        "    mixed_qkv = kept.setdefault(0, mixed_qkv.clone())\n    y, s = right",
    )
    for name, text in (("one", HONEST), ("two", HONEST), ("three", remembers)):
        sources = {"main.py": text, "reference.py": RIGHT}
        keys = {"op": OP.name, "destination_passing": True}
        helpers.write_algo(tmp_path, name, sources, **keys)
    args = (
        "compare one two three --op gdn_decode_packed -w batch_size=2 --seconds 0.2 --json"
        " --algos".split()
    )
    done = gdn(*args, tmp_path)
    records = {r["algo"]: r for r in done.json["records"]}
    statuses = [records[name]["status"] for name in ("one", "two", "three")]
    assert statuses == ["passed", "passed", "wrong"]
    assert records["one"]["in_place"] and records["two"]["timing"]["median_us"] > 0
    reason = records["three"]["reason"]
    assert "wrong on new values" in reason or "probe" in reason
