"""Jobs -> calls of one container each -> outcomes, as they arrive: number of
containers, limits, and Ctrl-C.

running.run can use an Engine instead of this machine; everything around it (packing,
records, tables) is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec

from .. import units
from ..catalog import official
from ..catalog.official import Harness
from ..catalog.registry import Algo
from ..catalog.workloads import Workload
from ..errors import RemoteError
from ..machine import environment, inventory
from ..records import comparison, statistics
from ..records.store import Writer
from ..run import planning
from ..run.elsewhere import Elsewhere
from ..run.execute import Came
from ..run.jobs import Job, Outcome
from ..schema.record_types import Document, RemoteCall, Rented
from . import costs, modal_client, modal_errors, replies, resume, setup, wire
from .settings import DATA, Gpu, Settings, pins
from .wire import Cache, Parcel, Piece, Reply, Wanted
from .work import Rent, Work, key, place, together

_SAY_S = 10.0  # between two lines about the progress of a call
_LOOK_S = 1.0  # between two looks at the connection; replies are seen at once
_SEVERAL = (
    "these times come from {} GPUs of one kind: ratios between algos include what differs between"
    " the GPUs, and none is marked as the fastest of those; --together takes one container"
    " for all"
)


@dataclass
class Engine(Elsewhere):
    """Runs jobs at Modal. `sent` are the calls that have not returned: their ids, the
    keys of their jobs, their time there. `earlier` are those of the command that this
    one resumes.
    """

    settings: Settings
    rent: Rent
    say: Callable[[str], None]
    command: str = "bench"
    asked: object = None  # the command's own options: a dataclass
    resumed: Document | None = None  # the run that this one resumes
    earlier: list[RemoteCall] = field(default_factory=list)
    sent: list[RemoteCall] = field(default_factory=list)
    writer: Writer | None = None
    # for `gdn modal check`: profiles besides the jobs, and what is installed there
    wanted: list[Wanted] | None = None
    reply: Reply | None = None  # the last one that came
    dataset_at: Path = Path(DATA)  # in the container

    def place(self, algo: Algo, device: str = "auto") -> inventory.Place:
        return place(algo, device)

    def __call__(
        self, jobs: list[Job], came: Came = lambda *_: None
    ) -> Generator[tuple[Job, Outcome], None, None]:
        self._came = came
        if jobs:
            with contextlib.closing(self.carry(self._split(jobs))) as answers:
                for work, reply in answers:
                    yield from self._outcomes(work, reply)

    def harness(self, asked: Harness) -> Harness:
        """The contest's harness where the container will have it: in the image, or
        installed into it.
        """
        found = official.there(asked, pins())
        if found.folder:
            image = msgspec.structs.replace(self.rent.image, then=(found.install(),))
            self.rent = replace(self.rent, image=image)
        return found

    # --- around a campaign

    def begin(self, plan: planning.Plan, writer: Writer) -> None:
        """Adapt the plan: algos that take turns, and results that an earlier run already has."""
        self.writer = writer
        costs.affordable(plan, getattr(self.asked, "tier", None) == "all")
        if self.rent.together:
            plan.jobs[:] = together(plan.jobs)
        if old := self.resumed:
            plan.jobs[:] = resume.resume(plan.jobs, old, writer)
            self.earlier = old.modal.calls
            writer.document.comparisons, writer.document.overall = (
                old.comparisons,
                old.overall,
            )
        self.note(writer.document)

    def note(self, document: Document) -> None:
        """Store the options and the calls under way in the document, whenever it is saved."""
        asked = msgspec.to_builtins(self.asked, enc_hook=str)
        document.modal = Rented(
            gpu=str(self.rent.gpu),
            image=self.rent.image.name,
            command=self.command,
            asked=asked,
            calls=self.sent,
        )

    def finish(self, document: Document) -> None:
        """Note what is only known from all records together."""
        uuids = {r.gpu.uuid for r in document.records if r.gpu}
        if len(uuids) > 1:
            document.warnings = [
                *(document.warnings or []),
                _SEVERAL.format(len(uuids)),
            ]
        baselines: dict[str, str] = {}
        for record in document.records:
            if record.rounds_us:
                baselines.setdefault(record.op, record.algo)
        if baselines:
            comparison.between(document, baselines, statistics.THRESHOLD)

    # --- what there is to do

    def _split(self, jobs: list[Job]) -> list[Work]:
        """The jobs that an earlier command's calls will answer, and those to send now."""
        by_key = {key(job): job for job in jobs}
        sent = [call for call in self.earlier if set(call.keys) <= set(by_key)]
        work = [
            Work([by_key[k] for k in call.keys], call.limit_s, earlier=call)
            for call in sent
        ]
        taken = {k for call in sent for k in call.keys}
        fresh = [job for job in jobs if key(job) not in taken]
        for part in (
            [fresh] if self.rent.together and fresh else [[job] for job in fresh]
        ):
            seconds = sum(job.timeout_s for job in part)
            work.append(Work(part, self.bounded(seconds), profiles=self.wanted or []))
        return work

    def bounded(self, seconds: float) -> int:
        """A container's time limit for this much work: including its start, and not
        more than --max-minutes.
        """
        whole = seconds + self.settings.limits.start
        return max(
            1,
            math.ceil(
                min(whole, self.rent.minutes * 60 if self.rent.minutes else whole)
            ),
        )

    def containers(self, calls: int) -> int:
        """How many run side by side."""
        return min(self.rent.containers, self.settings.limits.containers, calls)

    # --- there and back

    def carry(self, work: list[Work]) -> Iterator[tuple[Work, Reply]]:
        """Send what is not there yet, and yield each reply as it comes. RemoteError if
        the GPU is another one: other containers would have it too, and its times are
        useless.
        """
        old, fresh = [w for w in work if w.earlier], [w for w in work if not w.earlier]
        # before anything can fail: they run and are paid for
        self.sent.extend(w.earlier for w in old)
        modal_client.connect(self.settings.limits.connect)
        # otherwise no GPU is rented
        gpu = self.rent.gpu if any(w.cuda for w in fresh) else None
        self.look_at(
            [
                w
                for work in fresh
                for job in work.jobs
                if job.request.dataset
                for w in job.workloads
            ]
        )
        if fresh:
            self.say(self.bill(fresh, gpu))
        try:
            with contextlib.ExitStack() as stack:
                for w in old:
                    w.call = modal_client.recall(w.earlier.id)
                unsent: list[tuple[Work, Reply]] = []
                if fresh:
                    limit_s, containers = (
                        max(w.limit_s for w in fresh),
                        self.containers(len(fresh)),
                    )
                    declared = modal_client.declare(
                        self.settings, self.rent.image, gpu, limit_s, containers
                    )
                    spawn = stack.enter_context(
                        modal_client.session(*declared, self.rent.detach)
                    )
                    unsent = self._send(fresh, spawn, gpu)
                yield from unsent
                if not self.rent.detach:
                    yield from self._arriving([w for w in work if w.call])
        except BaseException as e:
            # the app was stopped, and its calls with it; without a connection that is not known
            known = (
                not isinstance(e, modal_errors.Unreachable)
                and modal_errors.UNSTOPPED not in e.args
            )
            if known and not self.rent.detach:
                for w in fresh:
                    self._ended(w)
            raise

    def look_at(self, workloads: list[Workload]) -> None:
        """See on the volume, before anything is paid, where the data set of --dataset
        is. MissingError if it is not.
        """
        inputs = [spec for w in workloads for spec in (w.inputs or {}).values()]
        needed = {spec["path"] for spec in inputs if spec["type"] == "safetensors"}
        if workloads:
            name = self.settings.volumes.dataset
            self.dataset_at = Path(
                DATA, setup.place(name, modal_client.Volume(name).files(), needed)
            )

    def _send(
        self,
        work: list[Work],
        spawn: Callable[[bytes], modal_client.Call],
        gpu: Gpu | None,
    ) -> list[tuple[Work, Reply]]:
        """Start the calls. Those that cannot be sent behind one that was: each with the reason."""
        for i, w in enumerate(work):
            try:
                w.call = spawn(self.parcel(w, gpu))
            except RemoteError as e:
                if i == 0:
                    raise
                return [
                    (unsent, Reply(lost=f"it was not sent: {e.message}"))
                    for unsent in work[i:]
                ]
            keys = [key(job) for job in w.jobs]
            self.sent.append(RemoteCall(id=w.call.id, keys=keys, limit_s=w.limit_s))
        return []

    def _ended(self, work: Work) -> None:
        """Its call has ended: there is nothing to fetch any more."""
        self.sent[:] = [
            call for call in self.sent if work.call is None or call.id != work.call.id
        ]

    @cached_property
    def commit(self) -> dict[str, str]:
        """The commit of the sources, which are sent without their .git."""
        found = environment.commit()
        return (
            {"GDN_COMMIT": found["commit"] + ("-dirty" if found.get("dirty") else "")}
            if found
            else {}
        )

    def parcel(self, work: Work, gpu: Gpu | None) -> bytes:
        facts = "\0".join([self.rent.image.base, *pins(), str(gpu), *work.sources])
        content = Parcel(
            image=self.rent.image.name,
            gpu=gpu,
            cache=Cache(
                hashlib.sha256(facts.encode()).hexdigest()[:24],
                self.settings.volumes.cache,
            ),
            # otherwise it is all that they may take
            limit_s=work.limit_s if self.rent.minutes else None,
            env={name: str(value) for name, value in self.settings.environment.items()}
            | self.commit,
            jobs=[piece(job, self.dataset_at) for job in work.jobs],
            profiles=work.profiles,
            tunings=work.tunings,
            examine=self.wanted is not None,
        )
        return wire.encode(content)

    def _arriving(self, waiting: list[Work]) -> Iterator[tuple[Work, Reply]]:
        """Each reply as it comes. Without a connection the calls go on there: wait for
        it as long as for them, and keep the ids of those that were not heard of.
        """
        patience = self.patience(waiting)
        deadline, cut = time.monotonic() + patience, False
        while waiting:
            left = deadline - time.monotonic()
            done = modal_client.first(
                [w.call for w in waiting], max(0.0, min(_LOOK_S, left))
            )
            trouble = next(filter(None, [w.call.look() for w in waiting]), None)
            if trouble and not cut:
                self.say(
                    f"{trouble.message}: the calls go on there; asking again for up to"
                    f" {_minutes(max(0, left))}"
                )
            elif cut and not trouble:
                self.say("Modal answers again")
            cut = trouble is not None
            for work in [w for w in waiting if w.call in done]:
                waiting.remove(work)
                reply = self._reply(work)
                if reply.wrong_gpu:
                    raise RemoteError(
                        reply.wrong_gpu,
                        hint="nothing was measured; name a GPU that Modal has: --gpu",
                    )
                yield work, reply
            for work in waiting:
                self._live(work)
            if left <= 0:
                yield from ((w, self._late(w, patience)) for w in waiting)
                return

    def _live(self, work: Work) -> None:
        """Pass on the records that a call has made since the last look, and say now and
        then how many there are.
        """
        new, work.seen = work.call.made[work.seen :], len(work.call.made)
        if work.tunings and new and time.monotonic() >= work.said + _SAY_S:
            work.said = time.monotonic()
            self.say(
                f"{work.tunings[0].algo.full_name}: {units.count(work.seen, 'measurement')}"
                " so far"
            )
        for made in replies.usable(work.jobs, new, self.rent.gpu):
            job, work.came[made.piece] = (
                work.jobs[made.piece],
                work.came[made.piece] + 1,
            )
            self._came(job, made.record, made.environment)
            now, done = time.monotonic(), work.came[made.piece]
            if now >= work.said + _SAY_S and done < job.due:
                work.said = now
                self.say(f"{planning.name(job)}: {done} of {job.due} so far")

    def _reply(self, work: Work) -> Reply:
        """What has come of a call. RemoteError if Modal refuses to say."""
        reply, data = Reply(), b""
        try:
            data = work.call.result()
        except modal_errors.CallFailed as e:
            reply.lost = str(e)
            if isinstance(e, modal_errors.TimedOut):
                option = "--max-minutes" if self.rent.minutes else "--timeout"
                reply.lost += f"; {option} gives more"
        try:
            reply = reply if reply.lost else wire.decode(data, Reply)
        except RemoteError as e:
            reply.lost = str(e)
            # the gdn that sent it can fetch it: its id stays
            if e.message.startswith(wire.OTHER):
                return reply
        self._ended(work)
        if not (reply.lost or reply.wrong_gpu):
            wanted = None if work.earlier else len(work.profiles)
            if work.tunings:
                reply.lost = replies.untuned(len(work.tunings), reply, self.rent.gpu)
            else:
                reply.lost = replies.fault(work.jobs, wanted, reply, self.rent.gpu)
        return reply

    def _late(self, work: Work, patience: float) -> Reply:
        """The reply in the place of one that did not come in time."""
        within = f"no reply within {patience / 60:.0f} minutes"
        if not work.call.trouble and work.call.cancel():
            self._ended(work)
            return Reply(
                lost=(
                    f"{within}: Modal had no {self.rent.gpu} free, or --max-minutes was too short"
                )
            )
        why = (
            work.call.trouble.message if work.call.trouble else "Modal does not answer"
        )
        return Reply(lost=f"{within}: {why}; the call may go on there")

    def patience(self, waiting: list[Work]) -> float:
        """Seconds to wait for replies at most."""
        if self.rent.minutes:
            return self.rent.minutes * 60
        rounds = math.ceil(len(waiting) / self.containers(len(waiting)))
        return rounds * max(w.limit_s for w in waiting) + self.settings.limits.queue

    def _outcomes(self, work: Work, reply: Reply) -> Iterator[tuple[Job, Outcome]]:
        self.reply = reply
        if reply.lost:
            unheard = work.call is None or any(
                call.id == work.call.id for call in self.sent
            )
            # the run that fetches it will ask
            found = [] if unheard else modal_client.kept(work.call.id)
            for job, made in zip(
                work.jobs, replies.kept(work.jobs, found, self.rent.gpu), strict=True
            ):
                if made.records:
                    self.say(
                        f"{planning.name(job)}: {len(made.records)} of {job.due} came before that"
                    )
                made.reason = reply.lost
                yield job, made
            return
        for job, outcome in zip(work.jobs, reply.outcomes, strict=True):
            if outcome.environment:  # never among the times of a GPU here
                outcome.environment.where = "modal"
            passed = sum(r.passed for r in outcome.records)
            device = outcome.environment and outcome.environment.device
            where = f", {device}" if device else ""
            self.say(f"{planning.name(job)}: {passed} of {job.due} passed{where}")
            yield job, outcome

    # --- what it may cost

    def bill(self, work: list[Work], gpu: Gpu | None) -> str:
        """Which GPU, how many containers, how long and for how much at most: printed
        before anything is started.
        """
        containers = self.containers(len(work))
        each = max(w.limit_s for w in work)
        whole = sum(w.limit_s for w in work)
        if self.rent.minutes and not self.rent.detach:
            whole = min(whole, containers * self.rent.minutes * 60)
        what = (
            f"{gpu or 'CPU only'}, {units.count(containers, 'container')},"
            f" {units.count(len(work), 'call')}"
        )
        most = f"{_minutes(whole)} of container time at most, {self.settings.dollars(gpu, whole)}"
        return f"Modal: {what} of at most {_minutes(each)}: {most}"


def piece(job: Job, dataset_at: Path = Path(DATA)) -> Piece:
    """A job as it is sent: the request that a worker here would get, with the data
    set's path in the container.
    """
    request = job.request
    if request.dataset:
        request = msgspec.structs.replace(request, dataset=str(dataset_at))
    return Piece(request, job.timeout_s)


def _minutes(seconds: float) -> str:
    return f"{math.ceil(seconds / 60)} min"
