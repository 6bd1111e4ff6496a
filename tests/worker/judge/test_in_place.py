"""`--in-place`: an output is the input that the op says it may be, and every call finds
it as it was before.
"""

from __future__ import annotations

from types import SimpleNamespace

import building
import helpers
import pytest
import reports
import torch

from gdn_cli.catalog import ops, registry
from gdn_cli.errors import UsageError
from gdn_cli.machine import inventory
from gdn_cli.records import comparison, history, store
from gdn_cli.report import merge
from gdn_cli.run import eligibility, planning
from gdn_cli.schema.record_types import Record
from gdn_cli.tune import race, search
from gdn_cli.worker import timing
from gdn_cli.worker.judge import check
from gdn_cli.worker.timing import Plan, Subject, TierUnavailableError, cupti, events

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode"]

# right wherever it writes; and right only where its results lie apart from its inputs
DECODE = f"""
from .right import run as right
def run({helpers.DECODE_ARGS}, output, new_state):
    y, s = right({helpers.DECODE_ARGS})
    output.copy_(y); new_state.copy_(s)
"""
TOO_EARLY = DECODE.replace("    y, s", "    new_state.zero_()\n    y, s")
RETURNS = "from .right import run\n"


def write_all(folder):
    for name, source, passing in (
        ("good", DECODE, True),
        ("early", TOO_EARLY, True),
        ("returns", RETURNS, False),
    ):
        helpers.write_algo(folder, name, source, destination_passing=passing)
    return folder


def entries(folder, *names: str) -> list[planning.Entry]:
    known = registry.load(str(folder))
    return [planning.Entry(known.find(name), inventory.Place("cpu")) for name in names]


# --- which calls there are


def test_who_cannot_is_refused_by_name_and_left_out_of_all(tmp_path):
    write_all(tmp_path)
    helpers.write_algo(
        tmp_path, "ready", DECODE, destination_passing=True, setup="main.py::run"
    )
    for name, says in (
        ("returns", "cannot write into given buffers"),
        ("ready", "keeps data that its setup made"),
    ):
        some = entries(tmp_path, "good", name)
        with pytest.raises(UsageError, match=f"--in-place: gdn_decode/{name} .*{says}"):
            eligibility.overwriting(REGISTRY, some, named=True)
    some = entries(tmp_path, "good", "returns")
    good, returns = eligibility.overwriting(REGISTRY, some, named=False)
    assert (good.place.mode, returns.place.mode) == ("cpu", None)
    assert "returns its results" in returns.place.reason


def test_an_op_without_an_in_place_output_is_refused():
    algo = REGISTRY.find("gdn_prefill/pt-reference")
    some = [planning.Entry(algo, inventory.Place("cpu"))]
    with pytest.raises(UsageError, match="gdn_prefill declares no output that") as e:
        eligibility.overwriting(REGISTRY, some, named=False)
    able = [name for name, op in REGISTRY.ops.items() if op.in_place]
    assert e.value.hint == f"{', '.join(able)} do"


# --- calls and times


def step(seen: list[float]):
    """A kernel that adds one to its state and remembers the old values."""

    def call(inputs, outputs):
        seen.append(float(inputs[0][0]))
        outputs[0].copy_(inputs[0] + 1)

    return call


def test_every_call_that_is_timed_finds_the_state_as_it_was():
    seen, state = [], torch.zeros(8)
    subject = Subject.from_kernel(step(seen), [state], [state])
    assert subject.in_place
    assert not Subject.from_kernel(step([]), [state], [torch.zeros(8)]).in_place
    timing.measure("wall", subject, Plan(warmup=0, iterations=20, in_a_row=True))
    assert len(seen) == 20 and set(seen) == {0.0} and float(state[0]) == 1


@pytest.fixture
def on_gpu(monkeypatch):
    """A log of the GPU tiers' actions around two calls of a kernel that adds one to its
    state, without a GPU.
    """
    log, state = [], torch.zeros(8)

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            log.append("event")

        def elapsed_time(self, other):
            return 1.0

    def call(inputs, outputs):
        log.append(f"call on {float(state[0]):g}")
        state.add_(1)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cupti, "rest", lambda: log.append("rest"))
    monkeypatch.setattr(cupti, "begin", lambda: log.append("begin"))
    monkeypatch.setattr(cupti, "cut", lambda ran, count: [timing.Sample(1.0)] * count)
    monkeypatch.setattr(events, "_HEAD_START", 0)
    subject = Subject.from_kernel(call, [state], [state])
    restore = subject.refresh
    subject.refresh = lambda: log.append("restore") or restore()

    def took(module, warm: bool) -> list[str]:
        log.clear()
        state.zero_()
        sampler = object.__new__(module.Sampler)
        sampler.subjects, sampler.alone = [subject], [1]
        sampler.warm, sampler.busy_s = warm, 0.0
        sampler.flush = lambda: log.append("flush")
        sampler.trace = SimpleNamespace(kernels=lambda loop: loop())
        sampler.take([0, 0])
        return list(log)

    return took


def test_on_a_gpu_the_state_is_put_back_where_it_is_not_timed(on_gpu):
    for tier, warm, steps in (
        (events, False, "restore, flush, event, call on 0, event"),
        (cupti, False, "rest, restore, flush, call on 0"),
        (events, True, "restore, call on 0, restore, event, call on 0, event"),
        (cupti, True, "rest, restore, rest, call on 0, restore, begin, call on 0"),
    ):
        assert on_gpu(tier, warm) == steps.split(", ") * 2


def test_a_copy_in_another_place_is_in_place_too_and_starts_from_the_same_values():
    seen, state = [], torch.zeros(8)
    subject = Subject.from_kernel(step(seen), [state], [state])
    subject.call()
    # its own buffers, and the same ones because they are small
    for least in (0, 10**6):
        other = subject.copy(least)
        assert other.in_place and other.outputs[0] is other.inputs[0]
        assert (other.inputs[0] is state) == bool(least)
        other.call()
        other.refresh()
        other.call()
    assert seen == [0.0] * 5


@pytest.mark.parametrize("tier", ["graph", "nvbench", "fib"])
def test_a_tier_that_cannot_put_the_state_back_says_so(tier):
    state = torch.zeros(8)
    subject = Subject.from_kernel(step([]), [state], [state])
    with pytest.raises(
        TierUnavailableError, match="cannot restore.*; cupti and events"
    ):
        timing.measure(tier, subject, Plan())


# --- checks


class Steps:
    """A kernel of this process."""

    destination_passing = True

    def __init__(self, early: bool) -> None:
        self.early = early

    def __call__(self, inputs, outputs):
        if self.early:
            outputs[1].zero_()
        y = inputs[0] + inputs[1]
        outputs[0].copy_(y)
        outputs[1].copy_(2 * inputs[1])


TOY = ops.Op(
    name="toy", definition="toy", op_type="toy", summary="toy", axes={"n": None},
    inputs={"x": ops.TensorSpec("float32", ("n",)), "s": ops.TensorSpec("float32", ("n",))},
    outputs={"y": ops.TensorSpec("float32", ("n",)), "t": ops.TensorSpec("float32", ("n",))},
    tolerance={"y": 1e-6, "t": 1e-6}, reference="none", linear_in=("x", "s"), label="n={n}", in_place={"t": "s"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("early", "apart", "in_place"), [(False, True, True), (True, True, False)]
)
def test_a_check_in_place_sees_who_reads_too_late_and_leaves_the_inputs(
    early, apart, in_place
):
    x, s = torch.ones(4), torch.full((4,), 3.0)
    right = [(x + s).double(), (2 * s).double()]
    given = TOY, {"n": 4}, [x, s], right
    for pairs, passes in (({}, apart), ({1: 1}, in_place)):
        problem = check.Problem(*given, pairs)
        verdict = check.check(helpers.local(Steps(early)), problem)
        assert verdict.passed == passes and not verdict.inputs_changed
        assert torch.equal(s, torch.full((4,), 3.0))


@pytest.fixture(scope="module")
def bench_in_place(tmp_path_factory, gdn):
    """One bench of three throw-away algos."""
    folder = write_all(tmp_path_factory.mktemp("algos"))
    args = "bench --in-place --algo good,early --tier wall --seconds 0.05 -w 901e --json".split()
    return gdn(*args, "--algos", folder, "--out", folder / "out.json").json


@pytest.mark.slow
def test_records_say_that_they_are_in_place(bench_in_place):
    assert bench_in_place["options"]["in_place"] is True
    found = {r["algo"]: r for r in bench_in_place["records"] if r["workload"]}
    assert set(found) == {"copy", "good", "early"}  # the reference returns its results
    assert all(r["in_place"] is True for r in bench_in_place["records"])
    good, early = found["good"], found["early"]
    assert good["status"] == "passed" and good["timing"]["median_us"] > 0
    assert good["probes"] and not any(good["probes"].values())
    assert early["status"] == "wrong" and early["check"]["inputs_changed"] == []


# --- reading in-place records


def record(us: float, **more) -> Record:
    timed = timing.summarise("cupti", [us], l2="cold")
    return building.record("cuda-v5", tier="cupti", timing=timed, **more)


def test_a_report_never_has_them_in_one_group_with_others():
    source = reports.source(
        "a.json", building.document(record(3.0), record(2.0, in_place=True))
    )
    book = merge.gather([source], REGISTRY)
    assert [(g.how, g.median_us("cuda-v5", "B=1")) for g in book.groups] == [
        ("cupti, L2 cold", 3.0),
        ("cupti, L2 cold, in place", 2.0),
    ]
    # neither took the other's place
    assert [m.record.in_place for m in book.measured] == [False, True]


def test_in_place_records_are_compared_only_with_each_other():
    saved = building.document(record(2.0, in_place=True))
    with pytest.raises(UsageError, match="a.json holds no times of gdn_decode"):
        comparison.check_saved(
            saved, "a.json", "gdn_decode", ["cuda-v5"], None, {"cupti"}
        )
    assert (
        comparison.check_saved(
            saved, "a.json", "gdn_decode", ["cuda-v5"], None, {"cupti"}, True
        )
        == "cuda-v5"
    )


def test_a_saved_time_is_of_the_same_kind_of_call():
    both = building.document(record(3.0), record(2.0, in_place=True))
    now = building.document(record(1.0, in_place=True))
    comparison.against(now, both, "a.json", "cuda-v5", 0.005)
    assert [c.baseline_us for c in now.comparisons] == [2.0]


def test_the_history_keeps_them_apart(tmp_path):
    document = building.document(record(3.0), record(2.0, in_place=True))
    (tmp_path / "x.json").write_text(store.dumps(document))
    series = history.read(tmp_path)[0]
    assert [(s.tier, s.measured) for s in series] == [
        ("cupti", 1),
        ("cupti, in place", 1),
    ]


@pytest.mark.parametrize("in_place", [False, True])
def test_tune_asks_for_them_and_keeps_what_it_measured_apart(in_place, monkeypatch):
    settings, algo = search.Settings("wall", in_place=in_place), REGISTRY.find("cpp-v1")
    plan = search.Plan(OP, algo, "cpu", {}, {"a": {}}, {"a": algo}, 0, {1: []}, None)
    monkeypatch.setattr(search.Plan, "space", search.Space((), None, {}))
    monkeypatch.setattr(search.tuned_table, "own_hash", lambda algo, op: "hash")
    work = search.State(
        plan,
        settings,
        lambda *_: None,
        lambda *_: None,
        (None,),
        {},
        None,
        {},
        homes={1: None},
    )
    jobs = [race._job(work, "check", [], None, [])]
    monkeypatch.setattr(race, "execute", lambda job, *_, **__: jobs.append(job))
    race._time(work, race.FIRST, {1: ["a"]}, [], "a group")
    assert [job.request.in_place for job in jobs] == [in_place] * 2 and [
        job.command for job in jobs
    ] == [
        "check",
        "compare",
    ]
    assert search.key_of(plan, settings, None).in_place == in_place
