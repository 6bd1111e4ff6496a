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
from .tournament import AGAIN, AT_ONCE, FINAL, FIRST, Meeting

# for a group and a workload in the first rounds, at most
COARSE_S, COARSE_TARGET = 0.3, 0.02
# size -> the candidates that meet there, the leader first
Groups = dict[Size, list[str]]


def run(state: State) -> None:
    """Check, time and choose. Raises GdnError if nothing can be chosen."""
    plan, kept = state.plan, state.journal.kept
    if any(kept.values()):
        found = f"{kept['check']} checks and {kept['time']} timings"
        state.say(f"resuming with {found} of an earlier run; --fresh starts again")
    here = {w.uuid for w in plan.workloads}
    for line in state.journal.all(Check):  # earlier failures count, on any workload
        if line.workload in here:
            state.judge(line.name, line.status, line.reason, line.at)
    ends = list({w.uuid: w for w in (plan.workloads[0], plan.workloads[-1])}.values())
    check(state, list(plan.constants), ends, state.gpus)
    if not state.left(list(plan.constants)):
        why = next(iter(state.out.values()))
        first = (why.reason or why.status.value).splitlines()[0]
        raise GdnError(
            f"none of the {len(state.out)} candidates of {plan.algo.full_name} is right: {first}"
        )
    state.homes = _homes(state)
    used = [gpu for gpu in state.gpus if gpu and gpu in state.homes.values()]
    state.cpus = gpu_sharing.cpus(used)
    with contextlib.ExitStack() as held:
        # a fixed order, so that no two wait for each other
        for gpu in sorted(used, key=lambda gpu: gpu.uuid):
            held.enter_context(locks.gpu(gpu.uuid, state.say, f"GPU {gpu.index}"))
        _rounds(state, ends)
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
    items: dict[Size, tuple[int, Sequence[Gpu | None]]] = {}
    for size, workloads in state.plan.sizes.items():
        lines = [state.journal.find(Time, workload=w.uuid) for w in workloads]
        before = {line.gpu for line in lines if line}
        kept = [gpu for gpu in state.gpus if gpu and gpu.uuid in before]
        items[size] = len(workloads), kept[:1] or state.gpus
    return gpu_sharing.deal(items)


def _rounds(state: State, ends: Sequence[Workload]) -> None:
    """The rounds of tournament.py. Groups are made from all that passed the first
    check, even if they drop out later, so that a resumed run makes the same groups.
    """

    def passed(name: str) -> bool:
        lines = [state.journal.find(Check, name=name, workload=w.uuid) for w in ends]
        return all(line and line.status is Status.PASSED for line in lines)

    names, step = list(filter(passed, state.plan.constants)), AT_ONCE - 1
    groups = [names[:AT_ONCE]] + [
        names[i : i + step] for i in range(AT_ONCE, len(names), step)
    ]
    _each_gpu(state, partial(_coarse, state, groups))
    finals = tournament.finals(state.meetings, state.out)
    _each_gpu(
        state,
        lambda sizes: _meet(
            state, FINAL, {s: finals[s] for s in sizes if s in finals}, "final"
        ),
    )


def _each_gpu(state: State, work: Callable[[list[Size]], None]) -> None:
    """Do `work` with the sizes of each GPU, on all GPUs at once."""
    sizes: dict[Gpu | None, list[Size]] = {}
    for size, gpu in state.homes.items():
        sizes.setdefault(gpu, []).append(size)
    gpu_sharing.side_by_side(
        [partial(work, mine) for mine in sizes.values()], state.stop
    )


def _coarse(state: State, groups: list[list[str]], sizes: list[Size]) -> None:
    """The rounds before the final."""
    for number, group in enumerate(groups, 1):
        leaders = {
            size: list(tournament.standing(state.meetings[size], FIRST, state.out))[:1]
            for size in sizes
        }
        meeting = {size: leader + group for size, leader in leaders.items()}
        _meet(state, FIRST, meeting, f"group {number} of {len(groups)}")
    best = {size: tournament.again(state.meetings[size], state.out) for size in sizes}
    _meet(state, AGAIN, best, "the best of all groups")


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
    plan, due = state.plan, {}
    for name in state.left(names):
        if lacking := [
            w
            for w in workloads
            if not state.journal.find(Check, name=name, workload=w.uuid)
        ]:
            due[name] = lacking
    workers = max(1, min(8 * len(gpus), (os.cpu_count() or 2) // 2))
    with ThreadPoolExecutor(workers, "gdn-tune") as pool:
        try:
            running = {}
            for (name, lacking), gpu in zip(
                due.items(), itertools.cycle(gpus), strict=False
            ):
                job = _job(state, "check", lacking, gpu, [plan.algos[name]])
                running[pool.submit(execute, job, given_up=state.stop.is_set)] = name
            for i, future in enumerate(as_completed(running)):
                state.progress("check", i, len(due))
                name, outcome = running[future], future.result()
                _met(state, outcome.environment)
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
    plan, s = state.plan, state.settings
    dataset = str(s.dataset.absolute()) if s.dataset else None
    return Job.of(
        command,
        plan.op,
        plan.definition,
        plan.mode,
        workloads,
        [(algo, algo.solution) for algo in algos if algo.solution],
        options=Options(dataset=dataset, in_place=s.in_place),
        gpu=gpu,
        machine=s.machine,
        **{"timeout_s": s.timeout_s, **more},
    )


def _verdict(state: State, name: str, outcome: Outcome, workload: Workload) -> Check:
    """The result of a candidate's check on a workload. Raises GdnError if a failure is
    not the candidate's fault.
    """
    label = state.plan.label(workload)
    for found in (*outcome.records, outcome):
        if found.blame is Blame.MACHINE:
            raise GdnError(
                found.reason or found.status.words, code=found.code or errors.MISSING
            )
        if found is not outcome and found.uuid == workload.uuid:
            return Check(name, workload.uuid, found.status, found.reason, label)
    at = None if outcome.status is Status.BUILD_FAILED else label
    return Check(
        name, workload.uuid, outcome.status, _without_folders(outcome.reason), at
    )


def _without_folders(text: str | None) -> str | None:
    """A compiler's lines with bare file names: evidence is stored and shared, folders
    are specific to this machine.
    """
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text) if text else text


def _met(state: State, env: Environment | None) -> None:
    if env and not state.journal.find(Where):
        state.journal.add(Where(env))


# --- times


def _meet(state: State, number: int, groups: Groups, what: str) -> None:
    """Time the candidates of each size in turns, all these sizes in one process. If the
    worker dies, it is run again without the candidates that fail on the workload where
    it died.
    """

    def lacking() -> list[tuple[Size, Workload]]:
        sizes = [(size, w) for size in groups for w in state.plan.sizes[size]]
        return [
            (size, w)
            for size, w in sizes
            if not _timed(state, number, size, groups[size], w)
        ]

    groups = _left(state, groups)
    while due := lacking():
        outcome = _time(state, number, groups, [w for _, w in due], what)
        for size, workload in lacking()[:1]:
            check(state, groups[size], [workload], [state.homes[size]])
            if state.left(groups[size]) == groups[size]:
                raise _no_end(state, outcome, groups[size], workload)
            groups = _left(state, groups)
    for size, names in groups.items():
        state.meetings[size].append(_meeting(state, number, size, names))


def _left(state: State, groups: Groups) -> Groups:
    found = {size: state.left(names) for size, names in groups.items()}
    return {size: names for size, names in found.items() if names}


def _timed(
    state: State, number: int, size: Size, names: list[str], workload: Workload
) -> Time | None:
    """The line of an earlier measurement, only from the GPU on which the size is timed."""
    gpu = state.homes[size]
    return state.journal.find(
        Time, workload=workload.uuid, round=number, names=names, gpu=gpu and gpu.uuid
    )


def _meeting(state: State, number: int, size: Size, names: list[str]) -> Meeting:
    """The lines of a size's workloads together; a candidate that failed on one of them
    is left out.
    """
    us, samples = {}, {}
    for w in state.plan.sizes[size]:
        line = _timed(state, number, size, names, w)
        for name, result in line.results.items():
            state.judge(name, result.status, result.reason, state.plan.label(w))
        us[w.uuid] = {name: r.us for name, r in line.results.items() if r.us}
        samples[w.uuid] = {
            name: r.samples for name, r in line.results.items() if r.samples
        }
        if number == FINAL:
            state.doubts |= {re.sub(r"[\d.]+", "#", text): text for text in line.doubts}
    return Meeting(number, tuple(names), us, samples)


def _time(
    state: State, number: int, groups: Groups, workloads: list[Workload], what: str
) -> Outcome:
    """One process: the candidates of each workload's size take turns, and a line is
    stored for each workload.
    """
    plan, s = state.plan, state.settings
    wanted = {
        w.uuid: names
        for size, names in groups.items()
        for w in plan.sizes[size]
        if w in workloads
    }
    rivals = [
        algo
        for name, algo in plan.algos.items()
        if any(name in names for names in wanted.values())
    ]
    (gpu,) = {state.homes[size] for size in groups}
    seconds, target = s.seconds, s.target
    if number != FINAL:
        seconds, target = min(COARSE_S, seconds), max(COARSE_TARGET, target)
    job = _job(
        state,
        "compare",
        workloads,
        gpu,
        rivals,
        turns={uuid: tuple(names) for uuid, names in wanted.items()},
        timing=Timing((s.tier,), {"seconds": seconds, "target": target, "l2": s.l2}),
        timeout_s=s.timeout_s * len(rivals),
        cpus=state.cpus.get(gpu, frozenset()),
    )
    seen: dict[str, dict[str, Record]] = {uuid: {} for uuid in wanted}
    shown = f"GPU {gpu.index}: {what}" if len(state.gpus) > 1 else what
    done = itertools.count(1)

    def on_record(record: Record, env: Environment | None) -> None:
        _met(state, env)
        name, uuid = record.algo, record.uuid
        if record.status is Status.TIER_UNAVAILABLE:
            raise MissingError(record.reason, hint="--tier names another one")
        if record.blame is Blame.MACHINE:  # the workload failed
            return
        for at in (
            [uuid] if uuid else [at for at, names in wanted.items() if name in names]
        ):
            seen[at][name] = record
        if uuid and len(seen[uuid]) == len(wanted[uuid]):
            doubts = dict.fromkeys(
                text for r in seen[uuid].values() for text in r.doubts or []
            )
            results = {name: _result(r, number) for name, r in seen[uuid].items()}
            state.journal.add(
                Time(
                    number, wanted[uuid], uuid, gpu and gpu.uuid, results, list(doubts)
                )
            )
            state.progress(shown, next(done), len(workloads))

    state.progress(shown, 0, len(workloads))
    return execute(job, on_record, given_up=state.stop.is_set)


def _result(record: Record, number: int) -> Result:
    """What is stored for a candidate on a workload; in a final also the samples, which decide."""
    if not record.passed:
        return Result(record.status, record.reason)
    samples = [float(f"{us:.7g}") for us in record.rounds_us] if number == FINAL else []
    return Result(
        record.status,
        us=float(f"{statistics.centre(record.rounds_us):.7g}"),
        samples=samples,
    )


def _no_end(
    state: State, outcome: Outcome, names: list[str], workload: Workload
) -> GdnError:
    """The error for a worker that died although no single candidate is to blame."""
    failed = [r for r in outcome.records if r.code]
    reason = outcome.reason or next((r.reason for r in failed), None)
    code = outcome.code or next((r.code for r in failed), errors.FAILED)
    who = ", ".join(tuned_table.label(state.plan.constants[name]) for name in names)
    return GdnError(
        f"timing at {state.plan.label(workload)} came to no end, though each passes its check"
        f" ({who}): {reason}",
        code=code,
        hint="measurements are kept: the same command resumes from here",
    )
