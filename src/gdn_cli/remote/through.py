"""`--engine NAME`: jobs run by a command that starts gdn on another machine, such as srun.

Its stdin gets a parcel. Each line of its stdout with our mark is a record as soon as it
is made, and the last one is the reply.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Annotated, BinaryIO

from msgspec import Meta, Struct

from .. import bounded, errors, paths
from ..catalog.registry import Algo
from ..errors import MissingError, unknown
from ..machine import inventory
from ..parsing import Positive, Text, WrongError, decode, read_config
from ..run.elsewhere import Elsewhere
from ..run.execute import Came
from ..run.jobs import Job, Outcome
from ..schema.record_types import Document
from . import container, replies, wire
from .wire import Parcel, Piece, Reply

_MARK = b"gdn-parcel: "
# bytes of a line; base64 is a third longer than a message
_LINE = wire.MOST * 4 // 3 + len(_MARK) + 8
_POLL_S = 0.05
# for the command to end once its reply is there, and for its output once it has ended
_GRACE_S = 5.0
# for the command to end once it is asked to
_END_S = 10.0
_FILLABLE = re.compile(r"([^{}\0]|\{\{|\}\}|\{python\}|\{minutes\})+")
_WORD = (
    "text without NUL, with {python} and {minutes} as its only braces ({{ and }} stand for a"
    " brace)"
)


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of configs/engines.toml. Raises parsing.WrongError for a word that no
    field fills in.
    """

    command: Annotated[
        tuple[Text, ...], Meta(min_length=1, description="a list of words")
    ]
    cuda: bool
    start_s: Positive
    queue_s: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        for i, word in enumerate(self.command):
            if not _FILLABLE.fullmatch(word):
                raise WrongError(("command", i), _WORD, word)


def settings(name: str) -> Settings:
    """The engine of this name. A UsageError names those that there are."""
    tables, files = read_config("engines.toml")
    if name not in tables:
        raise unknown("engine", name, tables, hint=f"they are in {files}")

    return decode(tables[name], Settings, f"{files}: [{name}]")


@dataclass
class Through(Elsewhere):
    """All jobs of a plan in one command, so on one GPU."""

    name: str
    how: Settings
    say: Callable[[str], None]

    def place(self, algo: Algo, device: str = "auto") -> inventory.Place:
        """What the other machine has is not known here: only whether it has a GPU."""

        def lacking(_: Algo, mode: str) -> inventory.Place | None:
            if mode != "cuda" or self.how.cuda:
                return None

            reason = f"engine {self.name} has no GPU"
            return inventory.Place(None, reason, "configs/engines.toml says so")

        return inventory.placed(algo, device, lacking)

    def __call__(
        self, jobs: list[Job], came: Came = lambda *_: None
    ) -> Generator[tuple[Job, Outcome], None, None]:
        if not jobs:
            return

        pieces = [Piece.of(job) for job in jobs]
        parcel = Parcel(
            where=self.name, gpu=None, cache=None, env=wire.commit(), jobs=pieces
        )
        limit_s = sum(job.timeout_s for job in jobs) + self.how.start_s
        kept: list[bytes] = []
        reply: Reply | None = None
        with contextlib.closing(self._started(wire.encode(parcel), limit_s)) as command:
            for message in command.messages(limit_s, self.how.queue_s):
                reply = _reply(message)
                if reply:
                    break

                kept.append(message)
                for made in replies.usable(jobs, [message], None):
                    came(jobs[made.piece], made.record, made.environment)

            end = command.end()

        if reply is None:
            reply = Reply(lost=f"{self.how.command[0]} {end}")
        elif not reply.lost and len(reply.outcomes) != len(jobs):
            count = len(reply.outcomes)
            reply.lost = f"the reply has {count} outcomes for {len(jobs)} jobs"

        yield from replies.outcomes(jobs, reply, kept, None, self.say)

    def finish(self, document: Document) -> None:
        """Nothing: all records are of one GPU."""

    def _started(self, parcel: bytes, limit_s: float) -> Command:
        minutes = math.ceil(limit_s / 60)
        filled = {"python": sys.executable, "minutes": minutes}
        words = [word.format(**filled) for word in self.how.command]
        waits = ""
        if self.how.queue_s:
            waits = f", and {self.how.queue_s / 3600:.3g} h in its queue"

        self.say(f"{self.name}: {words[0]}, at most {minutes} min once it runs{waits}")
        try:
            return Command(words, parcel)
        except OSError as e:
            raise MissingError(
                f"cannot start {words[0]}: {e.strerror}",
                hint=f"configs/engines.toml has the command of engine {self.name}",
            ) from None


class Command:
    """A command under way: what it answers, and the ends of its other words. Two
    threads read them, as what it leaves behind may hold its pipes open.
    """

    def __init__(self, words: list[str], parcel: bytes) -> None:
        packages = [str(paths.PACKAGE.parent), os.environ.get("PYTHONPATH")]
        with tempfile.TemporaryFile() as stdin:
            stdin.write(base64.b64encode(parcel))
            stdin.seek(0)
            self.process = subprocess.Popen(
                words,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(filter(None, packages))},
                # Ctrl-C is ours: it ends the command in `close`
                start_new_session=True,
            )

        self.log = bounded.Output()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()
        threading.Thread(target=self._read_answers, daemon=True).start()

    def _read_answers(self) -> None:
        assert self.process.stdout
        with self.process.stdout as stdout:
            while line := stdout.readline(_LINE):
                if line.startswith(_MARK):
                    self._answers.put(_unmarked(line[len(_MARK) :]))

        self._answers.put(None)

    def _read_log(self) -> None:
        assert self.process.stderr
        with self.process.stderr as stderr:
            while data := os.read(stderr.fileno(), 1 << 16):
                self.log.add(data)

    def messages(self, limit_s: float, queue_s: float) -> Iterator[bytes]:
        """What it answers until it ends, for at most `limit_s`: until the first message
        it may wait for `queue_s` more.
        """
        end = time.monotonic() + queue_s + limit_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                end = min(end, time.monotonic() + _GRACE_S)

            try:
                message = self._answers.get(timeout=_POLL_S)
            except queue.Empty:
                continue

            if message is None:
                return

            yield message
            end = min(end, time.monotonic() + limit_s)

    def end(self) -> str:
        """How it has ended without a reply; it gets a moment for that."""
        try:
            code = self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "was ended: no reply in its time; --timeout gives more"

        self._log_reader.join(_GRACE_S)
        words = [line for line in self.log.text().splitlines() if line.strip()]
        why = f": {words[-1][:300]}" if words else ""
        return f"ended with {code} and without a reply{why}"

    def close(self) -> None:
        """End it and what it left: srun cancels its step on SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)

        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

        self.process.wait()


def _reply(message: bytes) -> Reply | None:
    """The reply that this is; None for a record and for rubbish."""
    for reply in wire.readable([message], Reply):
        if reply.outcomes or reply.lost:
            return reply

    return None


def _unmarked(line: bytes) -> bytes:
    try:
        return base64.b64decode(line, validate=False)
    except ValueError:
        return b""


def serve(stdin: BinaryIO) -> int:
    """The other side: a parcel on stdin, records and the reply as marked lines on
    stdout. Returns the exit code.
    """
    out = os.fdopen(os.dup(1), "wb")
    # what else is printed here is no answer
    os.dup2(2, 1)

    def tell(data: bytes) -> None:
        out.write(_MARK + base64.b64encode(data) + b"\n")
        out.flush()

    tell(container.serve(_unmarked(stdin.read()), keep=tell))
    return errors.OK
