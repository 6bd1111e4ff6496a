"""The worker's side of a runner: starts it, sends commands, and trusts nothing that it
sends except times.
"""

from __future__ import annotations

import subprocess
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ...schema.record_types import Status
from .. import exit_reasons
from ..messages import Answer, Result, Said
from . import channel, process, shared_memory
from .calls import Strange

_BACKEND = 200  # characters of an algo's own words that are kept
_PATIENCE_S = 10.0  # how long a runner that closed its connection may take to end


class DiedError(Exception):
    """The runner ended before it answered: how it ended, and whose turn it was if that is known."""

    def __init__(
        self,
        status: Status,
        reason: str,
        exit_code: int | None,
        turn: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.status, self.reason, self.exit_code, self.turn = (
            status,
            reason,
            exit_code,
            turn,
        )


class RaisedError(Exception):
    """An exception of the algo's code."""

    def __init__(self, said: Said) -> None:
        super().__init__(said.text)
        self.one_line, self.trace, self.kind, self.missing = (
            said.line,
            said.trace,
            said.kind,
            said.missing,
        )


class OutOfMemoryError(RaisedError, MemoryError):
    pass


class NotThereError(RaisedError, LookupError):
    pass


class Runner:
    """One process that runs algos' code, for a worker that runs in a mode: cuda, cpu or
    interpreter.
    """

    def __init__(self, mode: str, started: process.Started) -> None:
        self.device = "cuda" if mode == "cuda" else "cpu"
        self.line, self.process, self.ooms, self.wrapped = started
        self.numbers: dict[int, int] = {}  # a storage's address here -> its number
        # number -> tensor kept, region, bytes
        self.regions: dict[int, tuple[Any, shared_memory.Region, Any]] = {}
        self.count = 0
        self.asked = 0
        # results no longer needed, and their storages
        self.dropped: list[tuple[int, int]] = []
        self.mark: shared_memory.Region | None = None

    # --- asking

    def ask(self, do: str, _descriptors: tuple[int, ...] = (), **fields: Any) -> Answer:
        """Send a command and wait for its answer. Raises DiedError, or RaisedError with the
        algo's exception.
        """
        if self.dropped:
            fields["dropped"], self.dropped = self.dropped, []
        self.asked += 1
        try:
            self.line.send({"do": do, "number": self.asked} | fields, _descriptors)
            answer = msgspec.convert(self.line.receive(), Answer)
            if answer.number != self.asked:
                raise channel.GarbledError("an answer that was not asked for")
        except (EOFError, OSError):
            raise self._death() from None
        except (channel.GarbledError, msgspec.ValidationError) as e:
            self.close()
            nonsense = (
                e if isinstance(e, channel.GarbledError) else f"an invalid answer: {e}"
            )
            raise DiedError(
                Status.CRASHED, f"the process that ran it sent {nonsense}", None
            ) from None
        if said := answer.raised:
            raise {"out_of_memory": OutOfMemoryError, "lookup": NotThereError}.get(
                said.kind, RaisedError
            )(said)
        return answer

    def _death(self) -> DiedError:
        try:
            code = self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:  # it closed its connection and still runs
            self.process.kill()
            self.process.wait()
            return DiedError(
                Status.EXITED,
                "the process closed its connection before it was done",
                None,
                self.turn(),
            )
        if self.wrapped and code > 128:  # as in a shell
            code = 128 - code
        return DiedError(*exit_reasons.death(code, self.ooms), code, self.turn())

    def usable(self) -> bool:
        """Whether it can still be used: after a fault on a GPU it cannot."""
        try:
            self.ask("pull", storages=[])
            return True
        except RaisedError:
            return False

    def close(self) -> None:
        """End the process. The keeper ends any processes that it started."""
        self.line.close()
        self.process.kill()
        self.process.wait()

    # --- tensors

    def forget(self) -> None:
        """Drop all tensors that were sent or received, and the results kept for them."""
        for _, region, _ in self.regions.values():
            region.close()
        self.numbers.clear()
        self.regions.clear()
        self.ask("forget")

    def number(self, x: torch.Tensor) -> int | None:
        """The number of the tensor's storage, which is shared from now on; None if it
        has no bytes.
        """
        storage = x.untyped_storage()
        if not storage.nbytes():
            return None
        if (found := self.numbers.get(storage.data_ptr())) is not None:
            return found
        number = self._share(storage.nbytes(), storage.data_ptr() % shared_memory.ALIGN)
        self.numbers[storage.data_ptr()] = number
        region = self.regions[number][1]
        # kept: its address must not become another's
        self.regions[number] = x, region, shared_memory.all_bytes(x)
        return number

    def _share(self, nbytes: int, place: int) -> int:
        self.count += 1
        region = shared_memory.Region(nbytes)
        self.ask(
            "share",
            (region.descriptor,),
            storage=self.count,
            nbytes=nbytes,
            place=place,
        )
        region.close()
        self.regions[self.count] = None, region, None
        return self.count

    def forms(self, values: Sequence[Any]) -> list[Any]:
        """A call's arguments in the form in which they are sent."""
        return [
            shared_memory.form(x, self.number(x)) if isinstance(x, torch.Tensor) else x
            for x in values
        ]

    def push(self, tensors: Sequence[Any]) -> None:
        """Send the runner the bytes of these tensors' storages."""
        numbers = self._numbers(tensors)
        for number in numbers:
            _, region, there = self.regions[number]
            region.bytes.copy_(there)
        self._settle()
        if numbers:
            self.ask("push", storages=numbers)

    def pull(self, tensors: Sequence[Any]) -> None:
        """Fetch the bytes from the runner: of results, and of storages that were pushed."""
        results = [
            x
            for x in tensors
            if isinstance(x, torch.Tensor) and hasattr(x, "_gdn_result")
        ]
        numbers = self._numbers([x for x in tensors if not hasattr(x, "_gdn_result")])
        asked = [(x, *x._gdn_result) for x in results if x.numel()]
        if not (numbers or asked):
            return
        self.ask(
            "pull",
            storages=numbers,
            results=[[result.number, storage] for _, result, storage in asked],
        )
        for number in numbers:
            _, region, here = self.regions[number]
            here.copy_(region.bytes)
        for x, _, storage in asked:
            x.copy_(
                self.regions[storage][1].bytes.view(x.dtype)[: x.numel()].view(x.shape)
            )

    def _numbers(self, tensors: Sequence[Any]) -> list[int]:
        found = (self.number(x) for x in tensors if isinstance(x, torch.Tensor))
        return list(dict.fromkeys(n for n in found if n is not None))

    def _settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def received(self, results: Sequence[Result], wanted: Sequence[tuple]) -> list[Any]:
        """The results that a runner reports: a tensor each, not yet pulled, if it has
        the expected form.
        """
        found = []
        for i, one in enumerate(results):
            form, due = (
                (one.shape, one.dtype, one.device),
                wanted[i] if i < len(wanted) else None,
            )
            if one.number is None:
                found.append(Strange(one.type[:80]))
            elif (
                due is None
                or form[:2] != (tuple(due[0]), str(due[1]))
                or not one.device.startswith(self.device)
            ):
                found.append(Strange("Tensor", form))
            else:
                x = torch.empty(due[0], dtype=due[1], device=self.device)
                x._gdn_result = one, self._share(x.nbytes, -1) if x.nbytes else 0
                weakref.finalize(x, self._drop, one.number, x._gdn_result[1])
                found.append(x)
        return found

    def _drop(self, result: int, storage: int) -> None:
        """A result that is no longer needed: the runner may free it with the next command."""
        self.dropped.append((result, storage))
        self.regions.pop(storage, None)

    # --- kernels

    def build(
        self, name: str, definition: dict, solution: dict, **how: Any
    ) -> tuple[Kernel, Answer]:
        """(the kernel, the build's answer). RaisedError with kind build_failed."""
        said = self.ask(
            "build", name=name, definition=definition, solution=solution, **how
        )
        return Kernel(self, name, said.destination_passing, how.get("setup")), said

    def watched(self) -> None:
        """Let the runner report whose turn it is, for `DiedError.turn`."""
        if self.mark is None:
            self.mark = shared_memory.Region(8)
            self.ask("watch", (self.mark.descriptor,))
            self.mark.close()
        self.mark.bytes[0] = 255

    def turns(
        self, kernels: list[str], inputs: list, outputs: list, **how: Any
    ) -> Answer:
        """Several kernels' times on the same buffers, their calls taking turns, and the
        results of each one's last call.
        """
        said = self.ask(
            "turns",
            kernels=kernels,
            inputs=self.forms(inputs),
            outputs=self.forms(outputs),
            **how,
        )
        complete = (
            len(kernels) == len(said.records) == len(said.rounds) == len(said.last)
        )
        if not complete and not said.replaced:
            raise DiedError(
                Status.CRASHED, "the process that ran it sent no time", None
            )
        return said if said.replaced else _measured(said)

    def turn(self) -> int | None:
        """Which kernel of `turns` was last at work."""
        return (
            int(self.mark.bytes[0])
            if self.mark is not None and int(self.mark.bytes[0]) != 255
            else None
        )


class Kernel:
    """A kernel in a runner, with the methods of calls.Here and some more. `wanted`
    gives the (shape, dtype) of each output.
    """

    def __init__(
        self,
        runner: Runner,
        name: str,
        destination_passing: bool,
        setup: str | None = None,
    ) -> None:
        self.runner, self.name, self.destination_passing, self.setup = (
            runner,
            name,
            destination_passing,
            setup,
        )

    def push(self, tensors: Sequence[Any]) -> None:
        self.runner.push(tensors)

    def pull(self, tensors: Sequence[Any]) -> None:
        self.runner.pull(tensors)

    def pulled(self, results: Sequence[Result], wanted: Sequence[tuple]) -> list[Any]:
        """The results that the runner described, with their bytes."""
        tensors = self.runner.received(results, wanted)
        self.pull(tensors)
        return tensors

    def ask(self, do: str, inputs: list, outputs: list, **more: Any) -> Answer:
        forms = self.runner.forms
        return self.runner.ask(
            do, kernel=self.name, inputs=forms(inputs), outputs=forms(outputs), **more
        )

    def _results(self, said: Answer, outputs: list, wanted: Sequence[tuple]) -> list:
        return (
            outputs
            if self.destination_passing
            else self.runner.received(said.results, wanted)
        )

    def run(self, inputs: list, outputs: list, wanted: Sequence[tuple]) -> list:
        return self._results(self.ask("run", inputs, outputs), outputs, wanted)

    def address(self, result: torch.Tensor) -> int:
        return result._gdn_result[0].address

    def odd(self, results: Sequence[Any]) -> list[str | None]:
        return [
            x._gdn_result[0].odd if hasattr(x, "_gdn_result") else None for x in results
        ]

    def at_return(
        self, inputs: list, outputs: list, wanted: Sequence[tuple]
    ) -> tuple[list, list]:
        said = self.ask("at_return", inputs, outputs)
        seen = self.runner.received(said.seen, wanted)
        results = self._results(said, outputs, wanted)
        self.pull([*seen, *results])
        return results, seen

    def late(
        self,
        inputs: list,
        outputs: list,
        late: list,
        zeroed: Sequence[int],
        copies: list,
        wanted: Sequence[tuple],
    ) -> list:
        self.push([*late, *copies])
        forms = self.runner.forms
        said = self.ask(
            "late",
            inputs,
            outputs,
            late=forms(late),
            zeroed=list(zeroed),
            copies=forms(copies),
        )
        results = self._results(said, outputs, wanted)
        self.pull([*copies, *results])
        return results

    def seconds(self, inputs: list, outputs: list) -> float:
        return self.ask("seconds", inputs, outputs).seconds

    def trace(self, inputs: list, outputs: list) -> tuple[Counter[str], int]:
        said = self.ask("trace", inputs, outputs)
        return Counter(said.counts), int(said.ns)

    def time(self, inputs: list, outputs: list, **how: Any) -> Answer:
        """A tier's part of a record, which parts of the timer had been replaced, and
        the results of the last calls.
        """
        said = _measured(self.ask("time", inputs, outputs, **how))
        if len(said.records) != 1 and not said.replaced:
            raise DiedError(
                Status.CRASHED, "the process that ran it sent no time", None
            )
        return said

    def seconds_outside(self, inputs: list, outputs: list, times: int) -> float:
        """The time of a call by the worker's clock, over `times` calls in a row."""
        began = time.perf_counter()
        self.ask("again", inputs, outputs, times=times)
        return (time.perf_counter() - began) / times

    def backend(self, inputs: list) -> str | None:
        told = self.runner.ask(
            "backend", kernel=self.name, inputs=self.runner.forms(inputs)
        ).backend
        return told and told[:_BACKEND]


def _measured(answer: Answer) -> Answer:
    """Check a runner's answer about times: each has a time, or a reason why not."""
    for each in answer.records:
        if (each.timing is None or each.doubts is None) and (
            each.timing or each.status is Status.PASSED
        ):
            raise DiedError(
                Status.CRASHED, "the process that ran it sent no time", None
            )
        if each.timing:
            each.status, each.reason = Status.PASSED, None
    return answer
