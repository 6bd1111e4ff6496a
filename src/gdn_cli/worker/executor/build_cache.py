"""The folder where flashinfer-bench's builders keep compiled libraries: is it usable,
and are its libraries complete?

A builder takes a library from there if the sources next to it are the same, without
checking that it is complete. Loading one that is cut short ends the process (SIGBUS),
so that is checked here first.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

from ... import files, paths
from ...errors import MissingError

_ELSEWHERE = "FIB_CACHE_PATH or GDN_HOME names another folder"
# compilers' messages about a full or unwritable disk
_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|File too large"
)


def unusable(cache: Path) -> str | None:
    """Why nothing can be built in this folder, and what to do; None if it can. The
    folder is created if needed.
    """
    if planted := paths.foreign(cache):
        return f"the build cache {cache} could hold what others put there ({planted}); {_ELSEWHERE}"
    try:
        paths.make(cache)
        with tempfile.TemporaryFile(dir=cache) as file:
            file.write(b"0" * 4096)
    except MissingError as e:
        return f"the build cache: {e.message}; {_ELSEWHERE}"
    except OSError as e:
        return f"the build cache {cache} cannot be written: {e.strerror}; {_ELSEWHERE}"
    return None


def machines_fault(e: BaseException, cache: Path) -> str | None:
    """The one line for a build that failed because of the disk; None if it is the algo's fault."""
    if wrong := unusable(cache):
        return wrong
    for each in causes(e):
        if isinstance(each, OSError) and _of_machine(each, cache):
            place = each.filename or cache
            return f"the build cache {place} cannot be written: {each.strerror}; {_ELSEWHERE}"
        if full := _FULL.search(str(each)):
            places = f"{cache} or {tempfile.gettempdir()}"
            return f"the compiler could not write to {places}: {full[0]}; {_ELSEWHERE}"
    return None


def _of_machine(e: OSError, cache: Path) -> bool:
    if e.errno in files.MACHINE:
        return True
    below = files.inside(Path(str(e.filename or "/")), cache)
    return below and isinstance(e, PermissionError)


def causes(e: BaseException) -> list[BaseException]:
    """An exception, and those that led to it."""
    chain = [e]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    return chain


def library(registry: Any, solution: Any) -> Path | None:
    """Where flashinfer-bench keeps, or will keep, a solution's compiled library; None
    if it does not compile one.
    """
    builder = next(
        (b for b in getattr(registry, "_builders", ()) if b.can_build(solution)), None
    )
    if builder is None or builder._build_dir_name != "tvm_ffi":
        return None
    name, folder = builder._get_package_name_and_build_path(solution)
    return folder / f"{name}.so"


def drop_damaged(library: Path) -> bool:
    """Delete a library that is damaged, with all of its build; returns whether a
    complete one exists.
    """
    if not library.is_file():
        return False
    if _whole(library):
        return True
    drop(library)
    return False


def drop(library: Path) -> None:
    """Delete a build, including the objects that the next one would be linked from."""
    shutil.rmtree(library.parent, ignore_errors=True)


def sign(library: Path) -> None:
    """Write down the digest of a library that works, if there is none yet."""
    with contextlib.suppress(OSError):  # then the next check is less strict
        if not _mark(library).exists():
            _mark(library).write_text(_digest(library))


def _mark(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _digest(library: Path) -> str:
    digest = hashlib.sha256()
    with library.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _whole(library: Path) -> bool:
    """Whether it is as it was when signed; an unsigned one must at least be as long as
    its header says.
    """
    try:
        if _mark(library).exists():
            return _mark(library).read_text() == _digest(library)
        with library.open("rb") as file:
            head = file.read(64)
            size = library.stat().st_size
    except OSError:
        return False
    if head[:4] != b"\x7fELF":
        return head[:4] in _OTHERS
    # 64 bits, little-endian: the only kind that is compiled here
    if len(head) < 64 or head[4:6] != b"\x02\x01":
        return False
    (sections,) = struct.unpack_from("<Q", head, 40)
    each, count = struct.unpack_from("<HH", head, 58)
    # the table of sections is written last by a linker
    return sections + each * count <= size


_OTHERS = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # macOS
