"""torch.profiler: what a call does on the host, op by op, and on the GPU, kernel by
kernel, with a Chrome trace.

Times of whole calls are taken before the profiler is on, because it adds about a
microsecond to each op.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

from msgspec import Struct

from ...errors import MissingError
from ...machine.inventory import HERE, Machine
from . import (
    Ask,
    Fact,
    Found,
    Reading,
    Reply,
    Run,
    Table,
    facts,
    files_in,
    symbols,
    turns,
)

TRACE = "trace.json.gz"
# the name of a call's range in the trace
CALL = "gdn_call"
_CALLS = 20
# for the calls under the profiler, and as much for those before
_SECONDS = 1.0

Callback = Callable[[], Any]


class Op(Struct):
    """An op of the host, over all calls; the one named CALL is the calls themselves:
    its own time is what no op took.
    """

    name: str
    count: int = 0
    self_us: float = 0.0


class Ran(NamedTuple):
    """What ran on the GPU; `start` is counted from the first of its call, in us."""

    name: str
    start: float
    us: float


class Profiled(Struct):
    """Calls under the profiler; `gpu` has what ran on the GPU in each."""

    calls: int
    ops: list[Op]
    gpu: list[list[Ran]] | None = None


class Answer(Struct):
    """The answer of `inside`. `host_us`: the host's time of each call."""

    host_us: list[float]
    seen: Profiled


def find(machine: Machine = HERE) -> None:
    if not machine.has_package("torch"):
        raise MissingError("torch is missing", hint="pip install torch")


def runs(ask: Ask, folder: Path) -> list[Run]:
    return [Run("torch", params={"trace": str(folder / TRACE), "calls": _CALLS})]


# --- in the worker


def inside(target: Any, trace: str, calls: int) -> Answer:
    call, prepare = target.subject.call, _nothing
    if target.mode == "cuda":
        from ..timing.kernels import Flush

        prepare = Flush() if target.l2 == "cold" else _warm(call)
    for _ in range(3):
        prepare()
        call()
    host_us = []
    for _ in turns(calls, _SECONDS, least=3):
        prepare()
        _wait(target.mode)
        start = perf_counter_ns()
        call()
        host_us.append((perf_counter_ns() - start) / 1e3)
    return Answer(host_us, profiled(call, target.mode, calls, prepare, Path(trace)))


def _nothing() -> None:
    pass


def _warm(call: Callback) -> Callback:
    """The work before each call that makes L2 warm; its last kernel is a mark."""
    from ..timing.kernels import begin, rest

    def warm() -> None:
        rest()
        call()
        begin()

    return warm


def _wait(mode: str) -> None:
    import torch

    if mode == "cuda":
        torch.cuda.synchronize()


def profiled(
    call: Callback,
    mode: str,
    calls: int,
    prepare: Callback = _nothing,
    trace: Path | None = None,
) -> Profiled:
    """Up to `calls` calls under torch.profiler, fewer if they take long."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if mode == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    # the first profile has the profiler's one-time costs
    for most in (1, calls):
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in turns(most, _SECONDS):
                prepare()
                _wait(mode)
                with torch.profiler.record_function(CALL):
                    call()
                _wait(mode)
    if trace:
        profile.export_chrome_trace(str(trace))
    ran, ranges = [], []
    for e in profile.events():
        if e.device_type != torch.autograd.DeviceType.CUDA:
            ranges += [e] if e.name == CALL else []
        elif e.name != CALL and not getattr(e, "is_user_annotation", False):
            ran.append((e.time_range.start, e.time_range.elapsed_us(), e.name))
    gpu = of_calls(ran) if mode == "cuda" else None
    return Profiled(len(ranges), _ops(ranges), gpu)


def _ops(ranges: list[Any]) -> list[Op]:
    """The ops in these ranges, by name."""
    ops: dict[str, Op] = {}
    left = list(ranges)
    while left:
        event = left.pop()
        left += event.cpu_children
        op = ops.setdefault(event.name, Op(event.name))
        op.count += 1
        op.self_us += event.self_cpu_time_total
    return list(ops.values())


def of_calls(ran: list[tuple[float, float, str]]) -> list[list[Ran]]:
    """(start, duration, name) of all that ran, split at the marks: each call's own."""
    from ..timing.kernels import BEGINS, REST

    calls: list[list[Ran]] = []
    current: list[Ran] | None = None
    first = 0.0
    for start, us, name in sorted(ran):
        if name.startswith(BEGINS):
            current = []
            calls.append(current)
        elif name.startswith(REST):
            current = None
        elif current is not None:
            first = first if current else start
            current.append(Ran(name, start - first, us))
    return calls


# --- after the run


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    answer = replies[0].answered(Answer)
    profile = answer.seen
    host_us = median(answer.host_us)
    count = sum(op.count for op in profile.ops if op.name != CALL) / profile.calls
    ops, tables = facts.fact("ops", count), ops_table(profile)
    notes = [f"{TRACE} shows {profile.calls} calls: each is a range {CALL}"]
    if profile.gpu is None:
        figures = [facts.fact("time_us", host_us, "wall, not profiled"), ops]
    else:
        note = "until the call returns, GPU idle before it, not profiled"
        figures = [facts.fact("host_us", host_us, note), *gpu_facts(profile.gpu), ops]
        tables = kernels_table(profile.gpu) + tables
        if not any(profile.gpu):
            notes.append(
                "torch.profiler saw no kernel of the call: another profiler may hold CUPTI in"
                " this process"
            )
    whole = Found("", tuple(figures), tuple(tables))
    return Reading((whole,), tuple(notes), files_in(folder, TRACE))


def ops_table(profile: Profiled, most: int = 20) -> list[Table]:
    """The host's ops by the time that they took themselves."""
    total = sum(op.self_us for op in profile.ops)
    rows = []
    for op in sorted(profile.ops, key=lambda op: -op.self_us)[:most]:
        name = "(outside any op)" if op.name == CALL else op.name
        share = 100 * op.self_us / total if total else None
        rows.append((name, op.count / profile.calls, op.self_us / profile.calls, share))
    return facts.table("ops", rows)


def gpu_facts(calls: list[list[Ran]]) -> list[Fact]:
    """The GPU's work in a call, medians over the calls."""
    calls = [call for call in calls if call]
    if not calls:
        return []
    spans, times = [], []
    for call in calls:
        spans.append(max(ran.start + ran.us for ran in call))
        times.append(sum(ran.us for ran in call))
    busy = [_busy(call) for call in calls]
    note = "kernels, copies and fills added up"
    share = 100 * median(busy) / (median(spans) or 1.0)
    launches = median(len(call) for call in calls)
    return [
        facts.fact("time_us", median(times), note),
        facts.fact("span_us", median(spans)),
        facts.fact("gpu_busy", share),
        facts.fact("launches", launches, "per call, copies and fills too"),
    ]


def _busy(call: Iterable[Ran]) -> float:
    """How long at least one of them ran: they may overlap."""
    total = until = 0.0
    for ran in call:
        end = ran.start + ran.us
        total += max(0.0, end - max(until, ran.start))
        until = max(until, end)
    return total


def kernels_table(calls: list[list[Ran]]) -> list[Table]:
    """Kernels, copies and fills by name, most time first; no table if nothing ran."""
    counts = Counter[str]()
    times = defaultdict[str, float](float)
    for ran in chain.from_iterable(calls):
        name = symbols.short(ran.name)
        counts[name] += 1
        times[name] += ran.us
    total = sum(times.values()) or 1.0
    rows = [
        (name, counts[name] / len(calls), us / len(calls), 100 * us / total)
        for name, us in sorted(times.items(), key=lambda item: -item[1])
    ]
    return facts.table("kernels", rows)
