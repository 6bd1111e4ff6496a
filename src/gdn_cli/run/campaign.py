"""`gdn run`, `bench` and `floors`: the algos of a command; and what all of its records
together say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..catalog import stress
from ..catalog.official import Harness
from ..catalog.ops import Op
from ..catalog.registry import DEFAULT_OP, Registry
from ..catalog.registry import names as listed
from ..machine import inventory
from ..machine.inventory import Machine
from ..records import official
from ..schema.record_types import Document
from . import eligibility, planning
from .planning import Entry, Settings


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
        algos = [known.reference(each) for each in _ops(known, names, op)]
        return [Entry(algo, settings.place(algo, device)) for algo in algos], False
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


def _ops(known: Registry, names: str | None, op: str | None) -> list[Op]:
    """The ops that are named, by their own names or by those of algos."""
    named = listed(names) or [op or DEFAULT_OP]
    algos = {algo.name for algo in known.algos}
    ops = [known.find(n, op).op if n in algos or "/" in n else n for n in named]
    return [known.op(name) for name in dict.fromkeys(ops)]


def conclude(document: Document, harness: Harness | None) -> None:
    """Set the fields of a document that need all records."""
    if harness:
        document.official = official.judged(document, harness)
    if document.options.get("stress"):
        document.largest = stress.largest(document.records)
