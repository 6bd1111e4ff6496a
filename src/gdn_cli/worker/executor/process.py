"""Starts a runner: as a copy of a worker that has imported torch and nothing else yet,
or as a new process.

Importing torch takes seconds of CPU time, so the usual worker does it once and forks
before it reads its request: the copy holds nothing that a runner must not see. A runner
in a sandbox, or one that replaces another, is a new process.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...errors import MissingError
from ...machine import linux, sandbox, sanitizers
from .. import exit_reasons
from ..request import Serving
from . import channel


class Forked:
    """A forked child, with the methods of Popen that a runner's client uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The return code as in Popen (-9 after SIGKILL); None while the child runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The return code, once the child has ended. Raises subprocess.TimeoutExpired
        after `timeout` seconds.
        """
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired("runner", timeout)
            time.sleep(0.001)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Started(NamedTuple):
    """A runner that has been started."""

    line: channel.Channel
    process: subprocess.Popen | Forked
    ooms: int  # fates.ooms() before the start
    wrapped: bool


def device_of(mode: str) -> str:
    return "cuda" if mode == "cuda" else "cpu"


def runner(request: Serving) -> Started:
    """A runner for a worker's request, in a sandbox if that asks for one."""
    wrap = sandbox.wrap(request.mode) if request.sandbox else ()
    env = {"FIB_CACHE_PATH": request.builds} if request.builds else {}
    if request.sanitize:
        env |= sanitizers.environment(request.sanitize, request.builds)
    return start(request.mode, wrap, env)


def start(
    mode: str, wrap: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Started:
    """A runner for a worker that runs in a mode: cuda, cpu, interpreter or emulator.
    `wrap` is put before its command line; `env` is added to its environment.
    """
    line, theirs = channel.pair()
    ooms = exit_reasons.ooms()
    command = [*wrap, sys.executable, "-m", __package__, str(theirs), device_of(mode)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(theirs,),
            env={**os.environ, **(env or {})},
        )
    except OSError as e:
        raise MissingError(f"cannot start {command[0]}: {e.strerror}") from None
    finally:
        os.close(theirs)
    return Started(line, process, ooms, bool(wrap))


def fork(mode: str) -> Started:
    """A runner that is a copy of this process: only for a worker that has not read a
    request yet, because the copy knows all that it knows. CUDA must not have been used;
    importing torch does not use it.
    """
    import flashinfer_bench  # noqa: F401  # both processes need it, and torch, which it imports
    import torch  # noqa: F401

    line, theirs = channel.pair()
    ooms = exit_reasons.ooms()
    worker = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return Started(line, Forked(pid), ooms, False)
    try:
        _become_runner(worker, theirs, mode)
    finally:
        os._exit(1)


def _become_runner(worker: int, descriptor: int, mode: str) -> None:
    """In the copy: give up the worker's descriptors and its random numbers, and serve."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    linux.end_with_parent(worker)
    linux.confine()
    from .main import main

    main(descriptor, device_of(mode))
