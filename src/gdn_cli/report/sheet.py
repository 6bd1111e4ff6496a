"""A book -> CSV: one row for each record, with all its figures and where it comes from."""

from __future__ import annotations

import csv
import io
from typing import Any

from ..text import csv_cell
from ..timing import COPY
from .gather import Book, Measurement

_TIMING = (
    "median_us", "low_us", "high_us", "ci_low_us", "ci_high_us", "spread", "samples", "kernels", "span_us", "stopped",
    "note",
)  # fmt: skip
_FIELDS = (
    "file", "time", "commit", "op", "algo", "source_hash", "mode", "device", "driver", "max_sm_clock_mhz", "tier", "l2",
    "workload", "index", "label", "status", "reason", *_TIMING, "bytes_moved", "over_floor", "speedup", "doubts", "how",
    "backend", "in_place", "setup",
)  # fmt: skip


def sheet(book: Book) -> str:
    """Times in microseconds. `over_floor` and `speedup` (over the reference) are of the same workload, tier and device;
    the axes and the checks' errors have a column each behind the others."""
    axes = list(dict.fromkeys(name for m in book.measured for name in m.axes))
    outputs = list(dict.fromkeys(name for m in book.measured for name in _errors(m)))
    medians = {(m.key[0], m.algo, *m.key[2:]): m.median_us for m in book.measured}
    file = io.StringIO()
    head = [*_FIELDS, *(f"axis_{a}" for a in axes), *(f"error_{name}" for name in outputs)]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(csv_cell, head))
    for m in book.measured:
        r, env, timing = m.record, m.source.environment(m.place), m.timing or {}
        known = book.registry.ops.get(m.op)

        def against(algo: str | None, m: Measurement = m) -> float | None:
            other = medians.get((m.op, algo, *m.key[2:])) if m.workload else None
            return other if other and m.median_us and algo != m.algo else None

        floor, reference = against(COPY), against(known.reference if known else None)
        row: dict[str, Any] = {
            "file": m.source.name, "time": m.source.document.get("time"), "commit": m.source.commit, "op": m.op,
            "algo": m.algo, "source_hash": r.get("source_hash"), "mode": m.mode, "device": m.device,
            "driver": env.get("driver"), "max_sm_clock_mhz": env.get("max_sm_clock_mhz"), "tier": m.tier, "l2": m.l2,
            "workload": (r["workload"] or {}).get("uuid"), "index": (r["workload"] or {}).get("index"),
            "label": m.label, "status": r["status"], "reason": r.get("reason"),
            **{key: timing.get(key) for key in _TIMING}, "bytes_moved": r.get("bytes_moved"),
            "over_floor": m.median_us / floor if floor else None,
            "speedup": reference / m.median_us if reference and m.algo != COPY else None,
            "doubts": "; ".join(map(str, r.get("doubts") or [])), "how": r.get("how"), "backend": r.get("backend"),
            "in_place": m.in_place, "setup": r.get("setup"),
            **{f"axis_{a}": m.axes.get(a) for a in axes}, **{f"error_{n}": _errors(m).get(n) for n in outputs},
        }  # fmt: skip
        writer.writerow([csv_cell(row[name]) for name in head])
    return file.getvalue()


def _errors(m: Measurement) -> dict[str, Any]:
    return (m.record.get("check") or {}).get("errors") or {}
