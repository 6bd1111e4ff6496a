"""Shared by the tasks: an algo built in a runner, a workload's tensors with the right
results, and records that are made whatever happens.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from msgspec import UNSET
from msgspec.structs import replace

from .... import errors
from ....catalog.ops import Op, Part
from ....catalog.workloads import Workload
from ....errors import GdnError, MissingError
from ....schema.record_types import Call, Check, Record, Status
from ...executor import build, calls, client, prepared, process
from ...messages import Answer, Measured, Result
from ...request import Rival, Serving
from ...timing import floor
from ...timing.flips import Flips, part
from .. import check, dataset, probes


def runner_of(request: Serving) -> client.Runner:
    """The process for the algo's code: the one started while this process imported
    torch, or a new one.
    """
    started, request.started = request.started, None
    return client.Runner(request.mode, started or process.of(request))


def built(
    runner: client.Runner, request: Serving, of: Serving | Rival, **how: Any
) -> tuple[client.Kernel, Answer]:
    """Build the solution of `of`: the request itself or one of its rivals."""
    specific = of.specific and request.mode == "cuda"
    try:
        return runner.build(
            of.name,
            request.definition,
            of.solution,
            specific=specific,
            setup=of.setup,
            **how,
        )
    except client.RaisedError as e:
        if e.kind != "build_failed":
            raise build.BuildFailedError(e.one_line) from None
        raise build.BuildFailedError(str(e), missing=e.missing) from None


def smallest(request: Serving, i: int) -> bool:
    """Without `--strict` each algo is probed once, where that is cheapest: on its
    smallest workload.
    """
    sizes = [size(request.op, workload) for workload in request.workloads]
    return i == sizes.index(min(sizes))


def size(op: Op, workload: Workload) -> int:
    return floor.bytes_moved(op, workload.axes)


def begun(request: Serving, workload: Workload | None, algo: str) -> Record:
    """A record before anything is known: of an algo (or a floor), with or without a workload."""
    call = workload and Call(
        uuid=workload.uuid,
        axes=dict(workload.axes),
        index=workload.index,
        origin=workload.origin,
        stress=workload.stress or UNSET,
    )
    return Record(
        op=request.op.name,
        algo=algo,
        source_hash=None,
        mode=request.mode,
        tier=None,
        workload=call,
        status=Status.PASSED,
        reason=None,
    )


def guarded(
    request: Serving,
    workload: Workload,
    names: Iterable[str],
    work: Callable[..., list[Record]],
    *args: Any,
    runner: client.Runner | None = None,
) -> list[Record]:
    """One workload's records. If it fails as a whole, each of `names` gets a record
    that says so. Its tensors are freed before this returns, in the runner too: never
    two workloads in memory.
    """
    try:
        with torch.no_grad():
            return work(request, workload, *args)
    except client.DiedError:
        raise
    except GdnError as e:  # the workload's data, not the algo
        failed = {"status": Status.REFUSED, "reason": str(e), "code": e.code}
    except Exception as e:
        failed = befell(e)
    finally:
        # the next command reports a dead runner
        with contextlib.suppress(client.DiedError, client.RaisedError):
            if runner:
                runner.forget()
    return [
        r
        for name in names
        for r in each_tier(request, replace(begun(request, workload, name), **failed))
    ]


class Fate(TypedDict, total=False):
    """The fields of a record for an algo without a result."""

    status: Status
    reason: str
    code: int
    trace: list[str]


def befell(e: Exception) -> Fate:
    """The fields for an algo that raised this exception, or whose work did."""
    if calls.out_of_memory(e):
        torch.cuda.empty_cache()
        return {
            "status": Status.OUT_OF_MEMORY,
            "reason": str(e).splitlines()[0] if str(e) else "out of memory",
        }
    known = isinstance(e, client.RaisedError)
    trace = (
        e.trace if known else "".join(traceback.format_exception(e)).splitlines()[-12:]
    )
    return {"status": Status.ERROR, "reason": errors.one_line(e), "trace": trace}


def each_tier(request: Serving, record: Record) -> list[Record]:
    """A record per tier for an algo that failed before it was timed: one is due for each tier."""
    return [replace(record, tier=tier) for tier in request.timing.tiers or [None]]


def with_time(
    record: Record, found: Measured, kernel: client.Kernel | None = None
) -> Record:
    """The record with a tier's measurement, or the reason why there is none. Says if
    the algo's setup is not in the time.
    """
    if kernel and kernel.setup and found.timing:
        said = found.timing.note
        found.timing.note = f"{prepared.NOTE}; {said}" if said else prepared.NOTE
    fate = (
        {}
        if found.status is Status.PASSED
        else {"status": found.status, "reason": found.reason}
    )
    about = {
        "timing": found.timing,
        "doubts": found.doubts,
        "gpu_state": found.gpu_state,
    }
    return replace(record, tier=found.tier, **about, **fate)


def wrong(record: Record, reason: str, **more: Any) -> Record:
    return replace(record, status=Status.WRONG, reason=reason, **more)


class Changing(TypedDict):
    """How a runner changes the inputs' values before each timed call."""

    flipped: list[Part]
    seed: int


class Case:
    """A workload's tensors, the right results, and a way to other values with known
    results: scaling the inputs in which the op is linear by a power of two scales every
    output by exactly that.
    """

    def __init__(self, request: Serving, workload: Workload, reference: Any) -> None:
        self.op, self.axes = request.op, workload.axes
        self.batch_invariant = request.batch_invariant
        self.stress = self.op.stress[workload.stress] if workload.stress else None
        if self.stress and self.stress.tolerance:
            self.op = replace(
                self.op, tolerance=dict.fromkeys(self.op.outputs, self.stress.tolerance)
            )
        self.in_place = self.op.overwrites if request.in_place else {}
        root = Path(request.dataset) if request.dataset else None
        self.inputs = dataset.load_inputs(
            self.op, workload, "cuda" if request.mode == "cuda" else "cpu", root
        )
        self.reference = reference
        self.expected = check.oracle(reference, self.inputs)
        if not check.finite(self.expected):
            raise MissingError(
                f"workload {workload.uuid}: the reference gives NaN or Inf on it, so its inputs"
                " cannot be used"
            )
        self.refresh = calls.Scaling(
            [part(self.inputs[i], *where) for i, *where in self.op.linear]
        )
        self.seed = secrets.randbits(64)  # of the values that timed calls get

    @property
    def right(self) -> list:
        """The right results for the values that are in the buffers now."""
        return [x * self.refresh.scale for x in self.expected]

    @functools.cached_property
    def right_last(self) -> list:
        """The right results of the timed calls that are checked: those for
        `Flips.last`'s values.
        """
        changing = {i for i, *_ in self.op.flipped}
        inputs = [x.clone() if i in changing else x for i, x in enumerate(self.inputs)]
        Flips(inputs, self.op.flipped, self.seed).last()
        return check.oracle(self.reference, inputs)

    def wrong_by_default(self, kernel: client.Kernel) -> str | None:
        """What is wrong if a scalar is not set: one call for each value that stands for
        its default.
        """
        for i, value in self.op.unset:
            inputs = [value if i == j else x for j, x in enumerate(self.inputs)]
            right = check.oracle(self.reference, inputs)
            verdict = check.check(
                kernel,
                self.op,
                self.axes,
                inputs,
                right,
                in_place=self.in_place,
                by_element=False,
            )
            if not verdict.passed:
                return f"with {list(self.op.inputs)[i]} = {value}, its default: {verdict.reason}"
        return None

    def probe(
        self, kernel: client.Kernel, names: list[str], hard: bool
    ) -> dict[str, str | None]:
        """What these probes find."""
        in_place = self.in_place if self.op.in_place_only else None
        return probes.run(
            kernel,
            self.op,
            self.axes,
            self.inputs,
            self.expected,
            names,
            in_place,
            hard,
        )

    def changing(self, kernels: Iterable[client.Kernel]) -> Changing:
        """What `time` and `turns` need to change the inputs' values. What a setup made
        of them would not follow.
        """
        fixed = any(kernel.setup for kernel in kernels)
        return {"flipped": [] if fixed else self.op.flipped, "seed": self.seed}

    def wrong_when_timed(
        self, kernel: client.Kernel, results: Sequence[Result], changed: bool
    ) -> Check | None:
        """The check of a timed call's results, if they are wrong."""
        tensors = kernel.pulled(results, check.wanted(self.op, self.axes))
        right = self.right_last if changed else self.right
        by_element = self.stress is None
        verdict = check.results(
            self.op, self.axes, tensors, right, kernel.destination_passing, by_element
        )
        return None if verdict.passed else verdict

    def check(self, kernel: Any) -> Check:
        """Check the kernel. The contest's rule has an absolute part: it says little
        about hard inputs, whose results may be of any size.
        """
        by_element = self.stress is None
        return check.check(
            kernel,
            self.op,
            self.axes,
            self.inputs,
            self.right,
            in_place=self.in_place,
            by_element=by_element,
        )

    def outputs(self) -> list:
        """Output buffers; in place, some of the inputs are among them."""
        made = check.allocate(self.op, self.axes, str(self.inputs[0].device))
        return [
            self.inputs[self.in_place[i]] if i in self.in_place else x
            for i, x in enumerate(made)
        ]

    def poison(self, outputs: list) -> list:
        """The outputs, filled with the marked NaN unless they are inputs too."""
        return [
            x if i in self.in_place else check.poison(x) for i, x in enumerate(outputs)
        ]


class Depth(NamedTuple):
    """How closely a workload's results are looked at.

    unset   call also with the values that stand for a scalar's default
    probed  all probes
    hard    look for races: equal calls while the machine is busy
    """

    unset: bool = False
    probed: bool = False
    hard: bool = False


def judged(record: Record, case: Case, kernel: client.Kernel, depth: Depth) -> Record:
    """The record with the check, and with the probes that are asked for."""
    verdict = case.check(kernel)
    record = replace(record, check=verdict)
    if not verdict.passed:
        record = wrong(record, _unsteady(case, kernel, verdict) or verdict.reason)
    elif names := _probes(case, depth):
        record.probes = case.probe(kernel, names, depth.hard)
        if caught := [
            f"probe {name}: {what}" for name, what in record.probes.items() if what
        ]:
            record = wrong(record, caught[0])
    if record.passed and depth.unset and (reason := case.wrong_by_default(kernel)):
        record = wrong(record, reason)
    record.backend = kernel.backend(case.inputs)
    return record


def _probes(case: Case, depth: Depth) -> list[str]:
    names = list(probes.USUAL if depth.probed else ())
    if depth.hard and not depth.probed:
        names.append("nondeterminism")
    if case.batch_invariant:
        names.append("neighbours")
    return names


def _unsteady(case: Case, kernel: client.Kernel, verdict: Check) -> str | None:
    """Whether a wrong result is another one in an equal call. What is not written at
    all is better named so.
    """
    if verdict.unwritten:
        return None
    try:
        return case.probe(kernel, ["nondeterminism"], hard=False)["nondeterminism"]
    except client.RaisedError:  # the first call did not
        return None


def wrong_when_timed(record: Record, verdict: Check, tier: str) -> Record:
    """The record of an algo that was right when it was checked and wrong while it was timed."""
    reason = f"right when it was checked, wrong while it was timed: {verdict.reason}"
    return wrong(record, reason, tier=tier, check=verdict)


def stale(record: Record, verdict: Check) -> Record:
    """The record of an algo that was right before it was timed and wrong after."""
    reason = (
        "right at first, wrong on new values in the same buffers after it was timed:"
        f" {verdict.reason}"
    )
    return wrong(record, reason, check=verdict)
