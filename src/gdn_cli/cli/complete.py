"""The values that the shell completes. Nothing here imports more than it needs: each press of
Tab starts a process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

Completion = Callable[[str], list[str]]


def choices(*values: str) -> Completion:
    return completion(lambda begun: values)


def completion(values: Callable[[str], Iterable[str]]) -> Completion:
    """Completes the part after the last comma; `values` gets it."""

    def complete(incomplete: str) -> list[str]:
        prefix, comma, begun = incomplete.rpartition(",")
        names = sorted(name for name in values(begun) if name.startswith(begun))
        return [prefix + comma + name for name in names]

    return complete


def _algos(begun: str) -> set[str]:
    """Short names, or full ones where a slash was typed."""
    from .. import paths

    own = os.environ.get("GDN_ALGOS", "").split(os.pathsep)
    names = set()
    for folder in (*map(Path, filter(None, own)), paths.ALGOS_DIR):
        for file in folder.glob("*/*/algo.toml"):
            op, name, _ = file.parts[-3:]
            names.add(f"{op}/{name}" if "/" in begun else name)
    return names


def _ops(begun: str) -> Iterable[str]:
    from .. import paths
    from ..catalog.ops import Ops

    return Ops(paths.config_dirs(), str)


def _presets(begun: str) -> Iterable[str]:
    from ..catalog import presets

    return presets.names()


def _tiers(begun: str) -> Iterable[str]:
    from ..catalog.tiers import TIERS

    return [*TIERS, "all"]


def _tools(begun: str) -> Iterable[str]:
    from ..worker import profilers

    return profilers.TOOLS


def _engines(begun: str) -> Iterable[str]:
    from ..parsing import read_config

    return read_config("engines.toml")[0]


def _runs(begun: str) -> list[str]:
    from .. import paths

    return [file.stem for file in paths.runs_dir().glob("*.json")]


def _profiles(begun: str) -> list[str]:
    from .. import paths

    folder = paths.profiles_dir()
    return [file.name for file in folder.glob("*")] if folder.is_dir() else []


algos = completion(_algos)
ops = completion(_ops)
presets = completion(_presets)
tiers = completion(_tiers)
tools = completion(_tools)
engines = completion(_engines)
runs = completion(_runs)
profiled = completion(lambda begun: {*_algos(begun), *_profiles(begun)})


def compared(incomplete: str) -> list[str]:
    """Algos, and files of records here."""
    files = Path().glob("*.json")
    return algos(incomplete) + [f.name for f in files if f.name.startswith(incomplete)]
