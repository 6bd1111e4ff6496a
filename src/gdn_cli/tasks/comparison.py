"""Several algos on the same buffers in one process, their calls taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import build
from ..isolation import client
from ..timing import floor
from ..workloads import Workload
from .common import BuildFailed, Case, built, each_tier, forget, guarded, judged, marked, runner_of, smallest, stale


def compare(request: dict, reply: dict) -> Iterator[dict]:
    """Several algos on the same buffers in one process, their calls taking turns.

    One that kills the process loses its place; the others go on in another one.
    """
    reference = build.reference(request["definition"])
    field = _Field(request)
    yield from field.built()
    for i, workload in enumerate(request["workloads"]):
        probed = request["strict"] or smallest(request, i)
        while True:
            try:
                for record in guarded(request, workload, field.meet, reference, probed):
                    # what befell the workload befell all of them
                    yield from [record] if "algo" in record else ({"algo": name} | record for name in field.kernels)
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
            self.runner, self.kernels = runner_of(self.request), {}
            try:
                for rival in list(self.rivals):
                    self.at = rival["name"]
                    try:
                        self.kernels[rival["name"]] = built(self.runner, self.request, rival)[0]
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
                yield from (head | record for record in each_tier(self.request, failed))

    def meet(self, request: dict, workload: Workload, reference: Any, probed: bool) -> list[dict[str, Any]]:
        """One workload's records: of each algo its timing, and its samples in the order in which they were taken."""
        named = request.get("turns", {}).get(workload.uuid, self.kernels)
        kernels = {name: self.kernels[name] for name in named if name in self.kernels}
        if not kernels:
            return []
        try:
            return self._met(request, workload, reference, kernels, probed)
        finally:
            forget(self.runner)

    def _met(self, request: dict, workload: Workload, reference: Any, kernels: dict, probed: bool) -> list[dict]:
        case = Case(request, workload, reference)
        verdicts, right = {}, {}
        for name, kernel in kernels.items():
            verdicts[name] = {"algo": name} | self._of_one(name, judged, case, kernel, probed)
            if verdicts[name]["status"] == "passed":
                right[name] = kernel
                verdicts[name]["bytes_moved"] = floor.bytes_moved(case.op, workload.axes)
        self.at = None
        records = [r for name in kernels if name not in right for r in each_tier(request, verdicts[name])]
        for tier in request["timing"]["tiers"] if right else []:
            records += self._in_turns(request, tier, case, verdicts, right)
        case.refresh()
        for name, kernel in right.items():
            if found := self._of_one(name, _again, case, kernel):
                records = [r for r in records if r["algo"] != name] + each_tier(request, verdicts[name] | found)
        self.at = None
        return records

    def _of_one(self, name: str, work: Callable[..., dict], case: Case, kernel: client.Kernel, *more: Any) -> dict:
        """What `work` says of one algo; what it raises is its own doing, and if that leaves the process unusable, as a
        fault on a GPU does, the others go on in another one."""
        self.at = name
        try:
            return work(case, kernel, *more)
        except client.Raised as e:
            found = _failed(e)
            if not self.runner.usable():
                raise client.Died(found["status"], found["reason"], None) from None
            return found

    def _guilty(self, case: Case, outputs: list, names: list[str]) -> str | None:
        """Who it was that raised while calls took turns. On a GPU a fault shows some calls later: there each one is
        called often by itself, and without a result it is the one whose turn it was."""
        for rival in self.rivals if self.request["mode"] == "cuda" else ():
            if rival["name"] in names:
                alone = runner_of(self.request)
                try:
                    kernel = built(alone, self.request, rival)[0]
                    kernel.push([*case.inputs, *outputs])
                    kernel.seconds_outside(case.inputs, outputs, _OFTEN)
                except (client.Raised, client.Died, BuildFailed):
                    return rival["name"]
                finally:
                    alone.close()
        turn = self.runner.turn()
        return names[turn] if turn is not None and turn < len(names) else None

    def _in_turns(self, request: dict, tier: str, case: Case, verdicts: dict, right: dict) -> list[dict[str, Any]]:
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
                self.at = self._guilty(case, outputs, self.meeting)
                found = _failed(e)
                raise client.Died(found["status"], found["reason"], None) from None
            gone = {"tier": tier, "status": "tier_unavailable", "reason": f"{tier}: {e}"}
            return [verdicts[name] | gone for name in right]
        if replaced := said.get("replaced"):
            wrong = {"tier": tier, "status": "wrong", "reason": f"probe timer: replaced {', '.join(replaced[:3])}"}
            return [verdicts[name] | wrong for name in right]
        return [
            verdicts[name]
            | marked(client.measured(found), right[name])
            | {"rounds_us": [client.number(us) for us in samples]}
            for name, found, samples in zip(right, said["records"], said["rounds"], strict=True)
        ]


_OFTEN = 300  # calls


def _again(case: Case, kernel: client.Kernel) -> dict[str, Any]:
    """What becomes of an algo that is wrong on new values, after it was timed; {} for one that is right."""
    verdict = case.check(kernel)
    return {} if verdict.passed else stale(verdict)


def _failed(e: client.Raised) -> dict[str, Any]:
    if e.kind == "out_of_memory":
        return {"status": "out_of_memory", "reason": str(e).splitlines()[0] if str(e) else "out of memory"}
    return {"status": "error", "reason": e.one_line, "trace": e.trace}
