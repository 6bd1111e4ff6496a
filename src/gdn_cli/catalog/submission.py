"""A team's repository as the contest reads it: one config.toml with one definition, at the top or in each immediate
subfolder, and the sources in solution/<language>/ beside it. Reads and writes the files; git is run/submit.py's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from .. import files
from ..errors import GdnError, UsageError
from ..parsing import Text, Wrong, decode, read_text, read_toml
from . import workloads
from .formats import Solution
from .pack import SUFFIXES, source_hash
from .registry import Registry

CONFIG = "config.toml"
_LANGUAGES = ("triton", "cuda")  # that the contest's kit packs


class About(Struct, frozen=True):
    name: Text
    definition: Text
    author: Text


class Build(Struct, frozen=True):
    language: Annotated[Literal["triton", "cuda"], Meta(description=f"one of {', '.join(_LANGUAGES)}")]
    entry_point: Text
    destination_passing_style: bool = True
    binding: str | None = None

    def __post_init__(self) -> None:
        file, colons, symbol = self.entry_point.partition("::")
        if not (file and colons and symbol) or "::" in symbol:
            raise Wrong(("entry_point",), "'<file>::<symbol>'", self.entry_point)


class Config(Struct, frozen=True):
    """The keys of a config.toml that the contest reads."""

    solution: About
    build: Build


class Entry(Struct):
    """One definition's folder of a repository, and what is wrong with it."""

    folder: str  # "." for the top
    definition: str | None
    faults: list[str]


def entries(root: Path, registry: Registry) -> list[Entry]:
    """All that the contest would find in a repository. What concerns the whole is among the top's faults."""
    configs = sorted(root.glob(f"*/{CONFIG}"))
    configs = [path for path in configs if not path.parent.name.startswith(".")]
    top, found = root / CONFIG, []
    for path in [*([top] if top.is_file() else []), *configs]:
        folder = path.parent.relative_to(root).as_posix()
        try:
            config, faults = decode(read_toml(path), Config, path.relative_to(root)), []
            faults = _faults(path.parent, config, registry)
            found.append(Entry(folder, config.solution.definition, faults))
        except GdnError as e:
            found.append(Entry(folder, None, [str(e)]))
    whole = []
    if top.is_file() and configs:
        whole.append(f"{CONFIG} at the top and in {configs[0].parent.name}/: for several definitions only in folders")
    names = [entry.definition for entry in found if entry.definition]
    for name in sorted({name for name in names if names.count(name) > 1}):
        whole.append(f"{name} is the definition of several folders: one of them is evaluated")
    deep = [p for p in root.glob(f"*/*/{CONFIG}") if not p.relative_to(root).parts[0].startswith(".")]
    whole += [f"{path.relative_to(root)} is too deep to be found" for path in sorted(deep)]
    return [Entry(".", None, whole), *found] if whole else found


def _faults(folder: Path, config: Config, registry: Registry) -> list[str]:
    unknown = _unknown(config.solution.definition, registry)
    found = [unknown] if unknown else []
    sources, file = folder / "solution" / config.build.language, config.build.entry_point.partition("::")[0]
    if not sources.is_dir():
        return [*found, f"no folder solution/{config.build.language}/ for its sources"]
    if not (sources / file).is_file():
        found.append(f"solution/{config.build.language}/ has no {file}, its entry point")
    for path in sorted(sources.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            found.append(f"{path.relative_to(folder)}/ is not packed: subfolders are dropped")
        elif path.is_file() and path.suffix in SUFFIXES and not read_text(path).strip():
            found.append(f"{path.relative_to(folder)} is empty, which flashinfer-bench refuses")
    return found


def place(found: list[Entry], definition: str, otherwise: str) -> str:
    """The folder for a definition: the one that has it, else a new one. UsageError if the layout has no room for it."""
    for entry in found:
        if entry.definition == definition:
            return entry.folder
    if any(entry.folder == "." and entry.definition for entry in found):
        hint = f"move it into a folder first: one for each definition, and no {CONFIG} at the top"
        raise UsageError(f"the repository's {CONFIG} is of another definition", hint=hint)
    return otherwise


def fit(solution: Solution, registry: Registry) -> None:
    """UsageError for what the contest would not take."""
    if (language := solution["spec"]["language"]) not in _LANGUAGES:
        raise UsageError(f"the contest takes {' and '.join(_LANGUAGES)}, not {language}")
    if wrong := _unknown(solution["definition"], registry):
        raise UsageError(wrong)


def _unknown(definition: str, registry: Registry) -> str | None:
    known = sorted(name for name in workloads.contest() if registry.ops.of_definition(name))
    if definition in known:
        return None
    return f"definition '{definition}' is not one of the contest's that gdn knows: {', '.join(known)}"


def write(folder: Path, solution: Solution) -> None:
    """Write a packed solution as the contest reads it; sources of an earlier one are replaced."""
    spec, hint = solution["spec"], "name another repository"
    sources = folder / "solution" / spec["language"]
    text = "".join(
        f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) + "\n"
        for table, keys in {
            "solution": {key: solution[key] for key in ("name", "definition", "author")},
            "build": {key: spec[key] for key in ("language", "entry_point", "destination_passing_style")}
            | ({"binding": spec["binding"]} if spec.get("binding") else {}),
        }.items()
    )
    try:
        for language in _LANGUAGES:
            shutil.rmtree(folder / "solution" / language, ignore_errors=True)
        sources.mkdir(parents=True)
    except OSError as e:
        raise files.failure(sources, e, hint) from None
    for source in solution["sources"]:
        files.write(sources / source["path"], source["content"], within=folder, hint=hint)
    files.write(folder / CONFIG, text.rstrip() + "\n", within=folder, hint=hint)


def written(folder: Path) -> str:
    """The source hash of what the contest will pack from a folder: to compare with what was proved."""
    config = decode(read_toml(folder / CONFIG), Config, folder / CONFIG)
    build, sources = config.build, folder / "solution" / config.build.language
    plain = [path for path in sorted(sources.iterdir()) if path.is_file()]
    found = [{"path": path.name, "content": read_text(path)} for path in plain]
    spec = {"language": build.language, "target_hardware": ["cuda"], "entry_point": build.entry_point}
    spec |= {"destination_passing_style": build.destination_passing_style, "binding": build.binding}
    return source_hash({"name": "", "definition": "", "author": "", "spec": spec, "sources": found})
