"""Calls of one container each: sent, followed, and answered or lost."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..catalog.workloads import Workload
from ..errors import RemoteError
from ..run.execute import Came
from ..schema.record_types import RemoteCall
from . import modal_client, modal_errors, replies, setup, wire
from .settings import DATA, Gpu, pins
from .wire import Cache, Parcel, Piece, Reply
from .work import Rent, Work, in_minutes, key

Answers = Generator[tuple[Work, Reply], None, None]
# between two lines about the progress of a call
_SAY_S = 10.0
# between two looks at the connection; replies are seen at once
_LOOK_S = 1.0


@dataclass(eq=False)
class Running:
    """A call under way."""

    work: Work
    call: modal_client.Call
    # so many of the records that it has kept at Modal are passed on
    seen: int = 0
    # when a line about that was printed
    said: float = -math.inf


@dataclass
class Calls:
    """Carries work to Modal. `sent` are the calls that have not returned: their ids,
    the keys of their jobs, their time there. `came` gets each record as it comes.
    """

    rent: Rent
    say: Callable[[str], None]
    sent: list[RemoteCall] = field(default_factory=list)
    came: Came = lambda *_: None
    # in the container
    dataset_at: Path = Path(DATA)
    name: str = "Modal"

    def limit_s(self, seconds: float) -> float:
        return self.rent.limit_s(seconds)

    def carry_one(self, piece: Work) -> Reply:
        """The reply to one piece of work; an empty one if it is left there."""
        with contextlib.closing(self.carry([piece])) as answers:
            for _, reply in answers:
                return reply

        return Reply()

    def carry(self, pieces: list[Work]) -> Answers:
        """Send what is not there yet, and yield each reply as it comes. RemoteError if
        the GPU is another one: other containers would have it too, and its times are
        useless.
        """
        fresh = [piece for piece in pieces if not piece.earlier]
        # before anything can fail: they run and are paid for
        self.sent.extend(piece.earlier for piece in pieces if piece.earlier)
        settings = self.rent.settings
        modal_client.connect(settings.limits.connect)
        # otherwise no GPU is rented
        gpu = self.rent.gpu if any(piece.cuda for piece in fresh) else None
        workloads: list[Workload] = []
        for piece in fresh:
            for job in piece.jobs:
                workloads += job.workloads if job.request.dataset else ()

        if workloads:
            self.find_dataset(workloads)

        running: list[Running] = []
        try:
            with contextlib.ExitStack() as stack:
                for piece in pieces:
                    if piece.earlier:
                        call = modal_client.recall(piece.earlier.id)
                        running.append(Running(piece, call))

                if fresh:
                    self.say(self.rent.bill(gpu, fresh))
                    limit_s = math.ceil(max(piece.limit_s for piece in fresh))
                    containers = self.rent.containers(len(fresh))
                    declared = modal_client.declare(
                        settings, self.rent.image, gpu, limit_s, containers
                    )
                    session = modal_client.session(*declared, self.rent.detach)
                    spawn = stack.enter_context(session)
                    yield from self._send(fresh, spawn, gpu, running)

                if running and not self.rent.detach:
                    yield from self._arriving(running)
        except BaseException as e:
            # the app was stopped, and its calls with it; without a connection that is not known
            unknown = isinstance(e, modal_errors.UnreachableError)
            unknown = unknown or modal_errors.UNSTOPPED in e.args
            if not (unknown or self.rent.detach):
                for each in running:
                    if not each.work.earlier:
                        self._forget(each)

            raise

    def find_dataset(self, workloads: list[Workload]) -> Path:
        """Where the data set of --dataset is in the container. Seen on the volume,
        before anything is paid: MissingError if it is not there.
        """
        needed = set()
        for workload in workloads:
            for spec in (workload.inputs or {}).values():
                if spec["type"] == "safetensors":
                    needed.add(spec["path"])

        settings = self.rent.settings
        modal_client.connect(settings.limits.connect)
        name = settings.volumes.dataset
        files = modal_client.Volume(name).files()
        self.dataset_at = Path(DATA, setup.place(name, files, needed))
        return self.dataset_at

    # --- sending

    def _send(
        self,
        pieces: list[Work],
        spawn: modal_client.Spawn,
        gpu: Gpu | None,
        running: list[Running],
    ) -> Iterator[tuple[Work, Reply]]:
        """Start the calls. Yields those that cannot be sent behind one that was, with
        the reason.
        """
        for i, piece in enumerate(pieces):
            try:
                call = spawn(self.parcel(piece, gpu))
            except RemoteError as e:
                if i == 0:
                    raise

                lost = f"it was not sent: {e.message}"
                yield from ((unsent, Reply(lost=lost)) for unsent in pieces[i:])
                return

            running.append(Running(piece, call))
            keys = [key(job) for job in piece.jobs]
            limit_s = math.ceil(piece.limit_s)
            self.sent.append(RemoteCall(id=call.id, keys=keys, limit_s=limit_s))

    def parcel(self, piece: Work, gpu: Gpu | None) -> bytes:
        settings, image = self.rent.settings, self.rent.image
        facts = [image.base, *pins(), str(gpu), *piece.sources]
        digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
        env = {name: str(value) for name, value in settings.environment.items()}
        content = Parcel(
            image=image.name,
            gpu=gpu,
            cache=Cache(digest, settings.volumes.cache),
            # otherwise it is all that they may take
            limit_s=piece.limit_s if self.rent.minutes else None,
            env=env | wire.commit(),
            jobs=[Piece.of(job, self.dataset_at) for job in piece.jobs],
            profiles=piece.profiles,
            tunings=piece.tunings,
        )
        return wire.encode(content)

    # --- following

    def _arriving(self, running: list[Running]) -> Iterator[tuple[Work, Reply]]:
        """Each reply as it comes. Without a connection the calls go on there: wait for
        it as long as for them, and keep the ids of those that were not heard of.
        """
        patience_s = self.rent.patience_s([each.work for each in running])
        deadline = time.monotonic() + patience_s
        waiting = list(running)
        cut = False
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            calls = [each.call for each in waiting]
            done = modal_client.first(calls, min(_LOOK_S, left_s))
            troubles = [call.trouble for call in calls if call.trouble]
            if troubles and not cut:
                self.say(
                    f"{troubles[0].message}: the calls go on there; asking again for up to"
                    f" {in_minutes(left_s)}"
                )
            elif cut and not troubles:
                self.say("Modal answers again")

            cut = bool(troubles)

            for each in list(waiting):
                self._pass_on(each)
                if each.call in done:
                    reply = self._reply(each)
                elif not left_s:
                    reply = self._late(each, patience_s)
                else:
                    continue

                # of a call that goes on the run that resumes will ask for the records;
                # a tuning is not resumed that way
                goes_on = any(call.id == each.call.id for call in self.sent)
                if reply.lost and (each.work.tunings or not goes_on):
                    each.work.kept = modal_client.kept(each.call.id)

                waiting.remove(each)
                yield each.work, reply

    def _pass_on(self, running: Running) -> None:
        """Pass on the records that a call has made since the last look, and say now and
        then how many there are.
        """
        new = running.call.made[running.seen :]
        running.seen += len(new)
        jobs = running.work.jobs
        for made in replies.usable(jobs, new, self.rent.gpu):
            self.came(jobs[made.piece], made.record, made.environment)

        now = time.monotonic()
        if new and now >= running.said + _SAY_S:
            running.said = now
            self.say(running.work.progress(running.seen))

    # --- the end of a call

    def _reply(self, running: Running) -> Reply:
        """What has come of a call. RemoteError if the GPU is another one."""
        reply = Reply()
        try:
            reply = wire.decode(running.call.listen().result(), Reply)
        except modal_errors.TimedOutError as e:
            option = "--max-minutes" if self.rent.minutes else "--timeout"
            reply.lost = f"{e}; {option} gives more"
        except modal_errors.CallFailedError as e:
            reply.lost = str(e)
        except RemoteError as e:
            reply.lost = str(e)
            # the gdn that sent it can fetch it: its id stays
            if e.message.startswith(wire.OTHER):
                return reply

        self._forget(running)
        if reply.wrong_gpu:
            hint = "nothing was measured; name a GPU that Modal has: --gpu"
            raise RemoteError(reply.wrong_gpu, hint=hint)

        reply.lost = reply.lost or replies.fault(running.work, reply, self.rent.gpu)
        return reply

    def _late(self, running: Running, patience_s: float) -> Reply:
        """The reply in the place of one that did not come in time."""
        within = f"no reply within {in_minutes(patience_s)}"
        trouble = running.call.trouble
        if not trouble and running.call.cancel():
            self._forget(running)
            why = f"Modal had no {self.rent.gpu} free, or --max-minutes was too short"
            return Reply(lost=f"{within}: {why}")

        silence = trouble.message if trouble else "Modal does not answer"
        return Reply(lost=f"{within}: {silence}; the call may go on there")

    def _forget(self, running: Running) -> None:
        """There is nothing to fetch any more."""
        self.sent[:] = [call for call in self.sent if call.id != running.call.id]
