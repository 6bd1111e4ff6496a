"""A runner: the process that runs an algo's code, started by process.py as a copy of its
worker, or by __main__.py.

It does what it is told on the socket. It does not judge, holds no descriptor that
records go to, and never sees the right results. Whatever fails here counts against the
algo.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ... import bounded
from ...catalog.formats import Definition, Solution
from ...errors import one_line
from ...parsing import Json
from ..messages import Answer, Result, Said
from ..timing import Plan, Subject, integrity
from ..timing.flips import Flips
from ..timing.subject import bound, values
from . import calls, channel, measuring, prepared, shared_memory, signature, survey
from .build import BuildFailedError, Kernel
from .tensors import Tensors


class Runner(Tensors):
    """Kernels by name, and the worker's tensors. The worker's commands are the methods
    of the same names.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.kernels: dict[str, Kernel] = {}
        # which kernel is at work, for a worker that finds this process dead
        self.turn = shared_memory.Region(8)
        # the timer's parts before any of an algo's code has run
        self.as_it_was: integrity.State = ()

    def serve(self, line: channel.Channel) -> None:
        """Serve until the worker closes the connection."""
        with torch.no_grad():
            while True:
                try:
                    message, descriptors = line.receive(1)
                except (EOFError, OSError, channel.GarbledError):
                    return
                number = message.pop("number", 0)
                try:
                    answer = self._answer(message, descriptors)
                except integrity.TamperedError as e:
                    answer = Answer(replaced=e.names)
                except Exception as e:
                    answer = Answer(raised=self._raised(e))
                answer.number = number
                line.send(bounded.clipped(msgspec.to_builtins(answer)))

    def _answer(self, message: Json, descriptors: list[int]) -> Answer:
        self._drop(message.pop("dropped", ()))
        # an attribute of the instance cannot hide it
        do = getattr(type(self), message.pop("do"))
        if do in (Runner.share, Runner.watch) and not descriptors:
            raise OSError(errno.EMFILE, "no file descriptor is left for the harness")
        if "kernel" in message:
            message["kernel"] = self.kernels[message["kernel"]]
        return do(self, *descriptors, **self._formed(message)) or Answer()

    def _raised(self, e: Exception) -> Said:
        """An exception, classified by its kind."""
        kinds = {
            "build_failed": isinstance(e, BuildFailedError),
            "out_of_memory": calls.out_of_memory(e),
            "lookup": isinstance(e, LookupError),
            "error": True,
        }
        kind = next(kind for kind, fits in kinds.items() if fits)
        if kind == "out_of_memory" and self.device == "cuda":
            torch.cuda.empty_cache()
        trace = "".join(traceback.format_exception(e)).splitlines()[-12:]
        return Said(str(e), one_line(e), trace, kind, getattr(e, "missing", False))

    def forget(self) -> None:
        """Drop all tensors; the kernels stay."""
        for kernel in self.kernels.values():
            kernel.last = None
        super().forget()

    # --- calls

    def build(
        self,
        name: str,
        definition: Definition,
        solution: Solution,
        prove: bool = False,
        **how: Any,
    ) -> Answer:
        self.as_it_was = self.as_it_was or integrity.state(self.device)
        began = time.perf_counter()
        self.kernels[name] = kernel = prepared.built(definition, solution, **how)
        answer = Answer(
            destination_passing=kernel.destination_passing,
            build_s=time.perf_counter() - began,
        )
        if prove:
            answer.proof = signature.match(kernel.entry_point, definition, solution)
        return answer

    def backend(self, kernel: Kernel, inputs: list) -> Answer:
        """Which path the algo says it takes for these inputs; None if it does not say."""
        return Answer(backend=kernel.backend(inputs))

    def call(
        self, kernel: Kernel, way: str, inputs: list, outputs: list, **how: Any
    ) -> Answer:
        """One call: a method of calls.Here."""
        work = getattr(calls.Here(kernel), way)
        results, copies = work(inputs, outputs, **how)
        if kernel.destination_passing:
            results = []
        return Answer(results=self._described(results), seen=self._described(copies))

    def seconds(self, kernel: Kernel, inputs: list, outputs: list) -> Answer:
        return Answer(seconds=calls.Here(kernel).seconds(inputs, outputs))

    def trace(self, kernel: Kernel, inputs: list, outputs: list) -> Answer:
        counts, ns = calls.Here(kernel).trace(inputs, outputs)
        return Answer(counts=dict(counts), ns=ns)

    # --- times

    def time(
        self,
        kernels: list[str],
        inputs: list,
        outputs: list,
        flipped: Sequence[Sequence],
        seed: int,
        definition: Definition,
        plan: dict,
        **how: Any,
    ) -> Answer:
        """A tier's part of a record for each of these kernels, whose calls on these
        buffers take turns. `flipped` (see `Op.flipped`) gets new values for each call.
        """
        flips = Flips(inputs, flipped, seed) if flipped else None
        refresh = values(inputs, outputs, flips)
        called: list[Any] = [self.kernels[name] for name in kernels]
        if len(called) > 1:
            called = [_Marked(self.turn, *pair) for pair in enumerate(called)]
        subjects = [
            Subject.from_kernel(kernel, inputs, outputs, refresh, definition)
            for kernel in called
        ]
        results: list[list[Result]] = []
        how["last"] = lambda tensors: results.append(self._described(tensors))
        how |= {"plan": Plan(**plan), "gpu": self.device == "cuda"}
        self._check_timer()
        records, rounds = measuring.timed(subjects, **how)
        self._check_timer()
        last = [[tensors] for tensors in results] if len(kernels) > 1 else [results]
        return Answer(records=records, rounds=rounds, last=last)

    def _check_timer(self) -> None:
        """Raises TamperedError if an algo has changed a part of the timer."""
        names = integrity.changed(self.as_it_was)
        for instance in (self, *self.kernels.values()):
            names += integrity.hidden(instance)
        if names:
            raise integrity.TamperedError(names)

    def again(self, kernel: Kernel, inputs: list, outputs: list, times: int) -> None:
        """`times` calls in a row, for a clock outside."""
        call = bound(kernel, inputs, outputs)
        for _ in range(times):
            call()
        self._settle()

    def survey(self, kernel: Kernel, inputs: list, outputs: list, l2: str) -> Answer:
        """What one call puts on the GPU."""
        return Answer(ran=survey.ran(Subject.from_kernel(kernel, inputs, outputs), l2))

    def watch(self, descriptor: int) -> None:
        """Take memory in which the number of the kernel at work is written."""
        self.turn = shared_memory.Region(8, descriptor)
        self.turn.close()


class _Marked:
    """A kernel that notes before each call whose turn it is."""

    def __init__(self, turn: shared_memory.Region, i: int, kernel: Kernel) -> None:
        self.turn = turn.bytes.numpy().data
        self.i = i
        self.kernel = kernel
        self.destination_passing = kernel.destination_passing

    @property
    def last(self) -> Any:
        return self.kernel.last

    def bind(self, inputs: list, outputs: list) -> Callable[[], None]:
        self.turn[0] = self.i
        kernel_call = bound(self.kernel, inputs, outputs)

        def call() -> None:
            self.turn[0] = self.i
            kernel_call()

        return call


def main(descriptor: int, device: str) -> None:
    line = channel.inherited(descriptor)
    code = 0
    try:
        Runner(device).serve(line)
    except SystemExit as e:  # an algo that exits by itself
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: threads that an algo left running must not delay it
