"""Profiles that are made at Modal: sent in one parcel, made there by profiling.py, their folders unpacked here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import profiling
from ..errors import GdnError
from ..pack import source_hash
from . import parcel
from .engine import Engine, profile
from .settings import DATA

_PROCESSES = 5  # that a profile takes at most, each with its own time limit


def made(engine: Engine, subjects: list[profiling.Subject], settings: profiling.Settings) -> Iterator[dict[str, Any]]:
    """The document of each subject, whose folder is here by then. Raises what the profile of one was refused for."""
    away = replace(settings, dataset=Path(DATA)) if settings.dataset else settings
    pieces = [
        {"profile": profiling.sent(subject, away), "cuda": True, "sources": [source_hash(subject.solution)]}
        for subject in subjects
    ]
    for subject, answer in zip(subjects, profile(engine, pieces, settings.timeout_s * _PROCESSES), strict=True):
        if failed := answer.get("failed"):
            raise GdnError(f"at Modal: {failed['message']}", code=failed["code"], hint=failed["hint"])
        yield _unpacked(subject, settings, answer, engine)


def _unpacked(subject: Any, settings: profiling.Settings, answer: dict[str, Any], engine: Engine) -> dict[str, Any]:
    document = answer["document"]
    folder = profiling.new_folder(settings.folder, [document["name"]])
    for name, text in answer["files"].items():
        with contextlib.suppress(OSError):  # a full disk costs a file, not the profile
            (folder / Path(name).name).write_bytes(parcel.bytes_of(text))
    if answer["left"]:
        engine.say(f"too large to come along: {', '.join(answer['left'])}")
    return profiling.keep(folder, document | {"name": folder.name})
