"""The compilers of this machine: nvcc with its toolkit, and C++."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .. import paths
from ..errors import MissingError

_ELSEWHERE = "FIB_CACHE_PATH or GDN_HOME names another folder"
# The architectures that the builders compile for, such as "8.0 9.0a"; unset, their
# GPU's capability.
ARCHITECTURES = "TVM_FFI_CUDA_ARCH_LIST"


def specific(capability: str) -> str | None:
    """The architecture with all features of a GPU of this capability: "9.0" -> "9.0a";
    None before 9.0.
    """
    major = int(capability.partition(".")[0])
    return f"{capability}a" if major >= 9 else None


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
            suffix = f"{os.getpid()}.{threading.get_ident()}"
            temporary = link.with_name(f".{link.name}.{suffix}")
            temporary.symlink_to(target)
            temporary.replace(link)
    return home


def cuda_version() -> str | None:
    """The version of nvcc, such as "13.0"; None if there is none."""
    home = cuda_home()
    if home is None:
        return None
    command = [str(home / "bin" / "nvcc"), "--version"]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    match = re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else None


def cxx() -> str | None:
    """The C++ compiler that the builder would call."""
    # CXX may be "ccache g++"
    return shutil.which((os.environ.get("CXX") or "c++").split()[-1])


def tools_path(path: str) -> str:
    """PATH with ninja, which is beside the Python of a virtual environment that may not be
    activated."""
    return os.pathsep.join([os.path.dirname(sys.executable), path])


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables in this process's environment while the block runs."""
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def unusable(cache: Path) -> str | None:
    """Why nothing can be built in this folder, and what to do; None if it can. The
    folder is created if needed.
    """
    if planted := paths.planted(cache):
        return f"the build cache {cache} could hold what others put there ({planted}); {_ELSEWHERE}"
    try:
        paths.make(cache)
        with tempfile.TemporaryFile(dir=cache) as file:
            file.write(b"0" * 4096)
    except MissingError as e:
        return f"the build cache: {e.message}; {_ELSEWHERE}"
    except OSError as e:
        return f"the build cache {cache} cannot be written: {e.strerror}; {_ELSEWHERE}"
    return None
