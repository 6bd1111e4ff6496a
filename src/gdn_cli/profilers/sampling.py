"""Where a process's CPU time goes: samples of the program counter while something works, by perf or by ourselves.

perf sees the kernel too and is the finer of the two, but a container seldom lets a process use it. sampler.cpp needs a
C++ compiler only: SIGPROF by CPU time, a sample for each tick of a CPU that works (100 to 1000 a second).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import machine
from . import Table, symbols

PERF_DATA = "perf.data"
_LIBRARY = "sampler.so"
_PERF_HZ = 2000
_PERIOD_US = 1000  # of CPU time; the kernel's tick may be longer
_ROOM = 100_000


@dataclass(frozen=True)
class Way:
    """How a worker is sampled: what goes in front of it, its environment, and what `sampled` gets. `why`: why not
    better."""

    by: str | None  # perf, signal or nothing
    wrap: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    library: str | None = None
    why: str | None = None


def choose(folder: Path, allowed: tuple[str, ...] = ("perf", "signal")) -> Way:
    """The best way that works here; its files go into `folder`."""
    why = "no perf here" if "perf" in allowed else ""
    if "perf" in allowed and (perf := shutil.which("perf")):
        why = _perf_fails(perf)
        if why is None:
            return Way("perf", (*_record(perf, folder / PERF_DATA), "--"))
    if "signal" in allowed:
        library, reason = _compiled(folder)
        if library:
            return Way("signal", env={"LD_PRELOAD": _preload(library)}, library=library, why=why)
        why = f"{why}; {reason}" if why else reason
    return Way(None, why=why)


def _record(perf: str, data: Path) -> list[str]:
    # by the clock that time.monotonic() reads, so that samples of anything but the calls can be left out afterwards
    return [perf, "record", "-q", "-F", str(_PERF_HZ), "-k", "CLOCK_MONOTONIC", "-o", str(data)]


def _perf_fails(perf: str) -> str | None:
    """Why perf cannot be used here, None where it can."""
    with tempfile.TemporaryDirectory(prefix="gdn-") as folder:
        data = Path(folder) / PERF_DATA
        try:
            for command in ([*_record(perf, data), "--", "true"], [perf, "script", "-i", str(data), "-F", "pid,ip"]):
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
                if done.returncode:
                    said = next((line.strip(" :") for line in done.stderr.splitlines() if line.strip()), "it fails")
                    return f"perf is not permitted here ({said[:80]})"
        except (OSError, subprocess.TimeoutExpired):
            return "perf does not work here"
    return None


def _compiled(folder: Path) -> tuple[str | None, str]:
    """sampler.cpp as a library, or why there is none."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        return None, f"functions are sampled on Linux only, not on {sys.platform} {platform.machine()}"
    if set(str(folder)) & set(" :"):
        return None, "LD_PRELOAD takes no path with a space or a colon, and the profile's folder has one"
    compiler = machine.cxx()
    if compiler is None:
        return None, "no C++ compiler for a sampler of our own: install perf, or g++ or clang++"
    library = folder / _LIBRARY
    source = Path(__file__).with_name("sampler.cpp")
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        return None, f"the sampler does not compile: {(done.stderr.splitlines() or ['no word why'])[0]}"
    return str(library), ""


def _preload(library: str) -> str:
    return " ".join(filter(None, (library, os.environ.get("LD_PRELOAD"))))


# --- in the worker ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sampled(by: str | None, library: str | None) -> Iterator[dict[str, Any]]:
    """Sample what the block does. The dict is for `read`: it has its entries when the block is over."""
    answer: dict[str, Any] = {"by": by, "pid": os.getpid()}
    buffer = (ctypes.c_uint64 * _ROOM)() if by == "signal" else None
    sampler = ctypes.CDLL(library) if buffer else None  # preloaded: the same one
    if sampler:
        sampler.gdn_sampler_start.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
        sampler.gdn_sampler_stop.restype = ctypes.c_size_t
        if sampler.gdn_sampler_start(buffer, _ROOM, _PERIOD_US):
            raise OSError("SIGPROF cannot be handled here")
    answer["began"] = time.monotonic()
    try:
        yield answer
    finally:
        answer["ended"] = time.monotonic()
        if sampler:
            taken = min(sampler.gdn_sampler_stop(), _ROOM)
            answer["pcs"] = list(Counter(buffer[:taken]).items())
        if by:
            answer["maps"] = Path("/proc/self/maps").read_text()


# --- afterwards ---------------------------------------------------------------------------------------------------

KERNEL = "[kernel]"


@dataclass(frozen=True)
class Spot:
    """Samples of one address, or of one function of the kernel."""

    count: int
    place: symbols.Place
    pc: int = 0

    @property
    def function(self) -> str:
        if self.place.symbol:
            return readable(symbols.short(self.place.symbol.name))
        if not self.place.library:
            return "(code made at run time)"
        return "(no symbol: OpenMP, mostly waiting)" if "omp" in self.library else "(no symbol)"

    @property
    def library(self) -> str:
        return Path(self.place.library).name if self.place.library else ""


_LONG = 80


def readable(name: str) -> str:
    """A function's name without what makes a template's instance too long to read: torch's loops by their kernel."""
    if len(name) <= _LONG:
        return name
    if m := re.search(r"at::native::(?:[A-Z]\w*::)?(\w*kernel\w*)", name):
        return f"at::native::{m[1]}"
    outer = name.split("<", 1)[0] + "<...>"
    return outer if len(outer) <= _LONG else outer[: _LONG - 3] + "..."


def read(answer: dict[str, Any], folder: Path) -> list[Spot]:
    """Where the samples of `sampled` fell, most samples first."""
    if not answer.get("by"):
        return []
    maps = symbols.mappings(answer["maps"])
    if answer["by"] == "signal":
        user, kernel = Counter({pc: n for pc, n in answer["pcs"]}), Counter()
    else:
        user, kernel = _perf_samples(answer, folder / PERF_DATA)
    spots = [Spot(n, symbols.place(pc, maps), pc) for pc, n in user.items()]
    spots += [Spot(n, symbols.Place(KERNEL, None, symbols.Symbol(0, 0, name))) for name, n in kernel.items()]
    return sorted(spots, key=lambda s: (-s.count, s.pc))


def _perf_samples(answer: dict[str, Any], data: Path) -> tuple[Counter[int], Counter[str]]:
    """Program counters of the worker and functions of the kernel, from what perf recorded between the two times."""
    span = f"{answer['began']:.6f},{answer['ended']:.6f}"
    command = [shutil.which("perf") or "perf", "script", "-i", str(data), "--time", span, "-F", "pid,time,ip,sym"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return Counter(), Counter()
    return parsed(done.stdout, answer["pid"])


def parsed(text: str, pid: int) -> tuple[Counter[int], Counter[str]]:
    """The lines of `perf script -F pid,time,ip,sym`: "15626 23297.326274:  ffffffff8157ae7d perf_event_mmap"."""
    user, kernel = Counter(), Counter()
    for line in text.splitlines():
        m = re.match(r"\s*(\d+)\s+[\d.]+:\s+([0-9a-f]+)(?:\s+(\S.*))?\s*$", line)
        if not m or int(m[1]) != pid:
            continue
        pc = int(m[2], 16)
        if pc >> 63:  # the upper half of the addresses is the kernel's
            kernel[m[3] or "[unknown]"] += 1
        else:
            user[pc] += 1
    return user, kernel


_MOST = 15  # rows of a table
_LEAST = 0.5  # % of the samples: what has fewer is one of the rest


def tables(spots: list[Spot], sources: dict[str, str]) -> list[Table]:
    """Functions, source lines where there are any, and instructions; `sources` are the algo's own, by file name."""
    total = sum(spot.count for spot in spots)
    if not total:
        return []
    share = lambda n: 100 * n / total  # noqa: E731
    functions: Counter[tuple[str, str]] = Counter()
    for spot in spots:
        functions[spot.function, spot.library] += spot.count
    rows = [(name, library, share(n), n) for (name, library), n in functions.most_common(_MOST) if share(n) >= _LEAST]
    if (rest := total - sum(row[-1] for row in rows)) > 0:
        rows.append(("(all others)", "", share(rest), rest))
    columns = (("function", ""), ("library", ""), ("share", "%"), ("samples", "count"))
    found = [Table("functions", "where the CPU time goes", columns, tuple(rows), f"{total} samples of CPU time")]
    where = _lines(spots, sources)
    if hot := _hot_lines(spots, where, sources, share):
        columns = (("where", ""), ("share", "%"), ("function", ""), ("source", ""))
        note = "an inlined function's time is at its own lines, a compiler header's at the line that called it"
        found.append(Table("hot", "hot lines", columns, tuple(hot), note))
    if slow := _hot_instructions(spots, where, share):
        columns = (("where", ""), ("share", "%"), ("line", ""), ("instruction", ""))
        note = "a sample falls on the instruction that waits or on one behind it"
        found.append(Table("instructions", "hot instructions", columns, tuple(slow), note))
    return found


def _lines(spots: list[Spot], sources: dict[str, str]) -> dict[tuple[str, int], symbols.Frame]:
    """The source line of each address: the innermost of the algo's own files, else the innermost outside of headers."""
    by_library: dict[str, list[int]] = {}
    for spot in spots:
        if spot.place.address is not None:
            by_library.setdefault(spot.place.library, []).append(spot.place.address)
    found = {}
    for library, addresses in by_library.items():
        for address, frames in symbols.lines(library, addresses).items():
            own = [frame for frame in frames if Path(frame[1]).name in sources]
            made = [frame for frame in frames if "/include/" not in frame[1]]
            found[library, address] = (own or made or frames)[0]
    return found


def _hot_lines(spots: list[Spot], where: dict, sources: dict[str, str], share: Any) -> list[tuple]:
    counts: Counter[symbols.Frame] = Counter()
    for spot in spots:
        if frame := where.get((spot.place.library, spot.place.address)):
            counts[frame] += spot.count
    rows = []
    for (function, file, line), n in counts.most_common(_MOST):
        name = Path(file).name
        text = _source(file, sources).splitlines()
        source = text[line - 1].strip() if 0 < line <= len(text) else ""
        if share(n) >= _LEAST:
            rows.append((f"{name}:{line}", share(n), readable(symbols.short(function)), source))
    return rows


def _source(file: str, sources: dict[str, str]) -> str:
    """The algo's own file, or one that a compiler of an algo has written."""
    try:
        return sources.get(Path(file).name) or Path(file).read_text(errors="replace")
    except OSError:
        return ""


def _hot_instructions(spots: list[Spot], where: dict, share: Any) -> list[tuple]:
    rows, read = [], {}
    for spot in spots[:_MOST]:
        symbol, address = spot.place.symbol, spot.place.address
        if not symbol or address is None or share(spot.count) < _LEAST:
            continue
        key = spot.place.library, symbol
        if key not in read:
            read[key] = symbols.instructions(*key)
        if text := read[key].get(address):
            frame = where.get((spot.place.library, address))
            line = f"{Path(frame[1]).name}:{frame[2]}" if frame else ""
            rows.append((f"{spot.function}+{address - symbol.start:#x}", share(spot.count), line, text))
    return rows
