"""`gdn modal check`: what works on a rented GPU, in a few minutes of it. Each algo of
an op is built and right once, floors are timed in every tier, and ncu reads one kernel;
the container says what is installed.
"""

from __future__ import annotations

from pathlib import Path

from .. import units
from ..catalog import workloads
from ..catalog.registry import Registry
from ..catalog.tiers import COPY, COPY_RATE, EMPTY, FLOORS, TIERS
from ..machine import inventory
from ..profile import session
from ..run import planning
from ..run.doctor import Finding, finding
from ..schema.record_types import Document, Record, Status
from .wire import Profile, Wanted
from .work import place

_TOOL = "ncu"
# what a container has no use for
_NOT_THERE = ("matplotlib", "modal")
# for a time
_SECONDS = 0.2


def plan(
    registry: Registry, op: str | None, timeout_s: float
) -> tuple[planning.Plan, list[Wanted]]:
    """The jobs, on the op's smallest workload, and the profile to make of the newest
    rung that is our own.
    """
    chosen = registry.op(op or "gdn_decode")
    entries = [
        planning.Entry(algo, place(algo, "cuda"))
        for algo in registry.of(chosen.name)
        if "cuda" in algo.modes
    ]
    small = min(workloads.embedded(chosen), key=lambda w: sum(w.axes.values()))
    part = planning.Part(chosen, entries, [small], {"seconds": _SECONDS})
    tiers = [name for name, t in TIERS.items() if t.mode == "cuda" and t.floors]
    floors = planning.Settings(
        "floor", tiers=tuple(tiers), timeout_s=timeout_s, place=place
    )
    checks = planning.Settings("check", timeout_s=timeout_s, place=place)
    planned = planning.prepare(registry, [part], checks)
    # what cannot run is missing once
    planned.jobs[:0] = [
        planning.as_extra(job)
        for job in planning.prepare(registry, [part], floors).jobs
    ]
    own = [
        entry.algo.full_name
        for entry in entries
        if entry.place.mode == "cuda" and entry.algo.language == "cuda"
    ]
    if not own:
        return planned, []
    names, uuid = own[-1:], small.uuid
    _, (subject,) = session.subjects(
        registry, names, None, _TOOL, uuid, None, "cuda", place=place
    )
    settings = session.Settings(_TOOL, Path(), seconds=_SECONDS, timeout_s=timeout_s)
    return planned, [session.sent(subject, settings)]


def findings(
    document: Document, installed: list[Finding], profiles: list[Profile]
) -> list[Finding]:
    """What works there, for a table; the records are in the document besides."""
    records = document.records
    checked = [record for record in records if record.algo not in FLOORS]
    right = sum(record.passed for record in checked)
    state = "ok" if checked and right == len(checked) else "bad"
    rows = [
        # nobody can install anything there
        row | {"mend": None}
        for row in installed
        if row["what"] not in _NOT_THERE
    ]
    rows += [_tier(record) for record in records if record.algo == COPY]
    rows += _floors(records)
    rows.append(_clocks(document))
    rows += [_counters(profile) for profile in profiles]
    built = f"{right} of {len(checked)} built and right"
    return [*rows, finding(state, "algos", built, "all")]


def _tier(copy: Record) -> Finding:
    name = f"tier {copy.tier}"
    if not copy.median_us:
        return finding("missing", name, copy.words, "times")
    megabytes = units.three((copy.bytes_moved or 0) / 1e6)
    text = f"a copy of {megabytes} MB takes {units.duration(copy.median_us)}"
    return finding("ok", name, text, "times")


def _floors(records: list[Record]) -> list[Finding]:
    """The first time of an empty launch, and of a large copy."""
    rows: dict[str, Finding] = {}
    for record in records:
        us = record.median_us
        if not us:
            continue
        if record.algo == EMPTY:
            text = units.duration(us)
            rows.setdefault(EMPTY, finding("ok", "an empty launch", text, "times"))
        elif record.algo == COPY_RATE:
            text = f"{units.three((record.bytes_moved or 0) / us / 1e3)} GB/s"
            rows.setdefault(COPY_RATE, finding("ok", "a large copy", text, "times"))
    return [rows[name] for name in (EMPTY, COPY_RATE) if name in rows]


def _clocks(document: Document) -> Finding:
    seen = []
    for record in document.records:
        state = record.gpu_state
        if state and state.after and state.after.sm_mhz:
            seen.append(state.after.sm_mhz)
    if not seen:
        return finding("missing", "clocks", "NVML does not say", "doubts")
    limits = [e.max_sm_clock_mhz for e in document.environments.values()]
    known = [f" of at most {limit}" for limit in limits if limit]
    text = f"{min(seen)} to {max(seen)} MHz{''.join(known[:1])} after a measurement"
    return finding("ok", "clocks", text, "doubts")


def _counters(profile: Profile) -> Finding:
    """Whether a counter could be read: Modal gives that right on request."""
    what, purpose = f"{_TOOL}'s counters", "profile"
    refused, document = profile.refused, profile.document
    if refused:
        return finding("missing", what, refused.message, purpose, refused.hint)
    assert document is not None
    if document.status is Status.PASSED:
        return finding("ok", what, f"it reads the counters of {document.algo}", purpose)
    reason = document.reason or document.status.words
    return finding("missing", what, reason, purpose, inventory.MODAL_RIGHTS)
