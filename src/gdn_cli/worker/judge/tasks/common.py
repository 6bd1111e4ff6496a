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
from ...request import PlanFields, Rival, Serving
from ...timing import floor
from ...timing.flips import Flips, part
from .. import check, dataset, probes


def runner_of(request: Serving) -> client.Runner:
    """The process for the algo's code: the one started while this process imported
    torch, or a new one.
    """
    started = request.started
    request.started = None
    return client.Runner(request.mode, started or process.of(request))


def built(
    runner: client.Runner, request: Serving, of: Serving | Rival, **how: Any
) -> tuple[client.Kernel, Answer]:
    """Build the solution of `of`: the request itself or one of its rivals."""
    assert of.name is not None and of.solution is not None
    how |= {"specific": of.specific and request.mode == "cuda", "setup": of.setup}
    try:
        return runner.build(of.name, request.definition, of.solution, **how)
    except client.RaisedError as e:
        # an exception of the algo's own may say `missing` too
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
    call = None
    if workload:
        call = Call(
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
        fate: Fate = {"status": Status.REFUSED, "reason": str(e), "code": e.code}
    except Exception as e:
        fate = befell(e)
    finally:
        # the next command reports a dead runner
        with contextlib.suppress(client.DiedError, client.RaisedError):
            if runner:
                runner.forget()
    failed = [replace(begun(request, workload, name), **fate) for name in names]
    return [record for each in failed for record in each_tier(request, each)]


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
    if isinstance(e, client.RaisedError):
        trace = e.trace
    else:
        trace = "".join(traceback.format_exception(e)).splitlines()[-12:]
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


class Timed(TypedDict):
    """How a runner times."""

    tier: str
    plan: PlanFields
    own: int  # how many of gdn's own processes are on the GPU
    flipped: list[Part]  # which inputs get other values before each call
    seed: int  # of those values


class Case:
    """A workload's tensors, the right results, and a way to other values with known
    results: scaling the inputs in which the op is linear by a power of two scales every
    output by exactly that.
    """

    def __init__(self, request: Serving, workload: Workload, reference: Any) -> None:
        self.request = request
        self.op = request.op
        self.axes = workload.axes
        stress = self.op.stress[workload.stress] if workload.stress else None
        # the contest's rule has an absolute part: it says little about hard inputs,
        # whose results may be of any size
        self.by_element = stress is None
        if stress and stress.tolerance:
            tolerance = dict.fromkeys(self.op.outputs, stress.tolerance)
            self.op = replace(self.op, tolerance=tolerance)
        self.in_place = self.op.overwrites if request.in_place else {}
        root = Path(request.dataset) if request.dataset else None
        device = process.device_of(request.mode)
        self.inputs = dataset.load_inputs(self.op, workload, device, root)
        self.reference = reference
        self.expected = check.oracle(reference, self.inputs)
        if not check.finite(self.expected):
            raise MissingError(
                f"workload {workload.uuid}: the reference gives NaN or Inf on it, so its inputs"
                " cannot be used"
            )
        linear = [part(self.inputs[i], *ends) for i, *ends in self.op.linear]
        self.refresh = calls.Scaling(linear)
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
            verdict = self._check(kernel, inputs, right, by_element=False)
            if not verdict.passed:
                name = list(self.op.inputs)[i]
                return f"with {name} = {value}, its default: {verdict.reason}"
        return None

    def probe(
        self, kernel: client.Kernel, names: list[str], hard: bool
    ) -> dict[str, str | None]:
        """Probe -> its finding."""
        in_place = self.in_place if self.op.in_place_only else None
        given = self.op, self.axes, self.inputs, self.expected
        return probes.run(kernel, *given, names, in_place, hard)

    def timed(self, tier: str, kernels: Iterable[client.Kernel]) -> Timed:
        """How the runner times these kernels. A setup's results would not follow other
        values of the inputs.
        """
        gpu = self.request.mode == "cuda"
        if gpu:
            torch.cuda.empty_cache()  # the runner needs the room
        fixed = any(kernel.setup for kernel in kernels)
        return {
            "tier": tier,
            "plan": self.request.timing.plan,
            "own": 1 + gpu,
            "flipped": [] if fixed else self.op.flipped,
            "seed": self.seed,
        }

    def wrong_when_timed(
        self, kernel: client.Kernel, results: Sequence[Result], changed: bool
    ) -> Check | None:
        """The check of a timed call's results, if they are wrong."""
        tensors = kernel.pulled(results, check.wanted(self.op, self.axes))
        right = self.right_last if changed else self.right
        marked = kernel.destination_passing
        given = self.op, self.axes, tensors, right, marked, self.by_element
        verdict = check.results(*given)
        return None if verdict.passed else verdict

    def check(self, kernel: Any) -> Check:
        return self._check(kernel, self.inputs, self.right, self.by_element)

    def _check(self, kernel: Any, inputs: list, right: list, by_element: bool) -> Check:
        given = self.op, self.axes, inputs, right
        in_place = self.in_place
        return check.check(kernel, *given, in_place=in_place, by_element=by_element)

    def outputs(self) -> list:
        """Output buffers; in place, some of the inputs are among them."""
        outputs = check.allocate(self.op, self.axes, str(self.inputs[0].device))
        for output, source in self.in_place.items():
            outputs[output] = self.inputs[source]
        return outputs

    def poison(self, outputs: list) -> list:
        """The outputs, filled with the marked NaN unless they are inputs too."""
        for i, output in enumerate(outputs):
            if i not in self.in_place:
                check.poison(output)
        return outputs


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
        unsteady = _unsteady(case, kernel, verdict)
        record = wrong(record, unsteady or str(verdict.reason))
    elif names := _probes(case, depth):
        record.probes = case.probe(kernel, names, depth.hard)
        for name, finding in record.probes.items():
            if finding and record.passed:
                record = wrong(record, f"probe {name}: {finding}")
    if record.passed and depth.unset and (reason := case.wrong_by_default(kernel)):
        record = wrong(record, reason)
    record.backend = kernel.backend(case.inputs)
    return record


def _probes(case: Case, depth: Depth) -> list[str]:
    names = list(probes.USUAL if depth.probed else ())
    if depth.hard and not depth.probed:
        names.append("nondeterminism")
    if case.request.batch_invariant:
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


def replaced(record: Record, names: list[str], tier: str) -> Record:
    """The record of an algo that has exchanged parts of the timer."""
    return wrong(record, f"probe timer: replaced {', '.join(names[:3])}", tier=tier)


def checked_again(record: Record, case: Case, kernel: client.Kernel) -> Record:
    """The record, after a check on the values that the buffers hold after timing."""
    verdict = case.check(kernel)
    return record if verdict.passed else stale(record, verdict)


def stale(record: Record, verdict: Check) -> Record:
    """The record of an algo that was right before it was timed and wrong after."""
    reason = (
        "right at first, wrong on new values in the same buffers after it was timed:"
        f" {verdict.reason}"
    )
    return wrong(record, reason, check=verdict)
