"""How gdn reads and writes files for its user.

Only plain files are read, up to a size: a pipe or a device may have no end, or never begin.

A plain file is written whole next to its destination and then renamed: whatever happens
on the way (a full disk, Ctrl-C, a power cut), the destination is the old file or the
new one. Links are followed. A device, a pipe and this process's stdout are streams: the
data is written into them and they are not replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import GdnError, MissingError, UsageError

OTHER_PLACE = "-o FILE names another place"
# Errors of this machine, not of the name that was given.
MACHINE = frozenset(
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EFBIG EROFS EIO ESTALE EMFILE ENFILE ENOMEM EAGAIN".split()
)
# the last: no more processes
_LIMITS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
LIMITS_HINT = (
    "`ulimit -a` shows the limits: files (-n), processes and threads (-u), memory (-v)"
)
# bytes of a file that is read: long records and data sets have tens of MiB
MOST = 256 << 20


@dataclass(frozen=True)
class Destination:
    """Where a name leads."""

    path: Path
    stream: bool  # written into, never replaced
    stdout: bool = False  # the stream is this process's standard output


def read(path: Path, most: int = MOST) -> bytes:
    """The content of a plain file of at most `most` bytes; links are followed. Raises OSError for
    anything else, with a `strerror` for the user."""
    name = _name(path)
    _plain(os.stat(name), path)  # before it is opened: some devices act on that
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        _plain(os.fstat(descriptor), path)
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EINVAL, f"it has more than {most >> 20} MiB", str(path))
    return data


def write(
    path: Path,
    content: str | bytes,
    *,
    within: Path | None = None,
    hint: str | None = OTHER_PLACE,
    sync: bool = True,
) -> None:
    """Write a file whole or not at all, with the permissions of the file that it
    replaces. Text is written as UTF-8.

    within  a folder that must hold the file, once links are followed
    hint    what the user can do if the file cannot be written
    sync    wait until the data is on the disk; without it a power cut may cost the new
      file (not the old one)

    Raises UsageError for a name that cannot be written (a folder, a link to nothing, no
    permission), MissingError if the machine is at fault (the disk is full, read-only or
    broken). An older file stays as it was in both cases.
    """
    data = content.encode() if isinstance(content, str) else content
    target = destination(path, within=within, hint=hint)
    if not target.stream:
        with beside(path, within=within, hint=hint, sync=sync) as temporary:
            temporary.write_bytes(data)
        return
    with _writing(path, hint):
        for printed in (sys.stdout, sys.stderr):
            printed.flush()  # keep the order of what was printed before
        # no O_CREAT: it must exist
        flags = os.O_WRONLY | os.O_APPEND
        descriptor = os.dup(1) if target.stdout else os.open(target.path, flags)
        # a reader of stdout that has left wanted no more, as with all that is printed
        ignored = (BrokenPipeError,) if target.stdout else ()
        with contextlib.suppress(*ignored), os.fdopen(descriptor, "wb") as file:
            file.write(data)


@contextlib.contextmanager
def beside(
    path: Path,
    *,
    within: Path | None = None,
    hint: str | None = OTHER_PLACE,
    sync: bool = True,
) -> Iterator[Path]:
    """A new, empty file next to `path`, for a library that writes to a name. It
    replaces `path` when the block ends without an error. Raises as `write` does.
    """
    target = destination(path, within=within, hint=hint).path
    with _writing(path, hint):
        temporary = _temporary(target)
        try:
            yield temporary
            if target.exists():
                old = target.stat()
                with contextlib.suppress(OSError):  # only root may give a file away
                    os.chown(temporary, old.st_uid, old.st_gid)
                os.chmod(temporary, stat.S_IMODE(old.st_mode))
            if sync:
                _flush(temporary)
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """Append lines to one of gdn's own files. Raises as `write` does; part of the text
    may be written by then.
    """
    with _writing(path, "GDN_HOME names another place"), path.open("ab") as file:
        file.write(text.encode())


def check_writable(path: Path, *, hint: str | None = OTHER_PLACE) -> None:
    """Raise what `write` would raise, as far as that is known without writing. The
    file's folder is created.
    """
    target = destination(path, hint=hint)
    with _writing(path, hint):
        if not target.stream:
            _temporary(target.path).unlink()
        elif not (target.stdout or os.access(target.path, os.W_OK)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def is_stdout(path: Path) -> bool:
    """Whether a name leads to this process's standard output, which then must carry
    nothing else.
    """
    return destination(path).stdout


def inside(path: Path, folder: Path) -> bool:
    """Whether a path, once links are followed, lies in a folder. A path that does not exist yet
    counts by its name, and one that no file can have lies nowhere."""
    try:
        real = Path(os.path.realpath(_name(path)))
        return real.is_relative_to(os.path.realpath(folder))
    except OSError:
        return False


def destination(
    path: Path, *, within: Path | None = None, hint: str | None = OTHER_PLACE
) -> Destination:
    """Where a name leads; UsageError if it cannot be a file: a folder, a disk, a
    socket, a link to nothing.
    """
    with _writing(path, hint):
        target = _resolve(path)
    if within is not None and (target.stream or not inside(target.path, within)):
        raise UsageError(
            f"{path} leads out of {within}; nothing is written there",
            hint="name a file in that folder",
        )
    return target


def failure(name: object, e: OSError, hint: str | None = None) -> GdnError:
    """The error for something that cannot be written: this machine's fault (exit 3) or
    the name's (exit 2).
    """
    kind = MissingError if e.errno in MACHINE else UsageError
    return kind(f"cannot write {name}: {e.strerror or e}", hint=hint)


def refused(e: Exception) -> GdnError | None:
    """The error for what this machine has refused, somewhere; None for another exception."""
    if isinstance(e, MemoryError):
        return MissingError("this machine has not enough memory", hint=LIMITS_HINT)
    if isinstance(e, RuntimeError) and "start new thread" in str(e):
        return MissingError("this machine starts no more threads", hint=LIMITS_HINT)
    if isinstance(e, UnicodeEncodeError):
        return UsageError(f"{e.object:.200}: not a name in UTF-8")
    if not isinstance(e, OSError):
        return None
    if e.errno in _LIMITS:
        message = f"this machine refuses more: {e.strerror}"
        return MissingError(message, hint=LIMITS_HINT)
    if e.errno in MACHINE:
        return failure(e.filename or "the output", e)
    if e.filename and e.strerror:
        return UsageError(f"{e.filename}: {e.strerror}")
    return None


@contextlib.contextmanager
def _writing(path: Path, hint: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise failure(path, e, hint) from None


def _name(path: Path) -> str:
    """The name for the system; OSError if no file can have it."""
    name = os.fspath(path)
    try:
        possible = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise OSError(errno.EINVAL, "no file can have this name", name)
    return name


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFBLK: "a disk",
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
}


def _plain(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a plain file", str(path))


def _resolve(path: Path) -> Destination:
    name = _name(path)
    real = Path(os.path.realpath(name))
    try:
        status = os.stat(name)
    except FileNotFoundError:
        if os.path.islink(name):
            reason = f"it is a link to {real}, which is not there"
            raise FileNotFoundError(errno.ENOENT, reason) from None
        return Destination(real, stream=False)
    if os.path.samestat(status, os.fstat(1)):
        return Destination(path, stream=True, stdout=True)
    if stat.S_ISREG(status.st_mode):
        return Destination(real, stream=False)
    if stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode):
        return Destination(path, stream=True)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a plain file")
    raise OSError(errno.EINVAL, f"it is {kind}")


def _temporary(target: Path) -> Path:
    """A new file next to `target`, with the permissions that the umask leaves. Nobody
    can have put a link at its name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is read-only")
    path = target.with_name(f".{target.name[:80]}.{secrets.token_hex(4)}")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return path


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        # a file system without fsync
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
