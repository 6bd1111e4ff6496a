"""What runs in the container: `serve(parcel) -> reply`, bytes both.

It looks at the GPU, then starts the same worker that `gdn bench` starts here, in an
empty folder, with its own time limit: if a kernel hangs, crashes or uses up the memory,
that algo fails, earlier measurements are sent back, and the container survives to say
so. Needs gdn's own files and the packages of the image, not Modal.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from .. import errors
from ..errors import GdnError, one_line
from ..machine.inventory import HERE, Machine
from ..run import doctor, jobs, worker_process
from ..schema.record_types import Environment, GpuName, Record, Status
from ..tune import away
from . import build_cache, wire
from .settings import CACHE
from .wire import Cache, Made, Parcel, Profile, Refusal, Reply, Wanted

_RESERVE_S = 15.0  # of the container's time, to send back what there is
_PROFILE_S = 60.0  # that must be left to begin a profile after other work
_FILES_MIB = 64  # of a profile's files; the ones to open first have priority
Commit = Callable[[str], None]  # makes changes on a volume permanent


def serve(
    data: bytes,
    commit: Commit = lambda volume: None,
    machine: Machine = HERE,
    keep: Callable[[bytes], None] = lambda made: None,
    before: Sequence[bytes] = (),
) -> bytes:
    """Do a parcel's work, one piece after the other; whatever happens, the answer is a
    reply. `keep` gets each record (wire.Made) as soon as it is made, in case that this
    process does not live to answer. `before` has the records of a container that did
    not: Modal starts a preempted call again, and this one goes on after them.
    """
    try:
        reply = _served(wire.decode(data, Parcel), commit, machine, keep, before)
    except Exception as e:  # the other side may not know the exception's type
        reply = Reply(lost=f"the container failed: {one_line(e)}")
    return wire.encode(reply)


def _served(
    content: Parcel,
    commit: Commit,
    machine: Machine,
    keep: Callable[[bytes], None],
    before: Sequence[bytes],
) -> Reply:
    if content.gpu and (
        why := content.gpu.mismatch([gpu.name for gpu in machine.gpus()])
    ):
        return Reply(wrong_gpu=why)
    end = time.monotonic() + (content.limit_s or math.inf) - _RESERVE_S
    had = _had(before)
    with _built(content.cache, commit) as env, _environment(env | content.env):
        return Reply(
            outcomes=[
                _outcome(i, content, machine, end, keep, had.get(i, []))
                for i in range(len(content.jobs))
            ],
            profiles=[
                _profile(wanted, content, machine, end) for wanted in content.profiles
            ],
            tuned=[
                _tuned(asked, machine, end, keep, before) for asked in content.tunings
            ],
            findings=doctor.installed(machine) if content.examine else [],
        )


def _had(before: Sequence[bytes]) -> dict[int, list[Made]]:
    """The records of an earlier container by their piece, each with the GPU that it had."""
    found: dict[int, list[Made]] = {}
    for data in before:
        with contextlib.suppress(GdnError):
            made = wire.decode(data, Made)
            if made.environment and made.environment.gpu_uuid:
                made.record.gpu = GpuName(
                    uuid=made.environment.gpu_uuid, name=made.environment.gpu
                )
            found.setdefault(made.piece, []).append(made)
    return found


def _outcome(
    number: int,
    content: Parcel,
    machine: Machine,
    end: float,
    keep: Callable[[bytes], None],
    had: list[Made],
) -> worker_process.Outcome:
    """A worker's outcome, at `end` at the latest: what it has measured by then is sent
    back. A worker is only asked for the workloads that an earlier one has not finished.
    """

    def made(record: Record, environment: Environment | None) -> None:
        if environment:
            _label(environment, content, machine)
        keep(wire.encode(Made(number, record, environment)))

    piece = content.jobs[number]
    request, earlier = piece.request, [made.record for made in had]
    rest = request.unfinished(earlier)
    if had and not rest:
        return worker_process.Outcome(
            Status.DONE, records=earlier, environment=had[-1].environment
        )
    left = end - time.monotonic()
    cut = f"the container's time of {content.limit_s or 0:g} s was up; --max-minutes gives more"
    if left <= 0:
        return worker_process.Outcome(
            Status.REMOTE_FAILED, cut, earlier, code=errors.REMOTE
        )
    environ = jobs.environ_of(request.mode, machine=machine)
    asked = structs.replace(request, workloads=rest)
    outcome = worker_process.serve(
        asked, environ, min(piece.timeout_s, left), on_record=made
    )
    finished = {record.uuid for record in earlier} - {w.uuid for w in rest}
    outcome.records = [
        record for record in earlier if record.uuid in finished
    ] + outcome.records
    # not for want of speed
    if outcome.status is Status.TIMED_OUT and left < piece.timeout_s:
        outcome.status, outcome.reason, outcome.code = (
            Status.REMOTE_FAILED,
            cut,
            errors.REMOTE,
        )
    if outcome.environment:
        _label(outcome.environment, content, machine)
    return outcome


def _label(environment: Environment, content: Parcel, machine: Machine) -> None:
    """Note where the numbers come from: measured at Modal, in which image, on which of its GPUs."""
    environment.where, environment.image = content.where, content.image
    if content.gpu and environment.gpu:
        environment.asked, environment.gpus = (
            str(content.gpu),
            [gpu.name for gpu in machine.gpus()],
        )


def _profile(wanted: Wanted, content: Parcel, machine: Machine, end: float) -> Profile:
    """A profile made as `gdn profile` makes it here: its document, and the files of its folder."""
    from ..profile import session

    if content.jobs and time.monotonic() > end - _PROFILE_S:
        return Profile(
            refused=Refusal(
                "no time was left for it", "--max-minutes gives more", errors.REMOTE
            )
        )
    with tempfile.TemporaryDirectory(prefix="gdn-profiles-") as folder:
        try:
            subject, settings = session.received(wanted, Path(folder))
            made = session.run(
                subject, settings, lambda *_: None, lambda line: None, machine
            )
        except GdnError as e:
            return Profile(refused=Refusal(e.message, e.hint, e.code))
        _label(made.environment, content, machine)
        files, left = _files(Path(made.folder), made.reading.files)
        made.folder = msgspec.UNSET
    return Profile(made, files, left)


def _tuned(
    asked: away.Wanted,
    machine: Machine,
    end: float,
    keep: Callable[[bytes], None],
    before: Sequence[bytes],
) -> away.Measured:
    """A tuning's measurements, as many as can be made until `end`."""
    over = threading.Event()
    alarm = threading.Timer(
        min(end - time.monotonic(), threading.TIMEOUT_MAX), over.set
    )
    alarm.daemon = True
    alarm.start()
    try:
        return away.measure(
            asked,
            machine,
            lambda note: keep(wire.encode(note)),
            wire.notes(before),
            over,
        )
    finally:
        alarm.cancel()


def _files(folder: Path, first: Sequence[str]) -> tuple[dict[str, bytes], list[str]]:
    """A profile's files by name, compressed, up to the size limit; and the names of
    those left out.
    """
    names = [
        *first,
        *sorted(
            p.name for p in folder.iterdir() if p.name not in first and p.is_file()
        ),
    ]
    files, left, room = {}, [], _FILES_MIB << 20
    for name in names:
        packed = zlib.compress((folder / name).read_bytes(), 1)
        if len(packed) <= room:
            files[name] = packed
            room -= len(packed)
        else:
            left.append(name)
    return files, left


@contextlib.contextmanager
def _built(cache: Cache | None, commit: Commit) -> Iterator[dict[str, str]]:
    """The builders' folders on the local disk, restored from an earlier container's
    builds; new builds are kept.
    """
    if cache is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="gdn-built-") as folder:
        root, mounted = Path(folder), Path(CACHE)
        if mounted.is_dir():
            build_cache.restore(mounted, cache.key, root)
        before = build_cache.state(root)
        yield build_cache.environment(root)
        if (
            mounted.is_dir()
            and build_cache.state(root) != before
            and build_cache.keep(mounted, cache.key, root)
        ):
            commit(cache.volume)


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """Set these variables, and make gdn's package importable for the worker: it was
    mounted, not installed.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    kept = dict(os.environ)
    os.environ.update(
        more | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
