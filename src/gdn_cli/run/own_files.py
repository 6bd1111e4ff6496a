"""What a compiler, an exception or a crash says of an algo, in terms of the user's own files.

flashinfer-bench builds a copy of the sources, in a folder that is named
`<builder>_<solution>_<6 hex digits>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from ..catalog import pack
from ..catalog.registry import Algo
from ..errors import UsageError
from ..schema.record_types import Record

_COPY = re.compile(
    r"(?:/[^\s/\"'():]+)+_[0-9a-f]{6}/(?P<file>[\w.+-]+)(?:\((?P<line>\d+)\))?"
)
_CRASH = re.compile(r"!{3,} .*(?:Segfault|Fatal|Abort)", re.IGNORECASE)
# frames below an algo's own: Python's interpreter, and the wrapper of a C++ function
_BELOW = re.compile(
    r'"\./Include/|"(?:Objects|Python|Modules)/|"<frozen|in __tvm_ffi_|in _start$|sigaction'
)
_NAMELESS = re.compile(r'File "<unknown>", line 0, in (?!0x)(?P<function>.+)')
_LONG = re.compile(r"(?<=[\w>])\(.{60,}")  # a C++ function's parameters
_MOST = 20  # lines of a tail


def pointed(record: Record, algo: Algo | None) -> Record:
    """The record with the user's own files where its texts name their copies in the
    build folder.
    """
    if algo is None or record.passed:
        return record
    paths = _paths(algo)

    def own(text: str) -> str:
        return _COPY.sub(lambda match: _place(match, paths), text)

    return replace(
        record,
        reason=record.reason and own(record.reason),
        tail=record.tail and [own(line) for line in record.tail],
        trace=record.trace and [own(line) for line in record.trace],
    )


def _paths(algo: Algo) -> dict[str, str]:
    """name -> path, as short as it can be from here; a packed file's sources have none."""
    try:
        files = pack.sources(algo) if algo.folder else []
    except (UsageError, OSError):  # changed since it was built
        return {}
    here = Path.cwd()
    return {
        path.name: str(path.relative_to(here) if path.is_relative_to(here) else path)
        for path in files
    }


def _place(match: re.Match[str], paths: dict[str, str]) -> str:
    name, line = match["file"], match["line"]  # nvcc writes file(12)
    return paths.get(name, name) + (f":{line}" if line else "")


def tail(lines: Iterable[str]) -> list[str]:
    """What a record keeps of a process's last words: of a crash the frames of the algo
    first, else the last lines.
    """
    lines = [line.rstrip() for line in lines if line.strip()]
    crashes = [i for i, line in enumerate(lines) if _CRASH.search(line)]
    if not crashes:
        return lines[-_MOST:]
    after = lines[crashes[0] + 1 :]
    frames = [line for line in after if line.lstrip().startswith("File ")]
    own = []
    for frame in frames:
        if "sigaction" in frame:
            continue
        if _BELOW.search(frame):
            break
        own.append(_frame(frame))
    own = own[: _MOST // 2]
    others = [line for line in lines if line not in frames and not _CRASH.search(line)]
    left = len(frames) - len(own)
    more = [f"({left} frames of Python and the system left out)"] if left else []
    return [*own, *more, *others[-(_MOST - len(own) - len(more)) :]]


def _frame(line: str) -> str:
    """In Run(...), for a frame that has a name and no line; others with short parameters."""
    nameless = _NAMELESS.fullmatch(line.strip())
    text = f"in {nameless['function']}" if nameless else line.strip()
    return _LONG.sub("(...)", text)
