"""`gdn run`, `bench` and `floors`: options -> the plan of a command; and what all of its
records together say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..catalog import stress
from ..catalog.official import Harness
from ..catalog.presets import Preset
from ..catalog.registry import DEFAULT_OP, Registry
from ..machine import inventory
from ..machine.inventory import Machine
from ..records import official
from ..schema.record_types import Document
from ..worker.request import PlanFields
from . import eligibility, planning
from .planning import Entry, Plan, Selected, Settings


def entries(
    known: Registry,
    names: str | None,
    op: str | None,
    files: Sequence[Path],
    device: str,
    settings: Settings,
) -> tuple[list[Entry], bool]:
    """The algos of a command (planning.choose), and whether the user named them one by
    one.
    """
    options = settings.options
    timed = settings.command == "bench"
    if settings.command == "floor":  # the reference, so that a device is chosen
        algo = known.reference(known.op(op or DEFAULT_OP))
        return [Entry(algo, settings.place(algo, device))], False
    result, named = planning.choose(
        known, names, op, list(files), device, timed=timed, place=settings.place
    )
    if named and settings.command == "check":
        result = [_without_gpu(entry, settings.machine) for entry in result]
    result = eligibility.overwriting(known, result, named, options.in_place, timed)
    if options.sanitize:
        result = eligibility.sanitized(result, named)
    if options.batch_invariant:
        result = eligibility.batch_invariant(known, result, named)
    return result, named


def _without_gpu(entry: Entry, machine: Machine) -> Entry:
    if entry.place.reason != inventory.NO_GPU:
        return entry
    return Entry(entry.algo, machine.without_gpu(entry.algo))


def plan(
    known: Registry,
    algos: list[Entry],
    which: Selected,
    preset: Preset | None,
    overrides: PlanFields,
    settings: Settings,
) -> Plan:
    """All jobs of a command; `overrides` replace the preset's way of timing."""
    parts = planning.select(known, algos, which, preset, overrides)
    return planning.prepare(known, parts, settings)


def conclude(document: Document, plan: Plan, harness: Harness | None) -> None:
    """Set the fields of a document that need all records."""
    if harness:
        document.official = official.judged(document, harness)
    if document.options.get("stress"):
        document.largest = stress.largest(document.records)
