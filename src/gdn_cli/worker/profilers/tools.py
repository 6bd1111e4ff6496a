"""Finds NVIDIA's tools: on PATH, in separate packages, in a CUDA toolkit, in PyPI's
wheels, in Triton; and runs any tool for its output.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import MissingError
from ...machine.inventory import HERE, Machine

PACKAGES, LOCAL = Path("/opt/nvidia"), Path("/usr/local")


def executables(name: str, package: str = "", machine: Machine = HERE) -> list[Path]:
    """All executables of this name that are here, in order of preference; `package` is
    a folder under /opt/nvidia that has one for each version.

    PATH comes first, because it was set on purpose. A tool's own package is newer than
    the toolkit's, and of several the newest knows the most GPUs.
    """
    paths = [Path(shutil.which(name) or "")]
    if package:
        paths += _newest_first(PACKAGES, f"{package}/*/{name}")
    if home := machine.cuda_home():
        paths.append(home / "bin" / name)
    paths.append(LOCAL / "cuda" / "bin" / name)
    paths += _newest_first(LOCAL, f"cuda-*/bin/{name}")
    for entry in sys.path:
        paths += _newest_first(Path(entry), f"nvidia/*/bin/{name}")
        paths.append(Path(entry, "triton", "backends", "nvidia", "bin", name))
    return [
        path
        for path in dict.fromkeys(paths)
        if path.is_file() and os.access(path, os.X_OK)
    ]


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    def version(path: Path) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", str(path))]

    return sorted(folder.glob(pattern), key=version, reverse=True)


def first(name: str, package: str = "", *, hint: str, machine: Machine = HERE) -> str:
    """The preferred one; MissingError if there is none."""
    for path in executables(name, package, machine):
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
    result = run(command, cwd=cwd)
    return result.stdout if result and result.returncode == 0 else None


def versions(name: str, machine: Machine = HERE) -> list[tuple[tuple[int, ...], Path]]:
    """All executables of this name that are here, newest first: a cubin may be from a
    newer CUDA than the first on PATH.
    """
    installed = []
    for path in {path.resolve() for path in executables(name, machine=machine)}:
        text = output(path, "--version") or ""
        if version := re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text):
            installed.append((tuple(map(int, version.groups())), path))
    return sorted(installed, reverse=True)
