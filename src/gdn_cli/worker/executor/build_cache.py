"""The folder where flashinfer-bench's builders keep compiled libraries: is it usable,
and are its libraries complete?

A builder takes a library from there if the sources next to it are the same, without
checking that it is complete. Loading one that is cut short ends the process (SIGBUS):
only one that has the digest of a library that worked is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path
from typing import Any

from ...machine.toolchain import unusable as unusable


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
    """Delete a library that is not as it was when it was signed, with all of its build;
    returns whether a complete one exists.
    """
    if not library.is_file():
        return False
    with contextlib.suppress(OSError):
        if _signature(library).read_text() == _digest(library):
            return True
    drop(library)
    return False


def drop(library: Path) -> None:
    """Delete a build, including the objects that the next one would be linked from."""
    shutil.rmtree(library.parent, ignore_errors=True)


def sign(library: Path) -> None:
    """Write down the digest of a library that works."""
    with contextlib.suppress(OSError):  # then it is compiled again next time
        if not _signature(library).exists():
            _signature(library).write_text(_digest(library))


def _signature(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()
