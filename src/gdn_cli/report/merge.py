"""Merge record files, or the document of a command, into a book.

A later file's record replaces an earlier one of the same (op, algo, mode, tier, l2,
workload, device).
"""

from __future__ import annotations

from collections import Counter
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
    files = sorted(folder.glob("*-bench-*.json"))
    if not files:
        raise MissingError(
            f"no record of a bench in {folder}",
            hint="`gdn bench` makes one; or name a FILE.json",
        )

    return files[-1]


def read(files: Iterable[Path], *, base: Path | None = None) -> list[Source]:
    """Read record files of any schema. Raises UsageError with the file and what is wrong with it.

    `base` is the folder of relative names.
    """
    sources = []
    for file in files:
        name = file.name if file.is_absolute() else file.as_posix()
        sources.append(Source(name, store.load((base or Path()) / file)))

    return sources


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
    batches = []
    for source in sources:
        records = source.document.records
        batches.append([_measurement(r, source, registry) for r in records])

    every = [m for batch in batches for m in batch]
    _check("op", (op,) if op else (), [m.op for m in every])
    _check("algo", algos, [m.algo for m in every])
    _check("tier", tiers, [m.tier for m in every if m.tier])
    merged, replaced = _merge(batches)
    kept = []
    for m in merged:
        of_tier = not tiers or m.tier is None or m.tier in tiers
        of_algo = not algos or m.algo in algos or m.algo in FLOORS
        if op in (None, m.op) and of_tier and of_algo:
            kept.append(m)

    order = {name: i for i, name in enumerate(registry.ops)}
    # stable: within an op as the files have them
    kept.sort(key=lambda m: order.get(m.op, len(order)))
    groups = _groups(kept, registry, algos)

    return Book(
        sources,
        groups,
        kept,
        registry,
        replaced,
        tiers,
        algos,
    )


def _check(
    kind: str,
    names: Iterable[str],
    known: list[str],
) -> None:
    """Raises UsageError for a name that no record has."""
    for name in names:
        if name not in known:
            raise unknown(kind, name, known, hint="these files hold no other")


def _measurement(
    record: Record,
    source: Source,
    registry: Registry,
) -> Measurement:
    """A record with its label, its device and L2's state."""
    label = ""
    order: tuple[float, ...] = ()
    if record.workload:
        label, order = label_of(registry.ops.get(record.op), record.workload.axes)

    l2 = None
    if record.timing:
        l2 = record.timing.l2
    elif record.mode == "cuda":  # the state it would have been timed in
        l2 = source.document.options.get("l2")

    return Measurement(
        record,
        source,
        label,
        order,
        source.device(record.place),
        l2,
    )


def _merge(
    batches: list[list[Measurement]],
) -> tuple[list[Measurement], Counter[tuple[str, str]]]:
    """The measurements that count, and how many records of a file another one replaced."""
    kept: list[Measurement] = []
    replaced: Counter[tuple[str, str]] = Counter()
    for batch in batches:
        last = {m.key: m for m in batch}
        # a later check that fails removes the times in all tiers: a wrong kernel has no valid time
        failed = {m.case for m in batch if not m.passed and m.tier is None}
        passed = {m.case for m in batch if m.passed}
        algos = {(m.op, m.algo, m.record.mode) for m in batch}
        stays = []
        for old in kept:
            again = (
                old.workload is None and (old.op, old.algo, old.record.mode) in algos
            )

            mended = not old.passed and (
                again or (old.tier is None and old.case in passed)
            )
            if old.key in last or old.case in failed or mended:
                replaced[old.source.name, batch[0].source.name] += 1
            else:
                stays.append(old)

        # keep all failures
        kept = stays + [m for m in batch if last[m.key] is m or not m.passed]

    return kept, replaced


def _groups(
    kept: list[Measurement], registry: Registry, algos: tuple[str, ...]
) -> list[Group]:
    """The groups of the timed records, with the failures that belong to them."""
    groups: dict[tuple, Group] = {}
    for m in kept:
        if m.tier and m.timing:
            key = (m.op, m.device, m.tier, m.l2, m.record.in_place)
            op = registry.ops.get(m.op)
            group = Group(
                m.op,
                m.device,
                m.tier,
                m.l2,
                op,
                m.record.in_place,
            )
            groups.setdefault(key, group)

    for group in groups.values():
        for m in kept:
            if not _belongs(m, group):
                continue

            if m.algo in FLOORS and m.workload is None:
                group.machine[m.algo] = m
            else:
                group.measured.append(m)

        group.algos = _in_order(group, registry, algos)

    # by op and device as they were measured, then the most exact tier first
    ranks = {tier: rank for rank, tier in enumerate(TIERS)}
    places = list(dict.fromkeys((m.op, m.device) for m in kept))

    return sorted(
        groups.values(),
        key=lambda group: (
            places.index((group.op, group.device)),
            ranks.get(group.tier, len(ranks)),
            group.l2 != "cold",
            group.in_place,
        ),
    )


def _belongs(m: Measurement, group: Group) -> bool:
    """Whether a measurement is one of a group's."""
    place = (m.op, m.device, m.record.in_place)
    if place != (group.op, group.device, group.in_place):
        return False

    # a failure without a tier belongs to all tiers
    if not m.tier and not m.passed:
        return True

    same = (m.tier, m.l2) == (group.tier, group.l2)

    return same and not (m.passed and not m.timing)


def _in_order(
    group: Group,
    registry: Registry,
    algos: tuple[str, ...],
) -> list[str]:
    """The copy, then the chosen algos; or the ladder, the user's own, and the peers."""
    names = list(dict.fromkeys(m.algo for m in group.measured))
    known = ladder(registry, group.op)
    every = [*known.order, *names]
    order = algos or sorted(every, key=lambda algo: algo in known.peers)
    return list(dict.fromkeys(algo for algo in [*FLOORS, *order] if algo in names))
