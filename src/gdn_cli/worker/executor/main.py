"""The process that runs an algo's code, started by process.py: a copy of its worker, or
`python -m gdn_cli.worker.executor.main DESCRIPTOR DEVICE`.

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ... import bounded
from ...errors import GdnError, one_line
from ...machine import linux
from ...parsing import Json
from ..messages import Answer, Form, Result, Said
from ..timing import integrity
from . import channel

if TYPE_CHECKING:
    from . import build

# arguments that hold a call's values, including tensors
_VALUES = {"inputs", "outputs", "late", "copies"}


class Runner:
    """Kernels by name, copies of the worker's storages, and results that the worker
    still needs. The worker's commands are the methods of the same names.
    """

    def __init__(self, device: str) -> None:
        import torch

        from . import calls, shared_memory

        self.torch, self.calls, self.shared = torch, calls, shared_memory
        self.device = device  # "cuda" or "cpu"
        self.kernels: dict[str, build.Kernel] = {}
        # number -> region, block, where in it the bytes begin
        self.storages: dict[int, tuple[Any, Any, int]] = {}
        # the same object for the same form: some kernels check a tensor's identity
        self.tensors: dict[Form, Any] = {}
        self.results: dict[int, Any] = {}
        self.count = 0
        # which kernel is at work, for a worker that finds this process dead
        self.turn = shared_memory.Region(8)
        # the timer's parts before any of an algo's code has run
        self.as_it_was: integrity.State = ()

    def serve(self, line: channel.Channel) -> None:
        """Serve until the worker closes the connection."""
        with self.torch.no_grad():
            while True:
                try:
                    message, descriptors = line.receive_with(1)
                except (EOFError, OSError, channel.GarbledError):
                    return
                number = message.pop("number", 0)
                try:
                    for result, storage in message.pop("dropped", ()):
                        self.results.pop(result, None)
                        self.storages.pop(storage, None)
                    # an attribute of the instance cannot hide it
                    do = getattr(type(self), message.pop("do"))
                    if do in (Runner.share, Runner.watch) and not descriptors:
                        raise OSError(
                            errno.EMFILE, "no file descriptor is left for the harness"
                        )
                    answer = do(self, *descriptors, **self._meant(message)) or Answer()
                except integrity.TamperedError as e:
                    answer = Answer(replaced=e.names)
                except Exception as e:
                    answer = Answer(raised=self._raised(e))
                answer.number = number
                line.send(bounded.clipped(msgspec.to_builtins(answer)))

    def _raised(self, e: Exception) -> Said:
        """An exception, classified by its kind."""
        from .. import timing
        from .build import BuildFailedError

        kinds = {
            "build_failed": isinstance(e, BuildFailedError),
            "out_of_memory": self.calls.out_of_memory(e),
            "tier_unavailable": isinstance(e, timing.TierUnavailableError),
            "refused": isinstance(e, GdnError),
            "lookup": isinstance(e, LookupError),
        }
        kind = next((kind for kind, so in kinds.items() if so), "error")
        if kind == "out_of_memory" and self.device == "cuda":
            self.torch.cuda.empty_cache()
        trace = "".join(traceback.format_exception(e)).splitlines()[-12:]
        return Said(
            text=str(e),
            line=one_line(e),
            trace=trace,
            kind=kind,
            missing=getattr(e, "missing", False),
        )

    # --- tensors

    def share(self, descriptor: int, storage: int, nbytes: int, place: int) -> None:
        """Add a storage of the worker's: it gets a copy here, whose bytes travel
        through this memory. With a negative `place` it only receives a result.
        """
        region = self.shared.Region(nbytes, descriptor)
        region.close()
        if place < 0:
            self.storages[storage] = region, None, 0
            return
        block, begin = self.shared.room(nbytes, self.device, place)
        self.storages[storage] = region, block[begin : begin + nbytes], begin

    def forget(self) -> None:
        """Drop all storages and results; the kernels stay."""
        self.storages.clear()
        self.tensors.clear()
        self.results.clear()
        for kernel in self.kernels.values():
            kernel.last = None
        if self.device == "cuda":
            self.torch.cuda.empty_cache()

    def push(self, storages: list[int]) -> None:
        for number in storages:
            region, block, _ = self.storages[number]
            block.data.copy_(region.bytes)
        self._settle()

    def pull(self, storages: list[int], results: list[list[int]] = ()) -> None:
        """Copy to the worker: whole storages, and results, each into its own storage."""
        for number in storages:
            region, block, _ = self.storages[number]
            region.bytes.copy_(block)
        for number, storage in results:
            x = self.results[number]
            if x.numel():
                region = self.storages[storage][0]
                region.bytes.view(x.dtype)[: x.numel()].view(x.shape).copy_(x)
        self._settle()

    def _settle(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def _meant(self, message: Json) -> Json:
        """A command's arguments, with names replaced by kernels and forms by tensors."""
        if "kernel" in message:
            message["kernel"] = self.kernels[message["kernel"]]
        for name in _VALUES & set(message):
            values = message[name]
            message[name] = [
                self._tensor(msgspec.convert(x, Form)) if isinstance(x, dict) else x
                for x in values
            ]
        return message

    def _tensor(self, form: Form) -> Any:
        if form not in self.tensors:
            _, block, begin = self.storages.get(form.storage, (None, None, 0))
            self.tensors[form] = self.shared.formed(form, block, begin, self.device)
        return self.tensors[form]

    def _described(self, results: Any) -> list[Result]:
        """The returned values, each with a number by which the worker can ask for its bytes."""
        found = []
        for x, odd in zip(results, self.calls.Here.odd(None, results), strict=True):
            if not isinstance(x, self.torch.Tensor):
                found.append(Result(type=type(x).__name__))
                continue
            self.count += 1
            self.results[self.count] = x
            shape, dtype, device = self.calls.described(x)
            address = x.data_ptr() if odd is None else 0
            found.append(
                Result(
                    number=self.count,
                    shape=shape,
                    dtype=dtype,
                    device=device,
                    odd=odd,
                    address=address,
                )
            )
        return found

    # --- kernels

    def build(
        self,
        name: str,
        definition: dict,
        solution: dict,
        specific: bool = False,
        prove: bool = False,
        setup: str | None = None,
    ) -> Answer:
        from . import prepared, signature

        self.as_it_was = self.as_it_was or integrity.state(self.device)
        began = time.perf_counter()
        kernel = prepared.built(definition, solution, setup, specific=specific)
        self.kernels[name] = kernel
        build_s = time.perf_counter() - began
        proof = (
            signature.match(kernel.entry_point, definition, solution) if prove else None
        )
        return Answer(
            destination_passing=kernel.destination_passing, build_s=build_s, proof=proof
        )

    def backend(self, kernel: Any, inputs: list) -> Answer:
        """Which path the algo says it takes for these inputs; None if it does not say."""
        found = kernel.backend(inputs)
        return Answer(backend=None if found is None else str(found))

    def run(self, kernel: Any, inputs: list, outputs: list) -> Answer:
        return self._returned(kernel, self.calls.Here(kernel).run(inputs, outputs))

    def late(
        self,
        kernel: Any,
        inputs: list,
        outputs: list,
        late: list,
        zeroed: list,
        copies: list,
    ) -> Answer:
        return self._returned(
            kernel, self.calls.Here(kernel).late(inputs, outputs, late, zeroed, copies)
        )

    def at_return(self, kernel: Any, inputs: list, outputs: list) -> Answer:
        results, seen = self.calls.Here(kernel).at_return(inputs, outputs)
        answer = self._returned(kernel, results)
        answer.seen = self._described(seen)
        return answer

    def _returned(self, kernel: Any, results: list) -> Answer:
        return Answer(
            results=[] if kernel.destination_passing else self._described(results)
        )

    def seconds(self, kernel: Any, inputs: list, outputs: list) -> Answer:
        return Answer(seconds=self.calls.Here(kernel).seconds(inputs, outputs))

    def trace(self, kernel: Any, inputs: list, outputs: list) -> Answer:
        ran, took = self.calls.Here(kernel).trace(inputs, outputs)
        return Answer(counts=dict(ran), ns=took)

    # --- times

    def time(
        self,
        kernel: Any,
        inputs: list,
        outputs: list,
        definition: dict,
        tier: str,
        flipped: list[list],
        seed: int,
        **how: Any,
    ) -> Answer:
        """One tier's part of a record, for calls on these buffers; `flipped` (see
        `Op.flipped`) gets new values for each.
        """
        from ..timing import Plan, Subject
        from . import measuring

        self._intact()
        results: list[list[Result]] = []
        refresh = self._changing(inputs, outputs, flipped, seed)
        subject = Subject.of(
            kernel, inputs, outputs, refresh=refresh, definition=definition
        )
        found = measuring.timed(
            tier,
            subject,
            Plan(**how.pop("plan")),
            gpu=self.device == "cuda",
            last=lambda tensors: results.append(self._described(tensors)),
            **how,
        )
        self._intact()
        return Answer(records=[found], last=results)

    @staticmethod
    def _changing(inputs: list, outputs: list, flipped: list[list], seed: int) -> Any:
        """What gives these buffers the values of the next call."""
        from ..timing.flips import Flips
        from ..timing.subject import values

        return values(
            inputs, outputs, Flips(inputs, flipped, seed) if flipped else None
        )

    def again(self, kernel: Any, inputs: list, outputs: list, times: int) -> None:
        """`times` calls in a row, for a clock outside."""
        from ..timing.subject import bound

        call = bound(kernel, inputs, outputs)
        for _ in range(times):
            call()
        self._settle()

    def turns(
        self,
        kernels: list[str],
        inputs: list,
        outputs: list,
        flipped: list[list],
        seed: int,
        tier: str,
        plan: dict,
        own: int,
    ) -> Answer:
        """Several kernels on the same buffers, their calls taking turns; `flipped` (see
        `Op.flipped`) gets new values for each.
        """
        from ...records import statistics
        from .. import timing
        from ..timing import Plan, Subject
        from . import measuring

        self._intact()
        plan = Plan(**plan)
        results: list[list[Result]] = []
        refresh = self._changing(inputs, outputs, flipped, seed)
        subjects = [
            Subject.of(
                _Marked(self.turn, i, self.kernels[name]),
                inputs,
                outputs,
                refresh=refresh,
            )
            for i, name in enumerate(kernels)
        ]
        enough = (
            (lambda each: statistics.enough(*each, target=plan.target))
            if len(kernels) > 1
            else None
        )
        with measuring.Watch(plan, self.device == "cuda", own) as watch:
            timings, rounds = timing.interleave(
                tier,
                subjects,
                plan,
                watch,
                enough,
                lambda tensors: results.append(self._described(tensors)),
            )
        records = [watch.measured(timed) for timed in timings]
        self._intact()
        return Answer(records=records, rounds=rounds, last=results)

    def survey(
        self, kernel: Any, inputs: list, outputs: list, definition: dict, l2: str
    ) -> Answer:
        """What one call puts on the GPU."""
        from ..timing import Subject
        from . import survey

        subject = Subject.of(kernel, inputs, outputs, definition=definition)
        return Answer(ran=survey.ran(subject, l2))

    def watch(self, descriptor: int) -> None:
        """Take memory in which the number of the kernel at work is written."""
        self.turn = self.shared.Region(8, descriptor)
        self.turn.close()

    def _intact(self) -> None:
        """Raises TamperedError if an algo has changed a part of the timer."""
        hidden = [
            name
            for each in (self, *self.kernels.values())
            for name in integrity.hidden(each)
        ]
        if names := integrity.changed(self.as_it_was) + hidden:
            raise integrity.TamperedError(names)


class _Marked:
    """A kernel that notes before each call whose turn it is."""

    def __init__(self, turn: Any, i: int, kernel: Any) -> None:
        self.turn, self.i, self.kernel = memoryview(turn.bytes.numpy()), i, kernel
        self.destination_passing = kernel.destination_passing

    @property
    def last(self) -> Any:
        return self.kernel.last

    def bind(self, inputs: list, outputs: list) -> Callable[[], None]:
        from ..timing.subject import bound

        self.turn[0] = self.i
        kernel_call = bound(self.kernel, inputs, outputs)

        def call() -> None:
            self.turn[0] = self.i
            kernel_call()

        return call


def main(descriptor: int, device: str, worker: int = 0) -> None:
    linux.end_with_parent(worker)
    linux.confine()
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
