"""A row for each record, with all its figures and their origin."""

from __future__ import annotations

from ...catalog.tiers import COPY
from ...records.columns import COLUMNS, Value, row
from ..book import Book, Measurement
from ..table import Table, words


def every_record(book: Book) -> Table:
    """All figures of each record. `over_floor` (over the copy) and `speedup` (over the
    reference) use the same workload, tier and device.
    """
    medians = {(m.op, m.algo, *m.key[2:]): m.median_us for m in book.measured}

    def over(m: Measurement, algo: str | None) -> float | None:
        """A record's time over another algo's for the same call."""
        other = medians.get((m.op, algo, *m.key[2:]))
        if not m.workload or not m.median_us or not other or algo == m.algo:
            return None

        return m.median_us / other

    rows: list[dict[str, Value]] = []
    for m in book.measured:
        op = book.registry.ops.get(m.op)
        values = row(m.record, m.source.document, m.source.name)
        reference = over(m, op.reference) if op and m.algo != COPY else None
        values |= {
            "commit": m.source.commit,
            "device": m.device,
            "l2": m.l2,
            "label": m.label,
            "over_floor": over(m, COPY),
            "speedup": 1 / reference if reference else None,
        }

        rows.append(values)

    names = dict.fromkeys(name for values in rows for name in values)
    more = [name for name in names if name not in COLUMNS]
    more.sort(key=lambda name: name.startswith("error_"))
    columns = [*COLUMNS, *more]
    table = Table("Records", words(*columns))
    for values in rows:
        cells = [values.get(name) for name in columns]
        table.add(*("" if value is None else str(value) for value in cells))

    return table
