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
from . import Ask, Fact, Found, Reading, Reply, Run, Table, facts, kept, symbols

TRACE = "trace.json.gz"
CALL = "gdn_call"  # the name of a call's range in the trace
_CALLS = 20
_SECONDS = 3.0  # for the calls under the profiler, and as much for those before
# of the host in one trace: more are slow to read, here and in a browser
_EVENTS = 40_000


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


class Profiled(Struct, kw_only=True):
    """Calls under the profiler; `gpu` has what ran on the GPU in each."""

    calls: int
    ops: list[Op]
    gpu: list[list[Ran]] | None = None


class Answer(Profiled, kw_only=True):
    """The answer of `inside`."""

    host_us: list[float]


def find(machine: Machine = HERE) -> None:
    if not machine.has_package("torch"):
        raise MissingError("torch is missing", hint="pip install torch")


def runs(ask: Ask, folder: Path) -> list[Run]:
    return [Run("torch", params={"trace": str(folder / TRACE), "calls": _CALLS})]


# --- in the worker


def inside(target: Any, trace: str, calls: int) -> Answer:
    call, before = target.subject.call, (lambda: None)
    if target.mode == "cuda":
        before = _before(call, target.l2)
    host_us = _host_times(call, before, _waiter(target.mode), calls)
    seen = profiled(call, target.mode, calls, before, Path(trace))
    return Answer(host_us=host_us, calls=seen.calls, ops=seen.ops, gpu=seen.gpu)


def _before(call: Callable[[], Any], l2: str) -> Callable[[], Any]:
    """The work before each call that makes L2 cold or warm; its last kernel is a mark."""
    from ..timing.kernels import Flush, begin, rest

    return Flush() if l2 == "cold" else lambda: (rest(), call(), begin())


def _waiter(mode: str) -> Callable[[], Any]:
    import torch

    return torch.cuda.synchronize if mode == "cuda" else lambda: None


def _host_times(
    call: Callable[[], Any],
    before: Callable[[], Any],
    wait: Callable[[], Any],
    calls: int,
) -> list[float]:
    """Microseconds until each call returned; on a GPU with nothing else queued; the
    kernels may still run.
    """
    for _ in range(3):
        before()
        call()
    times, began = [], time.perf_counter()
    while len(times) < calls and (
        len(times) < 3 or time.perf_counter() - began < _SECONDS
    ):
        before()
        wait()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    wait()
    return times


def profiled(
    call: Callable[[], Any],
    mode: str,
    calls: int,
    before: Callable[[], Any] = lambda: None,
    trace: Path | None = None,
) -> Profiled:
    """Up to `calls` calls under torch.profiler, fewer if they take long or do much."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if mode == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    wait = _waiter(mode)

    def some(count: int) -> Any:
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(count):
                before()
                wait()
                with torch.profiler.record_function(CALL):
                    call()
                wait()
        return profile

    # includes the profiler's one-time costs, and shows how long a call takes
    once = some(1).events()
    took_s = sum(e.cpu_time_total for e in once if e.name == CALL) / 1e6
    calls = max(
        1, min(calls, int(_SECONDS / max(took_s, 1e-6)), _EVENTS // max(1, len(once)))
    )
    profile = some(calls)
    if trace:
        profile.export_chrome_trace(str(trace))
    on_gpu = torch.autograd.DeviceType.CUDA
    events = list(profile.events())
    ran = [
        (e.time_range.start, e.time_range.elapsed_us(), e.name)
        for e in events
        if e.device_type == on_gpu
        and e.name != CALL
        and not getattr(e, "is_user_annotation", False)
    ]
    ops = _ops([e for e in events if e.name == CALL and e.device_type != on_gpu])
    return Profiled(calls=calls, ops=ops, gpu=of_calls(ran) if mode == "cuda" else None)


def _ops(roots: list[Any]) -> list[Op]:
    """What ran in these ranges, by name."""
    found: dict[str, Op] = {}
    left = list(roots)
    while left:
        event = left.pop()
        left += event.cpu_children
        op = found.setdefault(event.name, Op(event.name))
        op.count += 1
        op.self_us += event.self_cpu_time_total
    return list(found.values())


def of_calls(ran: list[tuple[float, float, str]]) -> list[list[Ran]]:
    """(start, duration, name) of all that ran, split at the marks: each call's own."""
    from ..timing.kernels import BEGINS, REST

    calls: list[list[Ran]] = []
    current: list[Ran] | None = None
    first = 0.0
    for start, us, name in sorted(ran):
        if name.startswith(BEGINS):
            calls.append(current := [])
        elif name.startswith(REST):
            current = None
        elif current is not None:
            first = first if current else start
            current.append(Ran(name, start - first, us))
    return calls


# --- after the run


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    answer = replies[0].answered(Answer)
    made, tables, notes = [], [], []
    host_us = median(answer.host_us)
    if answer.gpu is None:
        made.append(facts.fact("time_us", host_us, "wall, not profiled"))
    else:
        made.append(
            facts.fact(
                "host_us",
                host_us,
                "until the call returns, GPU idle before it, not profiled",
            )
        )
        made += gpu_facts(answer.gpu)
        tables += kernels_table(answer.gpu)
        if not any(answer.gpu):
            notes.append(
                "torch.profiler saw no kernel of the call: another profiler may hold CUPTI in"
                " this process"
            )
    made.append(
        facts.fact(
            "ops", sum(op.count for op in answer.ops if op.name != CALL) / answer.calls
        )
    )
    notes.append(f"{TRACE} shows {answer.calls} calls: each is a range {CALL}")
    found = Found("", tuple(made), (*tables, *ops_table(answer)))
    return Reading((found,), tuple(notes), kept(folder, TRACE))


def ops_table(seen: Profiled, most: int = 20) -> list[Table]:
    """The host's ops by the time that they took themselves."""
    calls, total = seen.calls, sum(op.self_us for op in seen.ops)
    rows = [
        (
            "(outside any op)" if op.name == CALL else op.name,
            op.count / calls,
            op.self_us / calls,
            100 * op.self_us / total if total else None,
        )
        for op in sorted(seen.ops, key=lambda op: (-op.self_us, op.name != CALL))
    ]
    if len(rows) > most:
        rest = rows[most - 1 :]
        rows[most - 1 :] = [
            ("(all others)", *(sum(row[i] or 0 for row in rest) for i in (1, 2, 3)))
        ]
    return facts.table("ops", rows)


def gpu_facts(calls: list[list[Ran]]) -> list[Fact]:
    """What the GPU did in a call, medians over the calls."""
    seen = [call for call in calls if call]
    if not seen:
        return []
    times = [busy((r.start, r.us) for r in call) for call in seen]
    span = [max(r.start + r.us for r in call) for call in seen]
    share = [100 * b / s if s else 100.0 for b, s in zip(times, span, strict=True)]
    idle = [s - b for b, s in zip(times, span, strict=True)]
    return [
        facts.fact(
            "time_us",
            median(sum(r.us for r in call) for call in seen),
            "kernels, copies and fills added up",
        ),
        facts.fact("span_us", median(span)),
        facts.fact("gpu_busy", median(share)),
        facts.fact("idle_us", median(idle)),
        facts.fact(
            "launches", median(map(len, seen)), "per call, copies and fills too"
        ),
    ]


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of (start, duration) ran: they may overlap."""
    total = until = 0
    for start, took in sorted(spans):
        total += max(0, start + took - max(until, start))
        until = max(until, start + took)
    return total


def kernels_table(calls: list[list[Ran]]) -> list[Table]:
    """What ran on the GPU by name, most time first; no table if nothing ran."""
    counts, times = Counter(), Counter()
    for ran in (ran for call in calls for ran in call):
        counts[symbols.short(ran.name)] += 1
        times[symbols.short(ran.name)] += ran.us
    whole = times.total()
    return facts.table(
        "kernels",
        (
            (
                name,
                counts[name] / len(calls),
                us / len(calls),
                100 * us / whole if whole else None,
            )
            for name, us in times.most_common()
        ),
    )
