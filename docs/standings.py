"""Who leads: the generated part of docs/results/leaders.md, from the records in results/.

A size counts where a record has one of ours and a peer, timed by the kernel. Its times
are of the record with the most peers, the newest of these; its leader leads since the
first of the records that agree on it without a break.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gdn_cli import units
from gdn_cli.catalog import registry
from gdn_cli.report import markdown, merge
from gdn_cli.report.book import Book, Group, Point, Source, quickest
from gdn_cli.report.table import Name, Table, numbers, words

ROOT = Path(__file__).parent.parent
TIER = "cupti"  # the one that times kernels alone
# its sdpa is a rung of the ladder, and not ours
PYTORCH = "PyTorch"
NO_PEER = (
    "No record of this GPU has a peer, so nobody leads here. What there is: ours against"
    " their own older versions, geometric means over all sizes."
)


def record(source: Source) -> str:
    """2026-11-21 1c3ec8c."""
    commit = (source.document.commit or "not known")[:7]
    changed = " with changes" if source.document.dirty else ""
    return f"{source.time[:10]} {commit}{changed}"


@dataclass(frozen=True)
class Standing:
    """The times of one size in one record."""

    source: Source
    ours: Point  # the quickest one
    peer: Point
    peers: tuple[str, ...]

    @property
    def lead(self) -> float:
        """The best peer's time over ours."""
        return self.peer.median_us / self.ours.median_us

    @property
    def leader(self) -> Point:
        return self.ours if self.lead >= 1 else self.peer

    @property
    def record(self) -> str:
        return record(self.source)


@dataclass(frozen=True)
class Size:
    """One size in all records that have it, oldest first."""

    label: str
    order: tuple[float, ...]
    every: list[Standing]

    @property
    def best(self) -> Standing:
        return max(self.every, key=lambda one: (len(one.peers), one.source.time))

    @property
    def since(self) -> Standing:
        """The first of the records in which the leader leads without a break."""
        leader = self.best.leader.algo
        back = reversed(self.every[: self.every.index(self.best) + 1])
        return [*itertools.takewhile(lambda one: one.leader.algo == leader, back)][-1]


def origin(algo: registry.Algo) -> str:
    """vLLM 0.33.0: the first words of its algo.toml's source."""
    return re.split(r",| \(", algo.provenance["source"])[0]


def standings(group: Group, peers: set[str]) -> Iterator[tuple[str, Standing]]:
    """Label -> the standing there, of one record's group."""
    for label in group.labels:
        points = (group.points.get((algo, label)) for algo in group.rivals)
        timed = [point for point in points if point and point.median_us]
        theirs = [point for point in timed if point.algo in peers]
        ours = quickest(point for point in timed if point.algo not in peers)
        if ours and theirs:
            names = tuple(point.algo for point in theirs)
            yield label, Standing(group.sources[0], ours, quickest(theirs), names)


def books() -> list[Book]:
    """A book of each record file, oldest first."""
    known = registry.load()
    sources = merge.read(sorted((ROOT / "results").glob("*/*.json")))
    sources.sort(key=lambda source: source.document.time)
    return [merge.gather([source], known) for source in sources]


def contests(every: list[Book]) -> dict[tuple[str, str, bool], list[Size]]:
    """(device, op, in place) -> its sizes with a peer, from small to large."""
    sizes: dict[tuple, dict[str, Size]] = {}
    for book in every:
        peers = {
            algo.name
            for algo in book.registry.algos
            if algo.peer or origin(algo) == PYTORCH
        }
        for group in book.groups:
            if group.tier != TIER:
                continue
            at = sizes.setdefault((group.device, group.op, group.in_place), {})
            for label, one in standings(group, peers):
                order = one.ours.first.order
                at.setdefault(label, Size(label, order, [])).every.append(one)
    return {
        key: sorted(at.values(), key=lambda size: size.order)
        for key, at in sizes.items()
        if at
    }


def versions(sizes: list[Size], known: registry.Registry) -> str:
    """The versions of these sizes' peers, each with its peers: the record's, else the one that
    its algo.toml names.
    """
    names: dict[str, set[str]] = {}
    for one in (size.best for size in sizes):
        packages = one.source.environment(one.peer.first.record.place).versions
        for name in one.peers:
            algo = known.find(name, one.peer.first.op)
            text = origin(algo)
            if text == PYTORCH:
                text = f"{PYTORCH} {packages['torch']}"
            for package in algo.packages.values():
                if package in packages:
                    text = f"{package} {packages[package]}"
            names.setdefault(text, set()).add(f"`{name}`")
    texts = (f"{text} ({', '.join(sorted(names[text]))})" for text in sorted(names))
    return ", ".join(texts)


def doubted(*points: Point) -> str:
    return " ?" if any(point.doubted for point in points) else ""


def details(sizes: list[Size]) -> Table:
    table = Table("", words("size", "leader") + numbers("time") + words("best other"))
    table.columns += numbers("its time", "lead", "leads since", "measured")
    for size in sizes:
        best = size.best
        first, other = best.leader, best.peer if best.leader is best.ours else best.ours
        table.add(
            size.label,
            Name(first.algo),
            units.duration(first.median_us) + doubted(first),
            Name(other.algo),
            units.duration(other.median_us) + doubted(other),
            f"{other.median_us / first.median_us:.3f}{doubted(first, other)}",
            size.since.record,
            best.record,
        )
    return table


def summary(rows: dict[str, list[Size]]) -> Table:
    """A row for each op: its leader, and our best over the best peer at all sizes."""
    table = Table(
        "", words("op", "leader") + numbers("at sizes", "least", "mean", "most")
    )
    table.columns += numbers("measured")
    for op, sizes in rows.items():
        leaders = [size.best.leader.algo for size in sizes]
        leads = [size.best.lead for size in sizes]
        first = statistics.mode(leaders)
        ends = min(leads), statistics.geometric_mean(leads), max(leads)
        table.add(
            op,
            Name(first),
            f"{leaders.count(first)} of {len(sizes)}",
            *(f"{lead:.2f}" for lead in ends),
            max(size.best.record for size in sizes),
        )
    return table


def before_and_after(every: list[Book], device: str) -> Table:
    """The comparisons of ours with their own older versions on a device without a peer."""
    table = Table(
        "", words("op", "algo", "against") + numbers("sizes", "times as fast")
    )
    table.columns += numbers("interval", "verdict", "measured")
    for book in every:
        for op in book.ops:
            for mean in book.overall(op):
                if book.sources[0].device(mean.mode) == device:
                    table.add(
                        op,
                        Name(mean.algo),
                        Name(mean.baseline),
                        str(mean.workloads),
                        f"{mean.ratio:.3f}",
                        f"{mean.low:.3f} to {mean.high:.3f}",
                        mean.verdict,
                        record(book.sources[0]),
                    )
    return table


def page() -> str:
    """The page's generated part."""
    every = books()
    found = contests(every)
    known = every[0].registry
    families = list(known.ops)
    rows: dict[str, dict[str, list[Size]]] = {
        group.device: {} for book in every for group in book.groups
    }
    for device, op, in_place in sorted(
        found, key=lambda key: (families.index(known.op(key[1]).family), key)
    ):
        name = re.sub(r"_qk(\d+)_v(\d+)$", r" \1/\2", op)
        # some ops are always in place
        if in_place and (device, op, False) in found:
            name += ", in place"
        rows[device][name] = found[device, op, in_place]
    blocks = []
    for device in sorted(rows, key=lambda device: not rows[device]):
        if of_device := rows[device]:
            blocks += [f"## {device}", markdown.table(summary(of_device))]
            blocks += sections(of_device, known)
        elif device.startswith("NVIDIA"):
            table = before_and_after(every, device)
            blocks += [f"## {device}", NO_PEER, markdown.table(table)]
    return "\n" + "\n\n".join(blocks) + "\n\n"


def sections(rows: dict[str, list[Size]], known: registry.Registry) -> Iterator[str]:
    """Each op's peers, and its sizes, folded."""
    for op, sizes in rows.items():
        yield f"### {op}"
        yield f"Peers: {versions(sizes, known)}."
        count = units.count(len(sizes), "size")
        yield f'<details markdown="1"><summary>{count}</summary>'
        yield markdown.table(details(sizes))
        yield "</details>"
