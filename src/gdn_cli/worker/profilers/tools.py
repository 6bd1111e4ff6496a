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
from collections.abc import Sequence
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
    places = [Path(there)] if (there := shutil.which(name)) else []
    places += sorted(
        (place for pattern in packages for place in PACKAGES.glob(pattern)),
        key=_version,
        reverse=True,
    )
    toolkits = [home] if (home := machine.cuda_home()) else []
    toolkits += [
        LOCAL / "cuda",
        *sorted(LOCAL.glob("cuda-*"), key=_version, reverse=True),
    ]
    places += [toolkit / "bin" / name for toolkit in toolkits]
    places += [
        wheel
        for entry in sys.path
        for wheel in sorted(Path(entry).glob(f"nvidia/*/bin/{name}"), reverse=True)
    ]
    return [
        place
        for place in dict.fromkeys(places)
        if place.is_file() and os.access(place, os.X_OK)
    ]


def _version(place: Path) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", str(place))]


def first(name: str, *packages: str, hint: str, machine: Machine = HERE) -> str:
    """The preferred one; MissingError if there is none."""
    for place in executables(name, *packages, machine=machine):
        return str(place)
    raise MissingError(f"no {name} here", hint=hint)


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float = 120.0,
    stdin: str = "",
    cwd: str | None = None,
) -> subprocess.CompletedProcess[str] | None:
    """A command with its output as text, numbers with a point; None if it cannot be
    started or takes too long.
    """
    try:
        return subprocess.run(
            list(map(str, command)),
            input=stdin,
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
    places = executables(name, machine=machine)
    if triton := triton_bin():
        places.append(triton / name)
    found = []
    for place in dict.fromkeys(path.resolve() for path in places if path.is_file()):
        if version := re.search(
            r"\bV(\d+)\.(\d+)\.(\d+)", output(place, "--version") or ""
        ):
            found.append((tuple(map(int, version.groups())), place))
    return sorted(found, key=lambda item: item[0], reverse=True)


def triton_bin() -> Path | None:
    """The folder of the tools in Triton's package; it is not imported."""
    try:
        spec = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    places = (
        [
            Path(p) / "backends" / "nvidia" / "bin"
            for p in (spec.submodule_search_locations or ())
        ]
        if spec
        else []
    )
    return next((place for place in places if place.is_dir()), None)
