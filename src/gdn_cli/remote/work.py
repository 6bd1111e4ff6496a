"""What is sent: a command's options for Modal, jobs that share a container, where an
algo runs there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, structs

from .. import files, paths, units
from ..catalog.formats import Solution
from ..catalog.pack import source_hash
from ..catalog.tiers import TIERS
from ..errors import GdnError, UsageError
from ..run import planning
from ..run.jobs import Job
from ..schema.record_types import RemoteCall, Rented, Spent
from ..tune import away
from .settings import Gpu, Image, Settings
from .wire import Wanted

if TYPE_CHECKING:
    from .modal_client import Call

# of one call, at Modal
_DAY_S = 24 * 3600


@dataclass(eq=False)
class Work:
    """Work for one container, to be done in at most `limit_s` seconds there."""

    jobs: list[Job]
    limit_s: float
    # to make: profiling.sent of each
    profiles: list[Wanted] = field(default_factory=list)
    tunings: list[away.Wanted] = field(default_factory=list)
    # if another command has sent it
    earlier: RemoteCall | None = None
    # its call, once it is sent
    call: Call | None = None
    # how many of its messages are passed on, and when a line said so
    seen: int = 0
    said: float = -math.inf
    # all of them, if there was no reply
    kept: list[bytes] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return [key(job) for job in self.jobs]

    @property
    def due(self) -> int:
        return sum(job.due for job in self.jobs)

    @property
    def cuda(self) -> bool:
        modes: set[str] = {job.mode for job in self.jobs}
        modes |= {wanted["subject"]["mode"] for wanted in self.profiles}
        modes |= {tuning.mode for tuning in self.tunings}
        # what an earlier command has sent may not be known
        return "cuda" in modes or (not modes and self.earlier is not None)

    @property
    def sources(self) -> list[str]:
        """The hashes of the algos to build."""
        solutions: list[Solution | None] = []
        for job in self.jobs:
            solutions += [solution for _, solution in job.packed]
        solutions += [wanted["subject"]["solution"] for wanted in self.profiles]
        solutions += [tuning.algo.solution for tuning in self.tunings]
        return sorted(source_hash(solution) for solution in solutions if solution)

    def progress(self) -> str:
        """How many of its measurements there are."""
        if self.tunings:
            name = self.tunings[0].algo.full_name
            return f"{name}: {units.count(self.seen, 'measurement')} so far"
        # a task that is started again while the first one lives makes some twice
        count = min(self.seen, self.due)
        return f"{planning.name(self.jobs[-1])}: {count} of {self.due} so far"


@dataclass(frozen=True)
class Rent:
    """A command's options for Modal, and its limits: how long, and for how much."""

    settings: Settings
    gpu: Gpu
    image: Image
    parallel: int = 1
    # everything in one container
    together: bool = False
    # after which everything is stopped
    minutes: float | None = None
    detach: bool = False

    def limit_s(self, seconds: float) -> int:
        """A container's time limit for this much work: including its start, and not
        more than --max-minutes. UsageError for more than Modal allows.
        """
        most = self.minutes * 60 if self.minutes else math.inf
        whole = min(seconds + self.settings.limits.start, most)
        if whole > _DAY_S:
            raise UsageError(
                f"a call of {whole:g} s: Modal's longest is 24 h, its start included",
                hint="a shorter --timeout, --max-minutes, or no --together",
            )
        return max(1, math.ceil(whole))

    def containers(self, calls: int) -> int:
        """How many run side by side."""
        return min(self.parallel, self.settings.limits.containers, calls)

    def patience_s(self, work: list[Work]) -> float:
        """How long to wait at most for the replies."""
        if self.minutes:
            return self.minutes * 60
        rounds = math.ceil(len(work) / self.containers(len(work)))
        return rounds * max(w.limit_s for w in work) + self.settings.limits.queue

    def bill(self, gpu: Gpu | None, work: list[Work]) -> str:
        """Which GPU, how many containers, how long and for how much at most: printed
        before anything is started.
        """
        side_by_side = self.containers(len(work))
        whole_s = float(sum(w.limit_s for w in work))
        if self.minutes and not self.detach:
            whole_s = min(whole_s, side_by_side * self.minutes * 60)
        each = in_minutes(max(w.limit_s for w in work))
        likely_s = likely(work, list(spent(str(self.gpu))))
        return (
            f"Modal: {gpu or 'CPU only'}, {units.count(side_by_side, 'container')},"
            f" {units.count(len(work), 'call')} of at most {each}: {in_minutes(whole_s)} of"
            f" container time at most, {self.settings.dollars(gpu, whole_s, likely_s)}"
        )


def in_minutes(seconds: float) -> str:
    return f"{math.ceil(seconds / 60)} min"


class _Run(Struct):
    """What is read of a document."""

    modal: Rented | None = None


def spent(gpu: str) -> Iterator[Spent]:
    """What calls on this GPU have taken, those of the newest run first."""
    for path in sorted(paths.runs_dir().glob("*.json"), reverse=True):
        with contextlib.suppress(GdnError, OSError, ValueError, RecursionError):
            rented = msgspec.json.decode(files.read(path), type=_Run).modal
            if rented and rented.gpu == gpu:
                yield from rented.spent


def likely(work: list[Work], before: list[Spent]) -> float | None:
    """How long such work took before, in seconds: calls for the same algos, else for
    others of the op. None if there was no such call.
    """
    whole_s = 0.0
    for piece in work:
        kinds = _kinds(piece.keys)
        same = [call for call in before if call.keys == piece.keys]
        same += [call for call in before if _kinds(call.keys) == kinds]
        if not same:
            return None

        more = max(1.0, piece.due / max(1, same[0].due))
        whole_s += min(piece.limit_s, same[0].seconds * more)

    return whole_s


def _kinds(keys: list[str]) -> list[list[str]]:
    """Command, op and mode of each job."""
    words = [name.split() for name in keys]
    return [[command, op, names[-1]] for command, op, *names in words]


# --- jobs


def together(jobs: list[Job]) -> list[Job]:
    """The timed algos of an op in one process, their calls taking turns; floors and
    references unchanged.
    """
    groups: dict[object, list[Job]] = {}
    for i, job in enumerate(jobs):
        alone = job.command != "bench" or job.added
        groups.setdefault(i if alone else (job.op.name, job.mode), []).append(job)
    return [_interleaved(group) for group in groups.values()]


def _interleaved(jobs: list[Job]) -> Job:
    first = jobs[0]
    if len(jobs) == 1:
        return first
    able = [n for n, t in TIERS.items() if t.interleaves and t.mode == first.mode]
    tiers = tuple(tier for tier in first.tiers if tier in able)
    if not tiers:
        raise UsageError(
            f"calls of several algos cannot take turns in {', '.join(first.tiers)}",
            hint=f"use --tier {', '.join(able)}",
        )
    request = first.request
    return Job.of(
        "compare",
        first.op,
        request.definition,
        first.mode,
        first.workloads,
        [pair for job in jobs for pair in job.packed],
        options=request.options,
        timing=structs.replace(request.timing, tiers=tiers, fallback=False),
        timeout_s=sum(job.timeout_s for job in jobs),
        machine=first.machine,
    )


def key(job: Job) -> str:
    """A job's name, the same from one command to the next."""
    return f"{job.command} {job.op.name} {'+'.join(job.names)} {job.mode}"
