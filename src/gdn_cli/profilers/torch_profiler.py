"""torch.profiler: what a call does on the host, op by op, and on the GPU, kernel by kernel, with a Chrome trace.

Times of whole calls are taken before the profiler is on: it adds about a microsecond to each op.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import GdnError, MissingError
from ..machine.inventory import HERE, Machine
from . import Ask, Fact, Found, Reading, Reply, Run, Table, kept, symbols

TRACE = "trace.json.gz"
CALL = "gdn_call"  # the name of a call's range in the trace
_CALLS = 20
_SECONDS = 3.0  # for the calls below the profiler, and as much for those before
_EVENTS = 40_000  # of the host in one trace: more are slow to read, here and in a browser


def find(machine: Machine = HERE) -> None:
    if not machine.has_package("torch"):
        raise MissingError("torch is missing", hint="pip install torch")


def runs(ask: Ask, folder: Path) -> list[Run]:
    return [Run("torch", params={"trace": str(folder / TRACE), "calls": _CALLS})]


# --- in the worker ------------------------------------------------------------------------------------------------


def inside(target: Any, params: dict[str, Any]) -> dict[str, Any]:
    call, before = target.subject.call, (lambda: None)
    if target.mode == "cuda":
        before = _before(call, target.l2)
    host_us = _host_times(call, before, target.mode, params["calls"])
    return {"host_us": host_us} | profiled(call, target.mode, params["calls"], before, Path(params["trace"]))


def _before(call: Callable[[], Any], l2: str) -> Callable[[], Any]:
    """What runs in front of each call, so that L2 is cold or warm; the last kernel of it is a mark."""
    from ..timing.kernels import Flush, begin, rest

    if l2 == "cold":
        return Flush()

    def warm() -> None:
        rest()
        call()
        begin()

    return warm


def _host_times(call: Callable[[], Any], before: Callable[[], Any], mode: str, calls: int) -> list[float]:
    """Microseconds until each call returned; on a GPU with nothing else queued, and the kernels may still run."""
    wait = _waiter(mode)
    for _ in range(3):
        before()
        call()
    wait()
    times, began = [], time.perf_counter()
    while len(times) < calls and (len(times) < 3 or time.perf_counter() - began < _SECONDS):
        before()
        wait()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    wait()
    return times


def _waiter(mode: str) -> Callable[[], Any]:
    import torch

    return torch.cuda.synchronize if mode == "cuda" else lambda: None


def profiled(
    call: Callable[[], Any],
    mode: str,
    calls: int,
    before: Callable[[], Any] = lambda: None,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Up to `calls` calls below torch.profiler: {"calls", "ops" of the host, "gpu"}.

    An op is {"name", "count", "self_us", "total_us"}, over all calls; the first one stands for the call itself, and
    its own time is what no op took. "gpu" has for each call what ran on the GPU: [name, start, duration] in us.
    """
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

    once = some(1).events()  # it pays for what the profiler does at its first start, and tells what a call costs
    took_s = sum(e.cpu_time_total for e in once if e.name == CALL) / 1e6
    calls = max(1, min(calls, int(_SECONDS / max(took_s, 1e-6)), _EVENTS // max(1, len(once))))
    profile = some(calls)
    if trace:
        profile.export_chrome_trace(str(trace))
    on_gpu = torch.autograd.DeviceType.CUDA
    events = list(profile.events())
    ran = [
        (e.time_range.start, e.time_range.end - e.time_range.start, e.name)
        for e in events
        if e.device_type == on_gpu and e.name != CALL and not getattr(e, "is_user_annotation", False)
    ]
    return {
        "calls": calls,
        "ops": _ops([e for e in events if e.name == CALL and e.device_type != on_gpu]),
        "gpu": of_calls(ran) if mode == "cuda" else None,
    }


def _ops(roots: list[Any]) -> list[dict[str, Any]]:
    """What ran in these ranges, by name."""
    found: dict[str, dict[str, Any]] = {}
    left = list(roots)
    while left:
        event = left.pop()
        left += event.cpu_children
        op = found.setdefault(event.name, {"name": event.name, "count": 0, "self_us": 0.0, "total_us": 0.0})
        op["count"] += 1
        op["self_us"] += event.self_cpu_time_total
        op["total_us"] += event.cpu_time_total
    return sorted(found.values(), key=lambda op: op["name"] != CALL)


def of_calls(ran: list[tuple[float, float, str]]) -> list[list[list[Any]]]:
    """(start, duration, name) of all that ran, cut at the marks: each call's own, as [name, start, duration] with the
    start counted from its first."""
    from ..timing.kernels import BEGINS, REST

    calls: list[list[list[Any]]] = []
    current: list[list[Any]] | None = None
    for start, us, name in sorted(ran):
        if name.startswith(BEGINS):
            calls.append(current := [])
        elif name.startswith(REST):
            current = None
        elif current is not None:
            current.append([name, start, us])
    for call in calls:
        first = call[0][1] if call else 0.0
        for row in call:
            row[1] -= first
    return calls


# --- afterwards ---------------------------------------------------------------------------------------------------


def answer_of(reply: Reply) -> dict[str, Any]:
    """What inside returned; GdnError with the reason where it did not return."""
    if reply.status != "done" or not reply.answer:
        last = f" ({reply.tail[-1][:200]})" if reply.tail and not reply.reason else ""
        raise GdnError(f"the algo's process below the profiler: {reply.reason or reply.status}{last}")
    return reply.answer


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    answer = answer_of(replies[0])
    facts, tables, notes = [], [], []
    host_us = statistics.median(answer["host_us"])
    if answer["gpu"] is None:
        facts.append(Fact("time_us", "duration", host_us, "us", "time", "wall, not profiled", "lower"))
    else:
        note = "until the call returns, GPU idle before it, not profiled"
        facts.append(Fact("host_us", "host time", host_us, "us", "time", note, "lower"))
        facts += gpu_facts(answer["gpu"])
        tables += kernels_table(answer["gpu"])
        if not any(answer["gpu"]):
            notes.append("torch.profiler saw no kernel of the call: another profiler may hold CUPTI in this process")
    facts.append(Fact("ops", "host ops", _host_ops(answer), "count", "time", "per call", "lower"))
    tables.append(ops_table(answer))
    notes.append(f"{TRACE} shows {answer['calls']} calls: each is a range {CALL}")
    found = Found("", tuple(facts), tuple(tables))
    return Reading((found,), tuple(notes), kept(folder, TRACE))


def _host_ops(answer: dict[str, Any]) -> float:
    return sum(op["count"] for op in answer["ops"] if op["name"] != CALL) / answer["calls"]


def ops_table(answer: dict[str, Any], most: int = 20) -> Table:
    """The host's ops by the time that they took themselves."""
    calls, total = answer["calls"], sum(op["self_us"] for op in answer["ops"])
    rows = [
        (
            "(outside any op)" if op["name"] == CALL else op["name"],
            op["count"] / calls,
            op["self_us"] / calls,
            100 * op["self_us"] / total if total else None,
        )
        for op in sorted(answer["ops"], key=lambda op: -op["self_us"])
    ]
    if len(rows) > most:
        rest = rows[most - 1 :]
        rows[most - 1 :] = [("(all others)", *(sum(row[i] or 0 for row in rest) for i in (1, 2, 3)))]
    columns = (("op", ""), ("per call", "count"), ("self per call", "us"), ("share", "%"))
    note = "below the profiler, which adds about 1 us to each op; outside any op: Python, and calls that are no ops"
    return Table("ops", "host ops by self time", columns, tuple(rows), note)


def gpu_facts(calls: list[list[list[Any]]]) -> list[Fact]:
    """What the GPU did in a call, medians over the calls."""
    seen = [call for call in calls if call]
    if not seen:
        return []
    times = [busy((start, us) for _, start, us in call) for call in seen]
    span = [max(start + us for _, start, us in call) for call in seen]
    share = [100 * b / s if s else 100.0 for b, s in zip(times, span, strict=True)]
    idle = [s - b for b, s in zip(times, span, strict=True)]
    mid = statistics.median
    total = mid(sum(us for _, _, us in call) for call in seen)
    return [
        Fact("time_us", "duration", total, "us", "time", "kernels, copies and fills added up", "lower"),
        Fact(
            "span_us", "span on the GPU", mid(span), "us", "time", "first start to last end, GPU idle before", "lower"
        ),
        Fact("gpu_busy", "GPU busy", mid(share), "%", "time", "of that span", "higher"),
        Fact("idle_us", "idle between kernels", mid(idle), "us", "time", "of that span", "lower"),
        Fact("launches", "launches", mid(map(len, seen)), "count", "launch", "per call, copies and fills too", "lower"),
    ]


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of (start, duration) ran: they may overlap."""
    total = until = 0
    for start, took in sorted(spans):
        total += max(0, start + took - max(until, start))
        until = max(until, start + took)
    return total


def kernels_table(calls: list[list[list[Any]]]) -> list[Table]:
    """What ran on the GPU by name, most time first; none where nothing ran."""
    sums: dict[str, tuple[int, float]] = {}
    for name, _, us in (row for call in calls for row in call):
        count, total = sums.get(symbols.short(name), (0, 0.0))
        sums[symbols.short(name)] = count + 1, total + us
    if not sums:
        return []
    whole = sum(us for _, us in sums.values())
    rows = [
        (name, count / len(calls), us / len(calls), 100 * us / whole if whole else None)
        for name, (count, us) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]
    columns = (("kernel", ""), ("launches", "count"), ("per call", "us"), ("share", "%"))
    return [Table("kernels", "GPU kernels", columns, tuple(rows), "means over the calls")]
