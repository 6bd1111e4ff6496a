"""The measuring of `gdn tune`: candidates are checked, the right ones are timed in
turns, and one is chosen for each size.

Each result goes into the journal first and is read from there: an earlier run's
measurements are not repeated.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

from .. import errors
from ..catalog.registry import Algo
from ..catalog.tuned_table import Size
from ..catalog.workloads import Workload
from ..errors import GdnError, MissingError
from ..machine import gpu_sharing, locks
from ..machine.inventory import Gpu
from ..records import statistics
from ..run import first_results
from ..run.jobs import Job, Outcome, execute
from ..schema.record_types import Blame, Environment, Record, Status
from ..worker.request import Options, Timing
from . import tournament
from .journal import Check, Result, Time, Where
from .search import Plan, Settings, State
from .tournament import AT_ONCE, FINAL, FIRST, Meeting

# for a group and a workload in the first round, at most
COARSE_S, COARSE_TARGET = 0.3, 0.02
# size -> the candidates that meet there, the leader first
Groups = dict[Size, list[str]]


def run(state: State) -> None:
    """Check, time and choose. Raises GdnError if nothing can be chosen."""
    plan, kept = state.plan, state.journal.kept
    if any(kept.values()):
        earlier = f"{kept['check']} checks and {kept['time']} timings"
        state.say(f"resuming with {earlier} of an earlier run; --fresh starts again")

    # earlier failures count, on any workload
    uuids = {w.uuid for w in plan.workloads}
    for line in state.journal.all(Check):
        if line.workload in uuids:
            state.judge(line.name, line, line.at)

    # the smallest and the largest workload: what fails in between is found later
    ends = plan.workloads[:1] + plan.workloads[1:][-1:]
    check(state, list(plan.constants), ends, state.gpus)
    if len(state.out) == len(plan.constants):
        why = next(iter(state.out.values()))
        first = (why.reason or why.status.value).splitlines()[0]
        raise GdnError(
            f"none of the {len(state.out)} candidates of {plan.algo.full_name} is right: {first}"
        )

    _choose_homes(state)
    used = [gpu for gpu in state.gpus if gpu and gpu in state.homes.values()]
    state.cpus = gpu_sharing.cpus(used)
    with contextlib.ExitStack() as locked:
        # a fixed order, so that no two wait for each other
        for gpu in sorted(used, key=lambda gpu: gpu.uuid):
            locked.enter_context(locks.gpu(gpu.uuid, state.say, f"GPU {gpu.index}"))

        _each_gpu(state, partial(_first, state, _groups(state, ends)))
        finals = tournament.finals(state.meetings, state.out)
        _each_gpu(state, partial(_final, state, finals))

    state.choices = tournament.choose(state.meetings, state.out)
    if len(state.choices) < len(plan.sizes):
        raise GdnError(
            "no candidate came through the final of every size",
            hint="`gdn run` shows why",
        )


def _choose_homes(state: State) -> None:
    """Each size stays on one GPU: the one of an earlier run, if it is here, else the
    least loaded one.
    """
    gpus = [gpu for gpu in state.gpus if gpu]
    if not gpus:
        state.homes = dict.fromkeys(state.plan.sizes)
        return

    able: dict[Size, tuple[int, Sequence[Gpu]]] = {}
    for size, workloads in state.plan.sizes.items():
        uuids = {w.uuid for w in workloads}
        before = {t.gpu for t in state.journal.all(Time) if t.workload in uuids}
        same = [gpu for gpu in gpus if gpu.uuid in before]
        able[size] = len(workloads), same[:1] or gpus

    state.homes = {**gpu_sharing.deal(able)}


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
    checks = state.journal.all(Check)
    passed = {(c.name, c.workload) for c in checks if c.status is Status.PASSED}

    names = list(state.plan.constants)
    for w in ends:
        names = [name for name in names if (name, w.uuid) in passed]

    # later groups have a place for the leader
    groups = [names[:AT_ONCE]]
    rest = names[AT_ONCE:]
    while rest:
        groups.append(rest[: AT_ONCE - 1])
        rest = rest[AT_ONCE - 1 :]

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


def _meet(state: State, number: int, groups: Groups, title: str) -> None:
    """Time the candidates of each size in turns, all these sizes in one process. If the
    worker dies, it is run again without the candidates that fail on the workload where
    it died.
    """
    groups = _remaining(state, groups)
    while due := _untimed(state, number, groups):
        outcome = _time(state, number, groups, due, title)
        # in the order in which the worker takes them
        for size, workload in _untimed(state, number, groups)[:1]:
            names = groups[size]
            check(state, names, [workload], [state.homes[size]])
            if state.left(names) == names:
                raise _no_end(state, outcome, workload)

            groups = _remaining(state, groups)

    for size, names in groups.items():
        state.meetings[size].append(_meeting(state, number, size, names))


def _remaining(state: State, groups: Groups) -> Groups:
    """The groups without those that have dropped out, and without empty ones."""
    remaining = {size: state.left(names) for size, names in groups.items()}
    return {size: names for size, names in remaining.items() if names}


def _untimed(state: State, number: int, groups: Groups) -> list[tuple[Size, Workload]]:
    """What these groups have still to measure."""
    due = []
    for size, names in groups.items():
        for w in state.plan.sizes[size]:
            if not _timed(state, number, size, names, w):
                due.append((size, w))

    return due


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
    meeting = Meeting(number, tuple(names), {}, {})
    for w in state.plan.sizes[size]:
        line = _timed(state, number, size, names, w)
        assert line is not None
        us = meeting.us[w.uuid] = {}
        samples = meeting.samples[w.uuid] = {}
        for name, result in line.results.items():
            state.judge(name, result, state.plan.label(w))
            if result.us:
                us[name] = result.us
                samples[name] = result.samples

        if number == FINAL:
            # one of a kind: two doubts that differ in their figures are the same
            for doubt in line.doubts:
                state.doubts[re.sub(r"[\d.]+", "#", doubt)] = doubt
    return meeting


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

    next_gpu = itertools.cycle(gpus)
    running = {}
    with ThreadPoolExecutor(_at_once(len(gpus)), "gdn-tune") as pool:
        try:
            for name in state.left(names):
                due = [w for w in workloads if (name, w.uuid) not in checked]
                if due:
                    algo = state.plan.algos[name]
                    job = _job(state, "check", due, next(next_gpu), [algo])
                    future = pool.submit(execute, job, given_up=state.stop.is_set)
                    running[future] = name, due

            for i, future in enumerate(as_completed(running)):
                state.show("check", i, len(running))
                name, due = running[future]
                outcome = future.result()
                _note_environment(state, outcome.environment)
                for workload in due:
                    line = _verdict(state, name, outcome, workload)
                    state.journal.add(line)
                    state.judge(name, line, line.at)
        except BaseException:  # Ctrl-C as well: end the workers that still run
            state.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _at_once(gpus: int) -> int:
    """How many are built at once. Compilers are the slow part: half of the CPUs."""
    return max(1, min(8 * gpus, (os.cpu_count() or 2) // 2))


def builds_s(plan: Plan) -> float | None:
    """About how long all builds take on this machine; None if the algo was not built here."""
    mode = plan.mode or "cuda"
    each = first_results.of_new_sources_s(plan.op.name, mode, plan.algo.name)
    return each and each * len(plan.constants) / _at_once(1)


def timings_s(plan: Plan) -> float:
    """How long both rounds may take on one GPU, without the start of their processes."""
    later = max(0, len(plan.constants) - AT_ONCE)
    groups = 1 + math.ceil(later / (AT_ONCE - 1))
    return len(plan.workloads) * (groups * COARSE_S + Settings.seconds)


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
        # one of these for each algo
        timeout_s=settings.timeout_s * len(algos),
        **more,
    )


def _verdict(state: State, name: str, outcome: Outcome, workload: Workload) -> Check:
    """The result of a candidate's check on a workload. Raises GdnError for what failed
    for want of memory, a compiler or a GPU: another run may find it right.
    """
    result: Record | Outcome = outcome
    for record in outcome.records:
        if record.uuid == workload.uuid or record.blame is Blame.MACHINE:
            result = record
            break

    status, reason = result.status, result.reason
    if result.blame is Blame.MACHINE:
        raise GdnError(reason or status.words, code=result.code or errors.MISSING)

    reason = _without_folders(reason) if reason else None
    label = state.plan.label(workload) if status is not Status.BUILD_FAILED else None
    return Check(name, workload.uuid, status, reason, label)


def _without_folders(text: str) -> str:
    """A compiler's lines with bare file names: evidence is stored and shared, folders
    are specific to this machine.
    """
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)


def _note_environment(state: State, env: Environment | None) -> None:
    """Store where it is measured, once: all GPUs are of one kind."""
    if env and not state.journal.find(Where):
        state.journal.add(Where(env))


# --- times


def _time(
    state: State,
    number: int,
    groups: Groups,
    due: list[tuple[Size, Workload]],
    title: str,
) -> Outcome:
    """One process: the candidates of each workload's size take turns, and a line is
    stored for each workload.
    """
    settings = state.settings
    turns = {w.uuid: groups[size] for size, w in due}
    named = set(itertools.chain(*turns.values()))
    rivals = [algo for name, algo in state.plan.algos.items() if name in named]

    # all sizes of a call have one GPU, see _each_gpu
    (gpu,) = {state.homes[size] for size in groups}

    seconds, target = settings.seconds, settings.target
    if number != FINAL:
        seconds = min(COARSE_S, seconds)
        target = max(COARSE_TARGET, target)

    job = _job(
        state,
        "compare",
        [w for _, w in due],
        gpu,
        rivals,
        turns={uuid: tuple(names) for uuid, names in turns.items()},
        timing=Timing(
            (settings.tier,),
            {"seconds": seconds, "target": target, "l2": settings.l2},
        ),
        cpus=state.cpus.get(gpu, frozenset()) if gpu else frozenset(),
    )
    if gpu and len(state.gpus) > 1:
        title = f"GPU {gpu.index}: {title}"

    records: dict[str, dict[str, Record]] = {uuid: {} for uuid in turns}
    counter = itertools.count(1)

    def on_record(record: Record, env: Environment | None) -> None:
        _note_environment(state, env)
        if record.status is Status.TIER_UNAVAILABLE:
            hint = "--tier names another one"
            raise MissingError(record.reason or record.status.words, hint=hint)

        # the workload failed
        if record.blame is Blame.MACHINE:
            return

        name, uuid = record.algo, record.uuid
        # without a workload it failed as a whole
        for key in [uuid] if uuid else turns:
            if name in turns[key]:
                records[key][name] = record
        if uuid and len(records[uuid]) == len(turns[uuid]):
            state.journal.add(_line(number, turns[uuid], uuid, gpu, records[uuid]))
            state.show(title, next(counter), len(due))

    state.show(title, 0, len(due))
    return execute(job, on_record, given_up=state.stop.is_set)


def _line(
    number: int,
    names: list[str],
    uuid: str,
    gpu: Gpu | None,
    records: dict[str, Record],
) -> Time:
    """What is stored of a workload.

    In a final these are the samples too, which decide.
    """
    line = Time(number, names, uuid, gpu.uuid if gpu else None, {}, [])
    for name, record in records.items():
        result = line.results[name] = Result(record.status, record.reason)
        if record.passed and record.rounds_us:
            result.us = statistics.centre(record.rounds_us)
            result.samples = record.rounds_us if number == FINAL else []
        line.doubts += [d for d in record.doubts or [] if d not in line.doubts]
    return line


def _no_end(state: State, outcome: Outcome, workload: Workload) -> GdnError:
    """The error for a worker that died although no single candidate is to blame."""
    failed = [record for record in outcome.records if record.code]
    why: Outcome | Record = outcome if outcome.reason or not failed else failed[0]
    return GdnError(
        f"timing at {state.plan.label(workload)} came to no end, though each candidate"
        f" passes its check: {why.reason}",
        code=why.code or errors.FAILED,
        hint="measurements are kept: the same command resumes from here",
    )
