"""What is sent: a command's options for Modal, jobs that share a container, where an
algo runs there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from msgspec import structs

from .. import units
from ..catalog.formats import Solution
from ..catalog.pack import source_hash
from ..catalog.registry import Algo
from ..catalog.tiers import TIERS
from ..errors import UsageError
from ..machine import inventory
from ..run.jobs import Job
from ..schema.record_types import RemoteCall
from ..tune import away
from .settings import Gpu, Image, Settings, pinned
from .wire import Wanted


@dataclass(frozen=True)
class Rent:
    """A command's options for Modal."""

    gpu: Gpu
    image: Image
    containers: int = 1
    # everything in one container
    together: bool = False
    # after which everything is stopped
    minutes: float | None = None
    detach: bool = False


@dataclass
class Work:
    """Work for one container, to be done in at most `limit_s` seconds there."""

    jobs: list[Job]
    limit_s: float
    # to make: profiling.sent of each
    profiles: list[Wanted] = field(default_factory=list)
    tunings: list[away.Wanted] = field(default_factory=list)
    # if another command has sent it
    earlier: RemoteCall | None = None
    # what its container kept at Modal, if there was no reply
    kept: list[bytes] = field(default_factory=list)

    @property
    def cuda(self) -> bool:
        modes: set[str] = {job.mode for job in self.jobs}
        modes |= {wanted["subject"]["mode"] for wanted in self.profiles}
        modes |= {asked.mode for asked in self.tunings}
        return "cuda" in modes

    @property
    def sources(self) -> list[str]:
        """The hashes of the algos to build."""
        solutions: list[Solution | None] = []
        for job in self.jobs:
            solutions += [solution for _, solution in job.packed]
        solutions += [wanted["subject"]["solution"] for wanted in self.profiles]
        solutions += [asked.algo.solution for asked in self.tunings]
        return sorted(source_hash(solution) for solution in solutions if solution)


# --- limits: how long, and for how much


def limit_s(settings: Settings, rent: Rent, seconds: float) -> int:
    """A container's time limit for this much work: including its start, and not more
    than --max-minutes.
    """
    whole = seconds + settings.limits.start
    if rent.minutes:
        whole = min(whole, rent.minutes * 60)
    return max(1, math.ceil(whole))


def containers(settings: Settings, rent: Rent, calls: int) -> int:
    """How many run side by side."""
    return min(rent.containers, settings.limits.containers, calls)


def patience_s(settings: Settings, rent: Rent, limits_s: list[float]) -> float:
    """How long to wait at most for the replies of calls with these limits."""
    if rent.minutes:
        return rent.minutes * 60
    calls = len(limits_s)
    rounds = math.ceil(calls / containers(settings, rent, calls))
    return rounds * max(limits_s) + settings.limits.queue


def bill(settings: Settings, rent: Rent, gpu: Gpu | None, work: list[Work]) -> str:
    """Which GPU, how many containers, how long and for how much at most: printed before
    anything is started.
    """
    side_by_side = containers(settings, rent, len(work))
    each = max(w.limit_s for w in work)
    whole = sum(w.limit_s for w in work)
    if rent.minutes and not rent.detach:
        whole = min(whole, side_by_side * rent.minutes * 60)
    return (
        f"Modal: {gpu or 'CPU only'}, {units.count(side_by_side, 'container')},"
        f" {units.count(len(work), 'call')} of at most {minutes(each)}:"
        f" {minutes(whole)} of container time at most, {settings.dollars(gpu, whole)}"
    )


def minutes(seconds: float) -> str:
    return f"{math.ceil(seconds / 60)} min"


# --- jobs


def place(algo: Algo, device: str = "auto") -> inventory.Place:
    """Where an algo runs in the container: Machine.place for one with a GPU and the
    pinned packages.
    """
    return inventory.placed(algo, device, _lacking)


def _lacking(algo: Algo, mode: str) -> inventory.Place | None:
    lacking = [wheel for wheel in algo.packages.values() if wheel not in pinned()]
    if not lacking:
        return None
    hint = "add it to the extra `image` of pyproject.toml, with its version"
    return inventory.Place(None, f"package {lacking[0]} is not in the image", hint)


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
    tiers = tuple(tier for tier in first.tiers if TIERS[tier].interleaves)
    if not tiers:
        able = [
            name
            for name, tier in TIERS.items()
            if tier.interleaves and tier.mode == first.mode
        ]
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
