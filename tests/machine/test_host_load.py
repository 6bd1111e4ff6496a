"""Rounds on a CPU: the host's load, the rounds that count, and the messages. No real
time, no load.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from gdn_cli.machine import environment, host_load
from gdn_cli.schema.record_types import GpuState
from gdn_cli.worker import timing
from gdn_cli.worker.timing import Plan, Sample, Subject, sampling, wall

# --- witnesses


def round_of(
    lasted: float = 0.02, waited: float = 0.0, preempted: int = 0, **yardsticks: float
) -> host_load.Round:
    return host_load.Round(
        1.0, 1.0 + lasted, waited, preempted, tuple(yardsticks.items())
    )


@pytest.mark.parametrize(
    ("seen", "waiting"),
    [
        ({}, False),
        ({"waited": 0.0019}, False),
        ({"waited": 0.0021}, True),
        ({"waited": 0.03}, True),  # two threads, longer than the round between them
        ({"preempted": 20}, False),
        ({"preempted": 21}, True),
        # a round of a few calls and one tick
        ({"lasted": 1e-4, "preempted": 3}, False),
    ],
)
def test_a_round_in_which_threads_waited(seen, waiting):
    found = round_of(**seen)
    assert (found.waiting, found.slowed, found.disturbed) == (waiting, False, waiting)


def test_a_cpu_that_does_less_than_it_can(monkeypatch):
    """Against its own kind, and against what may be seen later only."""
    monkeypatch.setattr(host_load, "_best", {})
    first = [
        host_load._noted(kind, us) for kind, us in (("quick", 30.0), ("slow", 60.0))
    ]
    found = host_load.Round(1.0, 1.02, 0.0, 0, tuple(first))
    assert not found.slowed
    host_load._noted("quick", 27.5)
    assert not found.slowed  # 9 %
    host_load._noted("quick", 27.0)
    assert found.slowed and found.disturbed and not found.waiting


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """tasks(name=(ran, waited, cpu), ...): this process's threads as /proc has them,
    times in ms; preempted with it.
    """
    (tmp_path / "task").mkdir()
    monkeypatch.setattr(host_load, "_TASKS", tmp_path / "task")
    monkeypatch.setattr(host_load, "_best", {})
    monkeypatch.setattr(host_load, "_yardstick", lambda: [20.0])
    counts = SimpleNamespace(preempted=0, visited=[])
    monkeypatch.setattr(host_load, "_preempted", lambda: counts.preempted)
    monkeypatch.setattr(host_load, "_kind", lambda cpu: f"cpu{cpu}")
    monkeypatch.setattr(
        host_load.os,
        "sched_setaffinity",
        lambda pid, cpus: counts.visited.extend(cpus),
        raising=False,
    )

    def write(**threads):
        for folder in (tmp_path / "task").iterdir():
            if folder.name not in threads:
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()
        for name, (ran, waited, cpu) in threads.items():
            folder = tmp_path / "task" / name
            folder.mkdir(exist_ok=True)
            (folder / "schedstat").write_text(
                f"{ran * 1_000_000} {waited * 1_000_000} 7\n"
            )
            (folder / "stat").write_text(
                f"{name} (a) 1 (b) S {' '.join(['0'] * 35)} {cpu} 0 0\n"
            )

    write.counts = counts
    return write


@pytest.fixture
def clock(monkeypatch):
    """Only timed work moves it: clock.now in seconds; clock.busy is the content of
    /proc/stat for two CPUs.
    """
    clock = SimpleNamespace(now=0.0, busy=0.0)
    monkeypatch.setattr(host_load, "_busy", lambda: (clock.busy, 2))
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_the_waits_of_all_threads_count_and_those_of_before_do_not(tasks, clock):
    tasks(main=(500, 40, 0), pool=(300, 60, 1), gone=(5, 9, 1))

    def work():
        clock.now += 0.02
        tasks(main=(520, 41, 0), pool=(309, 72, 3), new=(1, 2, 2))
        tasks.counts.preempted = 6
        return "done"

    result, seen = host_load.Witness().look_on(work)
    assert result == "done" and (seen.began, seen.ended, seen.preempted) == (
        0.0,
        0.02,
        6,
    )
    assert seen.waited_s == pytest.approx(0.001 + 0.012 + 0.002)
    # the yardstick is laid on where main and pool ran; `new` ran too little to have
    # carried the calls
    assert tasks.counts.visited == [0, 3] and seen.yardsticks == (
        ("cpu0", 20.0),
        ("cpu3", 20.0),
    )


def test_the_yardstick_is_there_before_a_round_too_and_on_few_of_many_cpus(
    tasks, clock
):
    witness = host_load.Witness()
    threads = range(64)

    def work():
        clock.now += 0.02
        tasks(**{f"t{i}": (20 * work.rounds, 0, i) for i in threads})
        work.rounds += 1

    work.rounds = 1
    tasks(**{f"t{i}": (0, 0, i) for i in threads})
    assert len(witness.look_on(work)[1].yardsticks) == 16 and tasks.counts.visited == [
        *range(0, 64, 4)
    ]
    assert len(witness.look_on(work)[1].yardsticks) == 32


def test_where_the_kernel_says_nothing_the_yardstick_is_where_this_thread_is(
    monkeypatch, tmp_path, clock
):
    monkeypatch.setattr(host_load, "_TASKS", tmp_path / "none")
    monkeypatch.setattr(host_load, "_best", {})
    monkeypatch.setattr(host_load, "_yardstick", lambda: [20.0])
    _, seen = host_load.Witness().look_on(lambda: None)
    assert seen.waited_s == 0 and seen.yardsticks == (("", 20.0),)


def test_what_other_processes_used(monkeypatch, tmp_path):
    """For the CPUs that this process may use, without its own use."""
    (tmp_path / "stat").write_text(
        "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 20 30 5000 70 1 2 3 0 0\n"
        "cpu1 900 0 0 0 0 0 0 0 0 0\ncpu12 10 0 0 400 0 0 0 40 0 0\nintr 5\n"
    )
    monkeypatch.setattr(host_load, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(
        host_load.os, "sched_getaffinity", lambda pid: {0, 12}, raising=False
    )
    monkeypatch.setattr(host_load.os, "sysconf", lambda name: 100)
    assert host_load._busy() == (pytest.approx(1.56 + 0.50), 2)
    (tmp_path / "stat").write_text("nothing of the kind")
    assert host_load._busy() == (0, 0)
    (tmp_path / "stat").unlink()
    assert host_load._busy() == (0.0, 0)


@pytest.mark.parametrize(
    ("busy_s", "line"),
    [(1.6, "BUSY: others use 1.6 of 2 CPUs"), (0.2, None), (0.0, None)],
)
def test_what_others_use_now(busy_s, line, monkeypatch):
    """A tenth of the CPUs is no load, and what is not known is none."""
    looks = iter([(0.0, 2), (busy_s, 2)])
    times = iter([0.0, 1.0])
    monkeypatch.setattr(host_load, "_busy", lambda: next(looks))
    monkeypatch.setattr(host_load.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(host_load.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(host_load.time, "sleep", lambda s: None)
    assert host_load.others_now() == line


def test_a_neighbour_that_makes_nobody_wait_is_said(monkeypatch, clock):
    """It has the other thread of the core, and had it all along: no round waits, and
    nothing was ever quicker.
    """

    def script(i):
        clock.busy += 0.1
        return {}

    t, _ = measured(monkeypatch, clock, script)
    # ten rounds, 30 ms each
    assert t.host.others == pytest.approx(10 * 0.1 / 0.3, rel=0.01) and t.host.cpus == 2
    (said,) = doubts(t)
    assert (
        said.startswith("other processes used 3.3 of 2 CPUs")
        and " of 2 CPUs: end other programs on this machine" in said
    )
    quiet = host_load.load_of([round_of()], [True], [100.0], (0.2, 2))
    record = timing.summarise("wall", [100.0] * 9, host=quiet)
    assert doubts(record) == []
    record.host.others, record.host.cpus = 0.5, 0  # a system that does not say
    assert doubts(record) == []


def test_the_yardstick_is_not_held_against_this_process_s_own_threads(monkeypatch):
    spent = iter(range(10**6))

    def process_time_ns():
        return next(spent) * 100

    monkeypatch.setattr(time, "thread_time_ns", iter(range(0, 10**6, 60)).__next__)
    monkeypatch.setattr(time, "process_time_ns", process_time_ns)
    # 100 against 60: another thread of its own ran as well
    assert host_load._yardstick() == []
    monkeypatch.setattr(time, "thread_time_ns", iter(range(0, 10**6, 90)).__next__)
    (us,) = host_load._yardstick()
    assert us > 0


# --- rounds


def doubts(timing):
    return environment.doubts(GpuState(), [], GpuState(), timing, 0.01)


def measured(monkeypatch, clock, script, plan=None, us=lambda i: 100.0):
    """A measurement of a call of `us(round)` microseconds; script(i): the host's load
    in round i.
    """
    rounds = []

    def look_on(self, work):
        began, i = clock.now, len(rounds)
        rounds.append(i)
        result = work()
        return result, round_of()._replace(began=began, ended=clock.now, **script(i))

    monkeypatch.setattr(host_load.Witness, "look_on", look_on)
    monkeypatch.setattr(host_load, "_best", {"": 20.0})
    monkeypatch.setattr(wall, "perf_counter_ns", lambda: round(clock.now * 1e9))
    calls = []

    def call():
        calls.append(len(rounds))
        clock.now += us(len(rounds) - 1) / 1e6

    return timing.measure(
        "wall", Subject(call, [], []), plan or Plan(seconds=0.3)
    ), calls


WAITS = {"waited_s": 0.015}
SLOW = {"yardsticks": (("", 26.0),)}


@pytest.mark.parametrize(("what", "waiting"), [(WAITS, 2), (SLOW, 0)])
def test_a_disturbed_round_is_set_aside_while_others_are_enough(
    monkeypatch, clock, what, waiting
):
    def script(i):
        return what if i in (0, 3) else {}

    t, _ = measured(
        monkeypatch, clock, script, us=lambda i: 500.0 if script(i) else 100.0
    )
    assert (t.host.taken, t.host.aside, len(t.host.rounds_us)) == (12, 2, 10)
    assert (t.host.waiting, t.host.slowed) == (waiting, 2 - waiting)
    assert t.histogram == ((100.0, t.samples),) and t.stopped == "target"
    assert doubts(t) == []


def test_where_no_round_is_left_alone_all_count_and_are_in_doubt(monkeypatch, clock):
    """Even a figure as steady as this one can come from a busy neighbour."""
    t, _ = measured(monkeypatch, clock, lambda i: WAITS | SLOW)
    n = t.host.taken
    assert (t.host.aside, t.host.waiting, t.host.slowed) == (0, n, n)
    assert t.stopped == "time" and 1.8 <= t.took_s < 2.0  # patience has an end
    waits, slow = doubts(t)
    assert waits.startswith(f"threads had to wait for a CPU in {n} of {n} rounds: ")
    assert slow.startswith(f"a CPU was slower than its best in {n} of {n} rounds")


def test_rounds_that_disagree_are_in_doubt_whatever_the_witnesses_saw(
    monkeypatch, clock
):
    t, _ = measured(monkeypatch, clock, lambda i: {}, us=lambda i: 100.0 + 20 * (i % 2))
    (text,) = doubts(t)
    assert f"the medians of {t.host.taken} lie between 100 and 120 us: end" in text
    assert t.stopped == "time" and t.host.taken > 5


@pytest.mark.parametrize(
    ("medians", "disagree"),
    [
        ([100.0] * 5, False),
        ([100.0, 100.0, 100.0, 100.0, 150.0], False),  # one of five may
        ([100.0, 100.0, 100.0, 115.0, 115.0], True),
        ([100.0, 104.0, 104.0, 108.0, 109.0], False),
        ([0.10, 0.10, 0.13, 0.15, 0.15], False),  # a clock's tick
        ([100.0, 150.0], True),
        ([100.0], False),
    ],
)
def test_when_rounds_disagree(medians, disagree):
    assert host_load.apart(medians) is disagree


def test_a_call_that_becomes_a_thousand_times_slower_does_not_make_a_round_last(
    monkeypatch, clock
):
    left = iter([1e-5] * 400)

    def take(count):
        for _ in range(count):
            clock.now += next(left, 1e-2)
        return [(Sample(1.0),)] * count

    rows = sampling._round(take, 0.02)
    assert 400 < len(rows) < 440 and clock.now < 0.25


def test_what_is_between_rounds_does_not_count(clock):
    log = []

    def take(count):
        log.append(count)
        clock.now += count * 0.001
        return [(Sample(1.0),)] * count

    found = sampling._counted(take, Plan(iterations=10, trials=1), lambda: None, 1)
    assert len(found.rows) == 10 and found.host.taken == 5
    assert 10 + 5 * 50 <= sum(log) <= 10 + 5 * 51
    assert (
        found.host.span_s == pytest.approx(4 * 0.05 + 5 * 0.002, abs=0.006)
        and found.host.span_s >= 0.2
    )


@pytest.mark.parametrize(
    ("iterations", "trials", "step", "shares"),
    [
        (40, 1, 1, [8] * 5),
        (7, 1, 1, [1, 1, 2, 1, 2]),
        (2, 1, 1, [1, 1]),
        (5, 8, 1, [5] * 8),
        (4, 2, 2, [2] * 4),
    ],
)
def test_exact_counts_stay_exact_in_rounds(
    clock, monkeypatch, iterations, trials, step, shares
):
    monkeypatch.setattr(sampling, "_settle", lambda take, lasts: None)
    taken = []

    def take(count):
        taken.append(count)
        return [(Sample(1.0),)] * count

    plan = Plan(iterations=iterations, trials=trials)
    found = sampling._counted(take, plan, lambda: None, step)
    assert (
        sorted(taken) == sorted(shares)
        and len(found.rows) == iterations * trials
        and found.stopped == "count"
    )
    assert found.host.taken == len(shares) and found.host.aside == 0


@pytest.mark.parametrize(
    ("samples", "said"), [(1, "only 1 sample: "), (5, "only 5 samples: "), (6, "")]
)
def test_so_few_samples_are_in_doubt(samples, said):
    record = timing.summarise(
        "wall", [4e5] * samples, host=host_load.load_of([round_of()], [True], [4e5])
    )
    expected = [f"{said}give it more time (--seconds 3)"] if said else []
    assert doubts(record) == expected
    record.host = None
    # a GPU's counts are its tier's
    assert doubts(record) == []


def test_rounds_of_several_set_the_same_calls_aside_for_all(monkeypatch, clock):
    """What took turns stays paired."""
    rounds = []

    def look_on(self, work):
        rounds.append(clock.now)
        began, result = clock.now, work()
        seen = round_of()._replace(began=began, ended=clock.now)
        return result, seen._replace(**WAITS) if len(rounds) == 2 else seen

    monkeypatch.setattr(host_load.Witness, "look_on", look_on)
    monkeypatch.setattr(wall, "perf_counter_ns", lambda: round(clock.now * 1e9))

    def call(us):
        return lambda: setattr(
            clock, "now", clock.now + (us * (50 if len(rounds) == 2 else 1)) / 1e6
        )

    subjects = [Subject(call(us), [], []) for us in (100.0, 200.0)]
    timings, each = timing.interleave("wall", subjects, Plan(seconds=0.3))
    assert [t.host.aside for t in timings] == [1, 1] and len(each[0]) == len(
        each[1]
    ) == timings[0].samples
    assert max(each[0]) == pytest.approx(100) and max(each[1]) == pytest.approx(200)
