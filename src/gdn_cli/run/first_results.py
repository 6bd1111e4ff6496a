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
from ..files import write
from .jobs import Job

_LEAST_S = 3.0  # what takes less needs no estimate


def usual_s(job: Job) -> float | None:
    """Seconds: those of the same sources, else of the last new ones of the same algos;
    None if they never ran here, or quickly.
    """
    with contextlib.suppress(GdnError, OSError, ValueError):
        known = [file for file in _files(job) if file.exists()]
        seconds = float(known[0].read_text()) if known else 0.0
        return seconds if seconds >= _LEAST_S else None
    return None


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
    place = [job.op.name, job.place]
    keys = (source_hash(solution) for _, solution in job.packed), job.names
    digests = ["\n".join([*place, *key]).encode() for key in keys]
    names = [hashlib.sha256(digest).hexdigest()[:24] for digest in digests]
    return [paths.builds_dir() / "seconds" / name for name in names]
