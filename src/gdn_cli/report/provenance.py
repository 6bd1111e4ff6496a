"""Where a book's numbers come from: devices, files, clocks, versions, sources; in words."""

from __future__ import annotations

from typing import Any

from ..schema.record_types import GpuState
from .book import Book, Group, Source


def origin(group: Group) -> str:
    """One line: device, driver, clocks, tier, L2."""
    parts = []
    for what, unit, key in (("driver ", "", "driver"), ("SM clock ", " MHz", "max_sm_clock_mhz")):
        values = {getattr(s.environment(place), key) for s in group.sources for place in group.places} - {None}
        if values:
            parts.append(what + "/".join(sorted(map(str, values))) + unit)
    within = ", ".join(parts)
    return f"{group.device}{f' ({within})' if within else ''}, tier {group.how}"


def environment(source: Source, place: str) -> dict[str, str]:
    """What a file says of a place where its records were made, in words."""
    env = source.environment(place)
    found: dict[str, Any] = {"file": source.name, "measured": source.time, "commit": source.commit or "not known"}
    found["command"] = f"gdn {source.document.command}"
    given = [f"{k} {v}" for k, v in source.document.options.items() if v not in (None, False, [], {})]
    found["options"] = ", ".join(given) or "none"
    found["device"] = source.device(place)
    words = {
        "driver": "driver", "cuda": "CUDA", "capability": "compute capability", "sms": "SMs", "cpus": "CPUs",
        "threads": "threads", "architectures": "compiled for",
    }  # fmt: skip
    found |= {word: value for key, word in words.items() if (value := getattr(env, key)) is not None}
    if env.l2_bytes:
        found["L2"] = f"{env.l2_bytes / 2**20:.0f} MiB"
    if env.max_sm_clock_mhz:
        found["greatest SM clock"] = f"{env.max_sm_clock_mhz} MHz"
    if env.affinity:
        found["affinity"] = env.affinity
    found |= _states(source, place)
    found |= env.versions
    return {k: str(v) for k, v in found.items()}


def _states(source: Source, place: str) -> dict[str, str]:
    """The clocks and temperatures that were read while measuring."""
    states: list[GpuState] = []
    for r in source.document.records:
        if r.place == place and r.gpu_state:
            states += [*r.gpu_state.during, r.gpu_state.after]
    words = {
        "sm_mhz": ("SM clock", "MHz"),
        "memory_mhz": ("memory clock", "MHz"),
        "temperature_c": ("temperature", "°C"),
    }
    found = {}
    for key, (word, unit) in words.items():
        if values := [value for state in states if (value := getattr(state, key))]:
            low, high = min(values), max(values)
            found[f"{word}, measuring"] = f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"
    return found


def hashes(book: Book) -> list[tuple[str, str, str, list[str]]]:
    """(op, algo, source hash, files that have it) of what ran."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for m in book.measured:
        if m.record.source_hash:
            found.setdefault((m.op, m.algo, m.record.source_hash), {})[m.source.name] = None
    return [(*what, list(files)) for what, files in found.items()]
