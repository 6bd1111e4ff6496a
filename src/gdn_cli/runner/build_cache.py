"""The folder where flashinfer-bench's builders keep what they compile: is it fit for use, and what lies in it whole?

A builder takes a library from there when the sources beside it are the same; whether it is whole, nobody looks. Loading
one that is cut short ends the process (SIGBUS), so it is looked at here before.
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

from .. import files, paths
from ..errors import MissingError

_ELSEWHERE = "FIB_CACHE_PATH or GDN_HOME names another folder"
# what a compiler says of a disk, whichever it is
_FULL = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system|File too large")


def unusable(cache: Path) -> str | None:
    """Why nothing can be built in this folder, and what to do; None where it can. It is made if it is not there."""
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
    """The one line for a build that failed for the disk's sake; None where it is the algo's fault."""
    if wrong := unusable(cache):
        return wrong
    chain: list[BaseException] = [e]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    for each in chain:
        below = isinstance(each, OSError) and files.inside(Path(str(each.filename or "/")), cache)
        if isinstance(each, OSError) and (each.errno in files.MACHINE or below and isinstance(each, PermissionError)):
            return f"the build cache {each.filename or cache} cannot be written: {each.strerror}; {_ELSEWHERE}"
        if found := _FULL.search(str(each)):
            return f"the compiler could not write to {cache} or {tempfile.gettempdir()}: {found[0]}; {_ELSEWHERE}"
    return None


def library(registry: Any, solution: Any) -> Path | None:
    """Where flashinfer-bench keeps, or will keep, the compiled library of a solution; None where it compiles none."""
    builder = next((b for b in getattr(registry, "_builders", ()) if b.can_build(solution)), None)
    if builder is None or builder._build_dir_name != "tvm_ffi":
        return None
    name, folder = builder._get_package_name_and_build_path(solution)
    return folder / f"{name}.so"


def drop_damaged(library: Path) -> bool:
    """Delete a library that is not what was compiled, with all of its build; returns whether a whole one is there."""
    if not library.is_file():
        return False
    if _whole(library):
        return True
    drop(library)
    return False


def drop(library: Path) -> None:
    """Delete a build: also what it was linked from, which the next one would be linked from again."""
    shutil.rmtree(library.parent, ignore_errors=True)


def sign(library: Path) -> None:
    """Write down what a library that works looks like, if that is not known yet."""
    with contextlib.suppress(OSError):  # then it is looked at less closely the next time
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
    """As it was when it was signed; one that nobody signed has at least all that its header promises."""
    try:
        if _mark(library).exists():
            return _mark(library).read_text() == _digest(library)
        with library.open("rb") as file:
            head, size = file.read(64), library.stat().st_size
    except OSError:
        return False
    if head[:4] != b"\x7fELF":
        return head[:4] in _OTHERS
    if len(head) < 64 or head[4:6] != b"\x02\x01":  # 64 bits, little-endian: the only ones that are compiled here
        return False
    (sections,) = struct.unpack_from("<Q", head, 40)
    each, count = struct.unpack_from("<HH", head, 58)
    return sections + each * count <= size  # the table of sections is what a linker writes last


_OTHERS = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # of a Mac
