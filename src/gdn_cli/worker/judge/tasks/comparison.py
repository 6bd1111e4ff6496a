"""Several algos on the same buffers in one process, their calls taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from ....catalog.workloads import Workload
from ....schema.record_types import Record, Status
from ...executor import build, client
from ...messages import Measured, Reply
from ...request import Serving
from ...timing import floor
from .common import (
    Case,
    Depth,
    befell,
    begun,
    built,
    each_tier,
    guarded,
    judged,
    runner_of,
    smallest,
    stale,
    with_time,
    wrong,
    wrong_when_timed,
)


def compare(request: Serving, reply: Reply) -> Iterator[Record]:
    """Compare the algos. If one kills the process it is dropped, and the others go on
    in a new process.
    """
    reference = build.reference(request.definition)
    field = _Field(request)
    yield from field.built()
    for i, workload in enumerate(request.workloads):
        first = smallest(request, i)
        depth = Depth(unset=first, probed=request.strict or first)
        while True:
            try:
                meet = field.meet, reference, depth
                yield from guarded(
                    request, workload, field.kernels, *meet, runner=field.runner
                )
                break
            except client.DiedError as e:
                yield from field.without(e, request.workloads[i:])
                if not field.kernels:
                    return


class _Field:
    """The rivals that are left, in the process that they share."""

    def __init__(self, request: Serving) -> None:
        self.request, self.rivals = request, list(request.rivals)
        self.runner: client.Runner | None = None
        self.kernels: dict[str, client.Kernel] = {}
        self.at: str | None = None
        self.meeting: list[str] = []

    def turn(self, name: str | None) -> None:
        """Note whose code runs now, if it is only one algo's; the command is told, in
        case it never ends.
        """
        self.at = name
        self.request.at(name)

    def built(self) -> Iterator[Record]:
        """Build all that are left in a new process; yields the records of those that
        cannot be built.
        """
        while True:
            self.runner, self.kernels = runner_of(self.request), {}
            try:
                for rival in list(self.rivals):
                    self.turn(rival.name)
                    try:
                        self.kernels[rival.name] = built(
                            self.runner, self.request, rival
                        )[0]
                    except build.BuildFailedError as e:
                        self.rivals.remove(rival)
                        yield from self._out(
                            rival.name, Status.BUILD_FAILED, str(e), [None], code=e.code
                        )
                self.turn(None)
                return
            except client.DiedError as e:
                yield from self._dropped(e, [None])

    def without(
        self, end: client.DiedError, workloads: Sequence[Workload]
    ) -> Iterator[Record]:
        """Go on without the algo whose turn it was; yields its records for the
        workloads that it will miss.
        """
        yield from self._dropped(end, workloads)
        yield from self.built()

    def _dropped(
        self, end: client.DiedError, workloads: Sequence[Workload | None]
    ) -> Iterator[Record]:
        self.runner.close()
        guilty = self.at
        if guilty is None and end.turn is not None and end.turn < len(self.meeting):
            guilty = self.meeting[end.turn]
        names = [rival.name for rival in self.rivals]
        for name in [guilty] if guilty else names:
            self.rivals = [rival for rival in self.rivals if rival.name != name]
            self.kernels.pop(name, None)
            yield from self._out(name, end.status, end.reason, workloads)

    def _out(
        self,
        name: str,
        status: Status,
        reason: str,
        workloads: Sequence[Workload | None],
        code: int | None = None,
    ) -> Iterator[Record]:
        for workload in workloads:
            if workload is None or name in self.request.turns.get(
                workload.uuid, [name]
            ):
                failed = replace(
                    begun(self.request, workload, name),
                    status=status,
                    reason=reason,
                    code=code,
                )
                yield from each_tier(self.request, failed)

    def meet(
        self, request: Serving, workload: Workload, reference: Any, depth: Depth
    ) -> list[Record]:
        """One workload's records: each algo's timing, and its samples in the order in
        which they were taken.
        """
        named = request.turns.get(workload.uuid, self.kernels)
        kernels = {name: self.kernels[name] for name in named if name in self.kernels}
        if not kernels:
            return []
        case, found = Case(request, workload, reference), {}
        for name, kernel in kernels.items():
            record = begun(request, workload, name)
            found[name] = self._of_one(record, judged, case, kernel, depth)
            if found[name].passed:
                found[name].bytes_moved = floor.bytes_moved(case.op, workload.axes)
        self.turn(None)
        right = {name: record for name, record in found.items() if record.passed}
        records = [
            r
            for record in found.values()
            if not record.passed
            for r in each_tier(request, record)
        ]
        for tier in request.timing.tiers if right else []:
            records += self._in_turns(request, tier, case, right)
        case.refresh()
        seen = {r.algo for r in records if r.status is Status.WRONG}
        for name, record in right.items():
            if name in seen:
                continue
            again = self._of_one(record, _again, case, kernels[name])
            if not again.passed:
                records = [r for r in records if r.algo != name] + each_tier(
                    request, again
                )
        self.turn(None)
        return records

    def _of_one(
        self,
        record: Record,
        work: Callable[..., Record],
        case: Case,
        kernel: client.Kernel,
        *more: Any,
    ) -> Record:
        """The result of `work` for one algo. An exception counts against that algo; if
        it makes the process unusable, as a fault on a GPU does, the others go on in a
        new one.
        """
        self.turn(record.algo)
        try:
            return work(record, case, kernel, *more)
        except client.RaisedError as e:
            failed = befell(e)
            if not self.runner.usable():
                raise client.DiedError(
                    failed["status"], failed["reason"], None
                ) from None
            return replace(record, **failed)

    def _guilty(self, case: Case, outputs: list, names: list[str]) -> str | None:
        """Which algo raised while calls took turns. On a GPU a fault shows some calls
        later, so each algo is called often by itself there; if that shows nothing, it
        is the one whose turn it was.
        """
        for rival in self.rivals if self.request.mode == "cuda" else ():
            if rival.name in names:
                alone = runner_of(self.request)
                try:
                    kernel = built(alone, self.request, rival)[0]
                    kernel.push([*case.inputs, *outputs])
                    kernel.seconds_outside(case.inputs, outputs, _OFTEN)
                except (client.RaisedError, client.DiedError, build.BuildFailedError):
                    return rival.name
                finally:
                    alone.close()
        turn = self.runner.turn()
        return names[turn] if turn is not None and turn < len(names) else None

    def _in_turns(
        self, request: Serving, tier: str, case: Case, right: dict[str, Record]
    ) -> list[Record]:
        # the same buffers for all, so that their place in memory affects all alike
        outputs = case.outputs()
        self.runner.push([*case.inputs, *outputs])
        gpu = request.mode == "cuda"
        if gpu:
            torch.cuda.empty_cache()
        self.meeting = list(right)
        self.runner.watched()
        try:
            plan = request.timing.plan
            kernels = [self.kernels[name] for name in right]
            changing = case.changing(kernels)
            said = self.runner.turns(
                self.meeting,
                case.inputs,
                outputs,
                tier=tier,
                plan=plan,
                own=1 + gpu,
                **changing,
            )
        except client.RaisedError as e:
            if e.kind != "tier_unavailable":
                self.turn(self._guilty(case, outputs, self.meeting))
                failed = befell(e)
                raise client.DiedError(
                    failed["status"], failed["reason"], None
                ) from None
            gone = Measured(
                tier=tier, status=Status.TIER_UNAVAILABLE, reason=f"{tier}: {e}"
            )
            return [with_time(record, gone) for record in right.values()]
        if said.replaced:
            reason = f"probe timer: replaced {', '.join(said.replaced[:3])}"
            return [wrong(record, reason, tier=tier) for record in right.values()]
        records = []
        for i, (kernel, record) in enumerate(zip(kernels, right.values(), strict=True)):
            timed = replace(
                with_time(record, said.records[i], kernel), rounds_us=said.rounds[i]
            )
            verdict = case.wrong_when_timed(
                kernel, said.last[i], bool(changing["flipped"])
            )
            records.append(
                wrong_when_timed(record, verdict, tier) if verdict else timed
            )
        return records


_OFTEN = 300  # calls


def _again(record: Record, case: Case, kernel: client.Kernel) -> Record:
    """The record of an algo after timing: checked again on new values."""
    verdict = case.check(kernel)
    return record if verdict.passed else stale(record, verdict)
