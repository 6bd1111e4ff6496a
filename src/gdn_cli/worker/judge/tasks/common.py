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
from typing import Any, NamedTuple

import torch
from msgspec import UNSET
from msgspec.structs import replace

from .... import errors
from ....catalog.ops import Op
from ....catalog.workloads import Workload
from ....errors import GdnError, MissingError
from ....parsing import Json
from ....schema.record_types import Call, Check, Record, Status
from ...executor import build, calls, client, prepared, process
from ...messages import Answer, Measured
from ...request import Rival, Serving
from ...timing import floor
from ...timing.flips import Flips, part
from .. import check, dataset, faults, probes


def runner_of(request: Serving) -> client.Runner:
    """The process for the algo's code: the one started while this process imported
    torch, or a new one.
    """
    started = request.started
    request.started = None
    return client.Runner(request.mode, started or process.runner(request))


def built(
    runner: client.Runner, request: Serving, rival: Serving | Rival, **how: Any
) -> tuple[client.Kernel, Answer]:
    """Build the solution of `rival`: the request itself or one of its rivals."""
    assert rival.name is not None and rival.solution is not None
    how["specific"] = rival.specific and request.mode == "cuda"
    how["setup"] = rival.setup
    how["emulated"] = request.mode == "emulator"
    try:
        return runner.build(rival.name, request.definition, rival.solution, **how)
    except client.RaisedError as e:
        # an exception of the algo's own may say `missing` too
        if e.said.kind != "build_failed":
            raise build.BuildFailedError(e.one_line) from None
        raise build.BuildFailedError(str(e), missing=e.said.missing) from None


def size(op: Op, workload: Workload) -> int:
    return floor.bytes_moved(op, workload.axes)


def begun(
    request: Serving, workload: Workload | None, algo: str, **known: Any
) -> Record:
    """A record of an algo (or a floor), with or without a workload, of which only the
    fields `known` are known.
    """
    call = None
    if workload:
        call = Call(
            uuid=workload.uuid,
            axes=dict(workload.axes),
            index=workload.index,
            origin=workload.origin,
            stress=workload.stress or UNSET,
        )
    known = {"status": Status.PASSED, "reason": None, "tier": None} | known
    return Record(
        op=request.op.name,
        algo=algo,
        source_hash=None,
        mode=request.mode,
        workload=call,
        **known,
    )


def guarded(
    request: Serving,
    workload: Workload,
    names: Iterable[str],
    work: Callable[..., list[Record]],
    *args: Any,
    runner: client.Runner | None = None,
) -> list[Record]:
    """One workload's records, one for each tier. If it fails as a whole, each of `names`
    gets records that say so. Its tensors are freed before this returns, in the runner
    too: never two workloads in memory.
    """
    try:
        with torch.no_grad():
            records = work(request, workload, *args)
    except client.DiedError:
        raise
    except Exception as e:
        fate = befell(e)
        records = [begun(request, workload, name, **fate) for name in names]
    finally:
        # the next command reports a dead runner
        with contextlib.suppress(client.DiedError, client.RaisedError):
            if runner:
                runner.forget()
    if faults.watched(request):
        lines = faults.collect()
        records = [faults.with_faults(record, lines) for record in records]
    return [copy for record in records for copy in each_tier(request, record)]


def befell(e: Exception) -> Json:
    """The fields of a record for an algo that raised this exception, or whose work did."""
    if isinstance(e, GdnError):  # the workload's data, not the algo
        return {"status": Status.REFUSED, "reason": str(e), "code": e.code}
    if calls.out_of_memory(e):
        torch.cuda.empty_cache()
        reason, *_ = str(e).splitlines() or ["out of memory"]
        return {"status": Status.OUT_OF_MEMORY, "reason": reason}
    if isinstance(e, client.RaisedError):
        trace = e.said.trace
    else:
        trace = "".join(traceback.format_exception(e)).splitlines()[-12:]
    return {"status": Status.ERROR, "reason": errors.one_line(e), "trace": trace}


def each_tier(request: Serving, record: Record) -> list[Record]:
    """A record per tier for an algo that was not timed: one is due for each tier."""
    if record.tier:
        return [record]
    return [replace(record, tier=tier) for tier in request.timing.tiers or [None]]


def with_time(
    record: Record, measured: Measured, kernel: client.Kernel | None = None
) -> Record:
    """The record with a tier's measurement, or the reason why there is none. Says if
    the algo's setup is not in the time.
    """
    timing = measured.timing
    if kernel and kernel.setup and timing:
        timing.note = "; ".join(filter(None, [prepared.NOTE, timing.note]))
    record = replace(
        record,
        tier=measured.tier,
        timing=timing,
        doubts=measured.doubts,
        gpu_state=measured.gpu_state,
    )
    if measured.status is not Status.PASSED:
        record.status = measured.status
        record.reason = measured.reason
    return record


def wrong(record: Record, reason: str, **more: Any) -> Record:
    return replace(record, status=Status.WRONG, reason=reason, **more)


class Depth(NamedTuple):
    """How closely a workload's results are looked at.

    unset   call also with the values that stand for a scalar's default
    probes  their names
    hard    look longer for races: equal calls while the machine is busy
    """

    unset: bool = False
    probes: Sequence[str] = ()
    hard: bool = False


def depth(request: Serving, i: int) -> Depth:
    """How closely the i-th workload is looked at. Without `--strict` each algo is probed
    once, where that is cheapest: on its smallest workload.
    """
    sizes = [size(request.op, workload) for workload in request.workloads]
    first = i == sizes.index(min(sizes))
    timing = request.command in ("bench", "compare")
    # the interpreter and the emulator are one thread
    hard = not timing and request.mode in ("cuda", "cpu")
    names = ["nondeterminism"] if hard else []
    if request.strict or (timing and first):
        names = list(probes.USUAL)
    if request.batch_invariant:
        names.append("neighbours")
    return Depth(first, names, hard)


class Case(check.Problem):
    """A workload's tensors, the right results, and a way to other values with known
    results: scaling the inputs in which the op is linear by a power of two scales every
    output by exactly that.
    """

    def __init__(self, request: Serving, workload: Workload, reference: Any) -> None:
        op = request.op
        stress = op.stress[workload.stress] if workload.stress else None
        # the contest's rule has an absolute part: it says little about hard inputs,
        # whose results may be of any size
        self.by_element = stress is None
        if stress and stress.tolerance:
            op = replace(op, tolerance=dict.fromkeys(op.outputs, stress.tolerance))
        root = Path(request.dataset) if request.dataset else None
        device = process.device_of(request.mode)
        inputs = dataset.load_inputs(op, workload, device, root)
        expected = check.oracle(reference, inputs)
        if not check.finite(expected):
            raise MissingError(
                f"workload {workload.uuid}: the reference gives NaN or Inf on it, so its inputs"
                " cannot be used"
            )
        in_place = op.overwrites if request.in_place else {}
        super().__init__(op, workload.axes, inputs, expected, in_place)
        self.request = request
        self.reference = reference
        self.refresh = calls.Scaling([part(inputs[i], *ends) for i, *ends in op.linear])
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

    def judged(self, record: Record, kernel: client.Kernel, depth: Depth) -> Record:
        """The record with the check, and with the probes that are asked for."""
        verdict = self.check(kernel)
        record = replace(record, check=verdict)
        if not verdict.passed:
            reason = self._unsteady(kernel, verdict) or verdict.reason
            record = wrong(record, str(reason))
        elif depth.probes:
            record.probes = self._probe(kernel, depth.probes, depth.hard)
            for name, finding in record.probes.items():
                if finding and record.passed:
                    record = wrong(record, f"probe {name}: {finding}")
        if record.passed and depth.unset and (reason := self._wrong_by_default(kernel)):
            record = wrong(record, reason)
        record.backend = kernel.backend(self.inputs)
        return record

    def _probe(
        self, kernel: client.Kernel, names: Sequence[str], hard: bool = False
    ) -> probes.Findings:
        """Probe -> its finding."""
        given = self.op, self.axes, self.inputs, self.expected
        in_place = self.in_place if self.op.in_place_only else {}
        return probes.run(kernel, check.Problem(*given, in_place), names, hard)

    def _unsteady(self, kernel: client.Kernel, verdict: Check) -> str | None:
        """Whether a wrong result is another one in an equal call. What is not written at
        all is better named so.
        """
        if verdict.unwritten:
            return None
        try:
            return self._probe(kernel, ["nondeterminism"])["nondeterminism"]
        except client.RaisedError:  # the first call did not
            return None

    def _wrong_by_default(self, kernel: client.Kernel) -> str | None:
        """What is wrong if a scalar is not set: one call for each value that stands for
        its default.
        """
        for i, value in self.op.unset:
            inputs = [*self.inputs]
            inputs[i] = value
            right = check.oracle(self.reference, inputs)
            problem = check.Problem(self.op, self.axes, inputs, right, self.in_place)
            verdict = check.check(kernel, problem, by_element=False)
            if not verdict.passed:
                name = list(self.op.inputs)[i]
                return f"with {name} = {value}, its default: {verdict.reason}"
        return None

    def check(self, kernel: Any) -> Check:
        given = self.op, self.axes, self.inputs, self.right, self.in_place
        return check.check(kernel, check.Problem(*given), self.by_element)

    def checked_again(self, record: Record, kernel: client.Kernel) -> Record:
        """The record, after a check on the values that the buffers hold after timing."""
        verdict = self.check(kernel)
        if verdict.passed:
            return record
        when = "wrong on new values in the same buffers after it was timed"
        return wrong(record, f"right at first, {when}: {verdict.reason}", check=verdict)

    def how(self, tier: str, kernels: Iterable[client.Kernel]) -> Json:
        """How the runner times these kernels: the fields of its command. A setup's
        results would not follow other values of the inputs.
        """
        gpu = self.request.mode == "cuda"
        if gpu:
            torch.cuda.empty_cache()  # the runner needs the room
        fixed = any(kernel.setup for kernel in kernels)
        return {
            "tier": tier,
            "plan": self.request.timing.plan,
            "definition": self.request.definition,
            "own": 1 + gpu,  # how many of gdn's own processes are on the GPU
            # which inputs get other values before each call, and their seed
            "flipped": [] if fixed else self.op.flipped,
            "seed": self.seed,
        }

    def timed(
        self, record: Record, kernel: client.Kernel, how: Json, answer: Answer, i: int
    ) -> Record:
        """The record with a tier's time, unless the results of its timed calls are wrong:
        the i-th of what the runner has answered.
        """
        if answer.replaced:
            names = ", ".join(answer.replaced[:3])
            return wrong(record, f"probe timer: replaced {names}", tier=how["tier"])
        marked = kernel.destination_passing
        for results in answer.last[i] if answer.records[i].timing else ():
            tensors = kernel.pulled(results, self.wanted)
            right = self.right_last if how["flipped"] else self.right
            verdict = check.results(self.op, tensors, right, marked, self.by_element)
            if not verdict.passed:
                when = "right when it was checked, wrong while it was timed"
                reason = f"{when}: {verdict.reason}"
                return wrong(record, reason, tier=how["tier"], check=verdict)
        return with_time(record, answer.records[i], kernel)

    def poison(self, outputs: list) -> list:
        """The outputs, filled with the marked NaN unless they are inputs too."""
        for i, output in enumerate(outputs):
            if i not in self.in_place:
                check.poison(output)
        return outputs
