"""configs/engines.toml, and what all of its engines share: a command's jobs -> work -> outcomes."""

from __future__ import annotations

import contextlib
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..catalog.registry import Algo
from ..catalog.workloads import Workload
from ..errors import RemoteError, unknown
from ..machine import inventory
from ..parsing import Positive, Text, WrongError, decode, read_config
from ..run.elsewhere import Elsewhere
from ..run.execute import Came
from ..run.jobs import Job, Outcome
from ..schema.record_types import Document
from ..tune import away
from . import replies, wire
from .wire import Hello, Parcel, Piece, Reply
from .work import Work

Answers = Generator[tuple[Work, Reply], None, None]
# between two lines about the progress of a piece of work
SAY_S = 10.0
_FILLABLE = re.compile(r"([^{}\0]|\{\{|\}\}|\{python\}|\{minutes\})+")
_WORD = (
    "text without NUL, with {python} and {minutes} as its only braces ({{ and }} stand for a"
    " brace)"
)


class Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of configs/engines.toml; seconds."""

    cuda: bool = True
    start_s: Positive = 120


class Command(Table, frozen=True, kw_only=True):
    """A machine that a command reaches. Raises parsing.WrongError for a word that no
    field fills in.
    """

    command: Annotated[
        tuple[Text, ...], Meta(min_length=1, description="a list of words")
    ]
    queue_s: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        for i, word in enumerate(self.command):
            if not _FILLABLE.fullmatch(word):
                raise WrongError(("command", i), _WORD, word)


class Cluster(Table, frozen=True, kw_only=True):
    """A cluster, by submitit's name of it, and sbatch's options."""

    submitit: Literal["slurm", "local", "debug"]
    partition: Text | None = None
    account: Text | None = None
    constraint: Text | None = None
    # only for work on a GPU; None: one GPU
    gres: Text | None = None
    cpus_per_task: Positive = 4
    # minutes; None: an estimate
    time: Positive | None = None
    # that share the algos, or with fewer of these the workloads; None: one for each algo
    tasks: Positive | None = None


def table(name: str) -> Command | Cluster:
    """The engine of this name. A UsageError names those that there are."""
    tables, files = read_config("engines.toml")
    if name not in tables:
        raise unknown("engine", name, tables, hint=f"they are in {files}")

    where = f"{files}: [{name}]"
    if "command" in tables[name]:
        return decode(tables[name], Command, where)

    return decode(tables[name], Cluster, where)


@dataclass
class Engine(Elsewhere):
    """Runs jobs elsewhere, whoever carries them."""

    name: str
    how: Any
    say: Callable[[str], None]
    # the command's own options
    asked: dict[str, Any] = field(default_factory=dict)

    came: Came = lambda *_: None

    def place(self, algo: Algo, device: str = "auto") -> inventory.Place:
        """What the other machine has is not known here: only whether it has a GPU."""

        def lacking(_: Algo, mode: str) -> inventory.Place | None:
            if mode != "cuda" or self.how.cuda:
                return None

            reason = f"engine {self.name} has no GPU"
            return inventory.Place(None, reason, "configs/engines.toml says so")

        return inventory.placed(algo, device, lacking)

    @abstractmethod
    def carry(self, pieces: list[Work]) -> Answers:
        """Send the work, and yield each reply as it comes. Closing it ends all."""

    def carry_one(self, piece: Work) -> Reply:
        with contextlib.closing(self.carry([piece])) as answers:
            return next(answers)[1]

    def split(self, jobs: list[Job]) -> list[Work]:
        return [Work(jobs, self.limit_s(sum(job.timeout_s for job in jobs)))]

    def limit_s(self, seconds: float) -> float:
        """How long work of so many seconds may take there, once it has begun."""
        return seconds

    def find_dataset(self, workloads: list[Workload]) -> Path:
        """--dataset is a folder there."""
        return Path(self.asked["dataset"]).absolute()

    def __call__(
        self, jobs: list[Job], came: Came = lambda *_: None
    ) -> Generator[tuple[Job, Outcome], None, None]:
        self.came = came
        if not jobs:
            return

        with contextlib.closing(self.carry(self.split(jobs))) as answers:
            for work, reply in answers:
                of_work = replies.outcomes(work.jobs, reply, work.kept, None, self.say)
                yield from of_work

    def finish(self, document: Document) -> None:
        """Nothing: each record has its GPU."""

    def parcel(self, work: Work) -> bytes:
        return wire.encode(
            Parcel(
                where=self.name,
                gpu=None,
                cache=None,
                env=wire.commit(),
                jobs=[Piece.of(job) for job in work.jobs],
                profiles=work.profiles,
                tunings=work.tunings,
            )
        )


@dataclass(eq=False)
class Heard:
    """What has come of one piece of work so far."""

    engine: Engine
    work: Work
    hello: Hello | None = None
    reply: Reply | None = None
    size: int = 0
    said: float = field(default_factory=time.monotonic)

    def take(self, message: bytes) -> None:
        """Pass a record on, keep a reply. RemoteError where the work needs a GPU and
        the machine has none: the others would fail there too.
        """
        for hello in wire.readable([message], Hello):
            self._greet(hello)
            return

        usable = list(replies.usable(self.work.jobs, [message], None))
        for made in usable:
            job = self.work.jobs[made.piece]
            self.engine.came(job, made.record, made.environment)

        noted = self.work.tunings and any(wire.readable([message], away.Noted))
        if usable or noted:
            self._keep(message)
            return

        try:
            self.reply = wire.decode(message, Reply)
        except RemoteError as e:
            if e.message.startswith(wire.OTHER):
                self.reply = Reply(lost=str(e))

    def _greet(self, hello: Hello) -> None:
        if self.work.cuda and not hello.gpus:
            hint = "name a partition or a machine that has one, or --device cpu"
            raise RemoteError(f"{hello.host} has no GPU", hint=hint)

        if hello.waits:
            self.engine.say(f"{hello.host}: {hello.waits}")
        elif not self.hello or hello.allocation != self.hello.allocation:
            self.engine.say(f"{self.engine.name}: runs on {hello}")

        self.hello = hello

    def _keep(self, message: bytes) -> None:
        self.size += len(message)
        if self.size <= wire.MOST:
            self.work.kept.append(message)

        if time.monotonic() >= self.said + SAY_S:
            self.said = time.monotonic()
            self.engine.say(self.work.progress(len(self.work.kept)))

    def ended(self, why: str) -> Reply:
        """The reply, or the one in its place; checked."""
        reply = self.reply or Reply(lost=why)
        due = len(self.work.jobs)
        if not reply.lost and len(reply.outcomes) != due:
            reply.lost = f"the reply has {len(reply.outcomes)} outcomes for {due} jobs"

        return reply


def lines(data: bytes) -> Iterator[bytes]:
    """The messages among the lines of a file or a stream."""
    for line in data.splitlines():
        if message := wire.unmarked(line):
            yield message
