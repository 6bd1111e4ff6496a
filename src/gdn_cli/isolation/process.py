"""Starts a runner. Imports no torch: worker and runner import it side by side, which takes each of them seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from .. import fates
from ..errors import MissingError
from ..request import Serving
from . import channel, sandbox


class Started(NamedTuple):
    """A runner that has been started."""

    line: channel.Channel
    process: subprocess.Popen
    ooms: int  # fates.ooms() from before
    wrapped: bool


def of(request: Serving) -> Started:
    """A runner for a worker's request, in a sandbox where that asks for one."""
    return start(request.mode, sandbox.wrap(request.mode) if request.sandbox else (), request.builds)


def start(mode: str, wrap: Sequence[str] = (), builds: str | None = None) -> Started:
    """A runner for a worker that runs in a mode: cuda, cpu or interpreter. `wrap` goes in front of its command line;
    `builds` is where it keeps what it compiles."""
    line, theirs = channel.pair()
    ooms = fates.ooms()
    command = [
        *wrap,
        sys.executable,
        "-m",
        "gdn_cli.isolation.runner",
        str(theirs),
        "cuda" if mode == "cuda" else "cpu",
    ]
    env = dict(os.environ) | ({"FIB_CACHE_PATH": builds} if builds else {})
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs,), env=env)
    except OSError as e:
        raise MissingError(f"cannot start {command[0]}: {e.strerror}") from None
    finally:
        os.close(theirs)
    return Started(line, process, ooms, bool(wrap))
