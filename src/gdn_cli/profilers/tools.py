"""Where NVIDIA's tools lie: on PATH, in packages of their own, in a CUDA toolkit, in PyPI's wheels."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from .. import machine

PACKAGES, LOCAL = Path("/opt/nvidia"), Path("/usr/local")


def executables(name: str, *packages: str) -> list[Path]:
    """All of this name that are here, the one to prefer first; `packages` are patterns below /opt/nvidia.

    What is on PATH was put there by somebody. Packages of one tool are newer than the toolkit's, and of several the
    newest knows the most GPUs.
    """
    places = [Path(there)] if (there := shutil.which(name)) else []
    places += sorted((place for pattern in packages for place in PACKAGES.glob(pattern)), key=_version, reverse=True)
    toolkits = [home] if (home := machine.cuda_home()) else []
    toolkits += [LOCAL / "cuda", *sorted(LOCAL.glob("cuda-*"), key=_version, reverse=True)]
    places += [toolkit / "bin" / name for toolkit in toolkits]
    places += [wheel for entry in sys.path for wheel in sorted(Path(entry).glob(f"nvidia/*/bin/{name}"), reverse=True)]
    return [place for place in dict.fromkeys(places) if place.is_file() and os.access(place, os.X_OK)]


def _version(place: Path) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", str(place))]
