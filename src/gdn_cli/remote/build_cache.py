"""Code compiled in a container, kept on a volume for the next one.

Compilers write thousands of small files, and volumes are slow with those. So builds go
to the container's own disk, and are saved and restored as one archive for each set of
sources, named after it. Two containers never write one file unless its content is the
same.
"""

from __future__ import annotations

import re
import tarfile
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


def environment(root: Path) -> dict[str, str]:
    """Variables that tell the builders where to write."""
    return {name: str(root / folder) for name, folder in _VARIABLES.items()}


def restore(volume: Path, key: str, root: Path) -> bool:
    """Unpack the archive `key`; False if there is none, or it cannot be read."""
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(_archive(volume, key)) as archive:
            archive.extractall(root, filter="data")
    except (OSError, tarfile.TarError):
        return False
    return True


def keep(volume: Path, key: str, root: Path) -> bool:
    """Pack the builds into one archive, in one step; False if it cannot be kept, which
    only costs time.
    """
    try:
        with (
            files.beside(_archive(volume, key)) as file,
            tarfile.open(file, mode="w:gz", compresslevel=1) as archive,
        ):
            for folder in _KEPT:
                if (root / folder).is_dir():
                    archive.add(root / folder, folder)
    except (GdnError, tarfile.TarError):
        return False
    return True


def state(root: Path) -> set[tuple[str, int]]:
    """The files that would be kept, to see whether there are new ones."""
    files = (
        path
        for folder in _KEPT
        for path in (root / folder).rglob("*")
        if path.is_file()
    )
    return {(str(path), path.stat().st_size) for path in files}


def _archive(volume: Path, key: str) -> Path:
    return volume / (re.sub(r"[^A-Za-z0-9._-]", "_", key) + ".tar.gz")
