"""`survey`: is the algo right, how long does a call take, what does it run? For other
tools: a profiler's target.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from msgspec.structs import replace

from ....catalog.workloads import Workload
from ....schema.record_types import Record
from ... import profilers
from ...executor import build, prepared
from ...messages import Floors, Reply, Survey
from ...request import Serving
from ...timing import Subject, floor
from .. import check, dataset
from .common import Case, Depth, begun, built, guarded, judged, runner_of
from .floors import timed_floor
from .trial import timed


class Target:
    """What a profiler's target works on. Everything is made on first use: some targets
    need no GPU or no kernel.
    """

    def __init__(self, request: Serving, workload: Workload) -> None:
        self.request, self.workload = request, workload
        self.op, self.mode = request.op, request.mode
        self.definition, self.solution = request.definition, request.solution
        self.l2 = request.profile.l2

    @cached_property
    def kernel(self) -> build.Kernel:
        """The algo in this process, because the tool looks at this process. Nothing
        here judges the algo.
        """
        specific = self.request.specific and self.mode == "cuda"
        return prepared.built(
            self.definition, self.solution, self.request.setup, specific=specific
        )

    @cached_property
    def case(self) -> Case:
        """The workload's tensors and the right results, from the float64 reference."""
        return Case(self.request, self.workload, build.reference(self.definition))

    @cached_property
    def subject(self) -> Subject:
        """The call on its own buffers, without an oracle: nothing else runs before it."""
        root = Path(self.request.dataset) if self.request.dataset else None
        device = "cuda" if self.mode == "cuda" else "cpu"
        inputs = dataset.load_inputs(self.op, self.workload, device, root)
        outputs = check.allocate(self.op, self.workload.axes, str(inputs[0].device))
        for output, source in (
            self.op.overwrites.items() if self.request.in_place else ()
        ):
            outputs[output] = inputs[source]
        return Subject.of(self.kernel, inputs, outputs, definition=self.definition)


def profile(request: Serving, reply: Reply) -> Iterator[Record]:
    """`survey`: is the algo right, how long does a call take, what does it run? For
    other tools: a profiler's target.
    """
    for workload in request.workloads:
        work = _surveyed if request.profile.task == "survey" else _inside
        yield from guarded(request, workload, [request.name], work)


def _inside(request: Serving, workload: Workload) -> list[Record]:
    """A tool's own part, in the process that the tool looks at."""
    ask = request.profile
    answer = profilers.module(ask.task).inside(Target(request, workload), **ask.params)
    return [replace(begun(request, workload, request.name), answer=answer)]


def _surveyed(request: Serving, workload: Workload) -> list[Record]:
    """What a profile is read against: the check, a time, the floors of this workload,
    and what a call runs.

    Without a tier nothing is timed: only the check and the build are wanted.
    """
    runner = runner_of(request)
    reference = build.reference(request.definition)
    kernel, _ = built(runner, request, request)
    case, op, l2 = Case(request, workload, reference), request.op, request.profile.l2
    record = judged(begun(request, workload, request.name), case, kernel, Depth())
    sizes = (floor.bytes_of(op, names, case.axes) for names in (op.inputs, op.outputs))
    record.answer = survey = Survey(bytes_in=next(sizes), bytes_out=next(sizes))
    if not request.timing.tiers:
        return [record]
    moved, tier = floor.bytes_moved(op, case.axes), request.timing.tiers[0]
    outputs = case.outputs()
    found = timed(request, record, tier, case, kernel, outputs)
    if not record.passed:  # a failed check outranks the time
        found.status, found.reason = record.status, record.reason
    if request.mode == "cuda":
        survey.ran = kernel.ask(
            "survey", case.inputs, outputs, definition=request.definition, l2=l2
        ).ran
    runner.close()
    copy, how = floor.fastest_copy(moved, request.mode, l2)
    large, large_bytes = floor.large_copy(request.mode)
    us = {}
    for name, subject in (
        ("copy_us", copy),
        ("empty_us", floor.empty(request.mode)),
        ("large_us", large),
    ):
        timing = timed_floor(request, tier, subject).timing
        us[name] = timing and timing.median_us
    survey.floors = Floors(**us, large_bytes=large_bytes, copy_how=how)
    return [found]
