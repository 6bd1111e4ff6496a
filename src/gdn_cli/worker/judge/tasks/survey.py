"""`survey`: is the algo right, how long does a call take, what does it run? For other
tools: a profiler's target.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from ....catalog.workloads import Workload
from ....schema.record_types import Record
from ... import profilers
from ...executor import build, prepared, process
from ...messages import Floors, Reply, Survey
from ...request import Profiling, Serving
from ...timing import Subject, floor
from .. import check, dataset
from . import trial
from .common import Case, Depth, begun, built, guarded, runner_of
from .floors import timed as floor_timed


class Target:
    """What a profiler's target works on. Everything is made on first use: some targets
    need no GPU or no kernel.
    """

    def __init__(self, request: Serving, workload: Workload, task: Profiling) -> None:
        self.request = request
        self.workload = workload
        self.l2 = task.l2
        self.op = request.op
        self.mode = request.mode
        self.definition = request.definition
        self.solution = request.solution

    @cached_property
    def kernel(self) -> build.Kernel:
        """The algo in this process, because the tool looks at this process. Nothing
        here judges the algo.
        """
        assert self.solution is not None
        specific = self.request.specific and self.mode == "cuda"
        given = self.definition, self.solution, self.request.setup
        return prepared.built(*given, specific=specific)

    @cached_property
    def case(self) -> Case:
        """The workload's tensors and the right results, from the float64 reference."""
        return Case(self.request, self.workload, build.reference(self.definition))

    @cached_property
    def subject(self) -> Subject:
        """The call on its own buffers, without an oracle: nothing else runs before it."""
        root = Path(self.request.dataset) if self.request.dataset else None
        device = process.device_of(self.mode)
        inputs = dataset.load_inputs(self.op, self.workload, device, root)
        in_place = self.op.overwrites if self.request.in_place else {}
        problem = check.Problem(self.op, self.workload.axes, inputs, [], in_place)
        return Subject.from_kernel(self.kernel, inputs, problem.buffers())


def profile(request: Serving, reply: Reply) -> Iterator[Record]:
    """`survey`, or a tool's own part of a profile."""
    task, name = request.profile, request.name
    assert task is not None and name is not None
    work = _surveyed if task.task == "survey" else _inside
    for workload in request.workloads:
        record = begun(request, workload, name)
        yield from guarded(request, workload, [name], work, task, record)


def _inside(
    request: Serving, workload: Workload, task: Profiling, record: Record
) -> list[Record]:
    """A tool's own part, in the process that the tool looks at."""
    target = Target(request, workload, task)
    record.answer = profilers.module(task.task).inside(target, **task.params)
    return [record]


def _surveyed(
    request: Serving, workload: Workload, task: Profiling, record: Record
) -> list[Record]:
    """What a profile is read against: the check, a time, the floors of this workload,
    and what a call runs.

    Without a tier nothing is timed: only the check and the build are wanted.
    """
    runner = runner_of(request)
    reference = build.reference(request.definition)
    kernel, _ = built(runner, request, request)
    case = Case(request, workload, reference)
    op = request.op
    record = case.judged(record, kernel, Depth())
    survey = Survey(
        bytes_in=floor.bytes_of(op, op.inputs, case.axes),
        bytes_out=floor.bytes_of(op, op.outputs, case.axes),
    )
    record.answer = survey
    if not request.timing.tiers:
        return [record]
    tier = request.timing.tiers[0]
    outputs = case.buffers()
    timed = trial.timed(record, tier, case, kernel, outputs)
    if not record.passed:  # a failed check outranks the time
        timed.status = record.status
        timed.reason = record.reason
    if request.mode == "cuda":
        survey.ran = kernel.ask("survey", case.inputs, outputs, l2=task.l2).ran
    runner.close()

    def us(subject: Subject) -> float | None:
        timing = floor_timed(request, tier, subject).timing
        return timing.median_us if timing else None

    moved = survey.bytes_in + survey.bytes_out
    copy, how_copied = floor.fastest_copy(moved, request.mode, task.l2)
    large, large_bytes = floor.large_copy(request.mode)
    survey.floors = Floors(
        copy_us=us(copy),
        empty_us=us(floor.empty(request.mode)),
        large_us=us(large),
        large_bytes=large_bytes,
        copy_how=how_copied,
    )
    return [timed]
