"""Code compiled in a container, kept on a volume for the next one.

Compilers write thousands of small files, and volumes are slow with those. So builds go
to the container's own disk, and are saved and restored as one archive for each set of
sources, named after it. Two containers never write one file unless its content is the
same.
"""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import files
from ..errors import GdnError

# the builders' own variables, each with its folder under one local root
_VARIABLES = {
    "GDN_HOME": "gdn",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
_KEPT = ("gdn/builds", "triton", "inductor", "flashinfer")


@contextlib.contextmanager
def kept(
    volume: Path, key: str, commit: Callable[[], None]
) -> Iterator[dict[str, str]]:
    """Variables that tell the builders where to write: folders with an earlier
    container's builds. New builds are kept; an archive that cannot be read or written
    only costs time.
    """
    archive = volume / f"{key}.tar.gz"
    with tempfile.TemporaryDirectory(prefix="gdn-built-") as folder:
        root = Path(folder)
        with (
            contextlib.suppress(OSError, tarfile.TarError),
            tarfile.open(archive) as tar,
        ):
            tar.extractall(root, filter="data")
        before = _state(root)
        yield {name: str(root / part) for name, part in _VARIABLES.items()}
        if not volume.is_dir() or _state(root) == before:
            return
        with contextlib.suppress(GdnError, tarfile.TarError):
            with (
                files.beside(archive) as file,
                tarfile.open(file, mode="w:gz", compresslevel=1) as tar,
            ):
                for part in _KEPT:
                    if (root / part).is_dir():
                        tar.add(root / part, part)
            commit()


def _state(root: Path) -> set[tuple[str, int]]:
    """The files that would be kept, to see whether there are new ones."""
    state = set()
    for part in _KEPT:
        for path in (root / part).rglob("*"):
            if path.is_file():
                state.add((str(path), path.stat().st_size))
    return state
