"""Records, times and documents for tests, made of what matters there; the rest is made up."""

from __future__ import annotations

from gdn_cli.schema.record_types import (
    Call,
    Document,
    Record,
    Status,
    Timing,
    document_of,
)


def timing(us: float = 100.0, tier: str = "cupti", **more) -> Timing:
    """A time whose quartiles are the median, unless `more` has others."""
    fields = {"low_us": us, "high_us": us, "samples": 100, "l2": "cold"} | more
    spread = (fields["high_us"] - fields["low_us"]) / 2 / us if us else 0.0
    return Timing(tier=tier, median_us=us, **{"spread": spread} | fields)


def record(
    algo: str = "a", us: float | None = None, uuid: str | None = "u1", **more
) -> Record:
    """A record of decode: passed, and timed where there is a time; `more` are other
    fields, those of `Call` among them. Without a uuid it is of no workload.
    """
    call = {
        key: more.pop(key)
        for key in ("index", "axes", "origin", "stress")
        if key in more
    }
    fields = {
        "op": "gdn_decode", "source_hash": None, "mode": "cuda", "tier": "cupti", "reason": None,
        "workload": uuid and Call(uuid=uuid, **{"axes": {"batch_size": 1}} | call),
    } | more  # fmt: skip
    fields["status"] = Status(fields.get("status", "passed"))
    if us is not None:
        fields.setdefault("timing", timing(us, fields["tier"]))
    return Record(algo=algo, **fields)


def document(*records: Record, command: str = "bench", **more) -> Document:
    """A document of schema 2 that holds these; `more` is as JSON has it, `environments`
    among it.
    """
    made = document_of({"schema": 2, "command": command, "records": []} | more)
    made.records = list(records)
    return made
