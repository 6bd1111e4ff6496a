"""Where numbers come from: heads of tables, environments, the sources that ran."""

from __future__ import annotations

from collections.abc import Iterable

from ...schema.record_types import Record
from ..book import Book, Group, Measurement, Source
from ..notes import grouped
from ..table import Table, words


def head(op: str, measured: list[Measurement], *more: str) -> str:
    """gdn_decode | NVIDIA H200 (GPU 0, 1) at 1620 to 1790 MHz | tier cupti, L2 cold."""
    parts = [op]
    for device, rows in grouped(measured, _device).items():
        gpus = sorted({m.gpu for m in rows if m.gpu is not None})
        if gpus:
            device += f" (GPU {', '.join(map(str, gpus))})"

        clock = sm_clock(rows)
        parts.append(f"{device} at {clock}" if clock else device)

    tiers = dict.fromkeys(m.tier for m in measured if m.tier)
    states = sorted({m.timing.l2 for m in measured if m.timing and m.timing.l2})
    if tiers:
        l2 = f", L2 {'/'.join(states)}" if states else ""
        parts.append(f"tier {', '.join(tiers)}{l2}")

    if any(m.record.in_place for m in measured):
        parts.append("in place")

    return " | ".join([*parts, *more])


def _device(m: Measurement) -> str:
    return m.source.environment(m.record.place).device or m.record.mode


def lead(group: Group) -> str:
    """The op, device and files of a group's numbers."""
    return f"{group.op} on {origin(group)}; {_files(group)}:"


def brief(group: Group) -> str:
    """The same below a heading that has op, device and tier."""
    return "; ".join(filter(None, [", ".join(_facts(group)), _files(group)]))


def _files(group: Group) -> str:
    files = []
    for source in group.sources:
        commit = f", commit {source.commit}" if source.commit else ""
        files.append(f"{source.name} ({source.time[:10]}{commit})")

    return ", ".join(files)


def origin(group: Group) -> str:
    """One line: device, driver, clocks, tier, L2."""
    facts = _facts(group)
    within = f" ({', '.join(facts)})" if facts else ""

    return f"{group.device}{within}, tier {group.how}"


def _facts(group: Group) -> list[str]:
    """Driver and clocks."""
    environments = [
        source.environment(place) for source in group.sources for place in group.places
    ]

    drivers = sorted({env.driver for env in environments if env.driver})
    clocks = {env.max_sm_clock_mhz for env in environments if env.max_sm_clock_mhz}
    facts = [f"driver {'/'.join(drivers)}"] if drivers else []
    if clock := sm_clock(group.measured):
        facts.append(f"SM clock {clock} during the run")

    if clocks:
        most = "/".join(sorted(map(str, clocks)))
        facts.append(f"{most} MHz at most" if clock else f"SM clock {most} MHz")

    return facts


def sm_clock(measured: Iterable[Measurement | Record]) -> str:
    """The SMs' mean clocks while these were measured, such as 1620 to 1790 MHz; "" if
    no record has one.
    """
    return _range([m.timing.sm_clock_mhz for m in measured if m.timing], "MHz")


def _range(values: list[float | None], unit: str) -> str:
    """1620 to 1790 MHz; one number if both ends are equal, "" without values."""
    known = [value for value in values if value]
    if not known:
        return ""

    ends = dict.fromkeys([f"{min(known):.0f}", f"{max(known):.0f}"])

    return f"{' to '.join(ends)} {unit}"


def _environment(source: Source, place: str) -> dict[str, str]:
    """The environment of one place in a file, as texts. Its SM clock is the SMs' own, or
    NVML's between batches.
    """
    document, env = source.document, source.environment(place)
    options = [f"{name} {value}" for name, value in document.options.items() if value]
    records = [record for record in document.records if record.place == place]
    states = []
    for record in records:
        if record.gpu_state:
            states += [*record.gpu_state.during, record.gpu_state.after]

    facts = {
        "file": source.name,
        "measured": source.time,
        "commit": source.commit or "not known",
        "command": f"gdn {document.command}",
        "options": ", ".join(options),
        "device": source.device(place),
        "driver": env.driver,
        "CUDA": env.cuda,
        "compute capability": env.capability,
        "SMs": env.sms,
        "CPUs": env.cpus,
        "threads": env.threads,
        "compiled for": env.architectures,
        "L2": env.l2_bytes and f"{env.l2_bytes / 2**20:.0f} MiB",
        "greatest SM clock": env.max_sm_clock_mhz and f"{env.max_sm_clock_mhz} MHz",
        "affinity": env.affinity,
        "SM clock, measuring": sm_clock(records)
        or _range([s.sm_mhz for s in states], "MHz"),
        "memory clock, measuring": _range([s.memory_mhz for s in states], "MHz"),
        "temperature, measuring": _range([s.temperature_c for s in states], "°C"),
        **env.versions,
    }

    return {name: str(value) for name, value in facts.items() if value}


def environments(book: Book) -> Table:
    """A column for each place of each file."""
    places = []
    for source in book.sources:
        places += [_environment(source, place) for place in source.places]

    files = [place.pop("file") for place in places]
    table = Table("Where it was measured", words("", *files), prose=True)
    for name in dict.fromkeys(name for place in places for name in place):
        table.add(name, *(place.get(name, "") for place in places))

    return table


def hashes(book: Book) -> Table | None:
    """The source hashes of the algos, and the files that have them."""
    files: dict[tuple[str, str, str], dict[str, None]] = {}
    for m in book.measured:
        if source_hash := m.record.source_hash:
            key = (m.op, m.algo, source_hash)
            files.setdefault(key, {})[m.source.name] = None

    table = Table("Sources that ran", words("op", "algo", "hash", "files"), prose=True)
    for key, names in files.items():
        table.add(*key, ", ".join(names))

    return table if table.rows else None
