"""A worker's process as the commands see it: starts it, sends it one request, follows
it, and says how it ended.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from .. import bounded
from ..machine import linux
from ..machine.environment import allocation
from ..schema.record_types import Blame, Environment, Record, Status, blame
from ..worker import exit_reasons
from ..worker.messages import Event, Reply
from ..worker.request import Request
from . import redaction

_KEEPER = Path(__file__).with_name("keeper.py")
_POLL_S = 0.02
_PATIENCE_S = 5.0  # for the keeper to end its processes
# bytes of a reply, and of one record: a long comparison has about 40 MiB
_MOST = 256 << 20
_LINE = 2000  # characters of a line of the tail
_LINES = 20  # of a tail
_CRASH = re.compile(r"!{3,} .*(?:Segfault|Fatal|Abort)", re.IGNORECASE)
_WAITS = re.compile(
    rb"^gdn: the build of [^\n]{1,200} is in use by [^\n]{1,200}; waiting$",
    re.MULTILINE,
)  # executor/build.py


class Outcome(msgspec.Struct):
    """The outcome of a job, or of its worker."""

    status: Status
    reason: str | None = None
    records: list[Record] = []
    environment: Environment | None = None  # None if the worker did not get to say
    tail: list[str] = []  # the last lines of the worker's output
    code: int | None = None  # the exit code, if the status alone does not determine it
    build_s: float | None = None
    proof: dict[str, str] | None = None
    at: str | None = None  # whose code ran last, if it is only one rival's

    @property
    def blame(self) -> Blame:
        """Who is at fault if this is not done."""
        return blame(self.status, self.code)


OnRecord = Callable[[Record, Environment | None], None]


class Worker:
    """One worker, its output so far, and its outcome. It imports what it needs (torch
    takes seconds) and waits for `serve`, which sends the request.

    env         its environment variables, from environ_of
    wrap, cpus  as in a job
    """

    def __init__(
        self,
        request: Request,
        env: dict[str, str],
        wrap: tuple[str, ...] = (),
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        self.outcome = Outcome(Status.DONE)
        self.request = request
        self.on_record: OnRecord = lambda record, environment: None
        self.secrets = redaction.values()
        self.log = bounded.Output(bounded.EDGE + 4096)
        self.reply = bytearray()
        self.partial = bytearray()
        self.garbled: str | None = None
        linux.hide_memory()  # from here on this process holds the seal
        # precedes each record: only the worker knows it, not the algo's code
        self.seal = os.urandom(16).hex()
        self.waits = False
        self.ooms = exit_reasons.ooms()
        self.selector = selectors.DefaultSelector()
        self.folder = Path(tempfile.mkdtemp(prefix="gdn-"))
        self.stdin = tempfile.TemporaryFile()
        waits, self.go = os.pipe()
        events, events_in = os.pipe()

        try:
            # its directory: nothing can be imported or found by accident
            (self.folder / "empty").mkdir()
            # left-over files are deleted with the folder
            env = env | {name: str(self.folder) for name in ("TMPDIR", "TEMP", "TMP")}
            self.process = subprocess.Popen(
                [
                    *_keeper(self.folder, cpus),
                    *wrap,
                    *_command(request, waits, events_in),
                ],
                stdin=self.stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.folder / "empty",
                env=env,
                start_new_session=True,
                pass_fds=(waits, events_in),
            )
        except BaseException:
            os.close(events)
            os.close(self.go)
            self.stdin.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            os.close(waits)
            os.close(events_in)

        self.events = os.fdopen(events, "rb", buffering=0)
        self.streams: dict[Any, Callable[[bytes], None]] = {
            self.events: self._event_bytes,
            self.process.stdout: self._reply_bytes,
            self.process.stderr: self._log_bytes,
        }

        for stream, take in self.streams.items():
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ, take)

    def serve(
        self,
        timeout_s: float,
        on_record: OnRecord = lambda record, environment: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Send the request and follow the worker to its end. The output is limited in
        size, and values of this process's secret variables are removed from it.
        """
        self.on_record = on_record
        deadline = time.monotonic() + timeout_s
        timed_out: str | None = None

        try:
            with self.stdin:
                self.stdin.write(
                    msgspec.json.encode(structs.replace(self.request, seal=self.seal))
                )
                self.stdin.seek(0)  # the worker's place in it too
            self._open_gate()
            while self.process.poll() is None:
                self._read(_POLL_S)
                if self.garbled:
                    break
                if time.monotonic() > deadline:
                    timed_out = f"no end after {timeout_s:g} s; --timeout gives more"
                    break
                if given_up():
                    raise KeyboardInterrupt
        # Ctrl-C too: no worker outlives its command, and no process of an algo outlives
        # its worker
        finally:
            self.close()

        text = bounded.clip(redaction.masked(self.log.text(), self.secrets))
        self.outcome.tail = tail(text)
        self._conclude(timed_out)
        return self.outcome

    def close(self) -> None:
        """End the worker, and read the last of its output."""
        if self.events.closed:
            return
        self._open_gate()
        self.stdin.close()
        _end(self.process)
        while self._read(0):  # an escaped process may hold a pipe open, so do not wait
            pass
        self.selector.close()
        for stream in self.streams:
            stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open_gate(self) -> None:
        if self.go >= 0:
            os.close(self.go)
            self.go = -1

    def _read(self, wait_s: float) -> bool:
        """Read what is there, or comes within this time; returns whether there was anything."""
        if not self.selector.get_map():
            time.sleep(wait_s)
            return False
        any_of_it = False
        for key, _ in self.selector.select(wait_s):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self.selector.unregister(key.fileobj)
                continue
            any_of_it = True
            key.data(data)
        return any_of_it

    def _log_bytes(self, data: bytes) -> None:
        self.log.add(data)
        # report the lock that it waits for, once
        if not self.waits and (match := _WAITS.search(data)):
            self.waits = True
            print(
                redaction.masked(match[0].decode(errors="replace"), self.secrets),
                file=sys.stderr,
                flush=True,
            )

    def _reply_bytes(self, data: bytes) -> None:
        self.reply += data
        if len(self.reply) > _MOST:
            self.garbled = f"its reply is longer than {_MOST >> 20} MiB"
            self.reply.clear()

    def _event_bytes(self, data: bytes) -> None:
        # whole lines, and the begin of the next; a long line comes in many parts
        *lines, begun = data.split(b"\n")

        if lines:
            lines[0] = bytes(self.partial) + lines[0]
            self.partial = bytearray(begun)
        else:
            self.partial += begun
        if len(self.partial) > _MOST:
            self.garbled = f"a record of it is longer than {_MOST >> 20} MiB"
        seal = self.seal.encode()

        for line in lines:
            event = None
            if line.startswith(seal):
                event = self._decoded(line[len(seal) :], Event, Record)
            if event is None:
                self.garbled = "a record came that its worker did not write"
                return
            if isinstance(event, Record):
                event.allocation = allocation()
                self.outcome.records.append(event)
                self.on_record(event, self.outcome.environment)
            elif event.environment:
                self.outcome.environment = event.environment
            else:
                self.outcome.at = event.at

    def _decoded(self, data: bytes | bytearray, *forms: Any) -> Any:
        """The worker's message as the first of these forms whose keys are all there,
        with long texts shortened and secrets removed. None for anything else.
        """
        try:
            content = redaction.masked(bounded.clipped(json.loads(data)), self.secrets)
            for form in forms:
                if set(content) <= set(form.__struct_fields__):
                    return msgspec.convert(content, form)
            return msgspec.convert(content, forms[-1])
        except (ValueError, RecursionError, TypeError):
            return None

    def _conclude(self, timed_out: str | None) -> None:
        """Set the status and the reason, from the reply or, without one, from how the
        worker ended.
        """
        outcome = self.outcome

        if timed_out:
            outcome.status = Status.TIMED_OUT
            outcome.reason = timed_out
            return
        reply = self._decoded(self.reply, Reply) if self.reply else None

        if self.garbled or (self.reply and (reply is None or reply.seal != self.seal)):
            outcome.status = Status.CRASHED
            outcome.reason = (
                self.garbled or "a reply came that its worker did not write"
            )
            return

        if reply is None:
            exit_code = self.process.returncode
            outcome.status, outcome.reason = exit_reasons.death(exit_code, self.ooms)
        else:
            exit_code = reply.exit_code
            for name in ("status", "reason", "code", "build_s", "proof"):
                setattr(outcome, name, getattr(reply, name))
        if outcome.status is Status.EXITED and exit_code and outcome.tail:
            outcome.reason = f"{outcome.reason}: {outcome.tail[-1][:200]}"


def tail(text: str) -> list[str]:
    """What a record keeps of a worker's output: the last lines; of a crash the first
    too, where the algo's own frames are.
    """
    lines = [line[:_LINE].rstrip() for line in text.splitlines() if line.strip()]
    crashes = [i for i, line in enumerate(lines) if _CRASH.search(line)]
    if not crashes:
        return lines[-_LINES:]
    crash = lines[crashes[0] :]
    half = _LINES // 2
    return crash if len(crash) <= _LINES else crash[:half] + crash[-half:]


def _keeper(folder: Path, cpus: frozenset[int]) -> list[str]:
    """The start of a worker's command line: the process around it."""
    pinning = ["--cpus", ",".join(map(str, sorted(cpus)))] if cpus else []
    return [sys.executable, "-I", "-S", str(_KEEPER), str(folder), *pinning, "--"]


def _command(request: Request, go: int, events: int) -> list[str]:
    early = request.judges and not (request.sandbox or request.sanitize)
    runner = ["--runner", request.mode] if early else []
    module = [sys.executable, "-m", "gdn_cli.worker.serve", *runner]
    places = ["--go", str(go), "--events", f"/dev/fd/{events}"]
    return [*module, "--mode", request.mode, *places]


def _end(process: subprocess.Popen) -> None:
    """End the keeper, which ends all its processes: compilers that the builder started,
    and any that left its group.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:  # it was stopped (SIGSTOP)
            pass
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(
    request: Request,
    env: dict[str, str],
    timeout_s: float,
    *,
    wrap: tuple[str, ...] = (),
    on_record: OnRecord = lambda record, environment: None,
) -> Outcome:
    """Run a worker on a request, wherever that was made: one sent to a container, for example."""
    return Worker(request, env, wrap).serve(timeout_s, on_record)
