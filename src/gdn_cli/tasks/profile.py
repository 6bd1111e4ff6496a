"""`survey`: is it right, how long does a call take, what does it run? Otherwise a profiler's target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import build, check, dataset, errors, prepared, profilers
from ..timing import Subject, floor
from ..workloads import Workload
from .common import BuildFailed, Case, built, guarded, judged, runner_of
from .floors import timed_floor
from .trial import timed


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
            setup = self.request.get("setup")
            return prepared.built(self.definition, self.solution, setup, specific=specific)
        except build.BuildFailed as e:
            raise BuildFailed(str(e), code=errors.MISSING if e.missing else errors.FAILED) from None

    @cached_property
    def case(self) -> Case:
        """The workload's tensors with what is right on them, by the float64 reference."""
        return Case(self.request, self.workload, build.reference(self.definition))

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
        yield from guarded(request, workload, work)


def _inside(request: dict, workload: Workload) -> list[dict[str, Any]]:
    """A tool's own part, in the process that the tool looks at."""
    ask = request["profile"]
    answer = profilers.module(ask["task"]).inside(Target(request, workload), ask["params"])
    return [{"tier": None, "status": "passed", "reason": None, "answer": answer}]


def _surveyed(request: dict, workload: Workload) -> list[dict[str, Any]]:
    """What a profile is read against: the check, a time, the floors of this workload, and what a call runs.

    Without a tier nothing is timed: the check and the build are all that is wanted.
    """
    runner = runner_of(request)
    reference = build.reference(request["definition"])
    kernel, _ = built(runner, request, request)
    case, op, l2 = Case(request, workload, reference), request["op"], request["profile"].get("l2", "cold")
    record = judged(case, kernel, probed=False)
    record["bytes_in"] = floor.bytes_of(op, op.inputs, case.axes)
    record["bytes_out"] = floor.bytes_of(op, op.outputs, case.axes)
    if not request["timing"]["tiers"]:
        return [{"tier": None} | record]
    moved, tier = floor.bytes_moved(op, case.axes), request["timing"]["tiers"][0]
    outputs = case.outputs()
    found = timed(request, tier, case, kernel, outputs)
    if record["status"] != "passed":  # a time does not make it right
        found = {k: v for k, v in found.items() if k not in ("status", "reason")}
    record |= found
    record["ran"] = None
    if request["mode"] == "cuda":
        record["ran"] = kernel.ask("survey", case.inputs, outputs, definition=request["definition"], l2=l2).get("ran")
    runner.close()
    floors: dict[str, Any] = {}
    copy, floors["copy_how"] = floor.fastest_copy(moved, request["mode"], l2)
    large, floors["large_bytes"] = floor.large_copy(request["mode"])
    for name, subject in (("copy", copy), ("empty", floor.empty(request["mode"])), ("large", large)):
        found = timed_floor(request, tier, subject).get("timing")
        floors[f"{name}_us"] = found["median_us"] if found else None
    return [record | {"floors": floors}]
