"""An engine that is a command, such as ssh: it starts gdn on another machine.

Its stdin gets a parcel, and stays open: the work there ends with it. Each line of its
stdout with our mark is a message, the last one the reply.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .. import bounded
from ..errors import MissingError
from . import wire
from .engines import Answers, Command, Engine, Heard
from .host import BEAT, BEAT_S, SILENCE_S
from .work import Work, in_minutes

# bytes of a line; base64 is a third longer than a message
_LINE = wire.MOST * 4 // 3 + len(wire.MARK) + 8
# lines that are read and not looked at yet
_AHEAD = 16
_POLL_S = 0.05
# for the command to end once its reply is there, and for its output once it has ended
_GRACE_S = 5.0
# for the command to end once it is asked to
_END_S = 10.0
# of a tuning or a profile, whose own time limits are there
_LONGEST_S = 86400.0


@dataclass(kw_only=True)
class Through(Engine):
    """All jobs of a plan in one command, so on one GPU."""

    config: Command

    def limit_s(self, seconds: float) -> float:
        return min(seconds + self.config.start_s, _LONGEST_S)

    def carry(self, pieces: list[Work]) -> Answers:
        for piece in pieces:
            heard = Heard(self, piece)
            with contextlib.closing(self._started(piece)) as pipe:
                why = pipe.follow(heard, piece.limit_s, self.config)
                why = f"{self.config.command[0]} {why or pipe.end()}"

            yield piece, heard.ended(why)

    def _started(self, piece: Work) -> Pipe:
        limit = in_minutes(piece.limit_s)
        minutes = limit.partition(" ")[0]
        filled = {"python": sys.executable, "minutes": minutes}
        words = [word.format(**filled) for word in self.config.command]
        self.say(f"{self.name}: {words[0]}, at most {limit} once it runs")
        try:
            return Pipe(words, self.parcel(piece))
        except OSError as e:
            raise MissingError(
                f"cannot start {words[0]}: {e.strerror}",
                hint=f"configs/engines.toml has the command of engine {self.name}",
            ) from None


class Pipe:
    """A command under way. Threads read what it says, as what it leaves behind may hold
    its pipes open.
    """

    def __init__(self, words: list[str], parcel: bytes) -> None:
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is ours: it ends the command in `close`
            start_new_session=True,
        )
        self.log = bounded.Output()
        self._lines: queue.Queue[bytes] = queue.Queue(_AHEAD)
        self._closing = threading.Event()
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, args=(parcel,), daemon=True).start()

    def _write(self, parcel: bytes) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError), self.process.stdin as stdin:
            stdin.write(wire.marked(parcel))
            stdin.flush()
            while not self._closing.wait(BEAT_S):
                stdin.write(BEAT)
                stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as stdout:
            while line := stdout.readline(_LINE):
                if line.startswith(wire.MARK) or line == BEAT:
                    self._lines.put(line)

        self._lines.put(b"")

    def _read_log(self) -> None:
        assert self.process.stderr
        with self.process.stderr as stderr:
            while data := os.read(stderr.fileno(), 1 << 16):
                self.log.add(data)

    def follow(self, heard: Heard, limit_s: float, config: Command) -> str | None:
        """Take what it says, until its reply or its end; why that was not waited for.
        The time limit counts from its hello, the queue's until then.
        """
        end = time.monotonic() + config.start_s + config.queue_s
        for line in self._arriving():
            now = time.monotonic()
            hello = heard.hello
            if message := wire.unmarked(line):
                heard.take(message)
            if heard.reply:
                return None
            if heard.hello and heard.hello is not hello:
                waits = config.queue_s if heard.hello.waits else 0
                end = now + limit_s + waits
            if now > end:
                option = "--timeout" if heard.hello else "start_s of its engine"
                return f"was ended: no reply in its time; {option} gives more"
            if heard.hello and now > self._last + SILENCE_S:
                return f"was ended: it was silent for {SILENCE_S:g} s"

        return None

    def _arriving(self) -> Iterator[bytes]:
        """Each line; an empty one where none comes for a moment."""
        self._last = time.monotonic()
        ended = None
        while ended is None or time.monotonic() < ended + _GRACE_S:
            if ended is None and self.process.poll() is not None:
                ended = time.monotonic()
            try:
                line = self._lines.get(timeout=_POLL_S)
            except queue.Empty:
                yield b""
                continue

            if not line:
                return

            self._last = time.monotonic()
            yield line

    def end(self) -> str:
        """How it has ended without a reply; it gets a moment for that."""
        try:
            code = self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "was ended: it said no more"

        self._log_reader.join(_GRACE_S)
        words = [line for line in self.log.text().splitlines() if line.strip()]
        why = f": {words[-1][:300]}" if words else ""
        return f"ended with {code} and without a reply{why}"

    def close(self) -> None:
        """End it: with its stdin the work there ends too."""
        self._closing.set()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)

        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

        self.process.wait()
