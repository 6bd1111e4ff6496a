"""The far side of an engine: a machine that others use too.

It says first which machine it is, refuses work for a GPU that it has not, and holds the
locks of a command that times here. A pipe is its leash: the work ends with it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from msgspec.structs import replace

from .. import __version__, errors
from ..errors import RemoteError
from ..machine import environment, inventory, locks
from . import container, wire
from .wire import Hello, Parcel, Reply
from .work import Work

# between two lines that say that a side still lives, and without any it is given up
BEAT_S = 10.0
SILENCE_S = 120.0
BEAT = b"gdn-beat\n"


def serve(
    data: bytes, keep: Callable[[bytes], None], before: Sequence[bytes] = ()
) -> bytes:
    """container.serve for one of these machines: `keep` gets its Hello too."""
    gpus = inventory.gpus()
    hello = Hello(
        host=platform.node(),
        gpus=[gpu.name for gpu in gpus],
        version=__version__,
        allocation=environment.allocation(),
    )
    keep(wire.encode(hello))
    try:
        content = wire.decode(data, Parcel)
    except RemoteError as e:
        return wire.encode(Reply(lost=f"{hello.host}: {e}"))

    work = Work([], 0, content.profiles, content.tunings)
    timed: set[str] = {p.request.mode for p in content.jobs if p.request.timing.tiers}
    cuda = work.cuda or any(p.request.mode == "cuda" for p in content.jobs)
    if cuda and not gpus:
        return wire.encode(Reply(lost=f"{hello.host} has no GPU"))

    with _locked(timed, gpus, hello, keep):
        return container.serve(data, keep=keep, before=before)


@contextlib.contextmanager
def _locked(
    timed: set[str],
    gpus: Sequence[inventory.Gpu],
    hello: Hello,
    keep: Callable[[bytes], None],
) -> Iterator[None]:
    def waits(line: str) -> None:
        keep(wire.encode(replace(hello, waits=line)))

    with contextlib.ExitStack() as locked:
        if "cuda" in timed:
            gpu = gpus[0]
            locked.enter_context(locks.gpu(gpu.uuid, waits, f"GPU {gpu.index}"))
        if "cpu" in timed:
            locked.enter_context(locks.cpu(waits))
        # what it may take counts from here
        keep(wire.encode(hello))
        yield


def serve_pipe(stdin: BinaryIO) -> int:
    """A parcel on the first line of stdin; messages as marked lines on stdout, the
    reply last. Once stdin has ended, or is silent, so does this process; the keepers
    of its workers end those. Returns the exit code.
    """
    out = os.fdopen(os.dup(1), "wb")
    # what else is printed here is no answer
    os.dup2(2, 1)
    parcel = wire.unmarked(stdin.readline())
    writing = threading.Lock()
    end = threading.Event()
    heard = [time.monotonic()]

    def write(line: bytes) -> None:
        try:
            with writing:
                out.write(line)
                out.flush()
        except OSError:
            os._exit(errors.REMOTE)

    def listen() -> None:
        # not stdin.read: its lock would be held when this process ends
        while os.read(stdin.fileno(), 4096):
            heard[0] = time.monotonic()

        os._exit(errors.REMOTE)

    def beat() -> None:
        while not end.wait(BEAT_S):
            if time.monotonic() > heard[0] + SILENCE_S:
                os._exit(errors.REMOTE)
            write(BEAT)

    threading.Thread(target=listen, daemon=True).start()
    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    reply = serve(parcel, lambda message: write(wire.marked(message)))
    end.set()
    beating.join()
    write(wire.marked(reply))
    return errors.OK
