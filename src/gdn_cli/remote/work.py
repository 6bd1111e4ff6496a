"""What is sent: a command's options for Modal, jobs that share a container, where an
algo runs there.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from ..catalog.pack import source_hash
from ..catalog.registry import Algo
from ..catalog.tiers import TIERS
from ..errors import UsageError
from ..machine import inventory
from ..run.jobs import Job
from ..schema.record_types import RemoteCall
from ..tune import away
from . import modal_client
from .settings import Gpu, Image, pinned
from .wire import Wanted


@dataclass(frozen=True)
class Rent:
    """A command's options for Modal."""

    gpu: Gpu
    image: Image
    containers: int = 1
    together: bool = False  # everything in one container
    minutes: float | None = None  # after which everything is stopped
    detach: bool = False


@dataclass
class Work:
    """Work for one container, to be done in at most `limit_s` seconds there."""

    jobs: list[Job]
    limit_s: int
    # to make: profiling.sent of each
    profiles: list[Wanted] = field(default_factory=list)
    tunings: list[away.Wanted] = field(default_factory=list)
    earlier: RemoteCall | None = None  # if another command has sent it
    call: modal_client.Call | None = None
    seen: int = 0  # so many of the records that it has kept at Modal are passed on
    came: Counter[int] = field(default_factory=Counter)  # of each job, by its number
    said: float = -math.inf  # when a line about that was printed

    @property
    def cuda(self) -> bool:
        modes = [job.mode for job in self.jobs] + [
            wanted["subject"]["mode"] for wanted in self.profiles
        ]
        return "cuda" in [*modes, *(asked.mode for asked in self.tunings)]

    @property
    def sources(self) -> list[str]:
        """The hashes of the algos to build."""
        solutions: list[Any] = [
            solution for job in self.jobs for _, solution in job.packed
        ]
        solutions += [wanted["subject"]["solution"] for wanted in self.profiles]
        solutions += [asked.algo.solution for asked in self.tunings]
        return sorted(source_hash(solution) for solution in solutions if solution)


def place(algo: Algo, device: str = "auto") -> inventory.Place:
    """Where an algo runs in the container: Machine.place for one with a GPU and the
    pinned packages.
    """
    return inventory.placed(algo, device, _lacking)


def _lacking(algo: Algo, mode: str) -> inventory.Place | None:
    there = pinned()
    lacking = [wheel for wheel in algo.packages.values() if wheel not in there]
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
    return [
        _interleaved(rivals) if len(rivals) > 1 else rivals[0]
        for rivals in groups.values()
    ]


def _interleaved(rivals: list[Job]) -> Job:
    first = rivals[0]
    tiers = tuple(tier for tier in first.tiers if TIERS[tier].interleaves)
    if not tiers:
        able = ", ".join(
            name for name, t in TIERS.items() if t.interleaves and t.mode == first.mode
        )
        raise UsageError(
            f"calls of several algos cannot take turns in {', '.join(first.tiers)}",
            hint=f"use --tier {able}",
        )
    request = first.request
    return Job.of(
        "compare",
        first.op,
        request.definition,
        first.mode,
        first.workloads,
        [pair for job in rivals for pair in job.packed],
        options=request.options,
        timing=structs.replace(request.timing, tiers=tiers, fallback=False),
        timeout_s=sum(job.timeout_s for job in rivals),
        machine=first.machine,
    )


def key(job: Job) -> str:
    """A job's name, the same from one command to the next."""
    return f"{job.command} {job.op.name} {'+'.join(job.names)} {job.mode}"
