"""Documents of schema 2 for the report's tests: small, made up, and the same every time."""

from __future__ import annotations

import json
import statistics
import uuid
from pathlib import Path
from typing import Any

from gdn_cli.report.book import Source
from gdn_cli.schema.record_types import Document, document_of

GPU = {
    "versions": {"gdn": "0.1.0", "python": "3.12.3", "torch": "2.11.0+cu130"},
    "gpu": "NVIDIA H200", "capability": "9.0", "sms": 132, "l2_bytes": 62914560, "driver": "580.159.04",
    "max_sm_clock_mhz": 1980, "cuda": "13.0",
}  # fmt: skip
CPU = {
    "versions": {"gdn": "0.1.0"},
    "cpu": "AMD EPYC",
    "cpus": 2,
    "threads": 2,
    "affinity": "0-1",
}

# overhead of each tier over the kernels' own time, in microseconds
EXTRA = {
    "cupti": 0.0,
    "events": 4.0,
    "graph": 0.3,
    "nvbench": 0.5,
    "fib": 35.0,
    "wall": 0.0,
}
# microseconds of a launch, and per sequence
ALGOS = {
    "copy": (1.4, 0.26),
    "pt-reference": (36.0, 1.6),
    "cuda-v1": (2.3, 0.26),
    "cuda-v4": (1.9, 0.28),
    "fi-baseline": (3.7, 0.47),
}


def typed(document: Document | dict[str, Any]) -> Document:
    return document if isinstance(document, Document) else document_of(document)


def source(name: str, document: Document | dict[str, Any]) -> Source:
    """A document as a part of a book."""
    return Source(name, typed(document))


def workload(batch_size: int, n: int = 0) -> dict[str, Any]:
    return {
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{batch_size}/{n}")), "index": 100 * batch_size + n,
        "axes": {"batch_size": batch_size}, "origin": "twin",
    }  # fmt: skip


def timing(
    us: float, tier: str = "cupti", l2: str | None = "cold", *, histogram: bool = True
) -> dict[str, Any]:
    """A timing around a median, its samples skewed a little to the right."""
    samples = [
        round(us * (1 + x), 4) for x in (-0.02, -0.01, -0.01, 0, 0, 0, 0.01, 0.02, 0.05)
    ]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    found = {
        "tier": tier, "median_us": us, "low_us": low, "high_us": high,
        "ci_low_us": us * 0.995, "ci_high_us": us * 1.005,
        "samples": 9, "l2": l2 if tier != "wall" else None, "kernels": 1, "span_us": us, "stopped": "target",
        "note": None, "spread": (high - low) / 2 / us,
    }  # fmt: skip
    if histogram:
        found["histogram"] = [[s, samples.count(s)] for s in sorted(set(samples))]
    return found


def record(
    algo: str,
    batch_size: int,
    us: float | None,
    tier: str | None = "cupti",
    n: int = 0,
    **more: Any,
) -> dict:
    """One record: passed and timed, or, without a time, what `more` says became of it."""
    found = {
        "op": "gdn_decode", "algo": algo, "source_hash": None if algo == "copy" else f"{algo}-1", "mode": "cuda",
        "tier": tier, "workload": workload(batch_size, n), "status": "passed", "reason": None,
        "bytes_moved": 1_000_000 * batch_size,
    }  # fmt: skip
    if us is not None:
        found["timing"] = timing(us, tier)
        found["gpu_state"] = {
            "before": {},
            "during": [{"sm_mhz": 1980, "temperature_c": 41}],
            "after": {"sm_mhz": 1965},
        }
    if algo != "copy":
        found["check"] = {
            "passed": True,
            "official": True,
            "errors": {"output": 1.8e-3, "new_state": 6e-8},
        }
    return found | more


def document(records: list[dict], **more: Any) -> dict[str, Any]:
    head = {
        "schema": 2, "command": "bench", "time": "2026-11-21T14:12:11Z", "options": {"preset": "quick", "l2": "cold"},
        "commit": "1c78cc43113f", "dirty": False, "interrupted": False, "environments": {"cuda": GPU}, "missing": [],
    }  # fmt: skip
    return head | more | {"records": records}


def bench(
    batch_sizes: tuple[int, ...] = (1, 8, 64),
    tiers: tuple[str, ...] = ("cupti",),
    each: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """A whole bench: ALGOS on these sizes, `each` workloads a size, in these tiers."""
    records = [
        record(
            algo,
            b,
            round((base + slope * b) * (1 + 0.01 * n) + EXTRA[tier], 3),
            tier,
            n,
        )
        for algo, (base, slope) in ALGOS.items()
        for b in batch_sizes
        for n in range(each)
        for tier in tiers
        if not (algo == "copy" and tier == "fib")
    ]
    machine = [
        record("empty", 1, 0.9, workload=None),
        record("copy-rate", 1, 500.0, workload=None),
    ]
    machine[1]["bytes_moved"] = 2_000_000_000
    return document(records + machine, **more)


def compared(
    ratios: dict[int, tuple[float, float, float, str]],
    algo: str = "cuda-v4",
    baseline: str = "cuda-v1",
):
    """What `gdn compare` adds: batch size -> ratio, low, high, verdict."""
    head = {
        "op": "gdn_decode",
        "mode": "cuda",
        "tier": "cupti",
        "baseline": baseline,
        "algo": algo,
    }
    head |= {
        "rounds": 30,
        "log_sd": 0.01,
        "df": 29.0,
        "level": 0.99,
        "threshold": 0.0,
        "method": "paired",
    }
    head["resolution"] = 0.01
    each = [
        head
        | {
            "workload": workload(b),
            "ratio": r,
            "low": low,
            "high": high,
            "verdict": v,
            "us": 2.0,
            "baseline_us": 2.0,
        }
        for b, (r, low, high, v) in ratios.items()
    ]
    mean = statistics.geometric_mean(r for r, *_ in ratios.values())
    overall = head | {
        "ratio": mean,
        "low": mean - 0.004,
        "high": mean + 0.004,
        "verdict": "SLOWER",
    }
    verdicts = [v for *_, v in ratios.values()]
    overall |= {
        "workloads": len(each),
        "verdicts": {v: verdicts.count(v) for v in dict.fromkeys(verdicts)},
    }
    return {"command": "compare", "comparisons": each, "overall": [overall]}


def everything() -> dict[str, Any]:
    """A document that has one of each: tiers, failures, doubts, comparisons, a score,
    missing parts.
    """
    found = bench(
        (1, 4, 8, 16, 64), ("cupti", "events", "graph", "nvbench", "fib"), each=2
    )
    records = found["records"]
    fail = {
        "source_hash": "wrong-1",
        "check": {"passed": False, "official": True, "errors": {"output": 0.31}},
    }
    records += [
        record(
            "wrong-v1",
            b,
            None,
            t,
            status="wrong",
            reason="output is off by 0.31",
            **fail,
        )
        for b in (1, 4)
        for t in EXTRA
        if t != "wall"
    ]
    records.append(
        record(
            "cuda-v9",
            64,
            None,
            status="crashed",
            reason="signal 11",
            unfinished=3,
            workload=None,
        )
    )
    for r in records:
        if (
            r["algo"] == "fi-baseline"
            and (r["workload"] or {}).get("axes") == {"batch_size": 16}
            and r["tier"] == "cupti"
        ):
            r["doubts"] = [
                "the SM clock moved between 1500 and 1980 MHz while this was measured: lock it"
            ]
    records[3] |= {"backend": "eager"}
    ratios = {
        1: (0.981, 0.975, 0.987, "SLOWER"),
        4: (1.001, 0.996, 1.006, "SAME"),
        16: (1.03, 1.02, 1.04, "FASTER"),
    }
    missing = [
        {
            "op": "gdn_decode",
            "algo": "fla-upstream",
            "reason": "fla is not here",
            "hint": "pip install fla-core",
        }
    ]
    more = compared(ratios) | {
        "missing": missing,
        "warnings": ["the saved record has another driver"],
    }
    return found | more | {"command": "bench", "records": records}


def write(folder: Path, found: dict[str, Any], name: str = "bench.json") -> Path:
    file = folder / name
    file.write_text(json.dumps(found))
    return file


HOSTILE = (
    "<script>alert(1)</script>",
    "a-name-that-is-much-longer-than-anything-that-fits-beside-a-bar-on-a-phone",
    '$x^2$ & "quotes" \'`|\\',
    "_under\x07bell",
    "=cmd()",
    "a|b",
)


def hostile() -> dict[str, Any]:
    """A document whose every text wants to be something else than text; of an op that
    gdn does not know, as well.
    """
    found = bench((1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31))
    for i, name in enumerate(HOSTILE):
        for b in (1, 2, 3, 5):
            found["records"].append(record(name, b, 4.0 + i + b))
            found["records"][-1] |= {
                "doubts": ["</style><img src=x onerror=alert(1)>"],
                "backend": "<b>",
            }
        axes = {"<i>rows</i>": 10**i, "a_rather_long_axis_name": 7}
        strange = {"uuid": None, "index": None, "axes": axes}
        found["records"].append(
            record("one", 1, 10.0**i, op="no_such<op>", workload=strange)
        )
    found["records"].append(
        record(
            "</desc>", 1, None, status="wrong", reason="]]></svg><!-- /gdn report -->"
        )
    )
    found["environments"]["cuda"] = GPU | {
        "gpu": 'GPU <&> "9000" ' + "x" * 60,
        "driver": "<1>",
    }
    ratios = {b: (1.0, 0.9, 1.1, "<SAME>") for b in (1, 2, 3)}
    return (
        found
        | compared(ratios, algo=HOSTILE[0], baseline=HOSTILE[2])
        | {"commit": "<commit>"}
    )
