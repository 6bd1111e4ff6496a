"""`gdn new`: copy a rung of the ladder to start the next one."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from .. import files, paths
from ..errors import UsageError
from ..parsing import read_text
from .pack import STAY_BEHIND
from .registry import NAME, Algo, Registry, is_source
from .tuned_table import EVIDENCE


def new(registry: Registry, name: str, source: Algo, into: Path | None) -> Path:
    """Copy `source` and the files that it shares to `<into>/<op>/<name>`, set `after`
    to its name, and return the folder. Overwrites nothing.

    Shared files are copied too: a kernel is meant to be changed, and twins share theirs.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"invalid algo name '{name}'",
            hint="use lower case letters, digits, '.', '_' and '-'",
        )
    if into is None and not paths.IN_CHECKOUT:
        raise UsageError(
            "an installed gdn has no folder for new algos",
            hint="--into DIR names your own",
        )
    op = registry.ops[source.op].family
    folder = (into or paths.ALGOS_DIR) / op / name
    full_name = f"{op}/{name}"
    known = {algo.full_name for algo in registry.algos}
    if os.path.lexists(folder) or full_name in known:
        raise UsageError(
            f"{full_name} exists already",
            hint="choose another name, or delete its folder first",
        )
    text = read_text(source.own_folder / "algo.toml")
    text = re.sub(r"(?m)^(after|peer) *=.*\n", "", text)
    text = re.sub(r"(?m)^shares *= *\[[^\]]*\].*\n", "", text)
    # after `summary`, so that it stays in the top table whatever tables follow
    head = f'''\
summary = "a copy of {source.name}: say here what it does differently"
after = "{source.name}"
'''
    text = re.sub(r"(?m)^summary *=.*\n", head, text, count=1)
    temporary = folder.with_name(f".{name}.{os.getpid()}")
    hint = "--into DIR names another algos folder"
    try:
        temporary.mkdir(parents=True)
        for path in source.own_folder.iterdir():  # it has no subfolders: see pack.py
            stays = path.name in STAY_BEHIND and path.name != EVIDENCE
            hidden = path.name.startswith(".")
            if is_source(path, source.own_folder) and not stays and not hidden:
                shutil.copy(path, temporary)
        for path in source.shares:
            shutil.copy(path, temporary)
        # last: without it the folder is not an algo
        files.write(temporary / "algo.toml", text, hint=hint)
        temporary.rename(folder)
    except OSError as e:
        raise files.failure(folder, e, hint) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
