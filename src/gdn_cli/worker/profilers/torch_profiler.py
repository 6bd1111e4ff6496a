"""torch.profiler: what a call does on the host, op by op, and on the GPU, kernel by
kernel, with a Chrome trace.

Times of whole calls are taken before the profiler is on, because it adds about a
microsecond to each op.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from msgspec import Struct

from ...errors import MissingError
from ...machine.inventory import HERE, Machine
from . import Ask, Fact, Found, Reading, Reply, Run, Table, facts, files_in, symbols

TRACE = "trace.json.gz"
# the name of a call's range in the trace
CALL = "gdn_call"
_CALLS = 20
# for the calls under the profiler, and as much for those before
_SECONDS = 3.0
# of the host in one trace: more are slow to read, here and in a browser
_EVENTS = 40_000

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
    call = target.subject.call
    prepare = _nothing
    if target.mode == "cuda":
        prepare = _before(call, target.l2)
    host_us = _host_times(call, prepare, _waiter(target.mode), calls)
    seen = profiled(call, target.mode, calls, prepare, Path(trace))
    return Answer(host_us, seen)


def _nothing() -> None:
    pass


def _before(call: Callback, l2: str) -> Callback:
    """The work before each call that makes L2 cold or warm; its last kernel is a mark."""
    from ..timing.kernels import Flush, begin, rest

    def warm() -> None:
        rest()
        call()
        begin()

    return Flush() if l2 == "cold" else warm


def _waiter(mode: str) -> Callback:
    import torch

    return torch.cuda.synchronize if mode == "cuda" else _nothing


def _host_times(
    call: Callback, prepare: Callback, wait: Callback, calls: int
) -> list[float]:
    """Microseconds until each call returned; on a GPU with nothing else queued; the
    kernels may still run.
    """
    for _ in range(3):
        prepare()
        call()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < calls and (len(times) < 3 or time.perf_counter() < end):
        prepare()
        wait()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    wait()
    return times


def profiled(
    call: Callback,
    mode: str,
    calls: int,
    prepare: Callback = _nothing,
    trace: Path | None = None,
) -> Profiled:
    """Up to `calls` calls under torch.profiler, fewer if they take long or do much."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if mode == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    wait = _waiter(mode)

    def profile_of(count: int) -> Any:
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(count):
                prepare()
                wait()
                with torch.profiler.record_function(CALL):
                    call()
                wait()
        return profile

    # includes the profiler's one-time costs, and shows how long a call takes
    first = profile_of(1).events()
    took_s = sum(e.cpu_time_total for e in first if e.name == CALL) / 1e6
    calls = min(calls, int(_SECONDS / max(took_s, 1e-6)), _EVENTS // (len(first) or 1))
    calls = max(1, calls)
    profile = profile_of(calls)
    if trace:
        profile.export_chrome_trace(str(trace))
    ran, ranges = [], []
    for e in profile.events():
        if e.device_type != torch.autograd.DeviceType.CUDA:
            ranges += [e] if e.name == CALL else []
        elif e.name != CALL and not getattr(e, "is_user_annotation", False):
            ran.append((e.time_range.start, e.time_range.elapsed_us(), e.name))
    gpu = of_calls(ran) if mode == "cuda" else None
    return Profiled(calls, _ops(ranges), gpu)


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
    seen = answer.seen
    tables, notes = ops_table(seen), []
    host_us = median(answer.host_us)
    if seen.gpu is None:
        made = [facts.fact("time_us", host_us, "wall, not profiled")]
    else:
        note = "until the call returns, GPU idle before it, not profiled"
        made = [facts.fact("host_us", host_us, note), *gpu_facts(seen.gpu)]
        tables = kernels_table(seen.gpu) + tables
        if not any(seen.gpu):
            notes.append(
                "torch.profiler saw no kernel of the call: another profiler may hold CUPTI in"
                " this process"
            )
    count = sum(op.count for op in seen.ops if op.name != CALL)
    made.append(facts.fact("ops", count / seen.calls))
    notes.append(f"{TRACE} shows {seen.calls} calls: each is a range {CALL}")
    found = Found("", tuple(made), tuple(tables))
    return Reading((found,), tuple(notes), files_in(folder, TRACE))


def ops_table(seen: Profiled, most: int = 20) -> list[Table]:
    """The host's ops by the time that they took themselves."""
    ranked = sorted(seen.ops, key=lambda op: (-op.self_us, op.name != CALL))
    if len(ranked) > most:
        others = ranked[most - 1 :]
        count, self_us = sum(o.count for o in others), sum(o.self_us for o in others)
        ranked[most - 1 :] = [Op("(all others)", count, self_us)]
    total = sum(op.self_us for op in seen.ops)
    rows = []
    for op in ranked:
        name = "(outside any op)" if op.name == CALL else op.name
        share = 100 * op.self_us / total if total else None
        rows.append((name, op.count / seen.calls, op.self_us / seen.calls, share))
    return facts.table("ops", rows)


def gpu_facts(calls: list[list[Ran]]) -> list[Fact]:
    """The GPU's work in a call, medians over the calls."""
    values: dict[str, list[float]] = {}
    for call in filter(None, calls):
        busy_us = busy((ran.start, ran.us) for ran in call)
        span = max(ran.start + ran.us for ran in call)
        figures = {
            "time_us": sum(ran.us for ran in call),
            "span_us": span,
            "gpu_busy": 100 * busy_us / span if span else 100.0,
            "idle_us": span - busy_us,
            "launches": len(call),
        }
        for key, value in figures.items():
            values.setdefault(key, []).append(value)
    notes = {
        "time_us": "kernels, copies and fills added up",
        "launches": "per call, copies and fills too",
    }
    return [
        facts.fact(key, median(each), notes.get(key, ""))
        for key, each in values.items()
    ]


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of (start, duration) ran: they may overlap."""
    total = until = 0.0
    for start, took in sorted(spans):
        total += max(0.0, start + took - max(until, start))
        until = max(until, start + took)
    return total


def kernels_table(calls: list[list[Ran]]) -> list[Table]:
    """Kernels, copies and fills by name, most time first; no table if nothing ran."""
    counts: Counter[str] = Counter()
    times: dict[str, float] = {}
    for call in calls:
        for ran in call:
            name = symbols.short(ran.name)
            counts[name] += 1
            times[name] = times.get(name, 0.0) + ran.us
    total = sum(times.values())
    rows = []
    for name, us in sorted(times.items(), key=lambda item: -item[1]):
        share = 100 * us / total if total else None
        rows.append((name, counts[name] / len(calls), us / len(calls), share))
    return facts.table("kernels", rows)
