"""What a worker can be asked to do: check, time and probe an algo, let several take turns, time the floors, be the
target of a profiler.

Each task is a generator of records, one for each workload and tier, made as soon as they can be.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from . import build, check, dataset, errors, probes, profilers
from .errors import GdnError, MissingError
from .isolation import client, measuring, process
from .registry import Op
from .timing import COPY, COPY_RATE, EMPTY, Plan, Subject, floor
from .workloads import Workload


class BuildFailed(GdnError):
    """The algo cannot be built; the code says whether that is its fault or a package's that is missing here."""


def algo(request: dict, reply: dict) -> Iterator[dict]:
    """`check`, `bench` and `prove`: one algo, workload after workload."""
    runner = _runner(request)
    reference = build.reference(request["definition"])  # before any of the algo's code runs
    kernel, said = _built(runner, request, request, prove=request["command"] == "prove")
    reply["build_s"] = said.get("build_s")
    if "proof" in said:
        reply["proof"] = said["proof"]
    for i, workload in enumerate(request["workloads"]):
        probed = request["strict"] or (request["command"] == "bench" and _smallest(request, i))
        yield from _guarded(request, workload, _measured, kernel, reference, probed)


def _runner(request: dict) -> client.Runner:
    """The process for the algo's code; one that was started while this one imported torch, where there is one."""
    return client.Runner(request["mode"], request.pop("started", None) or process.of(request))


def _built(runner: client.Runner, request: dict, of: dict, **how: Any) -> tuple[client.Kernel, dict[str, Any]]:
    """What `of`, the request itself or one of its rivals, holds the solution of."""
    specific = of.get("specific", False) and request["mode"] == "cuda"
    name = of.get("name", "algo")
    try:
        return runner.build(name, request["definition"], of["solution"], specific=specific, **how)
    except client.Raised as e:
        if e.kind != "build_failed":
            raise BuildFailed(e.one_line, code=errors.FAILED) from None
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
    except client.Died:
        raise
    except GdnError as e:  # the workload's data, not the algo
        failed = {"status": "refused", "reason": str(e), "code": e.code}
    except (torch.cuda.OutOfMemoryError, MemoryError) as e:
        torch.cuda.empty_cache()
        failed = {"status": "out_of_memory", "reason": str(e).splitlines()[0] if str(e) else "out of memory"}
    except client.Raised as e:
        failed = {"status": "error", "reason": e.one_line, "trace": e.trace}
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

    @property
    def right(self) -> list:
        """What is right on the values that are in the buffers now."""
        return [x * self.scale for x in self.expected]

    def check(self, kernel: Any) -> Any:
        return check.check(kernel, self.op, self.axes, self.inputs, self.right)

    def outputs(self) -> list:
        return check.allocate(self.op, self.axes, str(self.inputs[0].device))


def _judged(case: _Case, kernel: client.Kernel, probed: bool) -> dict[str, Any]:
    """The record of a check, and of the probes where they are asked for."""
    verdict = case.check(kernel)
    record: dict[str, Any] = {"status": "passed" if verdict.passed else "wrong", "reason": verdict.reason}
    record["check"] = verdict.to_json()
    if verdict.passed and probed:
        record["probes"] = probes.run(kernel, case.op, case.axes, case.inputs, case.expected)
        if caught := {name: what for name, what in record["probes"].items() if what}:
            name, what = next(iter(caught.items()))
            record |= {"status": "wrong", "reason": f"probe {name}: {what}"}
    if (backend := kernel.backend(case.inputs)) is not None:
        record["backend"] = backend
    return record


def _stale(verdict: Any) -> dict[str, Any]:
    """What becomes of a record whose algo was right before it was timed, and is not behind it."""
    reason = f"right at first, wrong on new values in the same buffers after it was timed: {verdict.reason}"
    return {"status": "wrong", "reason": reason, "check": verdict.to_json()}


def _measured(request: dict, workload: Workload, kernel: Any, reference: Any, probed: bool) -> list[dict[str, Any]]:
    """Check and, where it is right and a time is asked for, time it in each tier and check again on new values, so
    that a kernel that remembers what it returned, or that is right only once, loses its time."""
    try:
        case = _Case(request, workload, reference)
        record = _judged(case, kernel, probed)
        if request["command"] != "bench" or record["status"] != "passed":
            return _each_tier(request, record)
        record["bytes_moved"] = floor.bytes_moved(case.op, workload.axes)
        outputs = case.outputs()
        records = [record | _timed(request, tier, case, kernel, outputs) for tier in request["timing"]["tiers"]]
        case.refresh()
        again = case.check(kernel)
        if not again.passed:
            records = _each_tier(request, record | _stale(again))
        return records
    finally:
        _forget(kernel.runner)


def _forget(runner: client.Runner) -> None:
    with contextlib.suppress(client.Died, client.Raised):  # whoever finds it dead says so with the next command
        runner.forget()


_IN_PLACE = ("wall", "events", "cupti")  # tiers whose last call writes the very buffers that they are given


def _timed(request: dict, tier: str, case: _Case, kernel: client.Kernel, outputs: list) -> dict[str, Any]:
    """One tier's part of a record: what the runner measured, and what can be held against it from outside."""
    kernel.push([*case.inputs, *map(check.poison, outputs)])
    gpu = request["mode"] == "cuda"
    if gpu:
        torch.cuda.empty_cache()  # the runner needs the room
    found, replaced = kernel.time(
        case.inputs, outputs, definition=request["definition"], tier=tier, plan=request["timing"]["plan"],
        fallback=request["timing"]["fallback"], own=1 + gpu,
    )  # fmt: skip
    if replaced:
        return {"tier": tier, "status": "wrong", "reason": f"probe timer: replaced {', '.join(replaced[:3])}"}
    if "timing" not in found:
        return found
    if kernel.destination_passing and found["tier"] in _IN_PLACE:
        kernel.pull(outputs)
        verdict = check.results(case.op, case.axes, outputs, case.right)
        if not verdict.passed:
            reason = f"right when it was checked, wrong while it was timed: {verdict.reason}"
            return {"tier": tier, "status": "wrong", "reason": reason, "check": verdict.to_json()}
    if tier == "wall" and (doubt := _outside(kernel, case.inputs, outputs, found["timing"]["median_us"])):
        found["doubts"] = [*found["doubts"], doubt]
    return found


_TRAIN_S, _TRAINS, _SLOWER, _SLACK_US = 0.01, 5, 2.0, 5.0


def _outside(kernel: client.Kernel, inputs: list, outputs: list, median_us: float) -> str | None:
    """What the worker's own clock has to say against a time that the algo's process took.

    Trains of calls, the fastest counts: a busy machine makes some of them longer, and a wrong clock all of them.
    """
    times = max(1, min(5000, int(_TRAIN_S * 1e6 / median_us)))
    best = math.inf
    for _ in range(_TRAINS):
        best = min(best, kernel.seconds_outside(inputs, outputs, times) * 1e6)
        if best <= _SLOWER * median_us + _SLACK_US + _CALL_US / times:
            return None
    return (
        f"by a clock outside its process a call takes {best:.3g} us, by the one inside {median_us:.3g}: "
        "see what it does to the clock, or measure again"
    )


_CALL_US = 2000.0  # that asking for a train may take


# --- compare ------------------------------------------------------------------------------------------------------


def compare(request: dict, reply: dict) -> Iterator[dict]:
    """Several algos on the same buffers in one process, their calls taking turns.

    One that kills the process loses its place; the others go on in another one.
    """
    reference = build.reference(request["definition"])
    field = _Field(request)
    yield from field.built()
    for i, workload in enumerate(request["workloads"]):
        probed = request["strict"] or _smallest(request, i)
        while True:
            try:
                yield from _guarded(request, workload, field.meet, reference, probed)
                break
            except client.Died as e:
                yield from field.without(e, request["workloads"][i:])
                if not field.kernels:
                    return


class _Field:
    """The rivals that are left, in the process that they share."""

    def __init__(self, request: dict) -> None:
        self.request, self.rivals = request, list(request["rivals"])
        self.runner: client.Runner | None = None
        self.kernels: dict[str, client.Kernel] = {}
        self._at: str | None = None
        self.meeting: list[str] = []

    @property
    def at(self) -> str | None:
        """Whose code runs now, where it is one's alone; the command hears of it, in case that it never ends."""
        return self._at

    @at.setter
    def at(self, name: str | None) -> None:
        self._at = name
        self.request["at"](name)

    def built(self) -> Iterator[dict]:
        """Build all that are left in a new process; the records of those that cannot be built."""
        while True:
            self.runner, self.kernels = _runner(self.request), {}
            try:
                for rival in list(self.rivals):
                    self.at = rival["name"]
                    try:
                        self.kernels[rival["name"]] = _built(self.runner, self.request, rival)[0]
                    except BuildFailed as e:
                        self.rivals.remove(rival)
                        yield from self._out(rival["name"], "build_failed", str(e), [None], code=e.code)
                self.at = None
                return
            except client.Died as e:
                yield from self._dropped(e, [None])

    def without(self, end: client.Died, workloads: Sequence[Workload]) -> Iterator[dict]:
        """Go on without the one whose turn it was; its records for the workloads that it will not see."""
        yield from self._dropped(end, workloads)
        yield from self.built()

    def _dropped(self, end: client.Died, workloads: Sequence[Workload | None]) -> Iterator[dict]:
        self.runner.close()
        guilty = self.at
        if guilty is None and end.turn is not None and end.turn < len(self.meeting):
            guilty = self.meeting[end.turn]
        names = [rival["name"] for rival in self.rivals]
        for name in [guilty] if guilty else names:
            self.rivals = [rival for rival in self.rivals if rival["name"] != name]
            self.kernels.pop(name, None)
            yield from self._out(name, end.status, end.reason, workloads)

    def _out(self, name: str, status: str, reason: str, workloads: Sequence[Workload | None], **more: Any) -> Iterator:
        failed = {"algo": name, "status": status, "reason": reason} | more
        for workload in workloads:
            if workload is None or name in self.request.get("turns", {}).get(workload.uuid, [name]):
                head = {"workload": workload.to_json() if workload else {}}
                yield from (head | record for record in _each_tier(self.request, failed))

    def meet(self, request: dict, workload: Workload, reference: Any, probed: bool) -> list[dict[str, Any]]:
        """One workload's records: of each algo its timing, and its samples in the order in which they were taken."""
        named = request.get("turns", {}).get(workload.uuid, self.kernels)
        kernels = {name: self.kernels[name] for name in named if name in self.kernels}
        if not kernels:
            return []
        try:
            return self._met(request, workload, reference, kernels, probed)
        finally:
            _forget(self.runner)

    def _met(self, request: dict, workload: Workload, reference: Any, kernels: dict, probed: bool) -> list[dict]:
        case = _Case(request, workload, reference)
        judged, right = {}, {}
        for name, kernel in kernels.items():
            self.at = name
            try:
                judged[name] = {"algo": name} | _judged(case, kernel, probed)
            except client.Raised as e:
                status = "out_of_memory" if e.kind == "out_of_memory" else "error"
                reason = str(e).splitlines()[0] if status == "out_of_memory" and str(e) else e.one_line
                judged[name] = {"algo": name, "status": status, "reason": reason, "trace": e.trace}
            if judged[name]["status"] == "passed":
                right[name] = kernel
                judged[name]["bytes_moved"] = floor.bytes_moved(case.op, workload.axes)
        self.at = None
        records = [r for name in kernels if name not in right for r in _each_tier(request, judged[name])]
        for tier in request["timing"]["tiers"] if right else []:
            records += self._in_turns(request, tier, case, judged, right)
        case.refresh()
        for name, kernel in right.items():
            self.at = name
            again = case.check(kernel)
            if not again.passed:
                records = [r for r in records if r["algo"] != name] + _each_tier(request, judged[name] | _stale(again))
        self.at = None
        return records

    def _in_turns(self, request: dict, tier: str, case: _Case, judged: dict, right: dict) -> list[dict[str, Any]]:
        outputs = case.outputs()  # the same buffers for all: where they lie in memory costs everyone the same
        self.runner.push([*case.inputs, *outputs])
        gpu = request["mode"] == "cuda"
        if gpu:
            torch.cuda.empty_cache()
        self.meeting = list(right)
        self.runner.watched()
        linear = [i for i, name in enumerate(case.op.inputs) if name in case.op.linear_in]
        form = self.runner.form
        try:
            said = self.runner.ask(
                "turns", kernels=self.meeting, inputs=[form(x) for x in case.inputs],
                outputs=[form(x) for x in outputs], linear=linear, tier=tier, plan=request["timing"]["plan"],
                own=1 + gpu,
            )  # fmt: skip
        except client.Raised as e:
            if e.kind != "tier_unavailable":
                raise
            gone = {"tier": tier, "status": "tier_unavailable", "reason": f"{tier}: {e}"}
            return [judged[name] | gone for name in right]
        if replaced := said.get("replaced"):
            wrong = {"tier": tier, "status": "wrong", "reason": f"probe timer: replaced {', '.join(replaced[:3])}"}
            return [judged[name] | wrong for name in right]
        return [
            judged[name] | client.measured(found) | {"rounds_us": [client.number(us) for us in samples]}
            for name, found, samples in zip(right, said["records"], said["rounds"], strict=True)
        ]


# --- profile ------------------------------------------------------------------------------------------------------


class Target:
    """What a profiler's target works on. Everything is made when it is first asked for: some need no GPU, no kernel."""

    def __init__(self, request: dict, workload: Workload) -> None:
        self.request, self.workload = request, workload
        self.op, self.mode = request["op"], request["mode"]
        self.definition, self.solution = request["definition"], request["solution"]
        self.l2 = request["profile"].get("l2", "cold")

    @cached_property
    def kernel(self) -> build.Kernel:
        """The algo in this process, which is the one that the tool looks at: nothing here gives a verdict."""
        specific = self.request.get("specific", False) and self.mode == "cuda"
        try:
            return build.build(self.definition, self.solution, specific=specific)
        except build.BuildFailed as e:
            raise BuildFailed(str(e), code=errors.MISSING if e.missing else errors.FAILED) from None

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
    runner = _runner(request)
    reference = build.reference(request["definition"])
    kernel, _ = _built(runner, request, request)
    case, op, l2 = _Case(request, workload, reference), request["op"], request["profile"].get("l2", "cold")
    record = _judged(case, kernel, probed=False)
    record["bytes_in"] = floor.bytes_of(op, op.inputs, case.axes)
    record["bytes_out"] = floor.bytes_of(op, op.outputs, case.axes)
    if not request["timing"]["tiers"]:
        return [{"tier": None} | record]
    moved, tier = floor.bytes_moved(op, case.axes), request["timing"]["tiers"][0]
    outputs = case.outputs()
    timed = _timed(request, tier, case, kernel, outputs)
    if record["status"] != "passed":  # a time does not make it right
        timed = {k: v for k, v in timed.items() if k not in ("status", "reason")}
    record |= timed
    record["ran"] = None
    if request["mode"] == "cuda":
        record["ran"] = kernel.ask("survey", case.inputs, outputs, definition=request["definition"], l2=l2).get("ran")
    runner.close()
    floors: dict[str, Any] = {}
    copy, floors["copy_how"] = floor.fastest_copy(moved, request["mode"], l2)
    large, floors["large_bytes"] = floor.large_copy(request["mode"])
    for name, subject in (("copy", copy), ("empty", floor.empty(request["mode"])), ("large", large)):
        found = _floor(request, tier, subject).get("timing")
        floors[f"{name}_us"] = found["median_us"] if found else None
    return [record | {"floors": floors}]


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
    return [passed | _floor(request, tier, subject) for tier in request["timing"]["tiers"]]


def _floor(request: dict, tier: str, subject: Subject) -> dict[str, Any]:
    """One tier's part of a floor's record, measured in this process: a floor is no algo's code."""
    plan = Plan(**request["timing"]["plan"])
    return measuring.timed(
        tier, subject, plan, gpu=request["mode"] == "cuda", fallback=request["timing"]["fallback"]
    )  # fmt: skip


def _machine(request: dict) -> Iterator[dict]:
    """Floors of the machine, whatever the workload: an empty launch in each tier, and the rate of a large copy."""
    tiers = request["timing"]["tiers"]
    passed: dict[str, Any] = {"workload": {}, "status": "passed", "reason": None}
    subject = floor.empty(request["mode"])
    for tier in tiers:
        yield {"algo": EMPTY, "bytes_moved": 0} | passed | _floor(request, tier, subject)
    subject, moved = floor.large_copy(request["mode"])
    yield {"algo": COPY_RATE, "bytes_moved": moved} | passed | _floor(request, tiers[0], subject)


def _trace(e: BaseException) -> list[str]:
    return "".join(traceback.format_exception(e)).splitlines()[-12:]
