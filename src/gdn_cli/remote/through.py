"""`--engine NAME`: jobs run by a command that starts gdn on another machine, such as srun.

Its stdin gets a parcel. Each line of its stdout with our mark is a record as soon as it
is made, and the last one is the reply.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import IO, Annotated, BinaryIO

from msgspec import Meta, Struct

from .. import bounded, errors, paths
from ..catalog.registry import Algo
from ..errors import MissingError, unknown
from ..machine import inventory
from ..parsing import Positive, Text, Wrong, decode, read_toml
from ..run.elsewhere import Elsewhere
from ..run.execute import Came
from ..run.jobs import Job, Outcome
from ..schema.record_types import Document
from . import container, replies, wire
from .wire import Parcel, Piece, Reply

_MARK = b"gdn-parcel: "
_POLL_S = 0.05
# for the command to end once its reply is there
_GRACE_S = 5.0
# for the command to end once it is asked to
_END_S = 10.0
_FILLABLE = re.compile(r"([^{}\0]|\{\{|\}\}|\{python\}|\{minutes\})+")


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of configs/engines.toml. Raises parsing.Wrong for a word that cannot be filled in."""

    command: Annotated[
        tuple[Text, ...], Meta(min_length=1, description="a list of words")
    ]
    cuda: bool
    start_s: Positive
    queue_s: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        for i, word in enumerate(self.command):
            if not _FILLABLE.fullmatch(word):
                raise Wrong(("command", i), _WORD, word)


_WORD = (
    "text without NUL, with {python} and {minutes} as its only braces ({{ and }} stand for a"
    " brace)"
)


def settings(name: str) -> Settings:
    """The engine of this name. A UsageError names those that there are."""
    file = paths.CONFIGS_DIR / "engines.toml"
    known = decode(read_toml(file), dict[str, Settings], file)
    if name not in known:
        raise unknown("engine", name, known, hint=f"they are in {file}")
    return known[name]


@dataclass
class Through(Elsewhere):
    """All jobs of a plan in one command, so on one GPU."""

    name: str
    how: Settings
    say: Callable[[str], None]

    def place(self, algo: Algo, device: str = "auto") -> inventory.Place:
        return inventory.placed(algo, device, self._lacking)

    def _lacking(self, algo: Algo, mode: str) -> inventory.Place | None:
        """What the other machine has is not known here: only whether it has a GPU."""
        if mode == "cuda" and not self.how.cuda:
            return inventory.Place(
                None, f"engine {self.name} has no GPU", "configs/engines.toml says so"
            )
        return None

    def __call__(
        self, jobs: list[Job], came: Came = lambda *_: None
    ) -> Generator[tuple[Job, Outcome], None, None]:
        if not jobs:
            return
        content = Parcel(
            where=self.name,
            gpu=None,
            cache=None,
            env=wire.commit(),
            jobs=[Piece.of(job) for job in jobs],
        )
        limit_s = sum(job.timeout_s for job in jobs) + self.how.start_s
        heard = Heard(lambda data: self._record(data, jobs, came))
        reply = self._carried(wire.encode(content), limit_s, heard)
        if not reply.lost and len(reply.outcomes) != len(jobs):
            count = len(reply.outcomes)
            reply.lost = f"the reply has {count} outcomes for {len(jobs)} jobs"
        yield from replies.outcomes(jobs, reply, heard.made, None, self.say)

    def finish(self, document: Document) -> None:
        """Nothing: all records are of one GPU."""

    def _record(self, data: bytes, jobs: list[Job], came: Came) -> None:
        for made in replies.usable(jobs, [data], None):
            came(jobs[made.piece], made.record, made.environment)

    def _carried(self, parcel: bytes, limit_s: float, heard: Heard) -> Reply:
        """What the command answers; of one that fails, `heard` has the records until then."""
        minutes = str(math.ceil(limit_s / 60))
        words = self.how.command
        command = [w.format(python=sys.executable, minutes=minutes) for w in words]
        queue = ""
        if self.how.queue_s:
            queue = f", and {self.how.queue_s / 3600:.3g} h in its queue"
        self.say(
            f"{self.name}: {command[0]}, at most {minutes} min once it runs{queue}"
        )
        with tempfile.TemporaryFile() as stdin:
            stdin.write(base64.b64encode(parcel))
            stdin.seek(0)
            process = self._started(command, stdin)
            try:
                why = self._followed(process, heard, limit_s)
            finally:
                _end(process)
        if heard.reply is None:
            return Reply(lost=why or _unanswered(words[0], heard, process.returncode))
        if why:
            self.say(f"{self.name}: {why}")
        return heard.reply

    def _started(self, command: list[str], stdin: IO[bytes]) -> subprocess.Popen[bytes]:
        paths_ = [str(paths.PACKAGE.parent), os.environ.get("PYTHONPATH")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths_))}
        try:
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                # Ctrl-C is ours: it ends the command below
                start_new_session=True,
            )
        except OSError as e:
            hint = f"configs/engines.toml has the command of engine {self.name}"
            raise MissingError(
                f"cannot start {command[0]}: {e.strerror}", hint=hint
            ) from None

    def _followed(
        self, process: subprocess.Popen[bytes], heard: Heard, limit_s: float
    ) -> str | None:
        """Hear the command until it ends; or why it is to be ended."""
        what, queue_s = self.how.command[0], self.how.queue_s
        end = time.monotonic() + queue_s + limit_s
        with selectors.DefaultSelector() as selector:
            for stream, take in _streams(process, heard):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, take)
            while time.monotonic() < end:
                # before the last of its output is read
                gone = process.poll() is not None
                quiet = not _read(selector, 0 if gone else _POLL_S)
                if gone and quiet:
                    return None
                if heard.size > wire.MOST:
                    return f"{what} was ended: its messages are longer than {wire.MOST >> 20} MiB"
                if heard.size:
                    end = min(end, time.monotonic() + limit_s)
                # it may wait for something, and what it left may hold a pipe open
                if gone or heard.reply:
                    end = min(end, time.monotonic() + _GRACE_S)
        if process.poll() is not None:
            return None
        if heard.reply:
            return f"{what} did not end after its reply, and was ended"
        waited_s = limit_s + queue_s
        return f"{what} was ended: no reply after {waited_s:g} s; --timeout gives more"


def _unanswered(what: str, heard: Heard, code: int) -> str:
    lines = [text for text in heard.log.text().splitlines() if text.strip()]
    why = f": {lines[-1][:300]}" if lines else ""
    return f"{what} ended with {code} and without a reply{why}"


def _streams(
    process: subprocess.Popen[bytes], heard: Heard
) -> list[tuple[IO[bytes], Callable[[bytes], None]]]:
    assert process.stdout and process.stderr
    return [(process.stdout, heard.out), (process.stderr, heard.log.add)]


class Heard:
    """What a command has said so far: the reply, the records (wire.Made) before it, and
    the ends of its other words.

    look  gets each record as it comes
    """

    def __init__(self, look: Callable[[bytes], None]) -> None:
        self.look = look
        self.reply: Reply | None = None
        self.made: list[bytes] = []
        # of all marked lines
        self.size = 0
        self.log = bounded.Output()
        # the present one, if it may be marked; of another one its beginning
        self._line = bytearray()

    def out(self, data: bytes) -> None:
        *ends, rest = data.split(b"\n")
        for part in ends:
            self._add(part)
            if self._line.startswith(_MARK):
                self._marked(bytes(self._line[len(_MARK) :]))
            self._line.clear()
        self._add(rest)

    def _add(self, part: bytes) -> None:
        room = max(0, len(_MARK) - len(self._line))
        self._line += part[:room]
        if self._line.startswith(_MARK):
            self._line += part[room:]
            self.size += len(part)

    def _marked(self, line: bytes) -> None:
        if self.reply:
            return
        data = _unmarked(line)
        self.reply = _answer(data)
        if not self.reply:
            self.made.append(data)
            self.look(data)


def _answer(data: bytes) -> Reply | None:
    """The reply that this is; None for a record and for rubbish."""
    for reply in wire.readable([data], Reply):
        return reply if reply.outcomes or reply.lost else None
    return None


def _unmarked(line: bytes) -> bytes:
    try:
        return base64.b64decode(line, validate=False)
    except ValueError:
        return b""


def _read(selector: selectors.BaseSelector, wait_s: float) -> bool:
    """Read what is there, or comes within this time; whether there was anything."""
    if not selector.get_map():
        time.sleep(wait_s)
        return False
    ready = selector.select(wait_s)
    for key, _ in ready:
        if data := os.read(key.fd, 1 << 16):
            key.data(data)
        else:
            selector.unregister(key.fileobj)
    return bool(ready)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it left: srun cancels its step on SIGTERM."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def serve(stdin: BinaryIO) -> int:
    """The other side: a parcel on stdin, records and the reply as marked lines on
    stdout. Returns the exit code.
    """
    out, lock = os.fdopen(os.dup(1), "wb"), threading.Lock()
    # what else is printed here is no answer
    os.dup2(2, 1)

    def tell(data: bytes) -> None:
        with lock:
            out.write(_MARK + base64.b64encode(data) + b"\n")
            out.flush()

    tell(container.serve(_unmarked(stdin.read()), keep=tell))
    return errors.OK
