"""What a compiler, an exception or a crash says of an algo, in terms of the user's own files.

flashinfer-bench builds a copy of the sources, in a folder that is named
`<builder>_<solution>_<6 hex digits>`.
"""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import replace

from ..catalog import pack
from ..catalog.registry import Algo
from ..errors import UsageError
from ..schema.record_types import Record

_COPY = re.compile(
    r"(?:/[^\s/\"'():]+)+_[0-9a-f]{6}/(?P<file>[\w.+-]+)(?:\((?P<line>\d+)\))?"
)


def pointed(record: Record, algo: Algo | None) -> Record:
    """The record with the user's own files where its texts name their copies in the
    build folder.
    """
    if algo is None or record.passed:
        return record
    paths = _paths(algo)

    def own(match: re.Match[str]) -> str:
        name, line = match["file"], match["line"]  # nvcc writes file(12)
        if name.endswith(".cu.cpp"):  # of --emulate
            name = name.removesuffix(".cpp")
        return paths.get(name, name) + (f":{line}" if line else "")

    return replace(
        record,
        reason=record.reason and _COPY.sub(own, record.reason),
        tail=record.tail and [_COPY.sub(own, line) for line in record.tail],
        trace=record.trace and [_COPY.sub(own, line) for line in record.trace],
    )


def _paths(algo: Algo) -> dict[str, str]:
    """name -> path, as short as it can be from here; a packed file's sources have none."""
    try:
        files = pack.sources(algo) if algo.folder else []
    except (UsageError, OSError):  # changed since it was built
        return {}
    cwd = Path.cwd()
    return {
        path.name: str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
        for path in files
    }
