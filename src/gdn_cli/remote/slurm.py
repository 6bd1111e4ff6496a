"""An engine that is a cluster, by submitit: an array with a task for each share of the work.

What a task makes goes into the run's folder on the shared file system, record by record.
So a run can be resumed when the command that submitted it is gone, and a task that is
started again goes on where it was.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from .. import paths
from ..errors import MissingError, RemoteError, UsageError, one_line
from ..machine.inventory import Gpu
from ..records import store
from ..records.store import Writer
from ..run.jobs import Job
from ..run.planning import Entry, Plan
from ..schema.record_types import Document, RemoteCall, Status, Submitted
from ..units import count
from . import host, wire
from .engines import Answers, Cluster, Engine, Heard, lines
from .wire import Reply
from .work import Work, in_minutes, key

# between two looks at the folder, and at the queue
_LOOK_S = 1.0
_QUEUE_S = 5.0
# after a task has ended, for its files to appear
_GRACE_S = 10.0
# before the end of its time, to be started again
_WARNING_S = 30
# to build an algo, and for a workload beside its sampling
_BUILD_S = 60.0
_EACH_S = 5.0
# of a tuning or a profile, if the partition has no limit
_LONGEST_MIN = 240
_UNKNOWN = "SLURM does not know it any more"
# states of a task that does not go on
_ENDED = (
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED INTERRUPTED NODE_FAIL OUT_OF_MEMORY TIMEOUT"
).split() + [_UNKNOWN]
_HINTS = {"TIMEOUT": "; --time gives more"}


@dataclass
class Task:
    """What a task runs: submitit pickles it. It goes on after the records in `made`."""

    parcel: bytes
    made: Path

    def __call__(self) -> bytes:
        if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
            # the workers get it too: what they say then is no reply
            signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))

        before = list(lines(_read(self.made)))
        with self.made.open("ab", buffering=0) as file:

            def keep(message: bytes) -> None:
                # on a line of its own, whatever an earlier one has left
                file.write(b"\n" + wire.marked(message))

            return host.serve(self.parcel, keep, before)

    def checkpoint(self) -> Any:
        """What submitit submits again, before a preemption or the time limit."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(eq=False)
class Running(Heard):
    """A task under way; `read` are the bytes of its file that were read."""

    job: Any = None
    file: Path = Path()
    read: int = 0
    requeued: bool = False
    ended_at: float | None = None

    def look(self) -> None:
        data = _read(self.file)[self.read :]
        whole = data.rfind(b"\n") + 1
        self.read += whole
        for message in lines(data[:whole]):
            self.take(message)

    def fetch(self) -> str:
        """Take the reply; why there is none."""
        result, why = b"", "it answered nothing"
        try:
            result = self.job.result()
        except Exception as e:  # whatever it was there
            why = _last(e)

        # what it made in its last moments
        self.look()
        self.take(result)
        return why

    @property
    def answered(self) -> bool:
        path: Path = self.job.paths.result_pickle
        return path.exists()


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@dataclass(kw_only=True)
class Slurm(Engine):
    """A command's jobs, as tasks of an array. `resumes` is the file of an earlier one."""

    config: Cluster
    resumes: Path | None = None
    work: list[Work] = field(default_factory=list)
    submitted: Submitted | None = None

    def spread(self, entries: list[Entry], timed: bool) -> tuple[Gpu, ...]:
        """A GPU for each task; what is timed on a CPU is one: no record names the CPU."""
        ready = [entry for entry in entries if entry.place.mode]
        if timed and any(entry.place.mode == "cpu" for entry in ready):
            if self.config.tasks:
                hint = "drop it, or --device cuda"
                raise UsageError("--tasks: times of a CPU are of one task", hint=hint)
            return ()

        of_op = Counter(entry.algo.op for entry in ready)
        tasks = self.config.tasks or max(of_op.values(), default=1)
        return tuple(Gpu("", "99", "", index=i) for i in range(tasks))

    def begin(self, plan: Plan, writer: Writer) -> None:
        super().begin(plan, writer)
        tasks: dict[Gpu | None, list[Job]] = {}
        for job in plan.jobs:
            task = tasks.setdefault(job.gpu, [])
            task.append(replace(job, gpu=None, cpus=frozenset()))

        self.work = [
            Work(jobs, self.limit_s(_estimate(jobs))) for jobs in tasks.values()
        ]
        plan.jobs[:] = [job for jobs in tasks.values() for job in jobs]
        writer.document.slurm = self._folder()

    @contextlib.contextmanager
    def followed(self, file: Path) -> Iterator[None]:
        """Keep a tuning's task in `file`, for the same command if this one is killed."""
        if file.exists():
            before = store.load(file).slurm
            if before and Path(before.folder).is_dir():
                self.resumes = file

        self.writer = store.open_document("tune", {}, file)
        self.writer.document.slurm = self._folder()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            shutil.rmtree(self._folder().folder, ignore_errors=True)

    def _folder(self) -> Submitted:
        """Where the run is kept: a new folder, or that of the run to resume."""
        if self.submitted is None and self.resumes:
            self.submitted = store.load(self.resumes).slurm

        if self.submitted is None:
            # where it is missing, nothing is left behind
            import_module("submitit")
            folder = tempfile.mkdtemp(dir=paths.make(paths.cluster_dir()))
            options = msgspec.to_builtins(self.options, enc_hook=str)
            self.submitted = Submitted(folder=folder, cwd=os.getcwd(), asked=options)

        return self.submitted

    def split(self, jobs: list[Job]) -> list[Work]:
        return self.work

    def limit_s(self, seconds: float) -> float:
        """--time, or what it should take, but no more than the partition gives."""
        limit = math.inf
        if self.config.submitit == "slurm":
            partition = self.config.partition or os.environ.get("SBATCH_PARTITION")
            limit = most_minutes(partition)

        minutes = self.config.time
        if minutes and minutes > limit:
            raise UsageError(
                f"--time {minutes}: the partition takes {limit:g} min at most",
                hint="--partition names another one; a task is started again at its limit",
            )

        if limit == math.inf:
            limit = _LONGEST_MIN
        estimate = math.ceil(min((seconds + self.config.start_s) / 60, limit))
        return 60 * (minutes or estimate)

    # --- submitting

    def carry(self, pieces: list[Work]) -> Answers:
        kept = self._folder()
        running = [self._recalled(i, piece) for i, piece in enumerate(pieces)]
        try:
            self._submit([each for each in running if each.job is None])
            kept.calls = []
            for each in running:
                id, limit_s = each.job.job_id, math.ceil(each.work.limit_s)
                call = RemoteCall(id=id, keys=_keys(each.work), limit_s=limit_s)
                kept.calls.append(call)

            # a file of other records is only replaced by records
            if self.writer and (self.resumes or not self.writer.path.exists()):
                self.writer.save()
                self.say(
                    f"{self.name}: if this command is lost: {self._resume_command()}"
                )

            yield from self._arriving(running)
        except BaseException:
            for each in running:
                if each.job and not each.answered:
                    each.job.cancel(check=False)

            raise
        finally:
            if not (self.writer and kept.calls):
                shutil.rmtree(kept.folder, ignore_errors=True)

    def _recalled(self, i: int, work: Work) -> Running:
        """The task of an earlier command that has this work, if there was one."""
        import submitit

        kept = self._folder()
        running = Running(self, work, file=Path(kept.folder, f"{i}.made"))
        if self.resumes is None:
            return running

        call = kept.calls[i] if i < len(kept.calls) else None
        if not call or call.keys != _keys(work) or not Path(kept.folder).is_dir():
            raise UsageError(
                f"{self.resumes}: the algos, or {kept.folder}, have changed since then",
                hint="drop --resume to start over",
            )

        slurm = self.config.submitit == "slurm"
        kind = submitit.SlurmJob if slurm else submitit.LocalJob
        running.job = kind(kept.folder, call.id)
        if running.answered:
            running.fetch()
            over = running.reply is None or bool(running.reply.lost)
        else:
            over = self._states([running]).get(call.id) in _ENDED

        if over:
            self.say(f"{self.name}: job {call.id} is gone; its work is submitted again")
            running.job = running.reply = None

        return running

    def _submit(self, fresh: list[Running]) -> None:
        import submitit

        if not fresh:
            return

        logging.getLogger("submitit").setLevel(logging.ERROR)
        try:
            executor = submitit.AutoExecutor(
                self._folder().folder, self.config.submitit
            )
        except RuntimeError:
            raise MissingError(
                "there is no srun here", hint="run gdn where sbatch and srun are"
            ) from None

        seconds = max(each.work.limit_s for each in fresh)
        cuda = any(each.work.cuda for each in fresh)
        executor.update_parameters(
            name="gdn",
            timeout_min=math.ceil(seconds / 60),
            cpus_per_task=self.config.cpus_per_task,
            **self._options(cuda),
        )
        tasks = [Task(self.parcel(each.work), each.file) for each in fresh]
        try:
            # sbatch's words are in its exception too
            with contextlib.redirect_stderr(io.StringIO()):
                jobs = executor.submit_array(tasks)
        except submitit.core.utils.FailedJobError as e:
            why = _last(e)
            hint = "--gres none on a cluster without GRES" if "gres" in why else None
            raise RemoteError(why, hint=hint) from None

        # a terminal that closes ends neither the tasks nor this command
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for each, job in zip(fresh, jobs, strict=True):
            each.job = job

        number = jobs[0].job_id.partition("_")[0]
        limit = in_minutes(seconds)
        self.say(
            f"{self.name}: job {number}, {count(len(jobs), 'task')} of at most {limit}"
        )

    def _options(self, cuda: bool) -> dict[str, Any]:
        """sbatch's own. A step does not inherit its CPUs, nor always the environment."""
        config = self.config
        options: dict[str, Any] = {
            "slurm_partition": config.partition,
            "slurm_account": config.account,
            "slurm_constraint": config.constraint,
            "slurm_gres": config.gres if cuda else None,
            "slurm_signal_delay_s": _WARNING_S,
            "slurm_srun_args": [
                f"--cpus-per-task={config.cpus_per_task}",
                "--export=ALL",
            ],
        }
        if cuda and not config.gres:
            options["gpus_per_node"] = 1

        return {name: value for name, value in options.items() if value}

    # --- following

    def _arriving(self, running: list[Running]) -> Iterator[tuple[Work, Reply]]:
        waiting = list(running)
        states: dict[str, str] = {}
        looked, summary = -math.inf, ""
        while waiting:
            if time.monotonic() > looked + _QUEUE_S:
                looked = time.monotonic()
                states = self._states(waiting)
                if (line := _summary(states)) != summary:
                    summary = line
                    self.say(f"{self.name}: {line}")

            for each in list(waiting):
                each.look()
                if reply := self._reply(each, states.get(each.job.job_id, "")):
                    waiting.remove(each)
                    yield each.work, reply

            if waiting:
                time.sleep(_LOOK_S)

    def _reply(self, task: Running, state: str) -> Reply | None:
        """What has come of a task; None while it is under way."""
        task.requeued |= bool(task.hello) and state.startswith("PENDING")
        if task.answered or self.config.submitit == "debug":
            # its node was given up, and lived: the second one has nothing to do
            if task.requeued:
                task.job.cancel(check=False)
            return task.ended(f"job {task.job.job_id}: {task.fetch()}")

        now = time.monotonic()
        if state not in _ENDED:
            task.ended_at = None
            return None

        task.ended_at = task.ended_at or now
        if now < task.ended_at + _GRACE_S:
            return None

        task.look()
        return task.ended(f"job {task.job.job_id}: {state}{_HINTS.get(state, '')}")

    def _states(self, running: list[Running]) -> dict[str, str]:
        """State by id, of a waiting task with the reason; none while SLURM is silent."""
        jobs = [each.job for each in running]
        if self.config.submitit != "slurm":
            ended = {"FINISHED": "COMPLETED", "NO PROCESS AND NO RESULT": _UNKNOWN}
            return {job.job_id: ended.get(job.state, job.state) for job in jobs}

        numbers = {job.job_id.partition("_")[0] for job in jobs}
        words = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r"]
        code, out, err = _query([*words, f"--jobs={','.join(sorted(numbers))}"])
        # of one job that it does not know; of several it tells those that it does
        if code and "Invalid job id" not in err:
            return {}

        states: dict[str, str] = {}
        for line in out.splitlines():
            name, state, reason = line.split("|", 2)
            waits = state == "PENDING" and reason != "None"
            states[name] = f"{state} ({reason})" if waits else state

        return {job.job_id: states.get(job.job_id, _UNKNOWN) for job in jobs}

    # --- the end

    def finish(self, document: Document) -> None:
        """A complete run needs its folder no more; of another say how it goes on."""
        kept = self._folder()
        lost = Status.REMOTE_FAILED in {record.status for record in document.records}
        if lost or document.interrupted:
            self.say(f"{self.name}: to go on: {self._resume_command()}")
            return

        document.slurm = None
        shutil.rmtree(kept.folder, ignore_errors=True)

    def _resume_command(self) -> str:
        assert self.writer
        command = self.writer.document.command
        if command == "tune":
            return "the same command"

        return f"gdn {command} --resume {self.writer.path}"


def _keys(work: Work) -> list[str]:
    return [*map(key, work.jobs), *work.sources]


def _estimate(jobs: list[Job]) -> float:
    """Seconds that these jobs should take, twice the sampling."""
    whole = 0.0
    for job in jobs:
        sampling = job.request.timing.plan.get("seconds", 0.3) if job.tiers else 0
        seconds = job.due * (_EACH_S + 2 * sampling)
        whole += min(job.timeout_s, seconds + (_BUILD_S if job.algos else 0))

    return whole


# --- what SLURM says


def _query(words: list[str]) -> tuple[int, str, str]:
    try:
        process = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        return 1, "", str(e)

    return process.returncode, process.stdout, process.stderr


def most_minutes(partition: str | None) -> float:
    """The time limit of a partition, or of the default one; infinite if it is not known."""
    named = [f"--partition={partition}"] if partition else []
    _, out, _ = _query(["sinfo", "--noheader", "--format=%P|%l", *named])
    limits = []
    for line in out.splitlines():
        name, _, limit = line.partition("|")
        if partition or name.endswith("*"):
            limits.append(_minutes(limit))

    return max(limits, default=math.inf)


def _minutes(limit: str) -> float:
    """Of SLURM's DAYS-HOURS:MINUTES:SECONDS."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit.strip())
    if not match:
        return math.inf

    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + minutes + seconds / 60


def _summary(states: dict[str, str]) -> str:
    """How many tasks are in each state."""
    if not states:
        return "SLURM does not answer; asking again"

    counts = Counter(states.values())
    return ", ".join(f"{n} {state}" for state, n in counts.items())


def _last(e: Exception) -> str:
    """The last line of what an exception of submitit says: that is SLURM's, or Python's."""
    words = [line for line in str(e).splitlines() if line.strip("- ")]
    return words[-1] if words else one_line(e)
