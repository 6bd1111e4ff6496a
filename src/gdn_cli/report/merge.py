"""Merge record files, or the document of a command, into a book.

A later file's record replaces an earlier one of the same (op, algo, mode, tier, l2,
workload, device).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from .. import paths
from ..catalog.ops import label_of
from ..catalog.registry import Registry
from ..catalog.tiers import FLOORS, TIERS
from ..errors import MissingError, unknown
from ..records import store
from ..schema.record_types import Record
from .book import Book, Group, Measurement, Source, ladder


def newest() -> Path:
    """The newest bench of the runs folder; their names begin with their time."""
    folder = paths.runs_dir()
    found = sorted(folder.glob("*-bench-*.json"))
    if not found:
        raise MissingError(
            f"no record of a bench in {folder}",
            hint="`gdn bench` makes one; or name a FILE.json",
        )
    return found[-1]


def read(files: Iterable[Path], *, base: Path | None = None) -> list[Source]:
    """Read record files of any schema. Raises UsageError with the file and what is wrong with it.

    `base` is the folder of relative names.
    """
    return [
        Source(
            file.name if file.is_absolute() else file.as_posix(),
            store.load((base or Path()) / file),
        )
        for file in files
    ]


# --- merging


def gather(
    sources: list[Source],
    registry: Registry,
    *,
    op: str | None = None,
    algos: tuple[str, ...] = (),
    tiers: tuple[str, ...] = (),
) -> Book:
    """Merge record files into a book. `op` and `tiers` select records; `algos` selects
    and orders (the copy stays).

    Raises UsageError for a name that no record has.
    """
    batches = [
        [_measurement(r, source, registry) for r in source.document.records]
        for source in sources
    ]
    every = [m for batch in batches for m in batch]
    if op and op not in {m.op for m in every}:
        raise unknown("op", op, [m.op for m in every], hint="these files hold no other")
    for kind, names, there in (
        ("algo", algos, [m.algo for m in every]),
        ("tier", tiers, [m.tier for m in every]),
    ):
        for name in names:
            if name not in there:
                raise unknown(
                    kind,
                    name,
                    [n for n in there if n],
                    hint="these files hold no other",
                )
    kept, replaced = _merge(batches)
    kept = [
        m
        for m in kept
        if op in (None, m.op)
        and (not tiers or m.tier is None or m.tier in tiers)
        and (not algos or m.algo in algos or m.algo in FLOORS)
    ]
    order = {name: i for i, name in enumerate(registry.ops)}
    # stable: within an op as the files have them
    kept.sort(key=lambda m: order.get(m.op, len(order)))
    return Book(
        sources, _groups(kept, registry, algos), kept, registry, replaced, tiers, algos
    )


def _measurement(record: Record, source: Source, registry: Registry) -> Measurement:
    label, order = (
        label_of(registry.ops.get(record.op), record.workload.axes)
        if record.workload
        else ("", ())
    )
    if record.timing:
        l2 = record.timing.l2
    else:  # the state it would have been timed in
        l2 = source.document.options.get("l2") if record.mode == "cuda" else None
    return Measurement(record, source, label, order, source.device(record.place), l2)


def _merge(
    batches: list[list[Measurement]],
) -> tuple[list[Measurement], dict[tuple[str, str], int]]:
    kept: list[Measurement] = []
    replaced: dict[tuple[str, str], int] = {}
    for batch in batches:
        last = {m.key: m for m in batch}
        # a later check that fails removes the times in all tiers: a wrong kernel has no valid time
        failed = {m.case for m in batch if not m.passed and m.tier is None}
        passed = {m.case for m in batch if m.passed}
        seen = {(m.op, m.algo, m.record.mode) for m in batch}
        stays = []
        for old in kept:
            whole = old.workload is None and (old.op, old.algo, old.record.mode) in seen
            mended = not old.passed and (
                whole or old.tier is None and old.case in passed
            )
            if old.key in last or old.case in failed or mended:
                pair = old.source.name, batch[0].source.name
                replaced[pair] = replaced.get(pair, 0) + 1
            else:
                stays.append(old)
        # keep all failures
        kept = stays + [m for m in batch if last[m.key] is m or not m.passed]
    return kept, replaced


def _groups(
    kept: list[Measurement], registry: Registry, algos: tuple[str, ...]
) -> list[Group]:
    groups: dict[tuple, Group] = {}
    for m in kept:
        if m.tier and m.timing:
            key = m.op, m.device, m.tier, m.l2, m.record.in_place
            groups.setdefault(
                key,
                Group(
                    *key[:4], known=registry.ops.get(m.op), in_place=m.record.in_place
                ),
            )
    for m, group in itertools.product(kept, groups.values()):
        here = (m.op, m.device, m.record.in_place) == (
            group.op,
            group.device,
            group.in_place,
        )
        # a failure without a tier belongs to all tiers
        everywhere = not m.tier and not m.passed
        if (
            not here
            or (m.tier, m.l2) != (group.tier, group.l2)
            and not everywhere
            or m.passed
            and not m.timing
        ):
            continue
        if m.algo in FLOORS and m.workload is None:
            group.machine[m.algo] = m
        else:
            group.measured.append(m)
    for group in groups.values():
        there = list(dict.fromkeys(m.algo for m in group.measured))
        known = ladder(registry, group.op)
        chosen = algos or [
            *(a for a in known.order if not known.peer(a)),
            *(a for a in there if a not in known.order),  # the user's own
            *(a for a in known.order if known.peer(a)),
        ]
        group.algos = [
            a for a in (*FLOORS, *(a for a in chosen if a not in FLOORS)) if a in there
        ]
    ops, devices = (
        list(dict.fromkeys(m.op for m in kept)),
        list(dict.fromkeys(m.device for m in kept)),
    )
    ranks = list(TIERS)
    return sorted(
        groups.values(),
        key=lambda g: (
            ops.index(g.op),
            devices.index(g.device),
            ranks.index(g.tier) if g.tier in ranks else len(ranks),
            g.l2 != "cold",
            g.in_place,
        ),
    )
