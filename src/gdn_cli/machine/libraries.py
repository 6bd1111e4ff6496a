"""The libraries of the algos in C++ and CUDA that ship with gdn: built beforehand (`gdn build`), or
compiled on this machine and kept. Needs apache-tvm-ffi alone, and no torch.

A library is `<platform>/<op>-<algo>-<source_hash>-<target>.so` in one of `folders`. The platform
has what the library was linked for, CUDA's major version and tvm-ffi's version; the target is an
architecture such as sm_90a, or cpu.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import files, paths, source_hash
from ..errors import GdnError, MissingError, UsageError, one_line
from . import toolchain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUFFIXES = (".cu", ".cuh", ".cpp", ".cxx", ".cc", ".c", ".h", ".hpp")
# more folders to look in, separated like those of PATH
VARIABLE = "GDN_PREBUILT"
# where a wheel with libraries has them
PACKAGED = paths.PACKAGE.parent / "gdn" / "prebuilt"
_ARCH = re.compile(r"([0-9]+)\.([0-9])(a?)")
_ERRORS = 5  # of a compiler: the later ones often follow from the first
GET_NVCC = "gdn build makes libraries where nvcc is; pip install 'gdn[cuda]' brings it"


@dataclass(frozen=True)
class Source:
    """A shipped algo's sources. `name` is "op/algo"."""

    name: str
    language: str
    entry_point: str
    specific: bool
    capability: tuple[int, int]  # the lowest that it runs on
    files: tuple[Path, ...]

    @property
    def hash(self) -> str:
        """As records and packed files have it."""
        contents = [(path.name, files.read(path).decode()) for path in self.files]
        return source_hash.source_hash(
            self.language, self.entry_point, True, "tvm-ffi", contents
        )

    def file(self, target: str) -> str:
        return f"{self.name.replace('/', '-')}-{self.hash}-{target}.so"


def source(name: str) -> Source:
    """The algo of this full name. UsageError if gdn ships none, or it is in another language."""
    folder = paths.ALGOS_DIR / name
    try:
        table: dict[str, Any] = tomllib.loads(files.read(folder / "algo.toml").decode())
    except OSError:
        hint = "`gdn list` shows all"
        raise UsageError(f"gdn ships no algo {name}", hint=hint) from None
    if table["language"] not in ("cpp", "cuda"):
        raise UsageError(f"{name} is in {table['language']}, and has no library")
    sources = [path for path in folder.iterdir() if path.suffix in SUFFIXES]
    shared = [paths.ALGOS_DIR / path for path in table.get("shares", [])]
    return Source(
        name=name,
        language=table["language"],
        entry_point=table["entry_point"],
        specific=table.get("specific", False),
        capability=_numbers(table.get("capability", "0.0")),
        files=tuple(sorted([*sources, *shared], key=lambda path: path.name)),
    )


def _numbers(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor)


def platform_name(cuda: str | None) -> str:
    """Such as cu13-ffi0.1-x86_64. `cuda` is CUDA's version, None for a CPU's library."""
    try:
        ffi = version("apache-tvm-ffi")
    except PackageNotFoundError:
        hint = "pip install apache-tvm-ffi"
        raise MissingError("package apache-tvm-ffi is missing", hint=hint) from None
    kind = f"cu{cuda.partition('.')[0]}" if cuda else "cpu"
    return f"{kind}-ffi{'.'.join(ffi.split('.')[:2])}-{platform.machine()}"


def folders() -> list[Path]:
    """Where libraries that were built beforehand are looked for."""
    names = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [*(paths.expanded(name) for name in names if name), PACKAGED]


def kept() -> Path:
    """Where those that are compiled here are kept."""
    value = os.environ.get("FIB_CACHE_PATH")
    return (Path(value) if value else paths.builds_dir()) / "libraries"


def target(arch: str | None) -> str:
    """ "9.0a" -> sm_90a; None: cpu. UsageError for text of another form."""
    if arch is None:
        return "cpu"
    match = _ARCH.fullmatch(arch)
    if not match:
        hint = "such as 8.0, 9.0a or 10.0a"
        raise UsageError(f"'{arch}' is no architecture", hint=hint)
    return f"sm_{''.join(match.groups())}"


def runs_on(algo: Source, arch: str) -> bool:
    """Whether GPUs of an architecture, such as 9.0a, have the capability that an algo needs."""
    match = _ARCH.fullmatch(arch)
    return match is not None and (int(match[1]), int(match[2])) >= algo.capability


def architecture(algo: Source, capability: tuple[int, int] | None) -> str | None:
    """What is compiled for a GPU of this capability; None for a CPU."""
    if capability is None:
        return None
    plain = ".".join(map(str, capability))
    specific = toolchain.specific(plain) if algo.specific else None
    return specific or plain


def fitting(algo: Source, capability: tuple[int, int] | None) -> list[str]:
    """The targets that run on a GPU of this capability, the best first; of lower minor versions
    too, as CUDA's machine code runs on those above."""
    if capability is None:
        return ["cpu"]
    major, minor = capability
    exact = [f"sm_{major}{minor}", f"sm_{major}{minor}a"]
    lower = [f"sm_{major}{i}" for i in range(minor - 1, -1, -1)]
    return (exact[::-1] if algo.specific else exact) + lower


def prebuilt(
    algo: Source, capability: tuple[int, int] | None, cuda: str | None
) -> Path | None:
    """A library of these sources that was built beforehand and runs here."""
    place = platform_name(cuda)
    for name in map(algo.file, fitting(algo, capability)):
        for folder in folders():
            file = folder / place / name
            if file.is_file():
                return file
    return None


def compiled(
    algo: Source, capability: tuple[int, int] | None, cuda: str | None
) -> Path:
    """The library compiled on this machine: kept from before, or now. MissingError without a
    compiler, GdnError if it does not build."""
    return compile_to(kept(), algo, architecture(algo, capability), cuda)


def compile_to(folder: Path, algo: Source, arch: str | None, cuda: str | None) -> Path:
    """Compile into a folder for `prebuilt`, unless it is there. Raises as `compiled`."""
    library = folder / platform_name(cuda) / algo.file(target(arch))
    if library.is_file() and not paths.planted(library):
        return library
    fault = toolchain.unusable(library.parent)
    if fault:
        raise MissingError(fault)
    import tvm_ffi.utils

    with tvm_ffi.utils.FileLock(str(library.with_suffix(".lock"))):
        if not library.is_file():
            with building(arch):
                _compile(algo, library)
    return library


@contextmanager
def building(arch: str | None = None) -> Iterator[None]:
    """The environment of tvm-ffi's builder, in this process: nvcc and ninja."""
    variables = {"PATH": toolchain.tools_path(os.environ.get("PATH", ""))}
    home = toolchain.cuda_home()
    if home:
        variables["CUDA_HOME"] = str(home)
    if arch:
        variables[toolchain.ARCHITECTURES] = arch
    with toolchain.environment(variables):
        yield


def _compile(algo: Source, library: Path) -> None:
    if algo.language == "cuda" and toolchain.cuda_home() is None:
        raise MissingError(f"{algo.name}: no nvcc here", hint=GET_NVCC)
    if not toolchain.cxx():
        hint = "install g++ or clang++, or set CXX"
        raise MissingError(f"{algo.name}: no C++ compiler here", hint=hint)
    if not shutil.which("ninja"):
        hint = "pip install ninja"
        raise MissingError(f"{algo.name}: no ninja here", hint=hint)
    import tvm_ffi.cpp

    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        # as flashinfer-bench's builder has them: all in one folder
        copies = [shutil.copy(path, folder) for path in algo.files]
        try:
            output = tvm_ffi.cpp.build(
                library.stem,
                cpp_files=[
                    f for f in copies if Path(f).suffix in (".cpp", ".cxx", ".cc", ".c")
                ],
                cuda_files=[f for f in copies if f.endswith(".cu")],
                extra_include_paths=[folder],
                build_directory=folder,
            )
        except Exception as e:
            lines = [
                line
                for line in str(e).splitlines()
                if re.search(r"error\s*:|fatal", line)
            ]
            different = list(dict.fromkeys(lines))
            reason = "; ".join(different[:_ERRORS]) or one_line(e)
            raise GdnError(f"{algo.name} does not build: {reason}") from None
        # whole or not at all, whoever compiles at the same time
        os.replace(output, library)
