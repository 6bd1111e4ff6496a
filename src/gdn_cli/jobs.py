"""Starts the worker for one algo, follows it, and says what became of it: the commands' side of the seam.

A worker can crash, hang, exit or run out of memory; that is one algo's fate, and the next one gets a fresh process.
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

from . import bounded, fates, machine, paths, redaction
from .registry import Algo, Op
from .timing import FLOORS
from .worker import SCHEMA, op_to_json
from .workloads import Workload

_KEEPER = Path(__file__).with_name("keeper.py")
_POLL_S = 0.02
_PATIENCE_S = 5.0  # for the keeper to end what is below it
_MOST = 256 << 20  # bytes of a reply, and of one record: a long comparison has some 40 MiB
_LINE = 2000  # characters of a line of the tail
_WAITS = re.compile(rb"^gdn: the build of [^\n]{1,200} is in use by [^\n]{1,200}; waiting$", re.MULTILINE)  # build.py


@dataclass(frozen=True)
class Job:
    """One worker's work. `command`: check, bench, prove, floor, compare or profile; `algo` is None for floor and
    compare."""

    command: str
    op: Op
    definition: dict[str, Any]
    solution: dict[str, Any] | None
    mode: str  # cuda, cpu or interpreter
    workloads: tuple[Workload, ...]
    algo: Algo | None = None
    rivals: tuple[tuple[Algo, dict[str, Any]], ...] = ()  # of a comparison: each algo and its solution
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)  # workload -> which rivals meet there, else all
    dataset: Path | None = None
    tiers: tuple[str, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    fallback: bool = False  # whether events may stand in for cupti
    strict: bool = False  # probe every workload
    sandbox: bool = False  # run the algo's code in bubblewrap
    in_place: bool = False  # outputs are the inputs that the op says they may be
    profile: dict[str, Any] | None = None  # what a profiler's target is to do
    wrap: tuple[str, ...] = ()  # a command line that goes in front of the worker's: a profiler's
    added: bool = False  # gdn put it in to compare with; the user did not ask for it
    timeout_s: float = 300.0
    env: dict[str, str] = field(default_factory=dict)
    gpu: machine.Gpu | None = None  # the one to run on; None is the one that a CUDA process takes by itself
    cpus: frozenset[int] = frozenset()  # the only ones to run on; empty is all

    @property
    def place(self) -> str:
        """What a document calls where the job ran: "cpu", "cuda", or "cuda:1" where GPUs were chosen."""
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

    def asked(self, record: dict[str, Any]) -> bool:
        """Whether a record is about one of its algos, or its floors, on one of its workloads."""
        uuid, algo = (record.get("workload") or {}).get("uuid"), record.get("algo")
        right = (
            algo in FLOORS if self.command == "floor" else algo in (self.names if self.rivals else (None, *self.names))
        )
        return right and (uuid is None or any(w.uuid == uuid for w in self.workloads))

    def owed(self, records: list[dict[str, Any]]) -> dict[str | None, int]:
        """What a worker that has sent these records still owes: algo (None for floors) -> how many."""
        tiers = max(1, len(self.tiers))
        if self.command == "floor":
            return {None: self.due - len(records)} if len(records) < self.due else {}
        had = Counter((r.get("algo") or self.names[0], (r.get("workload") or {}).get("uuid")) for r in records)
        found: dict[str | None, int] = {}
        for workload in self.workloads:
            for name in self.turns.get(workload.uuid) or self.names:
                missing = 0 if (name, None) in had else tiers - had[name, workload.uuid]
                if missing > 0:
                    found[name] = found.get(name, 0) + missing
        return found

    def request(self) -> dict[str, Any]:
        """What `gdn worker` reads: plain JSON, complete in itself but for a dataset's files."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "op": op_to_json(self.op),
            "definition": self.definition,
            "solution": self.solution,
            "specific": bool(self.algo and self.algo.specific and self.command != "prove"),  # a judge's build
            "setup": self.algo.setup if self.algo else None,
            "mode": self.mode,
            "workloads": [w.to_json() for w in self.workloads],
            "dataset": str(self.dataset.absolute()) if self.dataset else None,
            "rivals": [
                {"name": algo.name, "solution": solution, "specific": algo.specific, "setup": algo.setup}
                for algo, solution in self.rivals
            ],
            "turns": {uuid: list(names) for uuid, names in self.turns.items()},
            "timing": {"tiers": list(self.tiers), "plan": self.plan, "fallback": self.fallback},
            "strict": self.strict,
            "sandbox": self.sandbox,
            "in_place": self.in_place,
            "profile": self.profile,
        }


@dataclass
class Outcome:
    """What became of a job. `status`: done, build_failed, crashed, killed, exited, out_of_memory, timed_out or
    refused."""

    status: str
    reason: str | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)  # the last lines of the worker's output
    reply: dict[str, Any] = field(default_factory=dict)  # the worker's whole answer; {} when it left none
    at: str | None = None  # whose code ran last, where that is one rival's alone


OnRecord = Callable[[dict[str, Any], dict[str, Any]], None]


def execute(
    job: Job,
    on_record: OnRecord = lambda record, environment: None,
    given_up: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run the job in a worker of its own; `on_record(record, environment)` is called as soon as the worker has one.

    `given_up` is asked all the while: True ends the worker and raises KeyboardInterrupt, which a thread other than the
    main one never gets by itself.
    """
    return serve(job.request(), environ(job), job.timeout_s, on_record, given_up, wrap=job.wrap, cpus=job.cpus)


def serve(
    request: dict[str, Any],
    env: dict[str, str],
    timeout_s: float,
    on_record: OnRecord = lambda record, environment: None,
    given_up: Callable[[], bool] = lambda: False,
    *,
    wrap: tuple[str, ...] = (),
    cpus: frozenset[int] = frozenset(),
) -> Outcome:
    """Run a worker on a request, wherever that was made: `execute` here, and a container for one that travelled.

    env         the worker's environment variables: environ_of's
    wrap, cpus  as a job has them

    Whatever the worker sends is bounded, and has no value of a secret variable of this process in it.
    """
    folder = Path(tempfile.mkdtemp(prefix="gdn-"))
    try:
        (folder / "empty").mkdir()  # the worker's own directory: nothing to import or to find by accident
        env = env | {name: str(folder) for name in ("TMPDIR", "TEMP", "TMP")}  # what is left there goes with it
        return _Following(folder, request, env, on_record, wrap, cpus).to_the_end(timeout_s, given_up)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Following:
    """One worker, what it has sent by now, and what becomes of it."""

    def __init__(
        self,
        folder: Path,
        request: dict[str, Any],
        env: dict[str, str],
        on_record: OnRecord,
        wrap: tuple[str, ...],
        cpus: frozenset[int],
    ) -> None:
        self.outcome, self.on_record = Outcome("done"), on_record
        self.secrets = redaction.values()
        self.log, self.reply, self.partial = bounded.Output(bounded.EDGE + 4096), bytearray(), bytearray()
        self.garbled: str | None = None
        self.seal = os.urandom(16).hex()  # in front of each record: only the worker knows it, not what it runs
        self.waits = False
        self.ooms = fates.ooms()
        self.selector = selectors.DefaultSelector()
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(request | {"seal": self.seal}).encode())
            stdin.seek(0)
            events, events_in = os.pipe()
            try:
                self.process = subprocess.Popen(
                    [
                        sys.executable, "-I", "-S", str(_KEEPER), str(folder),
                        *(["--cpus", ",".join(map(str, sorted(cpus)))] if cpus else []), "--",
                        *wrap, sys.executable, "-m", "gdn_cli.worker", "--events", f"/dev/fd/{events_in}",
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
        finally:  # Ctrl-C too: no worker outlives its command, and nothing that an algo started outlives its worker
            _end(self.process)
            while self._read(0):  # what came last; a process that got away may hold a pipe open, and is not waited for
                pass
            self.selector.close()
            for stream in (self.events, self.process.stdout, self.process.stderr):
                stream.close()
        text = bounded.clip(redaction.masked(self.log.text(), self.secrets))
        self.outcome.tail = [line.rstrip()[:_LINE] for line in text.splitlines() if line.strip()][-20:]
        self._conclude(f"no end after {timeout_s:g} s; --timeout gives more" if timed_out else None)
        return self.outcome

    def _read(self, wait_s: float) -> bool:
        """What is there by now, or comes within this time; whether anything was."""
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
        if not self.waits and (found := _WAITS.search(data)):  # a lock that is waited for is named, once
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
            if not line.startswith(seal) or (event := self._json(line[len(seal) :])) is None:
                self.garbled = "a record came that its worker did not write"
                return
            if "environment" in event:
                self.outcome.environment = event["environment"]
                continue
            if "at" in event:
                self.outcome.at = event["at"]
                continue
            self.outcome.records.append(event)
            self.on_record(event, self.outcome.environment)

    def _json(self, data: bytes | bytearray) -> dict[str, Any] | None:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return redaction.masked(bounded.clipped(found), self.secrets) if isinstance(found, dict) else None

    def _conclude(self, timed_out: str | None) -> None:
        """The status and the reason, from the reply or from the way in which the worker ended without one."""
        outcome = self.outcome
        if timed_out:
            outcome.status, outcome.reason = "timed_out", timed_out
            return
        reply = self._json(self.reply) if self.reply else None
        sealed = reply is not None and reply.pop("seal", None) == self.seal and isinstance(reply.get("status"), str)
        if self.garbled or (self.reply and not sealed):
            outcome.status, outcome.reason = "crashed", self.garbled or "a reply came that its worker did not write"
            return
        if reply is None:
            outcome.status, outcome.reason = fates.death(self.process.returncode, self.ooms)
            exit_code = self.process.returncode
        else:
            outcome.reply, outcome.status, outcome.reason = reply, reply["status"], reply.get("reason")
            exit_code = reply.get("exit_code")
        if outcome.status == "exited" and exit_code and outcome.tail:
            outcome.reason = f"{outcome.reason}: {outcome.tail[-1][:200]}"


def _end(process: subprocess.Popen) -> None:
    """End the keeper, which ends all that is below it: compilers that the builder started, and what left its group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            pass
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environ(job: Job) -> dict[str, str]:
    """The environment of a job's worker."""
    return environ_of(job.mode, job.gpu) | job.env


def environ_of(mode: str, gpu: machine.Gpu | None = None) -> dict[str, str]:
    """A worker's environment: of ours what `redaction.allowed` lets through, with the builders' tools within reach and
    their caches in gdn's own folder; and with `gpu`, which None leaves to CUDA, as the only one."""
    env = redaction.allowed(os.environ)
    # relative entries would point into the worker's empty directory
    if path := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in path.split(os.pathsep) if p)
    # ninja and the like live beside the interpreter of a virtual environment that nobody activated
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", "")])
    if home := machine.cuda_home():
        env["CUDA_HOME"] = str(home)
    gpus = ((gpu,) if gpu else machine.gpus()) if mode == "cuda" else ()
    if gpu and gpus or len(gpus) > 1:  # the one that is locked, whatever order CUDA would put them in
        env["CUDA_VISIBLE_DEVICES"] = gpus[0].uuid
    # flashinfer-bench's cache key knows neither the GPU nor the Python that a build was made for, nor that list
    target = gpus[0].capability if gpus else "cpu"
    if asked := env.get(machine.ARCHITECTURES):
        target += f"-for-{re.sub(r'[^0-9A-Za-z.+]+', '_', asked)}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    env.setdefault("FIB_CACHE_PATH", str(paths.builds_dir() / f"{python}-{target}"))
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(paths.builds_dir() / "inductor"))  # else in the temporary folder
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env
