"""Profiles that are made at Modal: sent as one request, made by profile/session.py, their folders unpacked here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import files
from ..catalog.pack import source_hash
from ..errors import GdnError
from ..profile import session
from ..schema.record_types import RemoteCall
from . import wire
from .engine import Engine, Work, answers
from .settings import DATA

_PROCESSES = 5  # that a profile takes at most, each with its own time limit


def made(engine: Engine, subjects: list[session.Subject], settings: session.Settings) -> Iterator[dict[str, Any]]:
    """The document of each subject, whose folder is here by then; none where they are left there (--detach). Raises
    what the profile of one was refused for."""
    away = replace(settings, dataset=Path(DATA)) if settings.dataset else settings
    pieces = [
        {"profile": session.sent(subject, away), "cuda": True, "sources": [source_hash(subject.solution)]}
        for subject in subjects
    ]
    limit_s = engine.bounded(settings.timeout_s * _PROCESSES * len(pieces))
    yield from _arrived(engine, Work(pieces, [], limit_s), settings.folder)


def fetched(engine: Engine, call: RemoteCall, folder: Path) -> Iterator[dict[str, Any]]:
    """The documents of what an earlier command left there: `call` is of its Engine.sent."""
    yield from _arrived(engine, Work([], [], call.limit_s, call.id), folder)


def _arrived(engine: Engine, work: Work, folder: Path) -> Iterator[dict[str, Any]]:
    for answer in answers(engine, work):
        if failed := answer.get("failed"):
            raise GdnError(f"at Modal: {failed['message']}", code=failed["code"], hint=failed["hint"])
        yield _unpacked(answer, folder, engine.say)


def _unpacked(answer: dict[str, Any], profiles: Path, say: Callable[[str], None]) -> dict[str, Any]:
    document = answer["document"]
    folder, lost = session.new_folder(profiles, [document["name"]]), []
    for name, text in answer["files"].items():
        try:  # a full disk costs a file, not the profile
            files.write(folder / Path(name).name, wire.bytes_of(text), hint=None)
        except GdnError as e:
            lost.append(e.message)
    if answer["left"]:
        say(f"too large to come along: {', '.join(answer['left'])}")
    kept = session.keep(folder, document | {"name": folder.name})
    return {"unkept": f"not all of the profile could be kept: {lost[0]}"} | kept if lost else kept
