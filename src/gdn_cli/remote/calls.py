"""Calls of one container each: sent, followed, and answered or lost."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import units
from ..catalog.workloads import Workload
from ..errors import RemoteError
from ..run.execute import Came
from ..schema.record_types import RemoteCall, Spent
from . import modal_client, modal_errors, replies, setup, wire
from .settings import DATA, Gpu, pins
from .wire import Cache, Parcel, Piece, Reply
from .work import Rent, Work, in_minutes, key

Answers = Generator[tuple[Work, Reply], None, None]
# between two lines about the progress of a call
_SAY_S = 10.0
# between two looks at the connection; replies are seen at once
_LOOK_S = 1.0
# for Modal to confirm that calls are cancelled: at Ctrl-C, and of one that is late
_STOP_S, _LATE_S = 1.0, 15.0


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
    the keys of their jobs, their time there; `ended` are the others. `came` gets each
    record as it comes.
    """

    rent: Rent
    say: Callable[[str], None]
    sent: list[RemoteCall] = field(default_factory=list)
    ended: list[RemoteCall] = field(default_factory=list)
    came: Came = lambda *_: None
    # called after each call that is sent: this process may be killed
    save: Callable[[], None] = lambda: None
    spent: list[Spent] = field(default_factory=list)
    # in the container
    dataset_at: Path = Path(DATA)

    def carry_one(self, piece: Work) -> Reply:
        """The reply to one piece of work; an empty one if it is left there."""
        with contextlib.closing(self.carry([piece])) as answers:
            for _, reply in answers:
                return reply

        return Reply()

    def carry(self, pieces: list[Work]) -> Answers:
        """Send what is not there yet, and yield each reply as it comes. Ends what it
        has sent if it is closed before.
        """
        fresh = [piece for piece in pieces if not piece.earlier]
        # before anything can fail: they run and are paid for
        for piece in pieces:
            if piece.earlier and piece.earlier not in self.sent:
                self.sent.append(piece.earlier)

        settings, image = self.rent.settings, self.rent.image
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
        for piece in pieces:
            if piece.earlier:
                running.append(Running(piece, modal_client.recall(piece.earlier.id)))

        try:
            if fresh:
                name = modal_client.app_name(settings, image)
                self.say(f"{self.rent.bill(gpu, fresh)}; app {name}")
                function = modal_client.fitted(
                    modal_client.deployed(name, settings, image, self.say),
                    settings.container,
                    gpu,
                    math.ceil(max(piece.limit_s for piece in fresh)),
                    self.rent.containers(len(fresh)),
                )
                yield from self._send(fresh, function, gpu, running)

            if not self.rent.detach:
                yield from self._arriving(running)
        except BaseException:
            if not self.rent.detach:
                self._stop(running)

            raise
        finally:
            if self.spent:
                cuda = any(piece.cuda for piece in pieces)
                seconds = sum(each.seconds for each in self.spent)
                cost = settings.dollars(self.rent.gpu if cuda else None, seconds)
                self.say(f"Modal: {seconds:.0f} s of container time, about {cost}")

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
        self, pieces: list[Work], function: Any, gpu: Gpu | None, running: list[Running]
    ) -> Iterator[tuple[Work, Reply]]:
        """Start the calls. Yields those that cannot be sent behind one that was, with
        the reason.
        """
        for i, piece in enumerate(pieces):
            sending = modal_client.spawn(function, self.parcel(piece, gpu))
            try:
                self._note(piece, sending.result(), running)
            except RemoteError as e:
                if i == 0:
                    raise

                lost = f"it was not sent: {e.message}"
                yield from ((unsent, Reply(lost=lost)) for unsent in pieces[i:])
                return
            except KeyboardInterrupt:
                # Modal may have it already, and nobody would know its id
                with contextlib.suppress(Exception):
                    self._note(piece, sending.result(_STOP_S), running)

                raise

    def _note(
        self, piece: Work, call: modal_client.Call, running: list[Running]
    ) -> None:
        running.append(Running(piece, call))
        keys = [key(job) for job in piece.jobs]
        limit_s = math.ceil(piece.limit_s)
        self.sent.append(RemoteCall(id=call.id, keys=keys, limit_s=limit_s))
        self.save()

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
        """What has come of a call."""
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

        self._forget(running.call)
        if reply.seconds:
            jobs = running.work.jobs
            due = sum(job.due for job in jobs)
            keys = [key(job) for job in jobs]
            self.spent.append(Spent(keys=keys, due=due, seconds=reply.seconds))

        reply.lost = reply.lost or replies.fault(running.work, reply, self.rent.gpu)
        return reply

    def _late(self, running: Running, patience_s: float) -> Reply:
        """The reply in the place of one that did not come in time."""
        within = f"no reply within {in_minutes(patience_s)}"
        trouble = running.call.trouble
        if not trouble and modal_client.cancel([running.call], _LATE_S):
            self._forget(running.call)
            why = f"Modal had no {self.rent.gpu} free, or --max-minutes was too short"
            return Reply(lost=f"{within}: {why}")

        silence = trouble.message if trouble else "Modal does not answer"
        return Reply(lost=f"{within}: {silence}; the call may go on there")

    def _stop(self, running: list[Running]) -> None:
        """Cancel the calls that this command has sent. Those for which Modal does not
        confirm that keep their ids.
        """
        left = {call.id for call in self.sent}
        mine = [each.call for each in running if not each.work.earlier]
        mine = [call for call in mine if call.id in left]
        stopped = modal_client.cancel(mine, _STOP_S)
        for call in stopped:
            self._forget(call)

        if unheard := len(mine) - len(stopped):
            count = units.count(unheard, "call")
            self.say(f"Modal does not answer: {count} could not be cancelled")

    def _forget(self, call: modal_client.Call) -> None:
        """There is nothing to fetch any more."""
        self.ended += [each for each in self.sent if each.id == call.id]
        self.sent[:] = [each for each in self.sent if each.id != call.id]
