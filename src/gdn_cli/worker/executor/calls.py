"""What can be done with a kernel in its own process: call it, look at its results at
the moment of the return, make its inputs late, time one call, list the kernels that it
runs.

`client.Kernel` has the same methods and asks a runner, which has a `Here`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import one_line
from ..timing import TierUnavailableError

# arguments of a command that hold a call's values, including tensors
VALUES = {"inputs", "outputs", "late", "copies"}
# GPU cycles until late inputs come: 20 ms at 2 GHz, longer than most calls take to
# launch
_HEAD_START = 40_000_000


@dataclass(frozen=True)
class Strange:
    """A result that is not the expected tensor, as the runner describes it."""

    form: str


def form(shape: Sequence[int], dtype: Any, device: Any) -> str:
    """A tensor's form, such as "(2, 8) float32 on cpu"."""
    return f"{tuple(shape)} {dtype} on {device}".replace("torch.", "")


def described(x: Any) -> str:
    """A tensor's form; for anything else the name of its type."""
    if isinstance(x, Tensor):
        return form(x.shape, x.dtype, x.device)
    return x.form if isinstance(x, Strange) else type(x).__name__


def out_of_memory(e: BaseException) -> bool:
    """Whether memory ran out; torch's CPU allocator raises a plain RuntimeError."""
    kinds = MemoryError, torch.cuda.OutOfMemoryError
    return isinstance(e, kinds) or "can't allocate memory" in str(e)


def odd(x: Any) -> str | None:
    """The name of a result's type, if that is a tensor that may be computed only when it
    is read.
    """
    plain = (Tensor, torch.nn.Parameter)
    return type(x).__name__ if isinstance(x, Tensor) and type(x) not in plain else None


# a call's outputs, given or returned by the kernel, and copies of them that were made
# at once
Called = tuple[list, list]


class Here:
    """A kernel of this process: a build.Kernel, or anything called like one."""

    odd = staticmethod(odd)

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.destination_passing = kernel.destination_passing

    def run(self, inputs: list, outputs: list) -> Called:
        """One complete call."""
        results = self._call(inputs, outputs)
        if _on_gpu(inputs):
            torch.cuda.synchronize()
        return results, []

    def _call(self, inputs: list, outputs: list) -> list:
        if not self.destination_passing:
            return self.kernel.returns(inputs)
        self.kernel(inputs, outputs)
        return outputs

    def at_return(self, inputs: list, outputs: list) -> Called:
        """One call on a CPU: its results, and copies of them as they were when it returned.

        `string_at` copies without releasing the interpreter's lock, and with a long
        switch interval no other thread runs between the return and the copies: a thread
        that the kernel left running has no time to finish.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(0.2)
        try:
            results = self._call(inputs, outputs)
            memory = [_bytes(x) if isinstance(x, Tensor) else None for x in results]
        finally:
            sys.setswitchinterval(interval)
        copies = []
        for out, kept in zip(results, memory, strict=True):
            if kept is not None and out.numel():
                raw, offset = kept
                flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
                out = flat.view(out.dtype).as_strided(out.shape, out.stride(), offset)
            copies.append(out)
        return results, copies

    def late(
        self,
        inputs: list,
        outputs: list,
        *,
        late: list,
        zeroed: Sequence[int],
        copies: list,
    ) -> Called:
        """One call on a GPU whose inputs become right late on the current stream.

        late    the inputs' values, written on the stream after a wait, right before the call
        zeroed  which inputs hold zeros until then
        copies  receive the results, copied on the stream right after the call

        The stream is not the default one, so that work on the legacy stream also counts
        as elsewhere.
        """
        side = _side_stream()
        for i in zeroed:
            inputs[i].data.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(_HEAD_START)
            for x, value in zip(inputs, late, strict=True):
                if isinstance(x, Tensor):
                    x.data.copy_(value)
            results = self._call(inputs, outputs)
            for copy, out in zip(copies, results, strict=False):
                if isinstance(out, Tensor) and out.shape == copy.shape:
                    copy.copy_(out)
        torch.cuda.synchronize()
        return results, []

    def seconds(self, inputs: list, outputs: list) -> float:
        """How long one call takes on the host's clock, from idle to idle."""
        gpu = _on_gpu(inputs)
        if gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        results = self._call(inputs, outputs)
        if gpu:
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        del results
        return took

    def trace(self, inputs: list, outputs: list) -> tuple[Counter[str], int]:
        """What one call runs on the GPU: kernels and copies by name, and the sum of
        their times in ns.

        Raises LookupError if no trace can be taken.
        """
        # imports Triton kernels, which a CPU does not need
        from ..timing.trace import Trace

        torch.cuda.synchronize()
        results: list = []

        def work() -> None:
            results.append(self._call(inputs, outputs))
            torch.cuda.synchronize()

        try:
            with closing(Trace()) as trace:
                ran = trace.kernels(work)
        except TierUnavailableError as e:
            raise LookupError(one_line(e)) from e
        if not ran:
            raise LookupError("nothing in the trace")
        counts = Counter(name for _, _, name in ran)
        return counts, sum(duration for _, duration, _ in ran)


class Scaling:
    """Other values in the same buffers: the linear inputs times -1, 1/2, -1/2, 1, ...
    Never more than 1: the contest's rule has an absolute part, which a result twice as
    large would fail at half the error. Without linear inputs the values stay.
    """

    def __init__(self, linear: list) -> None:
        self.linear = linear
        self.scale = 1.0
        self.turn = 0

    def __call__(self) -> None:
        if not self.linear:
            return
        scale = (-1.0, 0.5, -0.5, 1.0)[self.turn % 4]
        self.turn += 1
        for x in self.linear:
            x.mul_(scale / self.scale)
        self.scale = scale


def _on_gpu(inputs: list) -> bool:
    return any(isinstance(x, Tensor) and x.is_cuda for x in inputs)


def _bytes(x: Tensor) -> tuple[bytes, int]:
    """The memory of a tensor's storage, and how many elements come before the tensor's first."""
    if x.is_contiguous():
        return ctypes.string_at(x.data_ptr(), x.nbytes), 0
    storage = x.untyped_storage()
    memory = ctypes.string_at(storage.data_ptr(), storage.nbytes())
    return memory, int(x.storage_offset())


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """One stream for the whole process: torch reuses 32 streams in rotation, and a
    kernel must not get this one.
    """
    return torch.cuda.Stream()
