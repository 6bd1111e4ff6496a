"""The floors: what this machine needs, in the same run, to move an op's bytes, to
launch nothing, to copy a lot.

The copy moves the op's bytes (each input once, each output once; of a pool only the
slots in use), half of them read and half written. The fastest of several plain copies
counts, so that the floor belongs to the machine and not to one copy loop.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...catalog.ops import ITEMSIZE, Op, TensorSpec
from ...records.statistics import centre
from .measurement import interleave
from .subject import Call, Subject
from .tier import Plan, TierUnavailableError

Copy = Callable[[Tensor, Tensor], Any]

# read and written together: far beyond any cache
_RATE_BYTES = {"cuda": 2 * 2**30, "cpu": 2 * 2**28}
_TRIES = 20  # samples of each candidate in the search

# floats per CTA, warps per CTA, streaming hints for the caches or not. Small shares
# spread a small batch over all SMs, large ones save launches.
_COPIES = [
    (block, warps, stream)
    for block, warps in (
        (512, 1),
        (1024, 1),
        (1024, 2),
        (1024, 4),
        (2048, 2),
        (2048, 4),
        (4096, 4),
        (4096, 8),
    )
    for stream in (False, True)
]


def bytes_moved(op: Op, axes: dict[str, int]) -> int:
    """Each input read once and each output written once, in bytes."""
    return sum(bytes_of(op, specs, axes) for specs in (op.inputs, op.outputs))


def bytes_of(op: Op, specs: dict[str, TensorSpec], axes: dict[str, int]) -> int:
    """The bytes of these tensors that a call moves, each once."""
    return sum(
        math.prod(op.moved(spec, axes)) * ITEMSIZE[spec.dtype]
        for spec in specs.values()
    )


def fastest_copy(nbytes: int, mode: str, l2: str = "cold") -> tuple[Subject, str]:
    """The fastest plain copy that moves `nbytes` (read and written together), and its
    description.
    """
    half = max(round(nbytes / 2 / 16384), 1) * 16384  # whole CTAs of every candidate
    candidates = _on_gpu(half // 4) if mode == "cuda" else _on_cpu()
    source, target = _buffers(half, mode)
    subjects = [_subject(copy, source, target) for copy in candidates.values()]
    # the chosen one is timed again
    samples = _race(subjects, mode, Plan(iterations=_TRIES, in_a_row=True, l2=l2))
    best = min(range(len(subjects)), key=lambda i: centre(samples[i]))
    return subjects[best], list(candidates)[best]


def _buffers(nbytes: int, mode: str) -> tuple[Tensor, Tensor]:
    source = torch.ones(nbytes // 4, device="cuda" if mode == "cuda" else "cpu")
    return source, torch.empty_like(source)


def _subject(copy: Copy, source: Tensor, target: Tensor) -> Subject:
    def bind(inputs: list, outputs: list) -> Call:
        return lambda: copy(inputs[0], outputs[0])

    return Subject(bind([source], [target]), [source], [target], rebuild=bind)


def _race(subjects: list[Subject], mode: str, plan: Plan) -> list[list[float]]:
    """Samples of all of them, taken in turns, in the first available tier; on a CPU one
    after the other, because the threads of one copy would still be spinning when the
    next begins.
    """
    if mode != "cuda":
        return [interleave("wall", [subject], plan)[1][0] for subject in subjects]
    try:
        return interleave("cupti", subjects, plan)[1]
    except TierUnavailableError:
        return interleave("events", subjects, plan)[1]


def empty(mode: str) -> Subject:
    """The shortest possible call: an empty kernel, or on a CPU an empty function."""
    if mode != "cuda":
        return _fixed(lambda: None)
    from .kernels import gdn_empty

    return _fixed(lambda: gdn_empty[(1,)]())


def _fixed(call: Call) -> Subject:
    return Subject(call, [], [], rebuild=lambda inputs, outputs: call)


def large_copy(mode: str) -> tuple[Subject, int]:
    """torch's copy of so many bytes that only the memory's rate matters; also the
    number of bytes read and written.
    """
    nbytes = _RATE_BYTES[mode]
    return _subject(_torch_copy, *_buffers(nbytes // 2, mode)), nbytes


@lru_cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads())


def _on_cpu() -> dict[str, Copy]:
    threads = torch.get_num_threads()

    # ctypes releases the interpreter lock
    def memcpy(target: int, source: int, count: int) -> None:
        ctypes.memmove(target, source, count)

    def in_parts(source: Tensor, target: Tensor) -> None:
        size = source.nbytes
        part = -(-size // threads)
        starts = range(0, size, part)
        list(
            _pool().map(
                lambda s: memcpy(
                    target.data_ptr() + s, source.data_ptr() + s, min(part, size - s)
                ),
                starts,
            )
        )

    return {
        "memcpy": lambda source, target: memcpy(
            target.data_ptr(), source.data_ptr(), source.nbytes
        ),
        f"memcpy, {threads} threads": in_parts,
        "torch copy_": _torch_copy,
    }


def _torch_copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _on_gpu(count: int) -> dict[str, Copy]:
    from .kernels import gdn_copy_floor

    def copy(block: int, warps: int, stream: bool) -> Copy:
        grid = (count // block,)
        return lambda source, target: gdn_copy_floor[grid](
            source, target, block, stream, num_warps=warps
        )

    return {
        f"copy kernel, {block} floats a CTA of {warps} warps{', streaming' if stream else ''}": (
            copy(block, warps, stream)
        )
        for block, warps, stream in _COPIES
        if count % block == 0
    }
