"""Profile documents for the tests: figures of Nsight Compute 2025.3 on an H200, with
the fields that tests need.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gdn_cli.parsing import to_json
from gdn_cli.schema.profile_types import Profile
from gdn_cli.worker.profilers import Fact, Found, Reading, Table

GPU = {"gpu": "NVIDIA H200", "driver": "580.159.04", "cuda": "13.0", "sms": 132}
MEANINGS = {
    "long scoreboard": "waits for L2 or DRAM",
    "constant cache miss": "waits for the constant cache",
    "wait": "a fixed wait of the instruction before",
    "no instruction": "waits for the instruction cache, or jumped",
    "short scoreboard": "waits for shared memory or a special function",
    "drain": "waits for its stores, at its end",
}

# key -> label, unit, group, better, note
FACTS = {
    "time_us": ("duration", "us", "time", "lower", ""),
    "dram_read": ("DRAM read", "B", "memory", "lower", "1.01x what must be read"),
    "dram_written": ("DRAM written", "B", "memory", "lower", ""),
    "l2_read": ("L2 read", "B", "memory", "lower", ""),
    "dram_rate": ("DRAM rate", "GB/s", "memory", "higher", ""),
    "dram_peak": ("of DRAM's peak", "%", "memory", "higher", ""),
    "l2_hit": ("L2 hits", "%", "memory", "higher", ""),
    "occupancy": (
        "achieved occupancy",
        "%",
        "occupancy",
        "higher",
        "active warps of 64, while an SM is active",
    ),
    "occupancy_max": ("theoretical occupancy", "%", "occupancy", "higher", ""),
    "occupancy_limit": ("limited by", "", "occupancy", "", ""),
    "registers": ("registers per thread", "count", "occupancy", "lower", ""),
    "shared": ("shared memory per CTA", "B", "occupancy", "lower", ""),
    "instructions": ("instructions", "count", "instructions", "lower", ""),
    "issue": ("issue slots used", "%", "instructions", "higher", ""),
    "warps_eligible": ("eligible warps", "count", "instructions", "higher", ""),
    "thread_efficiency": ("active threads", "%", "instructions", "higher", ""),
    "bank_conflicts": ("bank conflicts", "count", "instructions", "lower", ""),
    "waves": ("waves", "x", "launch", "", ""),
    "ctas": ("CTAs", "count", "launch", "", ""),
    "threads": ("threads per CTA", "count", "launch", "", ""),
}

V4 = (
    "<unnamed>::gdn_decode_v4(const __nv_bfloat16 *, const __nv_bfloat16 *, float, __nv_bfloat16"
    " *, float *)"
)
FLA = "gdn_decode_kernel"

# ncu --cache-control all --clock-control none --set full, batch_size=1 and 64
V4_1 = {
    "time_us": 2.848, "dram_read": 534784, "dram_written": 0, "l2_read": 548160, "dram_rate": 187.775,
    "dram_peak": 3.93, "l2_hit": 56.06, "occupancy": 12.35, "occupancy_max": 100.0, "occupancy_limit": "registers",
    "registers": 32, "shared": 0, "instructions": 215040, "issue": 18.11, "warps_eligible": 0.24,
    "thread_efficiency": 95.4, "bank_conflicts": 0, "waves": 0.12, "ctas": 128, "threads": 256,
}  # fmt: skip
FLA_1 = {
    "time_us": 3.04, "dram_read": 536832, "dram_written": 0, "l2_read": 570752, "dram_rate": 176.589, "dram_peak": 3.73,
    "l2_hit": 57.25, "occupancy": 2.94, "occupancy_max": 50.0, "occupancy_limit": "warps", "registers": 60,
    "shared": 8, "instructions": 91392, "issue": 16.55, "warps_eligible": 0.17, "thread_efficiency": 98.0,
    "bank_conflicts": 5, "waves": 0.06, "ctas": 256, "threads": 32,
}  # fmt: skip
V4_STALLS = {
    "long scoreboard": 3.60, "constant cache miss": 2.57, "wait": 0.99, "no instruction": 0.98,
    "short scoreboard": 0.67, "drain": 0.14,
}  # fmt: skip
FLA_STALLS = {
    "long scoreboard": 2.38, "no instruction": 0.92, "constant cache miss": 0.71, "wait": 0.59,
    "short scoreboard": 0.17, "drain": 0.06,
}  # fmt: skip


def facts(values: dict[str, Any]) -> tuple[Fact, ...]:
    found = []
    for key, x in values.items():
        label, unit, group, better, note = FACTS[key]
        found.append(Fact(key, label, x, unit, group, note, better))
    return tuple(found)


def stalls(cycles: dict[str, float]) -> Table:
    whole = sum(cycles.values())
    columns = (
        ("reason", ""),
        ("share of the latency", "%"),
        ("cycles per issued instruction", "cycles"),
        ("meaning", ""),
    )
    rows = tuple(
        (name, 100 * x / whole, x, MEANINGS[name]) for name, x in cycles.items()
    )
    return Table("stalls", "what a warp waits for", columns, rows)


def kernel(
    name: str, values: dict[str, Any], cycles: dict[str, float] | None = None
) -> Found:
    return Found(name, facts(values), (stalls(cycles),) if cycles else ())


def verdict(bound: str, **more: Any) -> dict[str, Any]:
    found = {
        "bound": bound, "summary": f"{bound}-bound: the kernel is too small to fill the GPU",
        "why": ["97 % of the time is waiting, and DRAM is busy for 4 % of it"],
        "next": ["give an SM more to do at a time: split the state into more CTAs, or load earlier"],
    }  # fmt: skip
    return found | more


def survey(us: float = 2.1, **more: Any) -> dict[str, Any]:
    found = {
        "tier": "cupti", "time_us": us, "span_us": us, "launches": 1, "copy_us": 1.63, "empty_us": 0.54,
        "large_rate": 4230.0, "bytes_moved": 1054752, "bytes_in": 530000, "bytes_out": 524752,
        "ran": [{"name": V4, "start_us": 0.0, "us": us}], "doubts": [],
    }  # fmt: skip
    return found | more


def document(
    algo: str, *found: Found, us: float | None = 2.1, batch_size: int = 1, **more: Any
) -> dict[str, Any]:
    """A profile as it is read back from its file."""
    name = f"20261121-174500-gdn_decode-{algo}-B{batch_size}-ncu"
    reading = Reading(
        found, ("DRAM's writes stay in L2 here",), ("profile.ncu-rep", "raw.csv", "log")
    )
    made = {
        "schema": 1, "name": name, "folder": f"/home/someone/.local/share/gdn/profiles/{name}",
        "time": "2026-11-21T17:45:00Z", "commit": "1c78cc43113f", "dirty": False, "tool": "ncu", "op": "gdn_decode",
        "algo": algo, "source_hash": f"{algo}-1", "mode": "cuda", "l2": "cold",
        "workload": {
            "uuid": f"0000{batch_size:04d}-aaaa", "index": 0, "axes": {"batch_size": batch_size}, "origin": "twin",
        },
        "label": f"B={batch_size}", "environment": GPU, "status": "passed", "reason": None,
        "survey": None if us is None else survey(us), "reading": to_json(reading), "verdict": verdict("latency"),
    }  # fmt: skip
    return json.loads(json.dumps(made | more))


def v4(**more: Any) -> dict[str, Any]:
    return document("cuda-v4", kernel(V4, V4_1, V4_STALLS), **more)


def fla(**more: Any) -> dict[str, Any]:
    return document(
        "fla-recurrent", kernel(FLA, FLA_1, FLA_STALLS), **{"us": 2.08} | more
    )


def typed(document: dict[str, Any]) -> Profile:
    return msgspec.convert(document, Profile)


def told(reading: Reading) -> str:
    """A reading as text, for tests/screens."""
    lines = []
    for found in reading.found:
        lines.append(f"[{found.name or 'the call'}]")
        for fact in found.facts:
            figure = f"{fact.key} = {shown(fact.value)} {fact.unit}"
            lines.append(f"{fact.group}: {figure}  {fact.note}")
        for table in found.tables:
            lines.append(f"-- {table.title}. {table.note}")
            lines += [" | ".join(map(shown, row)) for row in table.rows]
    lines += [f"note: {note}" for note in reading.notes]
    return "\n".join(
        [*lines, f"files: {reading.files}", f"failed: {reading.failed}", ""]
    )


def shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
