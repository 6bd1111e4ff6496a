"""Several algos on the same buffers in one process, their calls taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
    checked_again,
    each_tier,
    guarded,
    judged,
    replaced,
    runner_of,
    smallest,
    with_time,
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
            meet = field.kernels, field.meet, reference, depth
            try:
                yield from guarded(request, workload, *meet, runner=field.runner)
                break
            except client.DiedError as e:
                yield from field.dropped(e, request.workloads[i:])
                yield from field.built()
                if not field.kernels:
                    return


class _Field:
    """The rivals that are left, in the process that they share."""

    def __init__(self, request: Serving) -> None:
        self.request = request
        self.rivals = list(request.rivals)
        self.runner = runner_of(request)
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
                    kernel, _ = built(self.runner, self.request, rival)
                    self.kernels[rival.name] = kernel
                except build.BuildFailedError as e:
                    self.rivals.remove(rival)
                    fate = {"status": Status.BUILD_FAILED, "reason": str(e)}
                    yield from self._out(rival.name, [None], code=e.code, **fate)
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
        guilty = self.current
        if guilty is None and end.turn is not None and end.turn < len(self.meeting):
            guilty = self.meeting[end.turn]
        for rival in list(self.rivals):
            if guilty in (None, rival.name):
                self.rivals.remove(rival)
                fate = {"status": end.status, "reason": end.reason}
                yield from self._out(rival.name, workloads, **fate)
        self.runner = runner_of(self.request)

    def _out(
        self, name: str, workloads: Sequence[Workload | None], **fate: Any
    ) -> Iterator[Record]:
        for workload in workloads:
            turns = self.request.turns.get(workload.uuid) if workload else None
            if turns is None or name in turns:
                failed = replace(begun(self.request, workload, name), **fate)
                yield from each_tier(self.request, failed)

    def meet(
        self, request: Serving, workload: Workload, reference: Any, depth: Depth
    ) -> list[Record]:
        """One workload's records: each algo's timing, and its samples in the order in
        which they were taken.
        """
        names = request.turns.get(workload.uuid, self.kernels)
        kernels = [self.kernels[name] for name in names if name in self.kernels]
        if not kernels:
            return []
        case = Case(request, workload, reference)
        records: list[Record] = []
        right: dict[str, Record] = {}
        for kernel in kernels:
            record = begun(request, workload, kernel.name)
            record = self._of_one(record, judged, case, kernel, depth)
            if record.passed:
                record.bytes_moved = floor.bytes_moved(case.op, workload.axes)
                right[kernel.name] = record
            else:
                records += each_tier(request, record)
        self.turn(None)
        if not right:
            return records
        for tier in request.timing.tiers:
            records += self._in_turns(request, tier, case, right)
        case.refresh()
        caught = {record.algo for record in records if record.status is Status.WRONG}
        for name, record in right.items():
            if name in caught:
                continue
            again = self._of_one(record, checked_again, case, self.kernels[name])
            if not again.passed:
                others = [each for each in records if each.algo != name]
                records = others + each_tier(request, again)
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
            fate = befell(e)
            if not self.runner.usable():
                raise client.DiedError(fate["status"], fate["reason"], None) from None
            return replace(record, **fate)

    def _guilty(self, case: Case, outputs: list, names: list[str]) -> str | None:
        """Which algo raised while calls took turns. On a GPU a fault shows some calls
        later, so each algo is called often by itself there; if that shows nothing, it
        is the one whose turn it was.
        """
        for rival in self.rivals if self.request.mode == "cuda" else ():
            if rival.name in names:
                alone = runner_of(self.request)
                try:
                    kernel, _ = built(alone, self.request, rival)
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
        self.meeting = list(right)
        self.runner.watched()
        kernels = [self.kernels[name] for name in right]
        how = case.timed(tier, kernels)
        try:
            answer = self.runner.turns(self.meeting, case.inputs, outputs, **how)
        except client.RaisedError as e:
            if e.kind != "tier_unavailable":
                self.turn(self._guilty(case, outputs, self.meeting))
                fate = befell(e)
                raise client.DiedError(fate["status"], fate["reason"], None) from None
            reason = f"{tier}: {e}"
            gone = Measured(tier=tier, status=Status.TIER_UNAVAILABLE, reason=reason)
            return [with_time(record, gone) for record in right.values()]
        if answer.replaced:
            return [
                replaced(record, answer.replaced, tier) for record in right.values()
            ]
        records = []
        for i, kernel in enumerate(kernels):
            record = right[kernel.name]
            results = answer.last[i]
            wrong = case.wrong_when_timed(kernel, results, bool(how["flipped"]))
            if wrong:
                records.append(wrong_when_timed(record, wrong, tier))
                continue
            record = with_time(record, answer.records[i], kernel)
            records.append(replace(record, rounds_us=answer.rounds[i]))
        return records


_OFTEN = 300  # calls
