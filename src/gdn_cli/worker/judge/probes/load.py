"""Other work on the machine while a kernel is called: a race often needs its threads to
be interrupted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator

import torch

_BYTES = 1 << 20  # checked at a time, without the interpreter's lock
_SIDE = 2048  # of the matrices on a GPU: a product takes tens of microseconds


@contextlib.contextmanager
def busy(gpu: bool) -> Iterator[None]:
    """Keep every CPU busy, and the GPU if the kernel runs there, until the end of the `with`."""
    over = threading.Event()
    works = [_on_cpu] * (os.cpu_count() or 1) + [_on_gpu] * gpu
    threads = [
        threading.Thread(target=work, args=(over.is_set,), daemon=True)
        for work in works
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _on_cpu(over: Callable[[], bool]) -> None:
    data = bytes(_BYTES)
    while not over():
        zlib.crc32(data)


def _on_gpu(over: Callable[[], bool]) -> None:
    a = torch.ones(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        while not over():
            torch.mm(a, a, out=product)
            stream.synchronize()
