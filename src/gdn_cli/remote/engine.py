"""Jobs -> calls of one container each -> outcomes, as they arrive: fan-out, bounds, and what happens on Ctrl-C.

running.run takes an Engine in the place of this machine; everything around it (packing, records, tables) is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import errors
from ..catalog.pack import source_hash
from ..catalog.registry import Algo
from ..catalog.tiers import TIERS
from ..errors import RemoteError, UsageError
from ..machine import environment, inventory
from ..parsing import to_json
from ..records import comparison, statistics
from ..records.store import Writer
from ..run import planning
from ..run.jobs import Job, Outcome
from ..schema.record_types import Document, RemoteCall, Rented, Status
from . import resume, wire
from .settings import DATA, Gpu, Image, Settings, pins

_WAIT_S = 0.5  # for a reply, over all calls: how late one may be noticed
_SEVERAL = (
    "these times come from {} GPUs of one kind: ratios between algos include what differs between the GPUs, and none "
    "is marked as the fastest of those; --together takes one container for all"
)
_SILENCE_S = 60.0  # of Modal's, while calls are under way, until the connection counts as lost


@dataclass(frozen=True)
class Rent:
    """What a command asks of Modal."""

    gpu: Gpu
    image: Image
    containers: int = 1
    together: bool = False  # everything in one container
    minutes: float | None = None  # after which all of it is stopped
    detach: bool = False


@dataclass
class Work:
    """What one container is to do, and under which id Modal does it. `limit_s` bounds its time there."""

    pieces: list[dict[str, Any]]
    jobs: list[Job]
    limit_s: int
    call: Any = None


def place(algo: Algo, device: str = "auto") -> inventory.Place:
    """Where an algo runs in the container: machine.place for a machine with a GPU and the pinned packages."""
    return inventory.place(algo, device, missing=_lacking)


def _lacking(algo: Algo, mode: str) -> inventory.Place | None:
    there = {pin.split("==")[0] for pin in pins()}
    lacking = [wheel for wheel in algo.packages.values() if wheel not in there]
    if not lacking:
        return None
    hint = "add it to the extra `image` of pyproject.toml, with its version"
    return inventory.Place(None, f"package {lacking[0]} is not in the image", hint)


def together(jobs: list[Job]) -> list[Job]:
    """The timed algos of an op in one process, their calls taking turns; floors and yardsticks as they were."""
    found: list[Job] = []
    for job in jobs:
        if job.command != "bench" or job.added:
            found.append(job)
            continue
        rivals = [j for j in jobs if (j.command, j.op.name, j.mode, j.added) == ("bench", job.op.name, job.mode, False)]
        if len(rivals) < 2:
            found.append(job)
        elif job is rivals[0]:
            found.append(_interleaved(rivals))
    return found


def _interleaved(rivals: list[Job]) -> Job:
    first = rivals[0]
    tiers = tuple(tier for tier in first.tiers if TIERS[tier].interleaves)
    if not tiers:
        able = ", ".join(name for name, t in TIERS.items() if t.interleaves and t.mode == first.mode)
        raise UsageError(
            f"calls of several algos cannot take turns in {', '.join(first.tiers)}", hint=f"use --tier {able}"
        )
    return replace(
        first, command="compare", algo=None, solution=None, tiers=tiers, fallback=False,
        rivals=tuple((j.algo, j.solution) for j in rivals), timeout_s=sum(j.timeout_s for j in rivals),
    )  # fmt: skip


def key(job: Job) -> str:
    """A job's name from one command to the next."""
    algos = [algo.name for algo, _ in job.rivals] or [job.algo.name if job.algo else ""]
    return f"{job.command} {job.op.name} {'+'.join(algos)} {job.mode}"


@dataclass
class Engine:
    """Carries out jobs at Modal. `sent` are the calls that outlive this command and have not come back: their ids, the
    keys of their jobs, their time there. `earlier` are those of the command that this one goes on with.
    """

    settings: Settings
    rent: Rent
    say: Callable[[str], None]
    earlier: list[RemoteCall] = field(default_factory=list)
    sent: list[RemoteCall] = field(default_factory=list)

    def __call__(self, jobs: list[Job]) -> Iterator[tuple[Job, Outcome]]:
        old, fresh = self._split(jobs)
        if old or fresh:
            with contextlib.closing(self.carry(old, fresh)) as answers:
                for work, reply in answers:
                    yield from self._outcomes(work, reply)

    # --- around a campaign ----------------------------------------------------------------------------------------

    def begin(
        self, plan: planning.Plan, writer: Writer, command: str, asked: dict[str, Any], old: Document | None
    ) -> None:
        """Make the plan fit: what takes turns, and what an earlier run has already."""
        if self.rent.together:
            plan.jobs[:] = together(plan.jobs)
        if old:
            plan.jobs[:] = resume.resume(plan.jobs, old, writer)
            self.earlier = old.modal.calls
            writer.document.comparisons, writer.document.overall = old.comparisons, old.overall
        self.note(writer.document, command, asked)

    def note(self, document: Document, command: str, asked: dict[str, Any]) -> None:
        """Have the document say what was asked, and which calls are under way, whenever it is saved."""
        document.modal = Rented(
            gpu=str(self.rent.gpu), image=self.rent.image.name, command=command, asked=asked, calls=self.sent
        )

    def finish(self, document: Document) -> None:
        """What is only known of all records together."""
        uuids = {r.gpu.uuid for r in document.records if r.gpu}
        if len(uuids) > 1:
            document.warnings = [*(document.warnings or []), _SEVERAL.format(len(uuids))]
        baselines: dict[str, str] = {}
        for record in document.records:
            if record.rounds_us:
                baselines.setdefault(record.op, record.algo)
        if baselines:
            comparison.between(document, baselines, statistics.THRESHOLD)

    # --- what there is to do --------------------------------------------------------------------------------------

    def _split(self, jobs: list[Job]) -> tuple[list[Work], list[Work]]:
        """The jobs whose answers an earlier command's calls will have, and those to be sent now."""
        by_key = {key(job): job for job in jobs}
        old, taken = [], set()
        for call in self.earlier:
            if set(call.keys) <= set(by_key):
                old.append(Work([], [by_key[k] for k in call.keys], call.limit_s, call=call.id))
                taken |= set(call.keys)
        left = [job for job in jobs if key(job) not in taken]
        parts = [left] if self.rent.together and left else [[job] for job in left]
        fresh = [
            Work([piece(job) for job in part], part, self.bounded(sum(job.timeout_s for job in part))) for part in parts
        ]
        return old, fresh

    def bounded(self, seconds: float) -> int:
        """A container's time for so much work: with its start, and not more than --max-minutes."""
        whole = seconds + self.settings.limits.start
        return max(1, math.ceil(min(whole, self.rent.minutes * 60 if self.rent.minutes else whole)))

    @property
    def containers(self) -> int:
        return min(self.rent.containers, self.settings.limits.containers)

    def gpu(self, work: list[Work]) -> Gpu | None:
        """None where nothing needs one: then none is paid for."""
        return self.rent.gpu if any(piece["cuda"] for w in work for piece in w.pieces) else None

    # --- there and back -------------------------------------------------------------------------------------------

    def carry(self, old: list[Work], fresh: list[Work]) -> Iterator[tuple[Work, dict[str, Any] | CallLost]]:
        """Send the fresh work, and give each one's reply as it comes, with those of old calls."""
        from . import modal_client

        for work in old:  # before anything can fail: they are there, and paid for
            self._keep(work, work.call)
        modal_client.connect(self.settings.limits.connect)
        gpu = self.gpu(fresh)
        if fresh:
            self.say(self.bill(fresh, gpu))
        with contextlib.ExitStack() as stack:
            for work in old:
                work.call = modal_client.recall(work.call)
            if fresh:
                containers = min(self.containers, len(fresh))
                declared = modal_client.declare(
                    self.settings, self.rent.image, gpu, max(w.limit_s for w in fresh), containers
                )
                running = stack.enter_context(modal_client.session(*declared, self.rent.detach))
                for work in fresh:
                    work.call = running.spawn(self.parcel(work, gpu))
                    if self.rent.detach:  # else it ends with the app, and the app with this command
                        self._keep(work, work.call.id)
                if self.rent.detach:
                    return
            yield from self._arriving([*old, *fresh])

    def _keep(self, work: Work, id: str) -> None:
        self.sent.append(RemoteCall(id=id, keys=[key(job) for job in work.jobs], limit_s=work.limit_s))

    @cached_property
    def commit(self) -> dict[str, str]:
        """The commit of the sources, which travel without their .git."""
        found = environment.commit()
        return {"GDN_COMMIT": found["commit"] + ("-dirty" if found.get("dirty") else "")} if found else {}

    def parcel(self, work: Work, gpu: Gpu | None) -> bytes:
        pieces = [{k: v for k, v in piece.items() if k not in ("cuda", "sources")} for piece in work.pieces]
        sources = sorted(s for piece in work.pieces for s in piece["sources"])
        facts = "\0".join([self.rent.image.base, *pins(), str(gpu), *sources])
        return wire.encode(
            {
                "work": pieces,
                "gpu": gpu.to_json() if gpu else None,
                "image": self.rent.image.name,
                "env": {name: str(value) for name, value in self.settings.environment.items()} | self.commit,
                "cache": {
                    "key": hashlib.sha256(facts.encode()).hexdigest()[:24],
                    "volume": self.settings.volumes.cache,
                },
            }
        )

    def _arriving(self, waiting: list[Work]) -> Iterator[tuple[Work, dict[str, Any] | CallLost]]:
        from . import modal_client

        patience = self.patience(waiting)
        deadline, heard = time.monotonic() + patience, time.monotonic()
        while waiting:
            for work in list(waiting):
                left = deadline - time.monotonic()
                reply: Any = None
                try:
                    data = work.call.wait(max(0.0, min(_WAIT_S / len(waiting), left)))
                    reply = wire.decode(data) if data is not None else None
                    heard = time.monotonic()
                except modal_client.CallFailed as e:
                    reply = CallLost(str(e))
                except modal_client.Unreachable:  # what runs there is paid for: not given up at the first silence
                    if time.monotonic() - heard > _SILENCE_S:
                        raise
                    time.sleep(_WAIT_S)
                if reply is None and left <= 0:
                    work.call.cancel()
                    reply = CallLost(
                        f"no reply within {patience / 60:.0f} minutes: Modal had no {self.rent.gpu} free, or "
                        "--max-minutes was too short"
                    )
                if reply is not None:
                    waiting.remove(work)
                    self.sent[:] = [call for call in self.sent if call.id != work.call.id]
                    yield work, self.checked(reply)

    def patience(self, waiting: list[Work]) -> float:
        """Seconds until nothing more is waited for."""
        if self.rent.minutes:
            return self.rent.minutes * 60
        rounds = math.ceil(len(waiting) / self.containers)
        return rounds * max(w.limit_s for w in waiting) + self.settings.limits.queue

    def checked(self, reply: dict[str, Any] | CallLost) -> dict[str, Any] | CallLost:
        """RemoteError where the GPU is another one: no other container will be better, and its times are no use."""
        if isinstance(reply, CallLost) or not reply["error"]:
            return reply
        if reply["error"]["kind"] == "gpu":
            raise RemoteError(reply["error"]["reason"], hint="nothing was measured; name a GPU that Modal has: --gpu")
        return CallLost(f"the container failed: {reply['error']['reason']}")

    def _outcomes(self, work: Work, reply: dict[str, Any] | CallLost) -> Iterator[tuple[Job, Outcome]]:
        if isinstance(reply, CallLost):
            for job in work.jobs:
                yield job, Outcome(Status.REMOTE_FAILED, reply.reason, code=errors.REMOTE)
            return
        for job, answer in zip(work.jobs, reply["answers"], strict=True):
            outcome = wire.outcome_of(answer)
            passed = sum(r.passed for r in outcome.records)
            device = outcome.environment and outcome.environment.device
            where = f", {device}" if device else ""
            self.say(f"{planning.name(job)}: {passed} of {job.due} passed{where}")
            yield job, outcome

    # --- what it may cost -----------------------------------------------------------------------------------------

    def bill(self, work: list[Work], gpu: Gpu | None) -> str:
        """Which GPU, how many containers, at most how long: said before anything is started."""
        containers = min(self.containers, len(work))
        each = max(w.limit_s for w in work)
        whole = sum(w.limit_s for w in work)
        if self.rent.minutes and not self.rent.detach:
            whole = min(whole, containers * self.rent.minutes * 60)
        what = f"{gpu or 'CPU only'}, {containers} container{'s' * (containers > 1)}"
        calls = f"{len(work)} call{'s' * (len(work) > 1)} of at most {_minutes(each)}"
        return f"Modal: {what}, {calls}: {_minutes(whole)} of container time at most"


@dataclass(frozen=True)
class CallLost:
    """A call that brought no answers, and why."""

    reason: str


def piece(job: Job) -> dict[str, Any]:
    """A job as it travels: the request that a worker here would get, with the dataset where it is mounted."""
    sent = replace(job, dataset=Path(DATA)) if job.dataset else job
    solutions = [job.solution] if job.solution else [solution for _, solution in job.rivals]
    return {
        "request": to_json(sent.request()),
        "timeout_s": job.timeout_s,
        "cuda": job.mode == "cuda",
        "sources": [source_hash(solution) for solution in solutions] or [job.command],
    }


def answers(engine: Engine, work: Work) -> list[dict[str, Any]]:
    """What a container answers to each piece of work, which may have been sent before; [] where it is left there
    (--detach). Raises RemoteError where the call is lost."""
    old, fresh = ([work], []) if work.call else ([], [work])
    with contextlib.closing(engine.carry(old, fresh)) as arriving:
        for _, reply in arriving:
            if isinstance(reply, CallLost):
                raise RemoteError(reply.reason)
            return reply["answers"]
    return []


def _minutes(seconds: float) -> str:
    return f"{math.ceil(seconds / 60)} min"
