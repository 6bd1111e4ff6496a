"""Profiles made at Modal: sent as one request, made by profile/session.py, their
folders unpacked here.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from .. import files
from ..errors import GdnError, RemoteError, one_line
from ..profile import session
from ..schema.profile_types import Profile
from ..schema.record_types import RemoteCall
from . import modal_client, wire
from .engine import Engine, Work
from .wire import Reply

_FILE = 1 << 30  # bytes of a file once it is unpacked
_PROCESSES = 5  # at most for a profile, each with its own time limit


def made(
    engine: Engine, subjects: list[session.Subject], settings: session.Settings
) -> Iterator[Profile]:
    """The profile of each subject, whose folder is here by then; none if they are left
    there (--detach). Raises the error if one was refused.
    """
    away = settings
    if settings.dataset:
        modal_client.connect(engine.settings.limits.connect)
        engine.look_at([subject.workload for subject in subjects])
        away = replace(settings, dataset=engine.dataset_at)
    limit_s = engine.bounded(settings.timeout_s * _PROCESSES * len(subjects))
    wanted = [session.sent(subject, away) for subject in subjects]
    yield from _arrived(engine, Work([], limit_s, wanted), settings.folder)


def fetched(engine: Engine, call: RemoteCall, folder: Path) -> Iterator[Profile]:
    """The profiles that an earlier command left there: `call` is from its Engine.sent."""
    yield from _arrived(engine, Work([], call.limit_s, earlier=call), folder)


def _arrived(engine: Engine, work: Work, folder: Path) -> Iterator[Profile]:
    with contextlib.closing(engine.carry([work])) as arriving:
        _, reply = next(arriving, (work, Reply()))
    if reply.lost:
        raise RemoteError(reply.lost)
    for arrived in reply.profiles:
        if refused := arrived.refused:
            raise GdnError(
                f"at Modal: {refused.message}", code=refused.code, hint=refused.hint
            )
        yield _unpacked(arrived, folder, engine.say)


def _unpacked(
    arrived: wire.Profile, profiles: Path, say: Callable[[str], None]
) -> Profile:
    profile = arrived.document
    folder, lost = session.new_folder(profiles, [profile.name]), []
    for name, packed in arrived.files.items():
        try:  # a full disk costs a file, not the profile
            files.write(
                folder / Path(name).name, wire.inflated(packed, _FILE), hint=None
            )
        except GdnError as e:
            lost.append(e.message)
        except (zlib.error, ValueError) as e:  # ValueError: a NUL in its name
            lost.append(f"{Path(name).name} arrived damaged ({one_line(e)})")
    if arrived.left:
        say(f"too large to send: {', '.join(arrived.left)}")
    profile.name = folder.name
    profile = session.keep(folder, profile)
    if lost and not profile.unkept:
        profile.unkept = f"not all of the profile could be kept: {lost[0]}"
    return profile
