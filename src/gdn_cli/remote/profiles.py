"""Profiles that are made at Modal: sent in one parcel, made there by profiling.py, their folders unpacked here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import Struct

from .. import files, profiling
from ..errors import GdnError, RemoteError
from ..pack import source_hash
from ..parsing import decode
from ..profile_types import Profile
from ..record_types import RemoteCall
from . import parcel
from .engine import Engine, Work, answers
from .settings import DATA

_PROCESSES = 5  # that a profile takes at most, each with its own time limit


def made(engine: Engine, subjects: list[profiling.Subject], settings: profiling.Settings) -> Iterator[Profile]:
    """The profile of each subject, whose folder is here by then; none where they are left there (--detach). Raises
    what the profile of one was refused for."""
    away = replace(settings, dataset=Path(DATA)) if settings.dataset else settings
    pieces = [
        {"profile": profiling.sent(subject, away), "cuda": True, "sources": [source_hash(subject.solution)]}
        for subject in subjects
    ]
    limit_s = engine.bounded(settings.timeout_s * _PROCESSES * len(pieces))
    yield from _arrived(engine, Work(pieces, [], limit_s), settings.folder)


def fetched(engine: Engine, call: RemoteCall, folder: Path) -> Iterator[Profile]:
    """The profiles of what an earlier command left there: `call` is of its Engine.sent."""
    yield from _arrived(engine, Work([], [], call.limit_s, call.id), folder)


def _arrived(engine: Engine, work: Work, folder: Path) -> Iterator[Profile]:
    for answer in answers(engine, work):
        if failed := answer.get("failed"):
            raise GdnError(f"at Modal: {failed['message']}", code=failed["code"], hint=failed["hint"])
        yield _unpacked(answer, folder, engine.say)


class _Arrived(Struct):
    """A profile that was made there, with the files of its folder, and the names of those that were too large."""

    document: Profile
    files: dict[str, str]  # as parcel.text_of makes them
    left: list[str]


def _unpacked(answer: Any, profiles: Path, say: Callable[[str], None]) -> Profile:
    arrived = decode(answer, _Arrived, "a profile from Modal", RemoteError)
    profile = arrived.document
    folder, lost = profiling.new_folder(profiles, [profile.name]), []
    for name, text in arrived.files.items():
        try:  # a full disk costs a file, not the profile
            files.write(folder / Path(name).name, parcel.bytes_of(text), hint=None)
        except GdnError as e:
            lost.append(e.message)
    if arrived.left:
        say(f"too large to come along: {', '.join(arrived.left)}")
    profile.name = folder.name
    profile = profiling.keep(folder, profile)
    if lost and not profile.unkept:
        profile.unkept = f"not all of the profile could be kept: {lost[0]}"
    return profile
