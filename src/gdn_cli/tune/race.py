"""The measuring of `gdn tune`: candidates are checked, the right ones are timed in
turns, and one is chosen for each size.

Each result goes into the journal first and is read from there: an earlier run's
measurements are not repeated.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

from .. import errors
from ..catalog import tuned_table
from ..catalog.registry import Algo
from ..catalog.tuned_table import Size
from ..catalog.workloads import Workload
from ..errors import GdnError, MissingError
from ..machine import gpu_sharing, locks
from ..machine.inventory import Gpu
from ..records import statistics
from ..run.jobs import Job, Outcome, execute
from ..schema.record_types import Blame, Environment, Record, Status
from ..worker.request import Options, Timing
from . import tournament
from .journal import Check, Result, Time, Where
from .search import State
from .tournament import AT_ONCE, FINAL, FIRST, Meeting

# for a group and a workload in the first round, at most
COARSE_S, COARSE_TARGET = 0.3, 0.02
# size -> the candidates that meet there, the leader first
Groups = dict[Size, list[str]]


def run(state: State) -> None:
    """Check, time and choose. Raises GdnError if nothing can be chosen."""
    plan, kept = state.plan, state.journal.kept
    names = list(plan.constants)
    if any(kept.values()):
        earlier = f"{kept['check']} checks and {kept['time']} timings"
        state.say(f"resuming with {earlier} of an earlier run; --fresh starts again")

    # earlier failures count, on any workload
    uuids = {w.uuid for w in plan.workloads}
    for line in state.journal.all(Check):
        if line.workload in uuids:
            state.judge(line.name, line.status, line.reason, line.at)

    # the smallest and the largest workload: what fails in between is found later
    ends = plan.workloads[:1] + plan.workloads[1:][-1:]
    check(state, names, ends, state.gpus)
    if not state.left(names):
        why = next(iter(state.out.values()))
        first = (why.reason or why.status.value).splitlines()[0]
        raise GdnError(
            f"none of the {len(state.out)} candidates of {plan.algo.full_name} is right: {first}"
        )

    state.homes = _homes(state)
    homes = state.homes.values()
    used = [gpu for gpu in state.gpus if gpu and gpu in homes]
    state.cpus = gpu_sharing.cpus(used)

    with contextlib.ExitStack() as locked:
        # a fixed order, so that no two wait for each other
        for gpu in sorted(used, key=lambda gpu: gpu.uuid):
            locked.enter_context(locks.gpu(gpu.uuid, state.say, f"GPU {gpu.index}"))

        groups = _groups(state, ends)
        _each_gpu(state, partial(_first, state, groups))
        finals = tournament.finals(state.meetings, state.out)
        _each_gpu(state, partial(_final, state, finals))

    state.choices = tournament.choose(state.meetings, state.out)
    if len(state.choices) < len(plan.sizes):
        raise GdnError(
            "no candidate came through the final of every size",
            hint="`gdn run` shows why",
        )


def _homes(state: State) -> dict[Size, Gpu | None]:
    """Each size stays on one GPU: the one of an earlier run, if it is here, else the
    least loaded one.
    """
    gpus = [gpu for gpu in state.gpus if gpu]
    if not gpus:
        return dict.fromkeys(state.plan.sizes)
    items: dict[Size, tuple[int, Sequence[Gpu]]] = {}
    for size, workloads in state.plan.sizes.items():
        before = set()
        for w in workloads:
            line = state.journal.find(Time, workload=w.uuid)
            if line:
                before.add(line.gpu)
        same = [gpu for gpu in gpus if gpu.uuid in before]
        items[size] = len(workloads), same[:1] or gpus
    return {**gpu_sharing.deal(items)}


def _each_gpu(state: State, work: Callable[[list[Size]], None]) -> None:
    """Do `work` with the sizes of each GPU, on all GPUs at once."""
    sizes_of: dict[Gpu | None, list[Size]] = {}
    for size, gpu in state.homes.items():
        sizes_of.setdefault(gpu, []).append(size)
    lanes = [partial(work, sizes) for sizes in sizes_of.values()]
    gpu_sharing.side_by_side(lanes, state.stop)


# --- the rounds


def _groups(state: State, ends: Sequence[Workload]) -> list[list[str]]:
    """The groups of the first round. They are made from all that passed the first
    check, even if they drop out later, so that a resumed run makes the same groups.
    """
    needed = {w.uuid for w in ends}
    passed: dict[str, set[str]] = {name: set() for name in state.plan.constants}
    for line in state.journal.all(Check):
        if line.status is Status.PASSED and line.name in passed:
            passed[line.name].add(line.workload)

    names = [name for name in passed if passed[name] >= needed]

    # later groups have a place for the leader
    groups = [names[:AT_ONCE]]
    for start in range(AT_ONCE, len(names), AT_ONCE - 1):
        groups.append(names[start : start + AT_ONCE - 1])
    return groups


def _first(state: State, groups: list[list[str]], sizes: list[Size]) -> None:
    """The groups one after the other, each with the fastest candidate so far."""
    for number, group in enumerate(groups, 1):
        meeting: Groups = {}
        for size in sizes:
            speeds = tournament.standing(state.meetings[size], FIRST, state.out)
            meeting[size] = list(speeds)[:1] + group
        _meet(state, FIRST, meeting, f"group {number} of {len(groups)}")


def _final(state: State, finals: Groups, sizes: list[Size]) -> None:
    """The best of each size, to the full precision. A size without finalists has no
    candidate that is right: `run` says so.
    """
    groups = {size: finals[size] for size in sizes if size in finals}
    _meet(state, FINAL, groups, "final")


def _meet(state: State, number: int, groups: Groups, what: str) -> None:
    """Time the candidates of each size in turns, all these sizes in one process. If the
    worker dies, it is run again without the candidates that fail on the workload where
    it died.
    """
    groups = _left(state, groups)
    while due := _untimed(state, number, groups):
        outcome = _time(state, number, groups, [w for _, w in due], what)
        died_at = _untimed(state, number, groups)[:1]
        for size, workload in died_at:
            names = groups[size]
            check(state, names, [workload], [state.homes[size]])
            if state.left(names) == names:
                raise _no_end(state, outcome, names, workload)
            groups = _left(state, groups)

    for size, names in groups.items():
        meeting = _meeting(state, number, size, names)
        state.meetings[size].append(meeting)


def _left(state: State, groups: Groups) -> Groups:
    """The groups without those that have dropped out, and without empty ones."""
    left = {size: state.left(names) for size, names in groups.items()}
    return {size: names for size, names in left.items() if names}


def _untimed(state: State, number: int, groups: Groups) -> list[tuple[Size, Workload]]:
    """What these groups have still to measure, in the order in which the worker takes
    it: the first is where one that died was.
    """
    return [
        (size, w)
        for size, names in groups.items()
        for w in state.plan.sizes[size]
        if not _timed(state, number, size, names, w)
    ]


def _timed(
    state: State, number: int, size: Size, names: list[str], workload: Workload
) -> Time | None:
    """The line of an earlier measurement, only from the GPU on which the size is timed."""
    gpu = state.homes[size]
    uuid = gpu.uuid if gpu else None
    return state.journal.find(
        Time, workload=workload.uuid, round=number, names=names, gpu=uuid
    )


def _meeting(state: State, number: int, size: Size, names: list[str]) -> Meeting:
    """The lines of a size's workloads together; a candidate that failed on one of them
    is left out.
    """
    us: dict[str, dict[str, float]] = {}
    samples: dict[str, dict[str, list[float]]] = {}
    for w in state.plan.sizes[size]:
        line = _timed(state, number, size, names, w)
        assert line is not None
        us[w.uuid] = {}
        samples[w.uuid] = {}
        for name, result in line.results.items():
            state.judge(name, result.status, result.reason, state.plan.label(w))
            if result.us:
                us[w.uuid][name] = result.us
                samples[w.uuid][name] = result.samples
        if number == FINAL:
            # one of a kind: two doubts that differ in their figures are the same
            for doubt in line.doubts:
                state.doubts[re.sub(r"[\d.]+", "#", doubt)] = doubt
    return Meeting(number, tuple(names), us, samples)


# --- checks


def check(
    state: State,
    names: Sequence[str],
    workloads: Sequence[Workload],
    gpus: Sequence[Gpu | None],
) -> None:
    """Build and check candidates, several at a time, spread over these GPUs; those that
    fail drop out.
    """
    checked = {(line.name, line.workload) for line in state.journal.all(Check)}
    due = {}
    for name in state.left(names):
        lacking = [w for w in workloads if (name, w.uuid) not in checked]
        if lacking:
            due[name] = lacking

    # compilers are the slow part: half of the CPUs
    workers = max(1, min(8 * len(gpus), (os.cpu_count() or 2) // 2))
    next_gpu = itertools.cycle(gpus)
    with ThreadPoolExecutor(workers, "gdn-tune") as pool:
        try:
            running = {}
            for name, lacking in due.items():
                algo = state.plan.algos[name]
                gpu = next(next_gpu)
                job = _job(state, "check", lacking, gpu, [algo])
                future = pool.submit(execute, job, given_up=state.stop.is_set)
                running[future] = name

            for i, future in enumerate(as_completed(running)):
                state.progress("check", i, len(due))
                name = running[future]
                outcome = future.result()
                _note_environment(state, outcome.environment)
                for workload in due[name]:
                    line = _verdict(state, name, outcome, workload)
                    state.journal.add(line)
                    state.judge(name, line.status, line.reason, line.at)
        except BaseException:  # Ctrl-C as well: end the workers that still run
            state.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _job(
    state: State,
    command: str,
    workloads: Sequence[Workload],
    gpu: Gpu | None,
    algos: Sequence[Algo],
    **more: Any,
) -> Job:
    """A worker's job, with what all jobs of a tuning have in common."""
    plan, settings = state.plan, state.settings
    assert plan.mode is not None
    dataset = str(settings.dataset.absolute()) if settings.dataset else None
    return Job.of(
        command,
        plan.op,
        plan.definition,
        plan.mode,
        workloads,
        [(algo, algo.solution) for algo in algos if algo.solution],
        options=Options(dataset=dataset, in_place=settings.in_place),
        gpu=gpu,
        machine=settings.machine,
        **{"timeout_s": settings.timeout_s, **more},
    )


def _verdict(state: State, name: str, outcome: Outcome, workload: Workload) -> Check:
    """The result of a candidate's check on a workload. Raises GdnError if a failure is
    not the candidate's fault.
    """
    label = state.plan.label(workload)
    for record in outcome.records:
        _refuse_the_machines(record)
        if record.uuid == workload.uuid:
            return Check(name, workload.uuid, record.status, record.reason, label)

    _refuse_the_machines(outcome)
    at = None if outcome.status is Status.BUILD_FAILED else label
    reason = _without_folders(outcome.reason)
    return Check(name, workload.uuid, outcome.status, reason, at)


def _refuse_the_machines(result: Record | Outcome) -> None:
    """Raise GdnError for what failed for want of memory, a compiler or a GPU: another
    run may find it right.
    """
    if result.blame is Blame.MACHINE:
        reason = result.reason or result.status.words
        raise GdnError(reason, code=result.code or errors.MISSING)


def _without_folders(text: str | None) -> str | None:
    """A compiler's lines with bare file names: evidence is stored and shared, folders
    are specific to this machine.
    """
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text) if text else text


def _note_environment(state: State, env: Environment | None) -> None:
    """Store where it is measured, once: all GPUs are of one kind."""
    if env and not state.journal.find(Where):
        state.journal.add(Where(env))


# --- times


def _time(
    state: State, number: int, groups: Groups, workloads: list[Workload], what: str
) -> Outcome:
    """One process: the candidates of each workload's size take turns, and a line is
    stored for each workload.
    """
    plan, settings = state.plan, state.settings
    turns: dict[str, list[str]] = {}
    for size, names in groups.items():
        for w in plan.sizes[size]:
            if w in workloads:
                turns[w.uuid] = names
    named = set(itertools.chain(*turns.values()))
    rivals = [algo for name, algo in plan.algos.items() if name in named]

    # all sizes of a call have one GPU, see _each_gpu
    (gpu,) = {state.homes[size] for size in groups}

    seconds, target = settings.seconds, settings.target
    if number != FINAL:
        seconds = min(COARSE_S, seconds)
        target = max(COARSE_TARGET, target)
    job = _job(
        state,
        "compare",
        workloads,
        gpu,
        rivals,
        turns={uuid: tuple(names) for uuid, names in turns.items()},
        timing=Timing(
            (settings.tier,),
            {"seconds": seconds, "target": target, "l2": settings.l2},
        ),
        timeout_s=settings.timeout_s * len(rivals),
        cpus=state.cpus.get(gpu, frozenset()) if gpu else frozenset(),
    )

    if gpu and len(state.gpus) > 1:
        what = f"GPU {gpu.index}: {what}"

    seen: dict[str, dict[str, Record]] = {uuid: {} for uuid in turns}
    done = itertools.count(1)

    def on_record(record: Record, env: Environment | None) -> None:
        _note_environment(state, env)
        if record.status is Status.TIER_UNAVAILABLE:
            hint = "--tier names another one"
            raise MissingError(record.reason or record.status.words, hint=hint)
        # the workload failed
        if record.blame is Blame.MACHINE:
            return

        name, uuid = record.algo, record.uuid
        # it failed as a whole
        if uuid is None:
            for at, names in turns.items():
                if name in names:
                    seen[at][name] = record
            return

        records = seen[uuid]
        records[name] = record
        if len(records) == len(turns[uuid]):
            home = gpu.uuid if gpu else None
            state.journal.add(_line(number, turns[uuid], uuid, home, records))
            state.progress(what, next(done), len(workloads))

    state.progress(what, 0, len(workloads))
    return execute(job, on_record, given_up=state.stop.is_set)


def _line(
    number: int,
    names: list[str],
    uuid: str,
    gpu: str | None,
    records: dict[str, Record],
) -> Time:
    """What is stored of a workload."""
    doubts: dict[str, None] = {}
    results = {}
    for name, record in records.items():
        results[name] = _result(record, number)
        doubts |= dict.fromkeys(record.doubts or [])
    return Time(number, names, uuid, gpu, results, list(doubts))


def _result(record: Record, number: int) -> Result:
    """What is stored of a candidate; in a final also the samples, which decide."""
    rounds_us = record.rounds_us
    if not record.passed or not rounds_us:
        return Result(record.status, record.reason)
    us = _short(statistics.centre(rounds_us))
    samples = [_short(sample) for sample in rounds_us] if number == FINAL else []
    return Result(record.status, us=us, samples=samples)


def _short(us: float) -> float:
    """Seven digits: a journal has thousands of samples."""
    return float(f"{us:.7g}")


def _no_end(
    state: State, outcome: Outcome, names: list[str], workload: Workload
) -> GdnError:
    """The error for a worker that died although no single candidate is to blame."""
    reason, code = outcome.reason, outcome.code
    for record in outcome.records:
        if record.code:
            reason = reason or record.reason
            code = code or record.code
    who = ", ".join(tuned_table.label(state.plan.constants[name]) for name in names)
    return GdnError(
        f"timing at {state.plan.label(workload)} came to no end, though each passes its check"
        f" ({who}): {reason}",
        code=code or errors.FAILED,
        hint="measurements are kept: the same command resumes from here",
    )
