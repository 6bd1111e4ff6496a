"""The one way in which gdn writes a file for its user.

A plain file is written whole beside the place where it belongs, and then renamed: whatever happens on the way (a full
disk, Ctrl-C, a power cut), the place has the old file or the new one. A link is followed to where it leads. A device, a
pipe, /dev/stdout and /dev/fd/N are streams: what is written flows into them, and they stay what they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import GdnError, MissingError, UsageError

OTHER_PLACE = "-o FILE names another place"
# What is this machine's fault, and not that of the name that was given.
MACHINE = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "EMFILE", "ENFILE", "ENOMEM", "ESTALE")
    if hasattr(errno, name)
)
_LINKS = 40  # a chain of more is a loop: as many as Linux follows
# the folder of a process's open files: links in it are the files themselves, and not to be followed
_OPEN_FILES = re.compile(r"/dev/fd|/proc/(?P<pid>\d+)(/task/\d+)?/fd")


@dataclass(frozen=True)
class Place:
    """Where a name leads to."""

    path: Path
    stream: bool  # written into, never replaced
    descriptor: int | None = None  # the stream is one that this process has open


def write(
    path: Path,
    content: str | bytes,
    *,
    within: Path | None = None,
    hint: str | None = OTHER_PLACE,
    sync: bool = True,
) -> None:
    """Write a file whole or not at all, with the rights of the one that it replaces; text as UTF-8.

    within  a folder that must hold the file, links followed
    hint    what the user may do where it cannot be written
    sync    wait until the disk has it; without, a power cut may cost the new file (not the old one)

    Raises UsageError for a name that cannot be written: a folder, a link to nothing, no permission. MissingError where
    the machine is at fault: the disk is full, read-only or broken. Both leave an older file as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    with opened(path, within=within, hint=hint, sync=sync) as file:
        file.write(data)


@contextlib.contextmanager
def opened(
    path: Path, *, within: Path | None = None, hint: str | None = OTHER_PLACE, sync: bool = True
) -> Iterator[BinaryIO]:
    """The same for what is written piece by piece: it is in its place once the block has ended without an error."""
    to = place(path, within=within, hint=hint)
    if not to.stream:
        with beside(path, within=within, hint=hint, sync=sync) as temporary, temporary.open("wb") as file:
            yield file
        return
    with _told(path, hint):
        if to.descriptor is None:
            descriptor = os.open(to.path, os.O_WRONLY | os.O_APPEND)  # without O_CREAT: it is there, or it is an error
        else:
            for printed in (sys.stdout, sys.stderr):
                printed.flush()  # what was printed before comes before it
            descriptor = os.dup(to.descriptor)
        with os.fdopen(descriptor, "wb") as file:
            yield file


@contextlib.contextmanager
def beside(
    path: Path, *, within: Path | None = None, hint: str | None = OTHER_PLACE, sync: bool = True, mark: str = ""
) -> Iterator[Path]:
    """A new, empty file beside `path`, for a library that writes to a name; it takes the place when the block ends.

    `mark` gives it the same name every time, so that what a killed command left is overwritten by the next.
    """
    target = place(path, within=within, hint=hint).path
    with _told(path, hint):
        temporary, old = _temporary(target, mark), target.stat() if target.exists() else None
        try:
            yield temporary
            _finish(temporary, old, sync)
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def append(path: Path, text: str) -> None:
    """Put lines behind a file of gdn's own. Raises as `write` does; a part of them may be there then."""
    with _told(path, "GDN_HOME names another place"), path.open("ab") as file:
        file.write(text.encode())


def check(path: Path, *, hint: str | None = OTHER_PLACE) -> None:
    """Raise what `write` would raise, as far as that can be known without writing anything; its folder is made."""
    to = place(path, hint=hint)
    with _told(path, hint):
        if to.descriptor is not None:
            os.close(os.dup(to.descriptor))
        elif to.stream:
            if not os.access(to.path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            _temporary(to.path, "").unlink()


def is_stdout(path: Path) -> bool:
    """Whether a name leads to this process's standard output, which then has to carry nothing else."""
    return place(path).descriptor == 1


def inside(path: Path, folder: Path) -> bool:
    """Whether a path, once links are followed, lies in a folder. What is not there yet counts by its name."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def place(path: Path, *, within: Path | None = None, hint: str | None = OTHER_PLACE) -> Place:
    """Where a name leads; UsageError for what can be no file: a folder, a disk, a socket, a link to nothing."""
    with _told(path, hint):
        to = _place(path)
    if within is not None and (to.stream or not inside(to.path, within)):
        raise UsageError(f"{path} leads out of {within}; nothing is written there", hint="name a file in that folder")
    return to


def failure(what: object, e: OSError, hint: str | None = None) -> GdnError:
    """The one line for a thing that cannot be written: this machine's fault (exit 3), or the name's (exit 2)."""
    kind = MissingError if e.errno in MACHINE else UsageError
    return kind(f"cannot write {what}: {e.strerror or e}", hint=hint)


@contextlib.contextmanager
def _told(path: Path, hint: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise failure(path, e, hint) from None


def _place(path: Path) -> Place:
    here, linked = os.fspath(path), os.path.islink(path)
    with contextlib.suppress(FileNotFoundError):
        os.stat(here)  # the kernel refuses a circle, and another user's link in a folder that all may write to
    for _ in range(_LINKS):
        folder = os.path.realpath(os.path.dirname(here) or os.curdir)
        name = os.path.basename(here)
        here = os.path.join(folder, name)
        if (found := _OPEN_FILES.fullmatch(folder)) and name.isdigit():
            own = found["pid"] is None or int(found["pid"]) == os.getpid()
            return Place(Path(here), True, int(name) if own else None)
        if not os.path.islink(here):
            break
        here = os.path.join(folder, os.readlink(here))
    else:
        raise OSError(errno.ELOOP, "its links lead in a circle")
    try:
        mode = os.stat(here).st_mode
    except FileNotFoundError:
        if linked:
            raise FileNotFoundError(errno.ENOENT, f"it is a link to {here}, which is not there") from None
        return Place(Path(here), False)
    if stat.S_ISREG(mode):
        return Place(Path(here), False)
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        return Place(Path(here), True)
    what = {stat.S_IFDIR: "a folder", stat.S_IFBLK: "a disk", stat.S_IFSOCK: "a socket"}.get(stat.S_IFMT(mode))
    raise OSError(errno.EINVAL, f"it is {what or 'no plain file'}")


def _temporary(target: Path, mark: str) -> Path:
    """A new file beside `target`, with the rights that the umask leaves. Nobody can have put a link at its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is not to be written to")
    path = target.with_name(f".{target.name[:80]}.{mark or secrets.token_hex(4)}")
    if mark:
        path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return path


def _finish(temporary: Path, old: os.stat_result | None, sync: bool) -> None:
    """Give the new file the old one's owner and rights, and the disk the time to take it."""
    if old:
        if hasattr(os, "chown"):
            with contextlib.suppress(OSError):  # only root may give a file away
                os.chown(temporary, old.st_uid, old.st_gid)
        os.chmod(temporary, stat.S_IMODE(old.st_mode))
    if sync:
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that knows no waiting
                raise
        finally:
            os.close(descriptor)
