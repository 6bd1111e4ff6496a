"""How long a job took to its first result when it ran here before: starting, compiling and
a first check. A file next to the builds has it, for the line of progress.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from .. import paths
from ..catalog.pack import source_hash
from ..errors import GdnError
from ..files import read, write
from .jobs import Job

_LEAST_S = 3.0  # what takes less needs no estimate


def usual_s(job: Job) -> float | None:
    """Seconds: those of the same sources, else of the last new ones of the same algos;
    None if they never ran here, or quickly.
    """
    with contextlib.suppress(GdnError, OSError, ValueError):
        return _seconds(_files(job))
    return None


def of_new_sources_s(op: str, place: str, algo: str) -> float | None:
    """Seconds that the algo took when its sources were last new here; None as above."""
    with contextlib.suppress(GdnError, OSError, ValueError):
        return _seconds([_file(op, place, algo)])
    return None


def _seconds(files: list[Path]) -> float | None:
    """What the first of these says that is there."""
    known = [file for file in files if file.exists()]
    seconds = float(read(known[0])) if known else 0.0
    return seconds if seconds >= _LEAST_S else None


def note(job: Job, seconds: float) -> None:
    """Keep what it took this time: of sources that are new here for the algos' next ones too."""
    # without a place for it there is no estimate
    with contextlib.suppress(GdnError, OSError):
        exact, by_name = _files(job)
        paths.make(exact.parent)
        for file in [exact] if exact.exists() else [exact, by_name]:
            write(file, f"{seconds:.1f}\n", sync=False)


def _files(job: Job) -> list[Path]:
    """That of these sources, and that of algos with these names."""
    hashes = [source_hash(solution) for _, solution in job.packed]
    return [_file(job.op.name, job.place, *key) for key in (hashes, job.names)]


def _file(*key: str) -> Path:
    name = hashlib.sha256("\n".join(key).encode()).hexdigest()[:24]
    return paths.builds_dir() / "seconds" / name
