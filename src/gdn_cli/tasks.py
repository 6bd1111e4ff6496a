"""What a worker can be asked to do: check, time and probe an algo, let several take turns, time the floors, be the
target of a profiler.

Each task is a generator of records, one for each workload and tier, made as soon as they can be.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from . import build, check, dataset, environment, errors, paired, probes, profilers, signature, timing
from .errors import GdnError, MissingError
from .registry import Op
from .timing import COPY, COPY_RATE, EMPTY, Plan, Subject, floor
from .workloads import Workload


class BuildFailed(GdnError):
    """The algo cannot be built; the code says whether that is its fault or a package's that is missing here."""


def algo(request: dict, reply: dict) -> Iterator[dict]:
    """`check`, `bench` and `prove`: one algo, workload after workload."""
    started = time.perf_counter()
    kernel = _built(request, request)
    reply["build_s"] = time.perf_counter() - started
    if request["command"] == "prove":
        reply["proof"] = signature.match(kernel.entry_point, request["definition"], request["solution"])
    reference = build.reference(request["definition"])
    for i, workload in enumerate(request["workloads"]):
        probed = request["strict"] or (request["command"] == "bench" and _smallest(request, i))
        yield from _guarded(request, workload, _measured, kernel, reference, probed)


def _built(request: dict, of: dict) -> Any:
    """What `of`, the request itself or one of its rivals, holds the solution of."""
    specific = of.get("specific", False) and request["mode"] == "cuda"
    try:
        return build.build(request["definition"], of["solution"], specific=specific)
    except build.BuildFailed as e:
        raise BuildFailed(str(e), code=errors.MISSING if e.missing else errors.FAILED) from None


def _smallest(request: dict, i: int) -> bool:
    """Without `--strict` each algo is probed once, where that costs least: on its smallest workload."""
    sizes = [_size(request["op"], workload) for workload in request["workloads"]]
    return i == sizes.index(min(sizes))


def _size(op: Op, workload: Workload) -> int:
    return floor.bytes_moved(op, workload.axes)


def _guarded(request: dict, workload: Workload, work: Callable[..., list[dict]], *args: Any) -> list[dict[str, Any]]:
    """One workload's records, whatever happens; its tensors are gone by then: never two workloads in memory."""
    head = {"workload": workload.to_json()}
    try:
        with torch.no_grad():
            return [head | record for record in work(request, workload, *args)]
    except GdnError as e:  # the workload's data, not the algo
        failed = {"status": "refused", "reason": str(e), "code": e.code}
    except (torch.cuda.OutOfMemoryError, MemoryError) as e:
        torch.cuda.empty_cache()
        failed = {"status": "out_of_memory", "reason": str(e).splitlines()[0] if str(e) else "out of memory"}
    except Exception as e:
        if "can't allocate memory" in str(e):  # torch's CPU allocator raises a plain RuntimeError
            failed = {"status": "out_of_memory", "reason": str(e).splitlines()[0]}
        else:
            failed = {"status": "error", "reason": errors.one_line(e), "trace": _trace(e)}
    return [head | record for record in _each_tier(request, failed)]


def _each_tier(request: dict, record: dict[str, Any]) -> list[dict[str, Any]]:
    """What befell the algo before it was timed befell it in every tier: a record each, as one is due for each."""
    return [{"tier": tier} | record for tier in request["timing"]["tiers"] or [None]]


class _Case:
    """A workload's tensors, what is right on them, and a way to other values with known results.

    Scaling the inputs in which the op is linear by a power of two scales every output by exactly as much, so that new
    values in the same buffers need no second oracle. By 1 at most: the contest's rule has an absolute part, which a
    result twice as large would miss at half the error.
    """

    def __init__(self, request: dict, workload: Workload, reference: Any) -> None:
        self.op, self.axes = request["op"], workload.axes
        root = Path(request["dataset"]) if request.get("dataset") else None
        self.inputs = dataset.load_inputs(self.op, workload, "cuda" if request["mode"] == "cuda" else "cpu", root)
        self.expected = check.oracle(reference, self.inputs)
        if not check.finite(self.expected):
            raise MissingError(
                f"workload {workload.uuid}: the reference gives NaN or Inf on it, so its inputs are no use"
            )
        self.linear = [x for name, x in zip(self.op.inputs, self.inputs, strict=True) if name in self.op.linear_in]
        self.scale, self._scales = 1.0, itertools.cycle([-1.0, 0.5, -0.5, 1.0])

    def refresh(self) -> None:
        """Other values in the same buffers."""
        scale = next(self._scales)
        for x in self.linear:
            x.mul_(scale / self.scale)
        self.scale = scale

    def check(self, kernel: Any) -> Any:
        return check.check(kernel, self.op, self.axes, self.inputs, [x * self.scale for x in self.expected])

    def outputs(self) -> list:
        return check.allocate(self.op, self.axes, str(self.inputs[0].device))


def _judged(case: _Case, kernel: Any, probed: bool) -> dict[str, Any]:
    """The record of a check, and of the probes where they are asked for."""
    verdict = case.check(kernel)
    record: dict[str, Any] = {"status": "passed" if verdict.passed else "wrong", "reason": verdict.reason}
    record["check"] = verdict.to_json()
    if verdict.passed and probed:
        record["probes"] = probes.run(kernel, case.op, case.axes, case.inputs, case.expected)
        if caught := {name: what for name, what in record["probes"].items() if what}:
            name, what = next(iter(caught.items()))
            record |= {"status": "wrong", "reason": f"probe {name}: {what}"}
    if callable(backend := getattr(kernel.module, "backend", None)):
        record["backend"] = str(backend(*case.inputs))
    return record


def _stale(verdict: Any) -> dict[str, Any]:
    """What becomes of a record whose algo was right before it was timed, and is not behind it."""
    reason = f"right at first, wrong on new values in the same buffers after it was timed: {verdict.reason}"
    return {"status": "wrong", "reason": reason, "check": verdict.to_json()}


def _measured(request: dict, workload: Workload, kernel: Any, reference: Any, probed: bool) -> list[dict[str, Any]]:
    """Check and, where it is right and a time is asked for, time it in each tier and check again on new values, so
    that a kernel that remembers what it returned, or that is right only once, loses its time."""
    case = _Case(request, workload, reference)
    record = _judged(case, kernel, probed)
    if request["command"] != "bench" or record["status"] != "passed":
        return _each_tier(request, record)
    record["bytes_moved"] = floor.bytes_moved(case.op, workload.axes)
    subject = Subject.of(kernel, case.inputs, case.outputs(), definition=request["definition"])
    records = [record | _timed(request, tier, subject) for tier in request["timing"]["tiers"]]
    case.refresh()
    again = case.check(kernel)
    if not again.passed:
        return _each_tier(request, record | _stale(again))
    return records


def _timed(request: dict, tier: str, subject: Any) -> dict[str, Any]:
    """One tier's part of a record: the timing with the state of the GPU around it, or why it cannot be had."""
    with _Watch(request) as watch:
        try:
            timed = timing.measure(tier, subject, watch.plan, watch)
        except torch.cuda.OutOfMemoryError as e:  # of this tier's buffers: the other tiers may have room
            torch.cuda.empty_cache()
            return {"tier": tier, "status": "out_of_memory", "reason": f"{tier}: {str(e).splitlines()[0]}"}
        except timing.TierUnavailable as e:
            if not request["timing"]["fallback"] or tier != "cupti":
                return {"tier": tier, "status": "tier_unavailable", "reason": f"{tier}: {e}"}
            timed = timing.measure("events", subject, watch.plan, watch)
            note = f"cupti not available ({e}): timed with CUDA events instead"
            timed = dataclasses.replace(timed, note=note)
    return watch.record(timed)


_NOISY = 0.01  # a median that is not even known to so much is in doubt, whatever was asked for


class _Watch:
    """Reads the GPU's state before, between and after the batches of a measurement."""

    def __init__(self, request: dict) -> None:
        self.plan = Plan(**request["timing"]["plan"])
        self.on_gpu = request["mode"] == "cuda"
        self.states: list[dict[str, Any]] = []

    def __call__(self, brief: bool = True) -> None:
        if self.on_gpu:
            self.states.append(environment.gpu_state(brief))

    def __enter__(self) -> _Watch:
        self(brief=False)
        return self

    def __exit__(self, *_: Any) -> None:
        self(brief=False)

    def record(self, timed: Any) -> dict[str, Any]:
        before, *during, after = self.states or [{}, {}]
        found = {"tier": timed.tier, "timing": timed.to_json()}
        target = max(self.plan.target, _NOISY)
        found["doubts"] = environment.doubts(before, during, after, found["timing"], target)
        if self.on_gpu:
            found["gpu_state"] = {"before": before, "during": _few(during), "after": after}
        return found


def _few(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the middle and the last of many, each once: enough to see a trend."""
    kept = states if len(states) <= 3 else [states[0], states[len(states) // 2], states[-1]]
    return [state for i, state in enumerate(kept) if not i or state != kept[i - 1]]


# --- compare ------------------------------------------------------------------------------------------------------


def compare(request: dict, reply: dict) -> Iterator[dict]:
    """Several algos on the same buffers in one process, their calls taking turns."""
    kernels: dict[str, Any] = {}
    for rival in request["rivals"]:
        try:
            kernels[rival["name"]] = _built(request, rival)
        except BuildFailed as e:
            failed = {"algo": rival["name"], "workload": {}, "status": "build_failed", "reason": str(e), "code": e.code}
            yield from ({"tier": tier} | failed for tier in request["timing"]["tiers"])
    reference = build.reference(request["definition"])
    for i, workload in enumerate(request["workloads"]):
        named = request.get("turns", {}).get(workload.uuid, kernels)
        meeting = {name: kernels[name] for name in named if name in kernels}
        yield from _guarded(
            request, workload, _in_turns, meeting, reference, request["strict"] or _smallest(request, i)
        )


def _in_turns(request: dict, workload: Workload, kernels: dict, reference: Any, probed: bool) -> list[dict[str, Any]]:
    """One workload's records: of each algo its timing, and its samples in the order in which they were taken."""
    case = _Case(request, workload, reference)
    judged = {name: {"algo": name} | _judged(case, kernel, probed) for name, kernel in kernels.items()}
    right = {name: kernel for name, kernel in kernels.items() if judged[name]["status"] == "passed"}
    records = [r for name in kernels if name not in right for r in _each_tier(request, judged[name])]
    outputs = case.outputs()  # the same buffers for all: where they lie in memory costs everyone the same
    refresh = case.refresh if case.linear else None
    subjects = [timing.Subject.of(kernel, case.inputs, outputs, refresh=refresh) for kernel in right.values()]
    target = Plan(**request["timing"]["plan"]).target
    enough = (lambda each: paired.enough(*each, target=target)) if len(right) > 1 else None
    for name in right:
        judged[name]["bytes_moved"] = floor.bytes_moved(case.op, workload.axes)
    for tier in request["timing"]["tiers"] if right else []:
        with _Watch(request) as watch:
            try:
                timings, rounds = timing.interleave(tier, subjects, watch.plan, watch, enough)
            except timing.TierUnavailable as e:
                gone = {"tier": tier, "status": "tier_unavailable", "reason": f"{tier}: {e}"}
                records += [judged[name] | gone for name in right]
                continue
        for name, timed, samples in zip(right, timings, rounds, strict=True):
            records.append(judged[name] | watch.record(timed) | {"rounds_us": samples})
    case.refresh()
    for name, kernel in right.items():
        again = case.check(kernel)
        if not again.passed:
            records = [r for r in records if r["algo"] != name] + _each_tier(request, judged[name] | _stale(again))
    return records


# --- profile ------------------------------------------------------------------------------------------------------


class Target:
    """What a profiler's target works on. Everything is made when it is first asked for: some need no GPU, no kernel."""

    def __init__(self, request: dict, workload: Workload) -> None:
        self.request, self.workload = request, workload
        self.op, self.mode = request["op"], request["mode"]
        self.definition, self.solution = request["definition"], request["solution"]
        self.l2 = request["profile"].get("l2", "cold")

    @cached_property
    def kernel(self) -> Any:
        return _built(self.request, self.request)

    @cached_property
    def case(self) -> _Case:
        """The workload's tensors with what is right on them, by the float64 reference."""
        return _Case(self.request, self.workload, build.reference(self.definition))

    @cached_property
    def subject(self) -> Subject:
        """The call on buffers of its own, without an oracle: nothing else runs in front of it."""
        root = Path(self.request["dataset"]) if self.request.get("dataset") else None
        device = "cuda" if self.mode == "cuda" else "cpu"
        inputs = dataset.load_inputs(self.op, self.workload, device, root)
        outputs = check.allocate(self.op, self.workload.axes, str(inputs[0].device))
        return Subject.of(self.kernel, inputs, outputs, definition=self.definition)


def profile(request: dict, reply: dict) -> Iterator[dict]:
    """`survey`: is it right, how long does a call take, what does it run? Otherwise a profiler's target."""
    for workload in request["workloads"]:
        work = _surveyed if request["profile"]["task"] == "survey" else _inside
        yield from _guarded(request, workload, work)


def _inside(request: dict, workload: Workload) -> list[dict[str, Any]]:
    """A tool's own part, in the process that the tool looks at."""
    ask = request["profile"]
    answer = profilers.module(ask["task"]).inside(Target(request, workload), ask["params"])
    return [{"tier": None, "status": "passed", "reason": None, "answer": answer}]


def _surveyed(request: dict, workload: Workload) -> list[dict[str, Any]]:
    """What a profile is read against: the check, a time, the floors of this workload, and what a call runs.

    Without a tier nothing is timed: the check and the build are all that is wanted.
    """
    target = Target(request, workload)
    case, op = target.case, target.op
    record = _judged(case, target.kernel, probed=False)
    record["bytes_in"] = floor.bytes_of(op, op.inputs, case.axes)
    record["bytes_out"] = floor.bytes_of(op, op.outputs, case.axes)
    if not request["timing"]["tiers"]:
        return [{"tier": None} | record]
    moved, tier = floor.bytes_moved(op, case.axes), request["timing"]["tiers"][0]
    subject = Subject.of(target.kernel, case.inputs, case.outputs(), definition=request["definition"])
    timed = _timed(request, tier, subject)
    if record["status"] != "passed":  # a time does not make it right
        timed = {k: v for k, v in timed.items() if k not in ("status", "reason")}
    record |= timed
    record["ran"] = _ran(subject, target.l2) if request["mode"] == "cuda" else None
    floors: dict[str, Any] = {}
    copy, floors["copy_how"] = floor.fastest_copy(moved, request["mode"], target.l2)
    large, floors["large_bytes"] = floor.large_copy(request["mode"])
    for name, subject in (("copy", copy), ("empty", floor.empty(request["mode"])), ("large", large)):
        found = _timed(request, tier, subject).get("timing")
        floors[f"{name}_us"] = found["median_us"] if found else None
    return [record | {"floors": floors}]


def _ran(subject: Subject, l2: str) -> list[dict[str, Any]] | None:
    """What one call puts on the GPU, in order: name, start and duration in microseconds; None where nothing tells."""
    from .timing.kernels import Flush, begin
    from .timing.trace import Trace

    try:
        trace = Trace.open()
    except timing.TierUnavailable:
        return None
    before = subject.call if l2 == "warm" else Flush()

    def once() -> None:
        before()
        torch.cuda.synchronize()
        begin()
        subject.call()
        torch.cuda.synchronize()

    try:
        once()
        ran = trace.kernels(once)
    except timing.TierUnavailable:
        return None
    finally:
        trace.close()
    first = next((i for i, (_, _, name) in enumerate(ran) if name.startswith("gdn_begin")), len(ran)) + 1
    started = ran[first][0] if first < len(ran) else 0
    return [{"name": name, "start_us": (at - started) / 1e3, "us": us / 1e3} for at, us, name in ran[first:]]


# --- floors -------------------------------------------------------------------------------------------------------


def floors(request: dict, reply: dict) -> Iterator[dict]:
    """The copy at each workload, then an empty launch and the copy rate, which have none."""
    seen: dict[int, list[dict]] = {}
    with torch.no_grad():
        for workload in request["workloads"]:
            moved = _size(request["op"], workload)
            if moved not in seen:  # the copy depends on nothing else
                made = _guarded(request, workload, _copy, moved)
                seen[moved] = [{k: v for k, v in record.items() if k != "workload"} for record in made]
            head = {"workload": workload.to_json(), "bytes_moved": moved}
            yield from ({"algo": COPY} | head | record for record in seen[moved])
        yield from _machine(request)


def _copy(request: dict, workload: Workload, moved: int) -> list[dict[str, Any]]:
    subject, how = floor.fastest_copy(moved, request["mode"], request["timing"]["plan"].get("l2", "cold"))
    passed = {"status": "passed", "reason": None, "how": how}
    return [passed | _timed(request, tier, subject) for tier in request["timing"]["tiers"]]


def _machine(request: dict) -> Iterator[dict]:
    """Floors of the machine, whatever the workload: an empty launch in each tier, and the rate of a large copy."""
    tiers = request["timing"]["tiers"]
    passed: dict[str, Any] = {"workload": {}, "status": "passed", "reason": None}
    subject = floor.empty(request["mode"])
    for tier in tiers:
        yield {"algo": EMPTY, "bytes_moved": 0} | passed | _timed(request, tier, subject)
    subject, moved = floor.large_copy(request["mode"])
    yield {"algo": COPY_RATE, "bytes_moved": moved} | passed | _timed(request, tiers[0], subject)


def _trace(e: BaseException) -> list[str]:
    return "".join(traceback.format_exception(e)).splitlines()[-12:]
