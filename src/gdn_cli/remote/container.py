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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from .. import errors
from ..errors import GdnError, one_line
from ..machine.inventory import HERE, Machine
from ..run import jobs, worker_process
from ..run.worker_process import Outcome
from ..schema.record_types import Environment, GpuName, Record, Status
from ..tune import away
from . import build_cache, wire
from .settings import CACHE
from .wire import Cache, Made, Parcel, Profile, Refusal, Reply, Wanted

# of the container's time, to send back what there is
_RESERVE_S = 15.0
# of a profile's files; the ones to open first have priority
_FILES_MIB = 64
# makes changes on a volume permanent
Commit = Callable[[str], None]


def serve(
    data: bytes,
    commit: Commit = lambda volume: None,
    machine: Machine = HERE,
    keep: Callable[[bytes], None] = lambda message: None,
    before: Sequence[bytes] = (),
) -> bytes:
    """Do a parcel's work, one piece after the other; whatever happens, the answer is a
    reply. `keep` gets each record (wire.Made) as soon as it is made, in case that this
    process does not live to answer. `before` has the records of a container that did
    not: Modal starts a preempted call again, and this one goes on after them.
    """
    start = time.monotonic()
    try:
        container = _Container(wire.decode(data, Parcel), machine, keep)
        reply = container.served(commit, before)
    except Exception as e:  # the other side may not know the exception's type
        reply = Reply(lost=f"the container failed: {one_line(e)}")

    reply.seconds = time.monotonic() - start
    return wire.encode(reply)


class _Container:
    """One parcel's work. `end` is when it must stop, to send back what there is."""

    def __init__(
        self, content: Parcel, machine: Machine, keep: Callable[[bytes], None]
    ) -> None:
        self.content = content
        self.machine = machine
        self.keep = keep
        self.end = time.monotonic() + (content.limit_s or math.inf) - _RESERVE_S

    def served(self, commit: Commit, before: Sequence[bytes]) -> Reply:
        content = self.content
        devices = [gpu.name for gpu in self.machine.gpus()] if content.gpu else []
        if content.gpu and (why := content.gpu.mismatch(devices)):
            return Reply(lost=f"{why}; nothing was measured: --gpu names another")

        earlier = _by_piece(before)
        reply = Reply()
        with _builds(content.cache, commit) as env, _environment(env | content.env):
            for i in range(len(content.jobs)):
                reply.outcomes.append(self._outcome(i, earlier.get(i, [])))

            for wanted in content.profiles:
                reply.profiles.append(self._profile(wanted))

            for tuning in content.tunings:
                reply.tuned.append(self._tuned(tuning, before))

        return reply

    def _outcome(self, number: int, before: list[Made]) -> Outcome:
        """A worker's outcome, at `end` at the latest: what it has measured by then is
        sent back. A worker is only asked for the workloads that an earlier one has not
        finished.
        """
        piece = self.content.jobs[number]
        request, earlier = piece.request, [entry.record for entry in before]
        rest = request.unfinished(earlier)
        if before and not rest:
            known = before[-1].environment
            return Outcome(Status.DONE, records=earlier, environment=known)

        left_s = self.end - time.monotonic()
        limit_s = self.content.limit_s or 0
        cut = f"the container's time of {limit_s:g} s was up; --max-minutes gives more"
        if left_s <= 0:
            return Outcome(Status.REMOTE_FAILED, cut, earlier, code=errors.REMOTE)

        def on_record(record: Record, environment: Environment | None) -> None:
            self._label(environment)
            self.keep(wire.encode(Made(number, record, environment)))

        environ = jobs.environ_of(request.mode, machine=self.machine)
        request = structs.replace(request, workloads=rest)
        timeout_s = min(piece.timeout_s, left_s)
        outcome = worker_process.serve(request, environ, timeout_s, on_record=on_record)
        unfinished = {w.uuid for w in rest}
        finished = [record for record in earlier if record.uuid not in unfinished]
        outcome.records = finished + outcome.records
        # not for want of speed
        if outcome.status is Status.TIMED_OUT and left_s < piece.timeout_s:
            outcome.status = Status.REMOTE_FAILED
            outcome.reason = cut
            outcome.code = errors.REMOTE

        self._label(outcome.environment)
        return outcome

    def _label(self, environment: Environment | None) -> None:
        """Note where the numbers come from: measured at Modal, in which image, on which
        of its GPUs.
        """
        if not environment:
            return

        environment.where = self.content.where
        environment.image = self.content.image
        if self.content.gpu and environment.gpu:
            environment.asked = str(self.content.gpu)
            environment.gpus = [gpu.name for gpu in self.machine.gpus()]

    def _profile(self, wanted: Wanted) -> Profile:
        """A profile made as `gdn profile` makes it here: its document, and the files of
        its folder.
        """
        from ..profile import session

        with tempfile.TemporaryDirectory(prefix="gdn-profiles-") as folder:
            try:
                subject, settings = session.received(wanted, Path(folder))
                profile = session.run(
                    subject, settings, lambda *_: None, lambda line: None, self.machine
                )
            except GdnError as e:
                return Profile(refused=Refusal(e.message, e.hint, e.code))

            self._label(profile.environment)
            files, left = _files(Path(str(profile.folder)), profile.reading.files)
            profile.folder = msgspec.UNSET

        return Profile(profile, files, left)

    def _tuned(self, tuning: away.Wanted, before: Sequence[bytes]) -> away.Measured:
        """A tuning's measurements, as many as can be made until `end`."""
        end = threading.Event()
        left_s = min(self.end - time.monotonic(), threading.TIMEOUT_MAX)
        alarm = threading.Timer(left_s, end.set)
        alarm.daemon = True
        alarm.start()
        try:
            return away.measure(
                tuning,
                self.machine,
                lambda noted: self.keep(wire.encode(noted)),
                wire.readable(before, away.Noted),
                end,
            )
        finally:
            alarm.cancel()


def _by_piece(before: Sequence[bytes]) -> dict[int, list[Made]]:
    """The records of an earlier container by their piece, each with the GPU that it had."""
    earlier: dict[int, list[Made]] = {}
    for entry in wire.readable(before, Made):
        env = entry.environment
        if env and env.gpu and env.gpu_uuid:
            entry.record.gpu = GpuName(uuid=env.gpu_uuid, name=env.gpu)

        earlier.setdefault(entry.piece, []).append(entry)

    return earlier


def _files(folder: Path, first: Sequence[str]) -> tuple[dict[str, bytes], list[str]]:
    """A profile's files by name, up to the size limit; and the names of those left out."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    files, left, room = {}, [], _FILES_MIB << 20
    for name in dict.fromkeys([*first, *names]):
        content = (folder / name).read_bytes()
        if len(content) <= room:
            files[name] = content
            room -= len(content)
        else:
            left.append(name)

    return files, left


def _builds(
    cache: Cache | None, commit: Commit
) -> contextlib.AbstractContextManager[dict[str, str]]:
    if cache is None:
        return contextlib.nullcontext({})

    return build_cache.kept(Path(CACHE), cache.key, lambda: commit(cache.volume))


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set these variables, and make gdn's package importable for the worker: it was
    mounted, not installed.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    saved = dict(os.environ)
    os.environ.update(
        variables | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
