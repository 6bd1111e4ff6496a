"""The columns of a table with a row for each record: `gdn report --format csv`.

After these, each axis has its column (axis_NAME), and each output's error (error_NAME).
Times are in microseconds.
"""

from __future__ import annotations

from ..schema.record_types import Document, Record

COLUMNS = (
    "file",
    "time",
    "command",
    "commit",
    "dirty",
    "interrupted",
    "op",
    "algo",
    "source_hash",
    "mode",
    "device",
    "driver",
    "max_sm_clock_mhz",
    "tier",
    "l2",
    "workload",
    "index",
    "origin",
    "label",
    "status",
    "reason",
    "unfinished",
    "median_us",
    "low_us",
    "high_us",
    "ci_low_us",
    "ci_high_us",
    "spread",
    "samples",
    "kernels",
    "span_us",
    "stopped",
    "note",
    "sm_clock_mhz",
    "bytes_moved",
    "over_floor",
    "speedup",
    "doubts",
    "how",
    "backend",
    "in_place",
    "setup",
)
Value = str | float | bool | None


def row(record: Record, document: Document, file: str) -> dict[str, Value]:
    """A record's value in every column. `label`, `over_floor` and `speedup` are empty:
    they need the op and other records.
    """
    timing, workload = record.timing, record.workload
    values: dict[str, Value] = dict.fromkeys(COLUMNS)
    environment = document.environment(record)
    for source in (workload, timing, environment, record, document):
        values |= {n: getattr(source, n) for n in COLUMNS if hasattr(source, n)}

    values |= {
        "file": file,
        "interrupted": document.interrupted is True,
        "workload": record.uuid,
        "status": record.status.value,
        "doubts": "; ".join(record.doubts or []),
        "how": record.how,
        "median_us": timing.median_us if timing else None,
    }
    if workload:
        values |= {f"axis_{name}": size for name, size in workload.axes.items()}

    if record.check:
        values |= {f"error_{name}": e for name, e in record.check.errors.items()}

    return values
