"""Calls of one container each: sent, followed, and answered or lost."""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import units
from ..catalog.workloads import Workload
from ..errors import RemoteError
from ..schema.record_types import RemoteCall, Spent
from . import modal_client, modal_errors, replies, setup, wire
from .engines import Answers, Carrier
from .settings import DATA, Gpu, pins
from .wire import Cache, Parcel, Piece, Reply
from .work import Rent, Work, in_minutes

# between two looks at the connection; replies are seen at once
_LOOK_S = 1.0
# for Modal to confirm that calls are cancelled: at Ctrl-C, and of one that is late
_STOP_S, _LATE_S = 1.0, 15.0
# at Ctrl-C for a call that is being sent
_SENT_S = 0.5


@dataclass(kw_only=True)
class Calls(Carrier):
    """Carries work to Modal. `sent` are the calls that have not returned: their ids,
    the keys of their jobs, their time there; `ended` are the others. `save` is called
    after each call that is sent.
    """

    rent: Rent
    name: str = "Modal"
    sent: list[RemoteCall] = field(default_factory=list)
    ended: list[RemoteCall] = field(default_factory=list)
    save: Callable[[], None] = lambda: None
    spent: list[Spent] = field(default_factory=list)
    # in the container
    dataset_at: Path = Path(DATA)

    @property
    def gpu(self) -> Gpu:
        return self.rent.gpu

    def limit_s(self, seconds: float) -> float:
        return self.rent.limit_s(seconds)

    def carry(self, pieces: list[Work]) -> Answers:
        """Send what is not there yet, and yield each reply as it comes. Cancels what it
        has sent if it is closed before.
        """
        # before anything can fail: they run and are paid for
        for piece in pieces:
            if piece.earlier and piece.earlier not in self.sent:
                self.sent.append(piece.earlier)

        modal_client.connect(self.rent.settings.limits.connect)
        fresh = [piece for piece in pieces if not piece.earlier]
        try:
            yield from self._send(fresh)
            if not self.rent.detach:
                for piece in pieces:
                    if piece.earlier:
                        piece.call = modal_client.recall(piece.earlier.id)

                yield from self._arriving(pieces)
        except BaseException:
            if not self.rent.detach:
                self._stop(fresh)

            raise
        finally:
            if self.spent:
                gpu = self.rent.gpu if any(piece.cuda for piece in pieces) else None
                seconds = sum(each.seconds for each in self.spent)
                cost = self.rent.settings.dollars(gpu, seconds)
                self.say(f"Modal: {seconds:.0f} s of container time, about {cost}")

    def find_dataset(self, workloads: list[Workload]) -> Path:
        """Where the data set of --dataset is in the container. Seen on the volume,
        before anything is paid: MissingError if it is not there.
        """
        specs = [spec for w in workloads for spec in (w.inputs or {}).values()]
        needed = {spec["path"] for spec in specs if spec["type"] == "safetensors"}
        settings = self.rent.settings
        modal_client.connect(settings.limits.connect)
        name = settings.volumes.dataset
        paths = modal_client.files(name)
        self.dataset_at = Path(DATA, setup.place(name, paths, needed))
        return self.dataset_at

    # --- sending

    def _send(self, pieces: list[Work]) -> Iterator[tuple[Work, Reply]]:
        """Start the calls. Yields those that cannot be sent behind one that was, with
        the reason.
        """
        if not pieces:
            return

        settings, image = self.rent.settings, self.rent.image
        # otherwise no GPU is rented
        gpu = self.rent.gpu if any(piece.cuda for piece in pieces) else None
        jobs = [job for piece in pieces for job in piece.jobs]
        reading = [job for job in jobs if job.request.dataset]
        if workloads := [w for job in reading for w in job.workloads]:
            self.find_dataset(workloads)

        name = modal_client.app_name(settings, image)
        self.say(f"{self.rent.bill(gpu, pieces)}; app {name}")
        function = modal_client.fitted(
            modal_client.deployed(name, settings, image, self.say),
            settings.container,
            gpu,
            math.ceil(max(piece.limit_s for piece in pieces)),
            self.rent.containers(len(pieces)),
        )
        for i, piece in enumerate(pieces):
            sending = modal_client.spawn(function, self.parcel(piece, gpu))
            try:
                self._note(piece, sending.result())
            except RemoteError as e:
                if i == 0:
                    raise

                lost = f"it was not sent: {e.message}"
                yield from ((unsent, Reply(lost=lost)) for unsent in pieces[i:])
                return
            except KeyboardInterrupt:
                # Modal may have it already, and nobody would know its id
                with contextlib.suppress(Exception):
                    self._note(piece, sending.result(_SENT_S))

                raise

    def _note(self, piece: Work, call: modal_client.Call) -> None:
        piece.call = call
        limit_s = math.ceil(piece.limit_s)
        self.sent.append(RemoteCall(id=call.id, keys=piece.keys, limit_s=limit_s))
        self.save()

    def parcel(self, piece: Work, gpu: Gpu | None) -> bytes:
        settings, image = self.rent.settings, self.rent.image
        facts = [image.base, *pins(), str(gpu), *piece.sources]
        digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
        env = {name: str(value) for name, value in settings.environment.items()}
        content = Parcel(
            nonce=secrets.token_hex(8),
            image=image.name,
            gpu=gpu,
            cache=Cache(digest, settings.volumes.cache),
            # otherwise it is all that they may take
            limit_s=piece.limit_s if self.rent.minutes else None,
            env=env | wire.commit(),
            jobs=[Piece.from_job(job, self.dataset_at) for job in piece.jobs],
            profiles=piece.profiles,
            tunings=piece.tunings,
        )
        return wire.encode(content)

    # --- following

    def _arriving(self, pieces: list[Work]) -> Iterator[tuple[Work, Reply]]:
        """Each reply as it comes. Without a connection the calls go on there: wait for
        it as long as for them, and keep the ids of those that were not heard of.
        """
        waiting = {piece: piece.call for piece in pieces if piece.call}
        patience_s = self.rent.patience_s(pieces)
        deadline = time.monotonic() + patience_s
        cut = False
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ended = modal_client.first([*waiting.values()], min(_LOOK_S, left_s))
            troubles = [call.trouble for call in waiting.values() if call.trouble]
            if troubles and not cut:
                self.say(
                    f"{troubles[0].message}: the calls go on there; asking again for up to"
                    f" {in_minutes(left_s)}"
                )
            elif cut and not troubles:
                self.say("Modal answers again")

            cut = bool(troubles)

            for piece, call in [*waiting.items()]:
                if new := call.records[piece.seen :]:
                    self.pass_on(piece, new)

                if call in ended:
                    reply = self._reply(piece, call)
                    if reply.call:
                        waiting[piece] = modal_client.recall(reply.call)
                        self._note(piece, waiting[piece])
                        continue
                elif not left_s:
                    reply = self._late(call, patience_s)
                else:
                    continue

                # of a call that goes on the run that resumes will ask for the records
                goes_on = any(sent.id == call.id for sent in self.sent)
                if reply.lost and not goes_on:
                    piece.kept = modal_client.kept(call.id)

                del waiting[piece]
                yield piece, reply

    # --- the end of a call

    def _reply(self, piece: Work, call: modal_client.Call) -> Reply:
        """What has come of a call."""
        reply = Reply()
        try:
            reply = wire.decode(call.listen().result(), Reply)
        except modal_errors.CallFailedError as e:
            reply.lost = str(e)
        except RemoteError as e:
            reply.lost = str(e)
            # the gdn that sent it can fetch it: its id stays
            if e.message.startswith(wire.OTHER):
                return reply

        self._forget(call)
        if reply.call:
            return reply

        if reply.seconds:
            spent = Spent(keys=piece.keys, due=piece.due, seconds=reply.seconds)
            self.spent.append(spent)

        reply.lost = reply.lost or replies.fault(piece, reply, self.rent.gpu)
        return reply

    def _late(self, call: modal_client.Call, patience_s: float) -> Reply:
        """The reply in the place of one that did not come in time."""
        within = f"no reply within {in_minutes(patience_s)}"
        if not call.trouble and modal_client.cancel([call], _LATE_S):
            self._forget(call)
            why = f"Modal had no {self.rent.gpu} free, or --max-minutes was too short"
            return Reply(lost=f"{within}: {why}")

        silence = call.trouble.message if call.trouble else "Modal does not answer"
        return Reply(lost=f"{within}: {silence}; the call may go on there")

    def _stop(self, pieces: list[Work]) -> None:
        """Cancel the calls of these. Those for which Modal does not confirm it keep
        their ids.
        """
        left = {sent.id for sent in self.sent}
        calls = [p.call for p in pieces if p.call and p.call.id in left]
        stopped = modal_client.cancel(calls, _STOP_S)
        for call in stopped:
            self._forget(call)

        if unheard := len(calls) - len(stopped):
            count = units.count(unheard, "call")
            self.say(f"Modal does not answer: {count} could not be cancelled")

    def _forget(self, call: modal_client.Call) -> None:
        """There is nothing to fetch any more."""
        self.ended += [sent for sent in self.sent if sent.id == call.id]
        self.sent[:] = [sent for sent in self.sent if sent.id != call.id]
