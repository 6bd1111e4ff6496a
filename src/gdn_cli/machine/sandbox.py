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
    if found := shutil.which("bwrap"):
        return found
    raise MissingError(
        "--sandbox needs bubblewrap (bwrap), which is not installed",
        hint="apt-get install bubblewrap",
    )


def wrap(mode: str) -> list[str]:
    """The command line before the runner's own. Its folder is the worker's temporary
    one. It also builds there, so what it compiles is deleted with it.
    """
    own = Path(tempfile.gettempdir())  # the worker's, see run/worker_process.py
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
    hidden = [Path("/tmp"), Path("/run/user"), *([home] if home != Path("/") else [])]
    for folder in hidden:
        if folder.is_dir():
            command += ["--tmpfs", str(folder)]
    for folder in _needed():
        if any(folder.is_relative_to(out) for out in hidden):
            command += ["--ro-bind", str(folder), str(folder)]
    built = own / "built"
    for folder in ("built", "home"):
        (own / folder).mkdir(exist_ok=True)
    command += ["--bind", str(own), str(own), "--chdir", str(own)]
    for folder in hidden:  # they look empty, and must not be written to either
        if folder.is_dir():
            command += ["--remount-ro", str(folder)]
    for name, value in (
        ("HOME", own / "home"),
        ("FIB_CACHE_PATH", built / "fib"),
        ("TORCHINDUCTOR_CACHE_DIR", built / "inductor"),
        ("TRITON_CACHE_DIR", built / "triton"),
        ("XDG_CACHE_HOME", built / "cache"),
    ):
        command += ["--setenv", name, str(value)]
    return command


def _needed() -> list[Path]:
    """What the runner reads: Python, gdn, and the folders that the environment names."""
    found = [
        sys.prefix,
        sys.base_prefix,
        os.path.dirname(os.path.realpath(sys.executable)),
        str(paths.PACKAGE.parent),
    ]
    found += [str(paths.ALGOS_DIR.parent)] if paths.IN_CHECKOUT else []
    for name in _KEPT:
        found += os.environ.get(name, "").split(os.pathsep)
    return list(
        dict.fromkeys(
            Path(entry).resolve() for entry in found if entry and os.path.isdir(entry)
        )
    )
