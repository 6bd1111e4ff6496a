"""Starts the worker for one algo, follows it, and reports its outcome: the commands' side.

A worker can crash, hang, exit or run out of memory. That counts against one algo, and the next gets a fresh process.
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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from .. import bounded
from ..catalog.formats import Definition, Solution
from ..catalog.ops import Op
from ..catalog.registry import Algo
from ..catalog.tiers import COPY, FLOORS
from ..catalog.workloads import Workload
from ..machine import inventory
from ..machine.builders import with_builders
from ..records import exit_reasons
from ..records.messages import Event, Reply
from ..records.request import PlanFields, Profiling, Request, Rival, Timing
from ..schema.record_types import Blame, Environment, Record, Status, blame
from . import own_files, redaction

_KEEPER = Path(__file__).with_name("keeper.py")
_POLL_S = 0.02
_PATIENCE_S = 5.0  # for the keeper to end its processes
_MOST = 256 << 20  # bytes of a reply, and of one record: a long comparison has about 40 MiB
_LINE = 2000  # characters of a line of the tail
_WAITS = re.compile(
    rb"^gdn: the build of [^\n]{1,200} is in use by [^\n]{1,200}; waiting$", re.MULTILINE
)  # runner/build.py


@dataclass(frozen=True)
class Job:
    """One worker's work. `command`: check, bench, prove, floor, compare or profile; `algo` is None for floor and
    compare."""

    command: str
    op: Op
    definition: Definition
    solution: Solution | None
    mode: str  # cuda, cpu or interpreter
    workloads: tuple[Workload, ...]
    algo: Algo | None = None
    rivals: tuple[tuple[Algo, Solution], ...] = ()  # in a comparison: each algo and its solution
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)  # workload -> its rivals, else all
    dataset: Path | None = None
    tiers: tuple[str, ...] = ()
    plan: PlanFields = field(default_factory=dict)
    fallback: bool = False  # whether events may replace cupti
    strict: bool = False  # probe every workload
    sandbox: bool = False  # run the algo's code in bubblewrap
    in_place: bool = False  # outputs overwrite the inputs, where the op allows it
    batch_invariant: bool = False  # a sequence alone must give the same bits as in its batch
    profile: Profiling | None = None  # what a profiler's target is to do
    wrap: tuple[str, ...] = ()  # a command line put before the worker's: a profiler's
    added: bool = False  # gdn put it in to compare with; the user did not ask for it
    timeout_s: float = 300.0
    env: dict[str, str] = field(default_factory=dict)
    gpu: inventory.Gpu | None = None  # the one to run on; None: the one that CUDA chooses
    cpus: frozenset[int] = frozenset()  # the only ones to run on; empty means all
    machine: inventory.Machine = inventory.HERE

    def __post_init__(self) -> None:
        if self.op.in_place_only and (self.algo is None or self.algo.destination_passing):
            object.__setattr__(self, "in_place", True)

    @property
    def place(self) -> str:
        """Where the job ran, as in a document: "cpu", "cuda", or "cuda:1" if GPUs were chosen."""
        return f"{self.mode}:{self.gpu.index}" if self.gpu else self.mode

    @property
    def due(self) -> int:
        """How many records the worker owes."""
        tiers = max(1, len(self.tiers))
        machine_wide = tiers + 1 if self.command == "floor" else 0
        every = max(1, len(self.rivals))
        return sum(len(self.turns.get(w.uuid, ())) or every for w in self.workloads) * tiers + machine_wide

    @property
    def names(self) -> tuple[str, ...]:
        """The algos that its records are about; none for floors."""
        return tuple(algo.name for algo, _ in self.rivals) or ((self.algo.name,) if self.algo else ())

    def asked(self, record: Record) -> bool:
        """Whether a record belongs to one of its algos, or its floors, and one of its workloads."""
        right = record.algo in (FLOORS if self.command == "floor" else self.names)
        return right and (record.uuid is None or any(w.uuid == record.uuid for w in self.workloads))

    def owed(self, records: list[Record]) -> dict[str, int]:
        """How many records a worker that has sent these still owes, by algo (the copy for floors)."""
        tiers = max(1, len(self.tiers))
        if self.command == "floor":
            return {COPY: self.due - len(records)} if len(records) < self.due else {}
        had = Counter((r.algo, r.uuid) for r in records)
        found: dict[str, int] = {}
        for workload in self.workloads:
            for name in self.turns.get(workload.uuid) or self.names:
                missing = 0 if (name, None) in had else tiers - had[name, workload.uuid]
                if missing > 0:
                    found[name] = found.get(name, 0) + missing
        return found

    def request(self) -> Request:
        """The request that `gdn worker` reads."""
        return Request(
            command=self.command,
            op=self.op,
            name=self.algo.name if self.algo else None,
            definition=self.definition,
            solution=self.solution,
            specific=bool(self.algo and self.algo.specific and self.command != "prove"),  # a judge's build
            setup=self.algo.setup if self.algo else None,
            mode=self.mode,
            workloads=self.workloads,
            dataset=str(self.dataset.absolute()) if self.dataset else None,
            rivals=tuple(Rival(algo.name, solution, algo.specific, algo.setup) for algo, solution in self.rivals),
            turns=self.turns,
            timing=Timing(self.tiers, self.plan, self.fallback),
            strict=self.strict,
            sandbox=self.sandbox,
            in_place=self.in_place,
            batch_invariant=self.batch_invariant,
            profile=self.profile,
        )


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


def execute(
    job: Job,
    on_record: OnRecord = lambda record, environment: None,
    given_up: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run the job in its own worker; `on_record(record, environment)` is called as soon as the worker has a record.

    `given_up` is called all the time: True ends the worker and raises KeyboardInterrupt, which threads other than the
    main one never get by themselves.
    """
    return serve(job.request(), environ(job), job.timeout_s, on_record, given_up, wrap=job.wrap, cpus=job.cpus)


def serve(
    request: Request,
    env: dict[str, str],
    timeout_s: float,
    on_record: OnRecord = lambda record, environment: None,
    given_up: Callable[[], bool] = lambda: False,
    *,
    wrap: tuple[str, ...] = (),
    cpus: frozenset[int] = frozenset(),
) -> Outcome:
    """Run a worker on a request, wherever that was made: for `execute` here, and in a container for one sent there.

    env         the worker's environment variables, from environ_of
    wrap, cpus  as in a job

    The worker's output is limited in size, and values of this process's secret variables are removed from it.
    """
    folder = Path(tempfile.mkdtemp(prefix="gdn-"))
    try:
        (folder / "empty").mkdir()  # the worker's directory: nothing can be imported or found by accident
        env = env | {name: str(folder) for name in ("TMPDIR", "TEMP", "TMP")}  # left-over files are deleted with it
        return _Following(folder, request, env, on_record, wrap, cpus).to_the_end(timeout_s, given_up)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Following:
    """One worker, its output so far, and its outcome."""

    def __init__(
        self,
        folder: Path,
        request: Request,
        env: dict[str, str],
        on_record: OnRecord,
        wrap: tuple[str, ...],
        cpus: frozenset[int],
    ) -> None:
        self.outcome, self.on_record = Outcome(Status.DONE), on_record
        self.secrets = redaction.values()
        self.log, self.reply, self.partial = bounded.Output(bounded.EDGE + 4096), bytearray(), bytearray()
        self.garbled: str | None = None
        self.seal = os.urandom(16).hex()  # precedes each record: only the worker knows it, not the algo's code
        self.waits = False
        self.ooms = exit_reasons.ooms()
        self.selector = selectors.DefaultSelector()
        with tempfile.TemporaryFile() as stdin:
            stdin.write(msgspec.json.encode(structs.replace(request, seal=self.seal)))
            stdin.seek(0)
            events, events_in = os.pipe()
            try:
                self.process = subprocess.Popen(
                    [
                        sys.executable, "-I", "-S", str(_KEEPER), str(folder),
                        *(["--cpus", ",".join(map(str, sorted(cpus)))] if cpus else []), "--",
                        *wrap, sys.executable, "-m", "gdn_cli.worker.serve",
                        *(["--runner", request.mode] if request.judges and not request.sandbox else []),
                        "--events", f"/dev/fd/{events_in}",
                    ],
                    stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder / "empty", env=env,
                    start_new_session=True, pass_fds=(events_in,),
                )  # fmt: skip
            except BaseException:
                os.close(events)
                raise
            finally:
                os.close(events_in)
        self.events = os.fdopen(events, "rb", buffering=0)
        for stream, take in (
            (self.events, self._event_bytes),
            (self.process.stdout, self._reply_bytes),
            (self.process.stderr, self._log_bytes),
        ):
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ, take)

    def to_the_end(self, timeout_s: float, given_up: Callable[[], bool]) -> Outcome:
        deadline, timed_out = time.monotonic() + timeout_s, False
        try:
            while self.process.poll() is None:
                self._read(_POLL_S)
                if self.garbled:
                    break
                if time.monotonic() > deadline:
                    timed_out = True
                    break
                if given_up():
                    raise KeyboardInterrupt
        finally:  # Ctrl-C too: no worker outlives its command, and no process of an algo outlives its worker
            _end(self.process)
            while self._read(0):  # the last output; an escaped process may hold a pipe open, so do not wait
                pass
            self.selector.close()
            for stream in (self.events, self.process.stdout, self.process.stderr):
                stream.close()
        text = bounded.clip(redaction.masked(self.log.text(), self.secrets))
        self.outcome.tail = [line[:_LINE] for line in own_files.tail(text.splitlines())]
        self._conclude(f"no end after {timeout_s:g} s; --timeout gives more" if timed_out else None)
        return self.outcome

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
        if not self.waits and (found := _WAITS.search(data)):  # report the lock that it waits for, once
            self.waits = True
            print(redaction.masked(found[0].decode(errors="replace"), self.secrets), file=sys.stderr, flush=True)

    def _reply_bytes(self, data: bytes) -> None:
        self.reply += data
        if len(self.reply) > _MOST:
            self.garbled = f"its reply is longer than {_MOST >> 20} MiB"
            self.reply.clear()

    def _event_bytes(self, data: bytes) -> None:
        *lines, rest = (bytes(self.partial) + data).split(b"\n") if b"\n" in data else (self.partial + data,)
        self.partial = bytearray(rest)
        if len(rest) > _MOST:
            self.garbled = f"a record of it is longer than {_MOST >> 20} MiB"
        for line in lines:
            seal = self.seal.encode()
            event = self._decoded(line[len(seal) :], Event, Record) if line.startswith(seal) else None
            if event is None:
                self.garbled = "a record came that its worker did not write"
                return
            if isinstance(event, Record):
                self.outcome.records.append(event)
                self.on_record(event, self.outcome.environment)
            elif event.environment:
                self.outcome.environment = event.environment
            else:
                self.outcome.at = event.at

    def _decoded(self, data: bytes | bytearray, *forms: Any) -> Any:
        """The worker's message as the first of these forms whose keys are all there, with long texts shortened and
        secrets removed. None for anything else."""
        try:
            found = redaction.masked(bounded.clipped(json.loads(data)), self.secrets)
            form = next((form for form in forms if set(found) <= set(form.__struct_fields__)), forms[-1])
            return msgspec.convert(found, form)
        except (ValueError, RecursionError, TypeError):
            return None

    def _conclude(self, timed_out: str | None) -> None:
        """Set the status and the reason, from the reply or, without one, from how the worker ended."""
        outcome = self.outcome
        if timed_out:
            outcome.status, outcome.reason = Status.TIMED_OUT, timed_out
            return
        reply = self._decoded(self.reply, Reply) if self.reply else None
        if self.garbled or (self.reply and (reply is None or reply.seal != self.seal)):
            outcome.status = Status.CRASHED
            outcome.reason = self.garbled or "a reply came that its worker did not write"
            return
        if reply is None:
            outcome.status, outcome.reason = exit_reasons.death(self.process.returncode, self.ooms)
            exit_code = self.process.returncode
        else:
            outcome.status, outcome.reason, outcome.code = reply.status, reply.reason, reply.code
            outcome.build_s, outcome.proof, exit_code = reply.build_s, reply.proof, reply.exit_code
        if outcome.status is Status.EXITED and exit_code and outcome.tail:
            outcome.reason = f"{outcome.reason}: {outcome.tail[-1][:200]}"


def _end(process: subprocess.Popen) -> None:
    """End the keeper, which ends all its processes: compilers that the builder started, and any that left its group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:  # it was stopped (SIGSTOP)
            pass
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environ(job: Job) -> dict[str, str]:
    """The environment of a job's worker."""
    return environ_of(job.mode, job.gpu, job.machine) | job.env


def environ_of(
    mode: str, gpu: inventory.Gpu | None = None, machine: inventory.Machine = inventory.HERE
) -> dict[str, str]:
    """A worker's environment: the variables that `redaction.allowed` lets through, with the builders' tools on PATH and
    their caches in gdn's folder, and with `gpu` as the only GPU (None: CUDA chooses)."""
    env = redaction.allowed(os.environ)
    # relative entries would point into the worker's empty directory
    if path := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in path.split(os.pathsep) if p)
    env = with_builders(env, mode, gpu, machine)
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env
