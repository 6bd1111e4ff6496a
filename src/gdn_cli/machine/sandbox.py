"""`--sandbox`: bubblewrap's command line for a runner. No network, no home, read-only
except for its own folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from .. import paths
from ..errors import MissingError

# folders that the runner must read
_KEPT = ("LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV")


def find() -> str:
    """The `bwrap` of this machine; MissingError if there is none."""
    bwrap = shutil.which("bwrap")
    if bwrap:
        return bwrap
    raise MissingError(
        "--sandbox needs bubblewrap (bwrap), which is not installed",
        hint="apt-get install bubblewrap",
    )


def wrap(mode: str) -> list[str]:
    """The command line before the runner's own. Its folder is the worker's temporary
    one. It also builds there, so what it compiles is deleted with it.
    """
    workdir = Path(tempfile.gettempdir())  # the worker's, see run/worker_process.py
    home = paths.home()
    command = [
        find(),
        "--die-with-parent",
        "--new-session",
        "--unshare-net",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
    ]
    command += ["--dev-bind", "/dev", "/dev"] if mode == "cuda" else ["--dev", "/dev"]
    candidates = Path("/tmp"), Path("/run/user"), home
    hidden = [path for path in candidates if path.is_dir() and path != Path("/")]
    for folder in hidden:
        command += ["--tmpfs", str(folder)]
    for folder in _needed():
        if any(folder.is_relative_to(parent) for parent in hidden):
            command += ["--ro-bind", str(folder), str(folder)]
    built = workdir / "built"
    for name in ("built", "home"):
        (workdir / name).mkdir(exist_ok=True)
    command += ["--bind", str(workdir), str(workdir), "--chdir", str(workdir)]
    for folder in hidden:  # they look empty, and must not be written to either
        command += ["--remount-ro", str(folder)]
    for name, folder in (
        ("HOME", workdir / "home"),
        ("FIB_CACHE_PATH", built / "fib"),
        ("TORCHINDUCTOR_CACHE_DIR", built / "inductor"),
        ("TRITON_CACHE_DIR", built / "triton"),
        ("XDG_CACHE_HOME", built / "cache"),
    ):
        command += ["--setenv", name, str(folder)]
    return command


def _needed() -> list[Path]:
    """What the runner reads: Python, gdn, and the folders that the environment names."""
    folders = [
        sys.prefix,
        sys.base_prefix,
        os.path.dirname(os.path.realpath(sys.executable)),
        str(paths.PACKAGE.parent),
    ]
    if paths.IN_CHECKOUT:
        folders.append(str(paths.ALGOS_DIR.parent))
    for name in _KEPT:
        folders += os.environ.get(name, "").split(os.pathsep)
    needed = [Path(name).resolve() for name in folders if os.path.isdir(name)]
    return list(dict.fromkeys(needed))
