"""Finds NVIDIA's tools: on PATH, in separate packages, in a CUDA toolkit, in PyPI's
wheels; and runs any tool for its output.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import MissingError
from ...machine.inventory import HERE, Machine

PACKAGES, LOCAL = Path("/opt/nvidia"), Path("/usr/local")


def executables(name: str, *packages: str, machine: Machine = HERE) -> list[Path]:
    """All executables of this name that are here, in order of preference; `packages`
    are patterns under /opt/nvidia.

    PATH comes first, because it was set on purpose. A tool's own package is newer than
    the toolkit's, and of several the newest knows the most GPUs.
    """
    paths = [Path(path) for path in (shutil.which(name),) if path]
    for pattern in packages:
        paths += _newest_first(PACKAGES.glob(pattern))
    home = machine.cuda_home()
    toolkits = [home] if home else []
    toolkits += [LOCAL / "cuda", *_newest_first(LOCAL.glob("cuda-*"))]
    paths += [toolkit / "bin" / name for toolkit in toolkits]
    for entry in sys.path:
        paths += sorted(Path(entry).glob(f"nvidia/*/bin/{name}"), reverse=True)
    return [
        path
        for path in dict.fromkeys(paths)
        if path.is_file() and os.access(path, os.X_OK)
    ]


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    def version(path: Path) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", str(path))]

    return sorted(paths, key=version, reverse=True)


def first(name: str, *packages: str, hint: str, machine: Machine = HERE) -> str:
    """The preferred one; MissingError if there is none."""
    for path in executables(name, *packages, machine=machine):
        return str(path)
    raise MissingError(f"no {name} here", hint=hint)


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float = 120.0,
    cwd: str | None = None,
) -> subprocess.CompletedProcess[str] | None:
    """A command with its output as text, numbers with a point; None if it cannot be
    started or takes too long.
    """
    try:
        return subprocess.run(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            timeout=timeout_s,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def output(*command: str | Path, cwd: str | None = None) -> str | None:
    """A command's output, None if it fails."""
    done = run(command, cwd=cwd)
    return done.stdout if done and done.returncode == 0 else None


def versions(name: str, machine: Machine = HERE) -> list[tuple[tuple[int, ...], Path]]:
    """All executables of this name that are here, including Triton's, newest first: a
    cubin may be from a newer CUDA than the first on PATH.
    """
    paths = executables(name, machine=machine)
    folder = triton_bin()
    if folder and (folder / name).is_file():
        paths.append(folder / name)
    found = []
    for path in {path.resolve() for path in paths}:
        text = output(path, "--version") or ""
        if version := re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text):
            found.append((tuple(map(int, version.groups())), path))
    return sorted(found, reverse=True)


def triton_bin() -> Path | None:
    """The folder of the tools in Triton's package; it is not imported."""
    try:
        spec = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    for package in (spec and spec.submodule_search_locations) or ():
        folder = Path(package, "backends", "nvidia", "bin")
        if folder.is_dir():
            return folder
    return None
