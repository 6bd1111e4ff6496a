"""Where a book's numbers come from: devices, files, clocks, versions, sources; in words."""

from __future__ import annotations

from typing import Any

from .. import records, units
from .gather import Book, Group, Source


def origin(group: Group) -> str:
    """One line: device, driver, clocks, tier, L2."""
    parts = []
    for what, unit, key in (("driver ", "", "driver"), ("SM clock ", " MHz", "max_sm_clock_mhz")):
        values = {s.environment(place).get(key) for s in group.sources for place in group.places} - {None}
        if values:
            parts.append(what + "/".join(sorted(map(str, values))) + unit)
    within = ", ".join(parts)
    return f"{group.device}{f' ({within})' if within else ''}, tier {group.how}"


def environment(source: Source, place: str) -> dict[str, str]:
    """What a file says of a place where its records were made, in words."""
    env = source.environment(place)
    found: dict[str, Any] = {"file": source.name, "measured": source.time, "commit": source.commit or "not known"}
    found["command"] = f"gdn {source.document.get('command')}"
    options = source.document.get("options") or {}
    given = [f"{k} {v}" for k, v in options.items() if v not in (None, False, [], {})]
    found["options"] = ", ".join(given) or "none"
    found["device"] = source.device(place)
    words = {
        "driver": "driver", "cuda": "CUDA", "capability": "compute capability", "sms": "SMs", "cpus": "CPUs",
        "threads": "threads", "architectures": "compiled for",
    }  # fmt: skip
    found |= {word: env[key] for key, word in words.items() if env.get(key) is not None}
    if env.get("l2_bytes"):
        found["L2"] = f"{env['l2_bytes'] / 2**20:.0f} MiB"
    if env.get("max_sm_clock_mhz"):
        found["greatest SM clock"] = f"{env['max_sm_clock_mhz']} MHz"
    if env.get("affinity"):
        found["affinity"] = str(env["affinity"])
    if seen := _states(source, place):
        found |= seen
    found |= {str(name): version for name, version in (env.get("versions") or {}).items()}
    return {k: str(v) for k, v in found.items()}


def _states(source: Source, place: str) -> dict[str, str]:
    """The clocks and temperatures that were read while measuring: gpu_state, or schema 1's clocks."""
    readings: dict[str, list[float]] = {}
    for r in source.document["records"]:
        if records.place(r) != place:
            continue
        state = r.get("gpu_state") or {}
        for reading in [*(state.get("during") or []), state.get("after") or {}, r.get("clocks") or {}]:
            for key, value in reading.items():
                if units.is_positive(value):
                    readings.setdefault(key, []).append(value)
    words = {
        "sm_mhz": ("SM clock", "MHz"),
        "memory_mhz": ("memory clock", "MHz"),
        "temperature_c": ("temperature", "°C"),
    }
    found = {}
    for key, (word, unit) in words.items():
        if values := readings.get(key):
            low, high = min(values), max(values)
            found[f"{word}, measuring"] = f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"
    return found


def hashes(book: Book) -> list[tuple[str, str, str, list[str]]]:
    """(op, algo, source hash, files that have it) of what ran."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for m in book.measured:
        if m.record.get("source_hash"):
            found.setdefault((m.op, m.algo, str(m.record["source_hash"])), {})[m.source.name] = None
    return [(*what, list(files)) for what, files in found.items()]
