"""Several algos on the same buffers in one process, their calls taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from ....catalog.workloads import Workload
from ....schema.record_types import Record, Status
from ...executor import build, client
from ...messages import Reply
from ...request import Rival, Serving
from ...timing import floor
from . import common
from .common import Case, Depth


def compare(request: Serving, reply: Reply) -> Iterator[Record]:
    """Compare the algos. If one kills the process it is dropped, and the others go on
    in a new process.
    """
    reference = build.reference(request.definition)
    field = _Field(request)
    yield from field.built()
    for i, workload in enumerate(request.workloads):
        depth = common.depth(request, i)
        meet = partial(field.meet, reference=reference, depth=depth)
        while field.kernels:
            names, runner = field.kernels, field.runner
            try:
                yield from common.guarded(request, workload, names, meet, runner=runner)
                break
            except client.DiedError as e:
                yield from field.dropped(e, request.workloads[i:])
                yield from field.built()


class _Field:
    """The rivals that are left, in the process that they share."""

    def __init__(self, request: Serving) -> None:
        self.request = request
        self.rivals = list(request.rivals)
        self.runner = common.runner_of(request)
        self.kernels: dict[str, client.Kernel] = {}
        # whose code runs, if it is only one's, and whose calls take turns
        self.current: str | None = None
        self.meeting: list[str] = []

    def turn(self, name: str | None) -> None:
        """Note whose code runs now, if it is only one algo's; the command is told, in
        case it never ends.
        """
        self.current = name
        self.request.at(name)

    def built(self) -> Iterator[Record]:
        """Build all that are left; yields the records of those that cannot be built."""
        self.kernels = {}
        try:
            for rival in list(self.rivals):
                self.turn(rival.name)
                try:
                    kernel, _ = common.built(self.runner, self.request, rival)
                    self.kernels[rival.name] = kernel
                except build.BuildFailedError as e:
                    fate = {"status": Status.BUILD_FAILED, "reason": str(e)}
                    yield from self._out(rival, [None], code=e.code, **fate)
            self.turn(None)
        except client.DiedError as e:
            yield from self.dropped(e, [None])
            yield from self.built()

    def dropped(
        self, end: client.DiedError, workloads: Sequence[Workload | None]
    ) -> Iterator[Record]:
        """Go on in a new process without the algo whose turn it was, or without all if
        that is not known; yields the records for the workloads that they will miss.
        """
        self.runner.close()
        guilty = self.current or self._named(end.turn)
        for rival in list(self.rivals):
            if guilty in (None, rival.name):
                fate = {"status": end.status, "reason": end.reason}
                yield from self._out(rival, workloads, **fate)
        self.runner = common.runner_of(self.request)

    def _named(self, turn: int | None) -> str | None:
        return None if turn is None else dict(enumerate(self.meeting)).get(turn)

    def _out(
        self, rival: Rival, workloads: Sequence[Workload | None], **fate: Any
    ) -> Iterator[Record]:
        """Go on without it; yields the records of the workloads that it will miss."""
        self.rivals.remove(rival)
        for workload in workloads:
            turns = self.request.turns.get(workload.uuid) if workload else None
            if turns is None or rival.name in turns:
                failed = common.begun(self.request, workload, rival.name, **fate)
                yield from common.each_tier(self.request, failed)

    def meet(
        self, request: Serving, workload: Workload, reference: Any, depth: Depth
    ) -> list[Record]:
        """One workload's records: each algo's timing, and its samples in the order in
        which they were taken.
        """
        turns = request.turns.get(workload.uuid, self.kernels)
        names = [name for name in turns if name in self.kernels]
        if not names:
            return []
        case = Case(request, workload, reference)
        records: list[Record] = []
        right: dict[str, Record] = {}
        for name in names:
            record = common.begun(request, workload, name)
            record = self._alone(record, case.judged, depth)
            if record.passed:
                record.bytes_moved = floor.bytes_moved(case.op, workload.axes)
                right[name] = record
            else:
                records.append(record)
        self.turn(None)
        if not right:
            return records
        for tier in request.timing.tiers:
            records += self._in_turns(tier, case, right)
        case.refresh()
        caught = [record.algo for record in records if record.status is Status.WRONG]
        for name, record in right.items():
            if name not in caught:
                again = self._alone(record, case.checked_again)
                if not again.passed:
                    records = [timed for timed in records if timed.algo != name]
                    records.append(again)
        self.turn(None)
        return records

    def _alone(self, record: Record, work: Callable[..., Record], *args: Any) -> Record:
        """The result of `work` for one algo. An exception counts against that algo; if
        it makes the process unusable, as a fault on a GPU does, the others go on in a
        new one.
        """
        self.turn(record.algo)
        try:
            return work(record, self.kernels[record.algo], *args)
        except client.RaisedError as e:
            fate = common.befell(e)
            if not self.runner.usable():
                raise client.DiedError(fate["status"], fate["reason"]) from None
            return replace(record, **fate)

    def _guilty(self, case: Case, outputs: list) -> str | None:
        """Which algo raised while calls took turns. On a GPU a fault shows some calls
        later, so each algo is called often by itself there; if that shows nothing, it
        is the one whose turn it was.
        """
        rivals = [rival for rival in self.rivals if rival.name in self.meeting]
        for rival in rivals if self.request.mode == "cuda" else ():
            alone = common.runner_of(self.request)
            try:
                kernel, _ = common.built(alone, self.request, rival)
                kernel.push([*case.inputs, *outputs])
                kernel.seconds_outside(case.inputs, outputs, _OFTEN)
            except (client.RaisedError, client.DiedError, build.BuildFailedError):
                return rival.name
            finally:
                alone.close()
        return self._named(self.runner.turn())

    def _in_turns(
        self, tier: str, case: Case, right: dict[str, Record]
    ) -> list[Record]:
        # the same buffers for all, so that their place in memory affects all alike
        outputs = case.buffers()
        self.runner.push([*case.inputs, *outputs])
        self.meeting = list(right)
        self.runner.watched()
        kernels = [self.kernels[name] for name in right]
        how = case.how(tier, kernels) | {"inputs": case.inputs, "outputs": outputs}
        try:
            answer = self.runner.time(self.meeting, **how)
        except client.RaisedError as e:
            self.turn(self._guilty(case, outputs))
            fate = common.befell(e)
            raise client.DiedError(fate["status"], fate["reason"]) from None
        records = []
        for i, kernel in enumerate(kernels):
            record = case.timed(right[kernel.name], kernel, how, answer, i)
            if record.passed:
                record.rounds_us = answer.rounds[i]
            records.append(record)
        return records


_OFTEN = 300  # calls
