"""The columns of a table with a row for each record: `gdn report --format csv` and
`gdn history --export`.

After these, each axis has its column (axis_NAME), and each output's error (error_NAME).
Times are in microseconds.
"""

from __future__ import annotations

from ..schema.record_types import Document, Record

_TIMING = (
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
)
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
    *_TIMING,
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
    environment = document.environment(record)
    timing, workload = record.timing, record.workload
    values: dict[str, Value] = dict.fromkeys(COLUMNS)
    values |= {
        "file": file,
        "time": document.time,
        "command": document.command,
        "commit": document.commit,
        "dirty": document.dirty,
        "interrupted": document.interrupted is True,
        "op": record.op,
        "algo": record.algo,
        "source_hash": record.source_hash,
        "mode": record.mode,
        "device": environment.device,
        "driver": environment.driver,
        "max_sm_clock_mhz": environment.max_sm_clock_mhz,
        "tier": record.tier,
        "status": record.status.value,
        "reason": record.reason,
        "unfinished": record.unfinished,
        "bytes_moved": record.bytes_moved,
        "doubts": "; ".join(record.doubts or []),
        "how": record.how,
        "backend": record.backend,
        "in_place": record.in_place,
        "setup": record.setup,
    }
    if timing:
        values["l2"] = timing.l2
        values |= {name: getattr(timing, name) for name in _TIMING}
    if workload:
        values["workload"] = workload.uuid
        values["index"] = workload.index
        values["origin"] = workload.origin
        values |= {f"axis_{name}": size for name, size in workload.axes.items()}
    if record.check:
        values |= {f"error_{name}": e for name, e in record.check.errors.items()}
    return values
