"""`gdn modal tune`: candidates measured in one container, in turns as here; the choice
is made here (tune/away.py).
"""

from __future__ import annotations

import contextlib

from ..errors import RemoteError
from ..tune import away
from ..tune.search import Plan, Settings
from . import modal_client, wire
from .engine import Engine, Work
from .wire import Reply


def measured(engine: Engine, plan: Plan, settings: Settings) -> away.Measured:
    """What was measured there; of a call that did not reply, what it had kept.
    RemoteError if there is nothing.
    """
    dataset = None
    if settings.dataset:
        modal_client.connect(engine.settings.limits.connect)
        engine.look_at(plan.workloads)
        dataset = engine.dataset_at
    asked = away.wanted(plan, settings, dataset)
    work = Work([], engine.bounded(float("inf")), tunings=[asked])
    with contextlib.closing(engine.carry([work])) as arriving:
        _, reply = next(arriving, (work, Reply()))
    if not reply.lost:
        return reply.tuned[0]
    unheard = work.call is None or any(call.id == work.call.id for call in engine.sent)
    notes = [] if unheard else wire.notes(modal_client.kept(work.call.id))
    if key := next((note.key for note in notes if note.key), None):
        return away.Measured(
            key=key, lines=[note.line for note in notes if note.line], reason=reply.lost
        )
    raise RemoteError(reply.lost)
