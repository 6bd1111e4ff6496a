"""configs/engines.toml, and what all of its engines share: a command's jobs -> work -> outcomes."""

from __future__ import annotations

import contextlib
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
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
from ..schema.record_types import Document, RemoteCall
from ..tune import away
from . import replies, wire
from .settings import Gpu
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

    place = f"{files}: [{name}]"
    if "command" in tables[name]:
        return decode(tables[name], Command, place)

    return decode(tables[name], Cluster, place)


@dataclass(kw_only=True)
class Carrier(Elsewhere):
    """Runs jobs on another machine, whoever carries them there."""

    name: str
    say: Callable[[str], None]
    # the command's own options
    options: dict[str, Any] = field(default_factory=dict)
    # of an earlier command that this one continues
    earlier: list[RemoteCall] = field(default_factory=list)
    came: Came = lambda *_: None

    @abstractmethod
    def carry(self, pieces: list[Work]) -> Answers:
        """Send the work, and yield each reply as it comes. Closing it ends all."""

    def carry_one(self, piece: Work) -> Reply:
        """The reply to one piece of work; an empty one if it is left there."""
        # to its end: closing it would cancel a call that another gdn can fetch
        answers = list(self.carry([piece]))
        return answers[0][1] if answers else Reply()

    @abstractmethod
    def split(self, jobs: list[Job]) -> list[Work]:
        """The jobs as work that is carried in one piece each."""

    @abstractmethod
    def limit_s(self, seconds: float) -> float:
        """How long work of so many seconds may take there, once it has begun."""

    @abstractmethod
    def find_dataset(self, workloads: list[Workload]) -> Path:
        """Where the data set of --dataset is there."""

    def followed(self, file: Path) -> contextlib.AbstractContextManager[object]:
        """Keep a tuning in `file` while its reply is awaited, if that can be fetched by
        another command.
        """
        return contextlib.nullcontext()

    @property
    def gpu(self) -> Gpu | None:
        """That each machine must have; None: any."""
        return None

    def __call__(
        self, jobs: list[Job], came: Came = lambda *_: None
    ) -> Generator[tuple[Job, Outcome], None, None]:
        self.came = came
        if not jobs:
            return

        with contextlib.closing(self.carry(self.split(jobs))) as answers:
            for work, reply in answers:
                yield from replies.outcomes(work, reply, self.gpu, self.say)

    def pass_on(self, work: Work, messages: Sequence[bytes]) -> bool:
        """Pass on the records among these, and say now and then how many there are;
        whether there was one.
        """
        work.seen += len(messages)
        usable = list(replies.usable(work.jobs, messages, self.gpu))
        for entry in usable:
            self.came(work.jobs[entry.piece], entry.record, entry.environment)

        noted = work.tunings and any(wire.readable(messages, away.Noted))
        if not (usable or noted):
            return False

        now = time.monotonic()
        if now >= work.said + SAY_S:
            work.said = now
            self.say(work.progress())

        return True


@dataclass(kw_only=True)
class Engine(Carrier):
    """A machine or a cluster of configs/engines.toml."""

    config: Any

    def place(self, algo: Algo, device: str = "auto") -> inventory.Place:
        """What the other machine has is not known here: only whether it has a GPU."""

        def lacking(_: Algo, mode: str) -> inventory.Place | None:
            if mode != "cuda" or self.config.cuda:
                return None

            reason = f"engine {self.name} has no GPU"
            return inventory.Place(None, reason, "configs/engines.toml says so")

        return inventory.placed(algo, device, lacking)

    def split(self, jobs: list[Job]) -> list[Work]:
        return [Work(jobs, self.limit_s(sum(job.timeout_s for job in jobs)))]

    def find_dataset(self, workloads: list[Workload]) -> Path:
        """--dataset is a folder there."""
        return Path(self.options["dataset"]).absolute()

    def finish(self, document: Document) -> None:
        """Nothing: each record has its GPU."""

    def parcel(self, work: Work) -> bytes:
        return wire.encode(
            Parcel(
                where=self.name,
                gpu=None,
                cache=None,
                env=wire.commit(),
                jobs=[Piece.from_job(job) for job in work.jobs],
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

    def take(self, message: bytes) -> None:
        """Pass a record on, keep a reply. RemoteError where the work needs a GPU and
        the machine has none: the others would fail there too.
        """
        for hello in wire.readable([message], Hello):
            self._greet(hello)
            return

        if self.engine.pass_on(self.work, [message]):
            self.size += len(message)
            if self.size <= wire.MOST:
                self.work.kept.append(message)

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

    def ended(self, why: str) -> Reply:
        """The reply, or the one in its place; checked."""
        reply = self.reply or Reply(lost=why)
        reply.lost = reply.lost or replies.fault(self.work, reply, None)
        return reply


def lines(data: bytes) -> Iterator[bytes]:
    """The messages among the lines of a file or a stream."""
    for line in data.splitlines():
        if message := wire.unmarked(line):
            yield message
