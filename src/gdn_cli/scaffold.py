"""`gdn new`: copy a rung of the ladder to start the next one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from . import paths
from .errors import UsageError
from .registry import NAME, Algo, Registry


def new(registry: Registry, name: str, source: Algo, into: Path | None) -> Path:
    """Copy `source` to `<into>/<op>/<name>`, mark whose successor it is, and return the folder. Overwrites nothing."""
    if not NAME.fullmatch(name):
        raise UsageError(f"'{name}' is no name for an algo", hint="use lower case letters, digits, '.', '_' and '-'")
    if into is None and not paths.IN_CHECKOUT:
        raise UsageError("an installed gdn has no folder for new algos", hint="--into DIR names one of yours")
    folder = (into or paths.ALGOS_DIR) / source.op / name
    if folder.exists() or any(a.name == name and a.op == source.op for a in registry.algos):
        raise UsageError(f"{source.op}/{name} exists already", hint="choose another name, or delete its folder first")
    try:
        behind = shutil.ignore_patterns("__pycache__", "README.md", "tuning.json", ".*")
        shutil.copytree(source.folder, folder, ignore=behind)
    except OSError as e:
        raise UsageError(f"cannot write {folder}: {e.strerror}", hint="--into DIR names another algos folder") from None
    toml = folder / "algo.toml"
    text = re.sub(r"(?m)^after *=.*\n", "", toml.read_text(encoding="utf-8"))
    # behind `summary`, so that it stays in the top table whatever tables follow
    toml.write_text(
        re.sub(r"(?m)^(summary *=.*\n)", rf'\g<1>after = "{source.name}"\n', text, count=1), encoding="utf-8"
    )
    return folder
