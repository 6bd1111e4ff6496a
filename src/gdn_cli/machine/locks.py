"""One holder per GPU, and one for the CPUs: two commands that time on one device at
once would disturb each other.

The lock is flock's on a file that all users of this machine share: the kernel releases
it however its holder ends, and a file that is left over means nothing. It does not work
across containers that have their own /tmp.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import stat
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from ..text import shown

_POLL_S = 0.1
_held: dict[Path, int] = {}  # this process's locks: file -> descriptor
_umask = threading.Lock()  # the process has one umask for all of its threads

Says = Callable[[str], None]
GivenUp = Callable[[], bool]


def shared(
    key: str, waiting: Says, name: str = "", given_up: GivenUp = lambda: False
) -> AbstractContextManager[None]:
    """Hold the lock `key`, shared by all users of this machine; see `hold`. `name` is
    the key by default.
    """
    return hold(_file(key), waiting, name or key, given_up, tell=True)


gpu = shared  # a GPU's key is its UUID, as NVML has it ("GPU-..." or "MIG-...")


def cpu(
    waiting: Says, given_up: GivenUp = lambda: False
) -> AbstractContextManager[None]:
    """`shared` for all CPUs of this machine: otherwise two commands' threads would be
    put on the same CPUs. A command that also needs a GPU takes the CPU lock first, so
    that no two wait for each other.
    """
    return shared("cpu", waiting, "the CPU", given_up)


@contextmanager
def hold(
    path: Path,
    waiting: Says,
    name: str,
    given_up: GivenUp = lambda: False,
    tell: bool = False,
) -> Iterator[None]:
    """Hold the lock on a file, waiting as long as it takes; Ctrl-C and SIGTERM end the
    wait as usual.

    waiting   is called once with a line that says who holds the lock, or why there is
      none; then the block runs
              without it
    name      the lock's name in that line, such as "GPU 0"
    given_up  is called during the wait: True ends it with KeyboardInterrupt, which only
      the main thread gets by itself
    tell      whether a line is worthwhile if there is no lock

    Within one process a second holder of the same file goes straight through.
    """
    if path in _held:
        yield
        return
    try:
        _held[path] = _take(
            path,
            lambda holder: waiting(f"{name} is in use by {holder}; waiting"),
            given_up,
        )
    except _NoLockError as e:
        if tell:
            waiting(f"no lock on {name} ({e}): another command may use it meanwhile")
    try:
        yield
    finally:
        # also None in a forked child, whose copy is already closed
        if (fd := _held.pop(path, None)) is not None:
            _free(fd)


class _NoLockError(Exception):
    """No lock can be had here; the message says why."""


def _file(key: str) -> Path:
    """The lock's file. /tmp and not TMPDIR, which can differ between users;
    GDN_LOCK_DIR moves it, for tests.
    """
    folder = os.environ.get("GDN_LOCK_DIR") or (
        "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    )
    # old names of MIG slices have slashes
    return Path(folder) / f"gdn-{re.sub(r'[^A-Za-z0-9.-]', '_', key)}.lock"


def _take(path: Path, busy: Says, given_up: GivenUp) -> int:
    """The descriptor that holds the lock on `path`; `busy(holder)` is called once if
    another one has it.
    """
    announced = False
    while True:
        fd = _open(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # otherwise /tmp was just cleaned, and the next command would lock another
            # file
            if _is_still(path, fd):
                _sign(fd)
                return fd
            holder = None
        except BlockingIOError:
            holder = _holder(fd)
        except OSError as e:  # a file system without locks
            os.close(fd)
            raise _NoLockError(f"{path}: {e.strerror}") from None
        os.close(fd)
        if holder is None:
            continue
        if not announced:
            busy(holder)
            announced = True
        if given_up():
            raise KeyboardInterrupt
        time.sleep(_POLL_S)


def _open(path: Path) -> int:
    """Open the file, created for all users if it does not exist; it must be a plain
    file, whoever made it.

    Other users can put anything at this name: through a link we would write into its
    target. The first attempt is without O_CREAT, because in a sticky folder the kernel
    refuses that for another user's file (fs.protected_regular).
    """
    # Python adds O_CLOEXEC: child programs do not get the descriptor
    flags = os.O_RDWR | os.O_NOFOLLOW
    try:
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            fd = _create(path, flags)
    except OSError as e:
        raise _NoLockError(f"{path}: {e.strerror}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise _NoLockError(f"{path}: not a plain file")
    return fd


def _create(path: Path, flags: int) -> int:
    """Create the file with its permissions set from the start: a later chmod would
    leave a gap for other users.
    """
    with _umask:
        umask = os.umask(0)
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:  # another command created it first
            return os.open(path, flags)
        finally:
            os.umask(umask)


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


class _Holder(msgspec.Struct):
    """The contents of a lock's file: who holds it."""

    pid: Annotated[int, msgspec.Meta(ge=0, lt=10**10)]
    command: str


def _sign(fd: int) -> None:
    """Write who holds it over what an earlier holder wrote; on a full disk only the
    name is lost, not the lock.
    """
    command = textwrap.shorten(
        shlex.join(["gdn", *sys.argv[1:]]), 60, placeholder=" ..."
    )
    # argv may not be UTF-8
    text = json.dumps({"pid": os.getpid(), "command": command})
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)


def _holder(fd: int) -> str:
    """`gdn bench ...` (pid 123), as far as the file says; any user may have written it."""
    try:
        holder = msgspec.json.decode(os.pread(fd, 4096, 0), type=_Holder)
    # or its holder has just started
    except (msgspec.MsgspecError, ValueError, RecursionError, OSError):
        return "another command"
    command = shown(holder.command[:80]).replace("`", "")
    return f"`{command}` (pid {holder.pid})"


def _free(fd: int) -> None:
    with suppress(OSError):
        os.ftruncate(fd, 0)
    # closing does not unlock while a child forked by C code has a copy
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _forget() -> None:
    """In a forked child: a copy of the descriptor would hold the lock for as long as
    the child lives.
    """
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_forget)
