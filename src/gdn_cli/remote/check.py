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
from ..schema.record_types import Document, Status
from .wire import Profile, Wanted
from .work import place

_TOOL = "ncu"
_NOT_THERE = ("matplotlib", "modal")  # what a container has no use for
_SECONDS = 0.2  # for a time


def plan(
    registry: Registry, op: str | None, timeout_s: float
) -> tuple[planning.Plan, list[Wanted]]:
    """The jobs, on the op's smallest workload, and the profile to make of the newest
    rung that is our own.
    """
    found = registry.op(op or "gdn_decode")
    entries = [
        planning.Entry(algo, place(algo, "cuda"))
        for algo in registry.of(found.name)
        if "cuda" in algo.modes
    ]
    small = min(workloads.embedded(found), key=lambda w: sum(w.axes.values()))
    part = planning.Part(found, entries, [small], {"seconds": _SECONDS})
    tiers = tuple(
        name for name, tier in TIERS.items() if tier.mode == "cuda" and tier.floors
    )
    floors = planning.Settings("floor", tiers=tiers, timeout_s=timeout_s, place=place)
    made = planning.prepare(registry, [part], floors)
    made.jobs[:] = [planning.as_extra(job) for job in made.jobs]
    made.missing.clear()
    checks = planning.prepare(
        registry, [part], planning.Settings("check", timeout_s=timeout_s, place=place)
    )
    made.jobs.extend(checks.jobs)
    made.missing.extend(checks.missing)
    made.unpackable.extend(checks.unpackable)
    own = [
        e.algo for e in entries if e.place.mode == "cuda" and e.algo.language == "cuda"
    ]
    wanted = []
    if own:
        _, (subject,) = session.subjects(
            registry,
            [own[-1].full_name],
            None,
            _TOOL,
            small.uuid,
            None,
            "cuda",
            place=place,
        )
        wanted.append(
            session.sent(
                subject,
                session.Settings(_TOOL, Path(), seconds=_SECONDS, timeout_s=timeout_s),
            )
        )
    return made, wanted


def findings(
    document: Document, installed: list[Finding], profiles: list[Profile]
) -> list[Finding]:
    """What was found, for a table; the records are in the document besides."""
    records = document.records
    found = [
        row | {"mend": None} for row in installed if row["what"] not in _NOT_THERE
    ]  # nobody can install anything there
    for record in (r for r in records if r.algo == COPY):
        if record.median_us:
            text = (
                f"a copy of {units.three((record.bytes_moved or 0) / 1e6)} MB takes"
                f" {units.duration(record.median_us)}"
            )
            found.append(finding("ok", f"tier {record.tier}", text, "times"))
        else:
            found.append(
                finding("missing", f"tier {record.tier}", record.words, "times")
            )
    for name, what in ((EMPTY, "an empty launch"), (COPY_RATE, "a large copy")):
        if record := next((r for r in records if r.algo == name and r.median_us), None):
            rate = f"{units.three((record.bytes_moved or 0) / record.median_us / 1e3)} GB/s"
            found.append(
                finding(
                    "ok",
                    what,
                    rate if name == COPY_RATE else units.duration(record.median_us),
                    "times",
                )
            )
    found += _clocks(document)
    found += [_read(profile) for profile in profiles]
    checked = [r for r in records if r.algo not in FLOORS]
    right = sum(r.passed for r in checked)
    state = "ok" if checked and right == len(checked) else "bad"
    return [
        *found,
        finding(state, "algos", f"{right} of {len(checked)} built and right", "all"),
    ]


def _clocks(document: Document) -> list[Finding]:
    most = next(
        (
            e.max_sm_clock_mhz
            for e in document.environments.values()
            if e.max_sm_clock_mhz
        ),
        None,
    )
    seen = [
        s.after.sm_mhz
        for r in document.records
        if (s := r.gpu_state) and s.after and s.after.sm_mhz
    ]
    if not seen:
        return [finding("missing", "clocks", "NVML does not say", "doubts")]
    of = f" of at most {most}" if most else ""
    return [
        finding(
            "ok",
            "clocks",
            f"{min(seen)} to {max(seen)} MHz{of} after a measurement",
            "doubts",
        )
    ]


def _read(profile: Profile) -> Finding:
    """Whether a counter could be read: Modal gives that right on request."""
    what, purpose = f"{_TOOL}'s counters", "profile"
    if profile.refused:
        return finding(
            "missing", what, profile.refused.message, purpose, profile.refused.hint
        )
    document = profile.document
    if document.status is Status.PASSED:
        return finding("ok", what, f"it reads the counters of {document.algo}", purpose)
    return finding(
        "missing",
        what,
        document.reason or document.status.words,
        purpose,
        inventory.MODAL_RIGHTS,
    )
