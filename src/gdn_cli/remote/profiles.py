"""Profiles and tunings at Modal: each is sent as one request. Profiles are made by
profile/session.py, and their folders unpacked here; the measuring of a tuning is
tune/away.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from .. import errors, files
from ..errors import GdnError, RemoteError, one_line
from ..profile import session
from ..schema.profile_types import Profile
from ..schema.record_types import RemoteCall
from ..tune import away, search
from ..tune.journal import Key
from . import wire
from .engines import Carrier
from .work import Work

# at most for a profile, each with its own time limit
_PROCESSES = 5


def make(
    calls: Carrier, subjects: list[session.Subject], settings: session.Settings
) -> Iterator[Profile]:
    """The profile of each subject, whose folder is here by then; none if they are left
    there (--detach). Raises the error if one was refused.
    """
    if settings.dataset:
        dataset = calls.find_dataset([subject.workload for subject in subjects])
        settings = replace(settings, dataset=dataset)

    limit_s = calls.limit_s(settings.timeout_s * _PROCESSES * len(subjects))
    wanted = [session.sent(subject, settings) for subject in subjects]
    yield from _arrived(calls, Work([], limit_s, wanted), settings.folder)


def fetched(calls: Carrier, call: RemoteCall, folder: Path) -> Iterator[Profile]:
    """The profiles that an earlier command left there: `call` is from its Engine.sent."""
    yield from _arrived(calls, Work([], call.limit_s, earlier=call), folder)


def _arrived(calls: Carrier, work: Work, folder: Path) -> Iterator[Profile]:
    reply = calls.carry_one(work)
    if reply.lost:
        raise RemoteError(reply.lost)

    for arrived in reply.profiles:
        if refused := arrived.refused:
            raise GdnError(
                f"at {calls.name}: {refused.message}",
                code=refused.code,
                hint=refused.hint,
            )

        yield unpacked(arrived, folder, calls.say)


def unpacked(
    arrived: wire.Profile, profiles: Path, say: Callable[[str], None]
) -> Profile:
    profile = arrived.document
    assert profile is not None
    folder = session.new_folder(profiles, [profile.name])
    lost = []
    for path, content in arrived.files.items():
        try:  # a full disk costs a file, not the profile
            files.write(folder / Path(path).name, content, hint=None)
        except (GdnError, ValueError) as e:  # ValueError: a NUL in its name
            lost.append(one_line(e))

    if arrived.left:
        say(f"too large to send: {', '.join(arrived.left)}")

    profile.name = folder.name
    profile = session.keep(folder, profile)
    if lost and not profile.unkept:
        profile.unkept = f"not all of the profile could be kept: {lost[0]}"

    return profile


def tuned(
    calls: Carrier, plan: search.Plan, settings: search.Settings
) -> away.Measured:
    """What was measured there; of a call that did not reply, or at Ctrl-C, what it had
    kept. RemoteError if there is nothing.
    """
    dataset = calls.find_dataset(plan.workloads) if settings.dataset else None
    tuning = away.wanted(plan, settings, dataset)
    work = Work([], calls.limit_s(float("inf")), tunings=[tuning])
    work.earlier = next(iter(calls.earlier), None)
    code = None
    try:
        reply = calls.carry_one(work)
    except KeyboardInterrupt:
        if work.call:
            work.kept = list(work.call.records)
        if not work.kept:
            raise
        reply, code = wire.Reply(lost="interrupted"), errors.INTERRUPTED

    if not reply.lost:
        return reply.tuned[0]

    lines = [noted.line for noted in wire.readable(work.kept, away.Noted)]
    if not lines or not isinstance(lines[0], Key):
        raise RemoteError(str(reply.lost))

    key = lines[0]
    measured = away.Measured(key=key, lines=[], reason=reply.lost, code=code)
    # another key: it was started again on another machine
    for line in lines[1:]:
        if isinstance(line, Key):
            if line != key:
                break
        elif line not in measured.lines:
            measured.lines.append(line)
    return measured
