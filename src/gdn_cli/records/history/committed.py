"""The times of an algo in the record files of a checkout's results/."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from ... import files
from ...errors import GdnError
from .. import store
from . import documents
from .query import Group, timeline


def committed(
    folder: Path, op: str, algo: str, named: str = ""
) -> tuple[str, Group] | None:
    """The path and the times of the bench with the most sizes among the files of
    `folder`; those that the text `named` names come first, in its order. None if there
    is none.
    """
    found: list[tuple[tuple, str, Group]] = []
    for path in sorted(folder.glob("*/*.json")):
        name = f"{folder.name}/{path.relative_to(folder)}"
        try:
            if f'"{algo}"'.encode() not in files.read(path):
                continue
            document = store.load(path)
        except (OSError, GdnError):
            continue
        if document.command != "bench" or document.options.get("in_place"):
            continue
        stored = documents.Stored(**structs.asdict(document) | {"file": name})
        own = [
            s
            for s in documents.series(stored, name)
            if (s.op, s.algo) == (op, algo) and s.measured
        ]
        at = min(
            (at for s in (name, path.name) if (at := named.find(s)) >= 0),
            default=len(named),
        )
        found += [
            ((at, -len(s.medians_us), name), name, timeline([s])[0]) for s in own[:1]
        ]
    return min(found, key=lambda each: each[0])[1:] if found else None
