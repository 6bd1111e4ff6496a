"""The worker's side of a runner: starts it, sends commands, and trusts nothing that it
sends except times.
"""

from __future__ import annotations

import subprocess
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...catalog.formats import Definition, Solution
from ...schema.record_types import Status
from .. import exit_reasons
from ..messages import Answer, Result, Said
from . import calls, channel, process, shared_memory

_TEXT = 200  # characters of an algo's own words that are kept
_PATIENCE_S = 10.0  # how long a runner that closed its connection may take to end
_NOBODY = 255  # in the shared byte that says whose turn it is


@dataclass(eq=False)
class DiedError(Exception):
    """The runner ended before it answered: how it ended, and whose turn it was if that is known."""

    status: Status
    reason: str
    exit_code: int | None = None
    turn: int | None = None


class RaisedError(Exception):
    """An exception of the algo's code."""

    def __init__(self, said: Said) -> None:
        super().__init__(said.text)
        self.said = said
        self.one_line = said.line


class OutOfMemoryError(RaisedError, MemoryError):
    pass


class NotThereError(RaisedError, LookupError):
    pass


_KINDS = {"out_of_memory": OutOfMemoryError, "lookup": NotThereError}


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
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        # id of a result's tensor here -> what the runner said of it, and its storage
        self.results: dict[int, tuple[Result, int]] = {}
        self.count = 0
        self.commands = 0
        # results no longer needed, and their storages
        self.dropped: list[tuple[int | None, int]] = []
        self.mark: shared_memory.Region | None = None

    # --- asking

    def ask(self, do: str, _descriptors: tuple[int, ...] = (), **fields: Any) -> Answer:
        """Send a command and wait for its answer. Raises DiedError, or RaisedError with the
        algo's exception.
        """
        for name in calls.VALUES & fields.keys():
            fields[name] = [
                shared_memory.form(x, self.number(x)) if isinstance(x, Tensor) else x
                for x in fields[name]
            ]
        self.commands += 1
        fields |= {"do": do, "number": self.commands, "dropped": self.dropped}
        self.dropped = []
        try:
            self.line.send(fields, _descriptors)
            message, _ = self.line.receive()
            answer = msgspec.convert(message, Answer)
            if answer.number != self.commands:
                raise channel.GarbledError("an answer that was not asked for")
        except (EOFError, OSError):
            raise self._death() from None
        except (channel.GarbledError, msgspec.ValidationError) as e:
            self.close()
            raise _sent(f"an invalid answer: {e}") from None
        if said := answer.raised:
            raise _KINDS.get(said.kind, RaisedError)(said)
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
        self.numbers.clear()
        self.regions.clear()
        self.kept.clear()
        self.ask("forget")

    def number(self, x: Tensor) -> int | None:
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

    def push(self, tensors: Sequence) -> None:
        """Send the runner the bytes of these tensors' storages."""
        numbers = self._numbers(tensors)
        for number in numbers:
            self.regions[number].bytes.copy_(self.kept[number][1])
        if self.device == "cuda":
            torch.cuda.synchronize()
        if numbers:
            self.ask("push", storages=numbers)

    def pull(self, tensors: Sequence) -> None:
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

    def _numbers(self, tensors: Sequence) -> list[int]:
        numbers = [self.number(x) for x in tensors if isinstance(x, Tensor)]
        return list(dict.fromkeys(n for n in numbers if n is not None))

    def received(self, results: Sequence[Result], wanted: Sequence[tuple]) -> list:
        """The results that a runner reports: a tensor each, not yet pulled, if it has
        the expected form.
        """
        tensors: list = []
        for result, due in zip_longest(results, wanted[: len(results)]):
            shape, dtype = due or ((), None)
            x = torch.empty(shape, dtype=dtype, device=self.device)
            fits = due and result.form == calls.described(x)
            if result.number is None or not fits:
                tensors.append(calls.Strange(result.form[:_TEXT]))
                continue
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
        self.mark.bytes[0] = _NOBODY

    def time(self, kernels: list[str], **how: Any) -> Answer:
        """Kernels' times on the same buffers, their calls taking turns, with the results
        of each one's last calls; or which parts of the timer had been replaced.
        """
        answer = self.ask("time", kernels=kernels, **how)
        timed = [record for record in answer.records if record.timing]
        complete = len(answer.records) == len(kernels)
        for record in answer.records:
            if record.timing is None:
                complete &= record.status is not Status.PASSED
                continue
            complete &= record.doubts is not None
            record.status = Status.PASSED
            record.reason = None
        if timed and how["tier"] != "fib":
            lists = answer.rounds, answer.last
            complete &= all(len(part) == len(kernels) for part in lists)
            complete &= all(answer.last)
        if not (complete or answer.replaced):
            raise _sent("no time, or no results of its timed calls")
        return answer

    def turn(self) -> int | None:
        """Which kernel of `time` was last at work."""
        number = _NOBODY if self.mark is None else int(self.mark.bytes[0])
        return None if number == _NOBODY else number


@dataclass
class Kernel:
    """A kernel in a runner, with the methods of calls.Here and some more. `wanted`
    gives the (shape, dtype) of each output.
    """

    runner: Runner
    name: str
    destination_passing: bool
    setup: str | None = None

    def push(self, tensors: Sequence) -> None:
        self.runner.push(tensors)

    def pull(self, tensors: Sequence) -> None:
        self.runner.pull(tensors)

    def pulled(self, results: Sequence[Result], wanted: Sequence[tuple]) -> list:
        """The results that the runner described, with their bytes."""
        tensors = self.runner.received(results, wanted)
        self.pull(tensors)
        return tensors

    def ask(self, do: str, inputs: list, outputs: list, **more: Any) -> Answer:
        more |= {"inputs": inputs, "outputs": outputs}
        return self.runner.ask(do, kernel=self.name, **more)

    def _call(
        self, way: str, inputs: list, outputs: list, wanted: Sequence[tuple], **how: Any
    ) -> calls.Called:
        answer = self.ask("call", inputs, outputs, way=way, **how)
        copies = self.runner.received(answer.seen, wanted)
        if self.destination_passing:
            return outputs, copies
        return self.runner.received(answer.results, wanted), copies

    def run(self, *given: Any) -> list:
        results, _ = self._call("run", *given)
        return results

    def address(self, result: Tensor) -> int:
        return self.runner.results[id(result)][0].address

    def odd(self, result: Any) -> str | None:
        known = self.runner.results.get(id(result))
        return known[0].odd if known else None

    def at_return(self, *given: Any) -> calls.Called:
        results, copies = self._call("at_return", *given)
        self.pull([*copies, *results])
        return results, copies

    def late(self, *given: Any, **how: Any) -> list:
        self.push([*how["late"], *how["copies"]])
        results, _ = self._call("late", *given, **how)
        self.pull([*how["copies"], *results])
        return results

    def seconds(self, inputs: list, outputs: list) -> float:
        return self.ask("seconds", inputs, outputs).seconds

    def trace(self, inputs: list, outputs: list) -> tuple[Counter[str], int]:
        answer = self.ask("trace", inputs, outputs)
        return Counter(answer.counts), int(answer.ns)

    def seconds_outside(self, inputs: list, outputs: list, times: int) -> float:
        """The time of a call by the worker's clock, over `times` calls in a row."""
        began = time.perf_counter()
        self.ask("again", inputs, outputs, times=times)
        return (time.perf_counter() - began) / times

    def backend(self, inputs: list) -> str | None:
        name = self.runner.ask("backend", kernel=self.name, inputs=inputs).backend
        return name and name[:_TEXT]


def _sent(what: str) -> DiedError:
    return DiedError(Status.CRASHED, f"the process that ran it sent {what}")
