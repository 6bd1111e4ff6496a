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

from ...catalog.formats import Definition, Solution
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
        self.status = status
        self.reason = reason
        self.exit_code = exit_code
        self.turn = turn


class RaisedError(Exception):
    """An exception of the algo's code."""

    def __init__(self, said: Said) -> None:
        super().__init__(said.text)
        self.one_line = said.line
        self.trace = said.trace
        self.kind = said.kind
        self.missing = said.missing


class OutOfMemoryError(RaisedError, MemoryError):
    pass


class NotThereError(RaisedError, LookupError):
    pass


class Runner:
    """One process that runs algos' code, for a worker that runs in a mode: cuda, cpu or
    interpreter.
    """

    def __init__(self, mode: str, started: process.Started) -> None:
        self.device = process.device_of(mode)
        self.line, self.process, self.ooms, self.wrapped = started
        self.numbers: dict[int, int] = {}  # a storage's address here -> its number
        self.regions: dict[int, shared_memory.Region] = {}
        # number -> the tensor, kept so that its address does not become another's, and
        # all bytes of its storage
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # id of a result's tensor here -> what the runner said of it, and its storage
        self.results: dict[int, tuple[Result, int]] = {}
        self.count = 0
        self.asked = 0
        # results no longer needed, and their storages
        self.dropped: list[tuple[int | None, int]] = []
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
            invalid = not isinstance(e, channel.GarbledError)
            raise _sent(f"an invalid answer: {e}" if invalid else str(e)) from None
        if said := answer.raised:
            kinds = {"out_of_memory": OutOfMemoryError, "lookup": NotThereError}
            raise kinds.get(said.kind, RaisedError)(said)
        return answer

    def _death(self) -> DiedError:
        try:
            code = self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:  # it closed its connection and still runs
            self.process.kill()
            self.process.wait()
            reason = "the process closed its connection before it was done"
            return DiedError(Status.EXITED, reason, None, self.turn())
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
        for region in self.regions.values():
            region.close()
        self.numbers.clear()
        self.regions.clear()
        self.kept.clear()
        self.ask("forget")

    def number(self, x: torch.Tensor) -> int | None:
        """The number of the tensor's storage, which is shared from now on; None if it
        has no bytes.
        """
        storage = x.untyped_storage()
        if not storage.nbytes():
            return None
        address = storage.data_ptr()
        if address not in self.numbers:
            number = self._share(storage.nbytes(), address % shared_memory.ALIGN)
            self.numbers[address] = number
            self.kept[number] = x, shared_memory.all_bytes(x)
        return self.numbers[address]

    def _share(self, nbytes: int, place: int) -> int:
        self.count += 1
        region = shared_memory.Region(nbytes)
        descriptors = (region.descriptor,)
        self.ask("share", descriptors, storage=self.count, nbytes=nbytes, place=place)
        region.close()
        self.regions[self.count] = region
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
            self.regions[number].bytes.copy_(self.kept[number][1])
        if self.device == "cuda":
            torch.cuda.synchronize()
        if numbers:
            self.ask("push", storages=numbers)

    def pull(self, tensors: Sequence[Any]) -> None:
        """Fetch the bytes from the runner: of results, and of storages that were pushed."""
        numbers = self._numbers([x for x in tensors if id(x) not in self.results])
        returned = [x for x in tensors if id(x) in self.results and x.numel()]
        if not (numbers or returned):
            return
        wanted = [self.results[id(x)] for x in returned]
        pairs = [(result.number, storage) for result, storage in wanted]
        self.ask("pull", storages=numbers, results=pairs)
        for number in numbers:
            self.kept[number][1].copy_(self.regions[number].bytes)
        for x, (_, storage) in zip(returned, wanted, strict=True):
            x.copy_(self.regions[storage].like(x))

    def _numbers(self, tensors: Sequence[Any]) -> list[int]:
        numbers = [self.number(x) for x in tensors if isinstance(x, torch.Tensor)]
        return list(dict.fromkeys(n for n in numbers if n is not None))

    def received(self, results: Sequence[Result], wanted: Sequence[tuple]) -> list[Any]:
        """The results that a runner reports: a tensor each, not yet pulled, if it has
        the expected form.
        """
        tensors: list[Any] = []
        for i, result in enumerate(results):
            due = wanted[i] if i < len(wanted) else (None, None)
            if result.number is None:
                tensors.append(Strange(result.type[:80]))
            elif (result.shape, result.dtype) != (due[0], str(due[1])) or (
                not result.device.startswith(self.device)
            ):
                form = result.shape, result.dtype, result.device
                tensors.append(Strange("Tensor", form))
            else:
                x = torch.empty(due[0], dtype=due[1], device=self.device)
                storage = self._share(x.nbytes, -1) if x.nbytes else 0
                self.results[id(x)] = result, storage
                weakref.finalize(x, self._drop, id(x), result.number, storage)
                tensors.append(x)
        return tensors

    def _drop(self, tensor: int, result: int | None, storage: int) -> None:
        """A result that is no longer needed: the runner may free it with the next command."""
        self.dropped.append((result, storage))
        self.results.pop(tensor, None)
        self.regions.pop(storage, None)

    # --- kernels

    def build(
        self, name: str, definition: Definition, solution: Solution, **how: Any
    ) -> tuple[Kernel, Answer]:
        """(the kernel, the build's answer). RaisedError with kind build_failed."""
        how |= {"name": name, "definition": definition, "solution": solution}
        answer = self.ask("build", **how)
        return Kernel(self, name, answer.destination_passing, how.get("setup")), answer

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
        how |= {"inputs": self.forms(inputs), "outputs": self.forms(outputs)}
        answer = self.ask("turns", kernels=kernels, **how)
        if answer.replaced:
            return answer
        if not len(kernels) == len(answer.rounds) == len(answer.last):
            raise _sent("no time")
        return _measured(answer, len(kernels))

    def turn(self) -> int | None:
        """Which kernel of `turns` was last at work."""
        number = 255 if self.mark is None else int(self.mark.bytes[0])
        return None if number == 255 else number


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
        self.runner = runner
        self.name = name
        self.setup = setup
        self.destination_passing = destination_passing

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
        more |= {"inputs": forms(inputs), "outputs": forms(outputs)}
        return self.runner.ask(do, kernel=self.name, **more)

    def _results(self, answer: Answer, outputs: list, wanted: Sequence[tuple]) -> list:
        if self.destination_passing:
            return outputs
        return self.runner.received(answer.results, wanted)

    def run(self, inputs: list, outputs: list, wanted: Sequence[tuple]) -> list:
        return self._results(self.ask("run", inputs, outputs), outputs, wanted)

    def address(self, result: torch.Tensor) -> int:
        return self.runner.results[id(result)][0].address

    def odd(self, results: Sequence[Any]) -> list[str | None]:
        known = self.runner.results
        return [known[id(x)][0].odd if id(x) in known else None for x in results]

    def at_return(
        self, inputs: list, outputs: list, wanted: Sequence[tuple]
    ) -> tuple[list, list]:
        answer = self.ask("at_return", inputs, outputs)
        seen = self.runner.received(answer.seen, wanted)
        results = self._results(answer, outputs, wanted)
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
        how = {"late": forms(late), "zeroed": list(zeroed), "copies": forms(copies)}
        answer = self.ask("late", inputs, outputs, **how)
        results = self._results(answer, outputs, wanted)
        self.pull([*copies, *results])
        return results

    def seconds(self, inputs: list, outputs: list) -> float:
        return self.ask("seconds", inputs, outputs).seconds

    def trace(self, inputs: list, outputs: list) -> tuple[Counter[str], int]:
        answer = self.ask("trace", inputs, outputs)
        return Counter(answer.counts), int(answer.ns)

    def time(self, inputs: list, outputs: list, **how: Any) -> Answer:
        """A tier's part of a record, which parts of the timer had been replaced, and
        the results of the last calls.
        """
        answer = self.ask("time", inputs, outputs, **how)
        return answer if answer.replaced else _measured(answer, 1)

    def seconds_outside(self, inputs: list, outputs: list, times: int) -> float:
        """The time of a call by the worker's clock, over `times` calls in a row."""
        began = time.perf_counter()
        self.ask("again", inputs, outputs, times=times)
        return (time.perf_counter() - began) / times

    def backend(self, inputs: list) -> str | None:
        forms = self.runner.forms(inputs)
        name = self.runner.ask("backend", kernel=self.name, inputs=forms).backend
        return name and name[:_BACKEND]


def _measured(answer: Answer, count: int) -> Answer:
    """Check a runner's answer about times: each has a time, or a reason why not."""
    if len(answer.records) != count:
        raise _sent("no time")
    for record in answer.records:
        if record.timing is None and record.status is Status.PASSED:
            raise _sent("no time")
        if record.timing and record.doubts is None:
            raise _sent("no time")
        if record.timing:
            record.status = Status.PASSED
            record.reason = None
    return answer


def _sent(what: str) -> DiedError:
    return DiedError(Status.CRASHED, f"the process that ran it sent {what}", None)
