"""The compilers of this machine: nvcc with its toolkit, and C++."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

from .. import paths
from ..errors import MissingError


def cuda_home() -> Path | None:
    """The CUDA toolkit's folder: CUDA_HOME, else that of nvcc, else /usr/local/cuda,
    else PyPI's nvcc wheel.

    flashinfer-bench's builder uses `CUDA_HOME/bin/nvcc`, `CUDA_HOME/include` and
    `CUDA_HOME/lib64`. If the nvcc on PATH is a wrapper script, its folder has no
    libraries, so a folder counts only if it also has the headers.
    """
    named = os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")
    places = [Path(name) for name in named if name]
    nvcc = shutil.which("nvcc")
    if nvcc:
        places.append(Path(nvcc).resolve().parent.parent)
    places.append(Path("/usr/local/cuda"))
    places += sorted(Path("/usr/local").glob("cuda-*"), reverse=True)
    for place in places:
        if _is_toolkit(place):
            return place
    return _wheel_cuda_home()


def _is_toolkit(folder: Path) -> bool:
    header = folder / "include" / "cuda_runtime.h"
    return header.is_file() and (folder / "bin" / "nvcc").is_file()


def _wheel_cuda_home() -> Path | None:
    """nvcc from the extra `gdn[cuda]`: site-packages/nvidia/cu13, which does not have
    the names that a linker looks for.
    """
    for entry in sys.path:
        wheel = Path(entry) / "nvidia" / "cu13"
        if not _is_toolkit(wheel):
            continue
        try:
            return _linked_home(wheel, paths.builds_dir() / "cuda-home")
        # the links cannot be made: then nothing can be built; doctor reports it
        except (OSError, MissingError):
            return None
    return None


def _linked_home(wheel: Path, home: Path) -> Path:
    """`home` with the names that a builder needs, each a link into the wheel. Safe to
    repeat, and to run twice at once.
    """
    libraries = home / "lib64"
    paths.make(libraries)
    links = {home / name: wheel / name for name in ("bin", "include", "nvvm")}
    links |= {libraries / lib.name: lib for lib in (wheel / "lib").glob("*.*")}
    # -lcudart needs libcudart.so, but the wheel has only libcudart.so.13
    links |= {
        libraries / (lib.name.split(".so")[0] + ".so"): lib
        for lib in (wheel / "lib").glob("lib*.so.*")
    }
    for link, target in links.items():
        if not (link.is_symlink() and link.readlink() == target):
            temporary = link.with_name(
                f".{link.name}.{os.getpid()}.{threading.get_ident()}"
            )
            temporary.symlink_to(target)
            temporary.replace(link)
    return home


def cxx() -> str | None:
    """The C++ compiler that the builder would call."""
    # CXX may be "ccache g++"
    return shutil.which((os.environ.get("CXX") or "c++").split()[-1])
