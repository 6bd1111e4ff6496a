"""Where a book's numbers come from: devices, files, clocks, versions, sources; in words."""

from __future__ import annotations

from .book import Group, Source


def origin(group: Group) -> str:
    """One line: device, driver, clocks, tier, L2."""
    every = [s.environment(place) for s in group.sources for place in group.places]
    drivers, clocks = {env.driver for env in every} - {None}, {env.max_sm_clock_mhz for env in every} - {None}
    within = [f"driver {'/'.join(sorted(drivers))}"] if drivers else []
    within += [f"SM clock {'/'.join(sorted(map(str, clocks)))} MHz"] if clocks else []
    both = ", ".join(within)
    return f"{group.device}{f' ({both})' if both else ''}, tier {group.how}"


def environment(source: Source, place: str) -> dict[str, str]:
    """What a file says of a place where its records were made, in words."""
    env = source.environment(place)
    given = [f"{k} {v}" for k, v in source.document.options.items() if v not in (None, False, [], {})]
    found = {
        "file": source.name, "measured": source.time, "commit": source.commit or "not known",
        "command": f"gdn {source.document.command}", "options": ", ".join(given) or "none",
        "device": source.device(place), "driver": env.driver, "CUDA": env.cuda, "compute capability": env.capability,
        "SMs": env.sms, "CPUs": env.cpus, "threads": env.threads, "compiled for": env.architectures,
        "L2": env.l2_bytes and f"{env.l2_bytes / 2**20:.0f} MiB",
        "greatest SM clock": env.max_sm_clock_mhz and f"{env.max_sm_clock_mhz} MHz", "affinity": env.affinity or None,
    }  # fmt: skip
    told = {what: str(value) for what, value in found.items() if value is not None}
    return told | _states(source, place) | env.versions


def _states(source: Source, place: str) -> dict[str, str]:
    """The clocks and temperatures that were read while measuring."""
    mine = [r.gpu_state for r in source.document.records if r.place == place and r.gpu_state]
    states = [state for read in mine for state in (*read.during, read.after)]
    found = {}
    for key, word, unit in (
        ("sm_mhz", "SM clock", "MHz"), ("memory_mhz", "memory clock", "MHz"), ("temperature_c", "temperature", "°C"),
    ):  # fmt: skip
        if values := [value for state in states if (value := getattr(state, key))]:
            low, high = min(values), max(values)
            found[f"{word}, measuring"] = f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"
    return found
