"""`--engine NAME`: jobs run by a command that starts gdn on another machine, such as srun.

Its stdin gets a parcel. Each line of its stdout with our mark is a record as soon as it is made, and the last one is
the reply.
"""

from __future__ import annotations

import base64
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Annotated, BinaryIO

from msgspec import Meta, Struct

from .. import errors, paths
from ..catalog.registry import Algo
from ..errors import MissingError, RemoteError, unknown
from ..machine import environment, inventory
from ..parsing import Positive, Text, decode, read_toml
from ..run import planning
from ..run.elsewhere import Elsewhere
from ..run.execute import Came
from ..run.jobs import Job, Outcome
from ..schema.record_types import Document
from . import container, replies, wire
from .wire import Parcel, Piece, Reply

_MARK = b"gdn-parcel: "
_END_S = 10.0  # for the command to end once it is asked to


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of configs/engines.toml."""

    command: Annotated[tuple[Text, ...], Meta(min_length=1, description="a list of words")]
    cuda: bool
    start_s: Positive


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
            return inventory.Place(None, f"engine {self.name} has no GPU", "configs/engines.toml says so")
        return None

    def __call__(self, jobs: list[Job], came: Came = lambda *_: None) -> Generator[tuple[Job, Outcome], None, None]:
        if not jobs:
            return
        limit = sum(job.timeout_s for job in jobs) + self.how.start_s
        found = environment.commit()
        env = {"GDN_COMMIT": found["commit"] + ("-dirty" if found.get("dirty") else "")} if found else {}
        content = Parcel(
            where=self.name, gpu=None, cache=None, env=env, jobs=[Piece(job.request(), job.timeout_s) for job in jobs]
        )
        made: list[bytes] = []
        reply = self._carried(wire.encode(content), limit, made, lambda data: self._record(data, jobs, came))
        if not reply.lost and len(reply.outcomes) != len(jobs):
            reply.lost = f"the reply has {len(reply.outcomes)} outcomes for {len(jobs)} jobs"
        if reply.lost:
            outcomes = replies.kept(jobs, made, None)
            for outcome in outcomes:
                outcome.reason = reply.lost
        else:
            outcomes = reply.outcomes
        for job, outcome in zip(jobs, outcomes, strict=True):
            device = outcome.environment and outcome.environment.device
            passed = sum(record.passed for record in outcome.records)
            self.say(f"{planning.name(job)}: {passed} of {job.due} passed" + (f", {device}" if device else ""))
            yield job, outcome

    def finish(self, document: Document) -> None:
        """Nothing: all records are of one GPU."""

    def _record(self, data: bytes, jobs: list[Job], came: Came) -> None:
        for made in replies.usable(jobs, [data], None):
            came(jobs[made.piece], made.record, made.environment)

    def _carried(self, parcel: bytes, limit_s: float, made: list[bytes], look: Callable[[bytes], None]) -> Reply:
        """What the command answers; of one that fails, `made` has the records until then."""
        filled = {"python": sys.executable, "minutes": str(math.ceil(limit_s / 60))}
        command = [word.format(**filled) for word in self.how.command]
        package = str(paths.PACKAGE.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self.say(f"{self.name}: {' '.join(command[:1])}, at most {filled['minutes']} min once it runs")
        last = b""
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as log:
            stdin.write(base64.b64encode(parcel))
            stdin.seek(0)
            try:
                process = subprocess.Popen(
                    command, stdin=stdin, stdout=subprocess.PIPE, stderr=log, env=os.environ | {"PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C is ours: it ends the command below
                )  # fmt: skip
            except OSError as e:
                hint = f"configs/engines.toml has the command of engine {self.name}"
                raise MissingError(f"cannot start {command[0]}: {e.strerror}", hint=hint) from None
            try:
                for line in process.stdout:
                    if line.startswith(_MARK):
                        if last:
                            made.append(last)
                            look(last)
                        last = _unmarked(line)
                process.wait()
            finally:
                _end(process)
            log.seek(0)
            said = [text for text in log.read().decode(errors="replace").splitlines() if text.strip()]
        return self._reply(last, made, process.returncode, said)

    def _reply(self, last: bytes, made: list[bytes], code: int, said: list[str]) -> Reply:
        try:
            reply = wire.decode(last, Reply)
            if reply.outcomes or reply.lost:
                return reply
        except RemoteError:
            pass
        if last:  # a record: it ended after that
            made.append(last)
        why = f": {said[-1][:300]}" if said else ""
        return Reply(lost=f"{self.how.command[0]} ended with {code} and without a reply{why}")


def _unmarked(line: bytes) -> bytes:
    try:
        return base64.b64decode(line[len(_MARK) :], validate=False)
    except ValueError:
        return b""


def _end(process: subprocess.Popen) -> None:
    """End the command: srun cancels its step on SIGTERM."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    process.stdout.close()


def serve(stdin: BinaryIO) -> int:
    """The other side: a parcel on stdin, records and the reply as marked lines on stdout. Returns the exit code."""
    out, lock = os.fdopen(os.dup(1), "wb"), threading.Lock()
    os.dup2(2, 1)  # what else is printed here is no answer

    def tell(data: bytes) -> None:
        with lock:
            out.write(_MARK + base64.b64encode(data) + b"\n")
            out.flush()

    try:
        parcel = base64.b64decode(stdin.read())
    except ValueError:
        parcel = b""
    tell(container.serve(parcel, keep=tell))
    return errors.OK
