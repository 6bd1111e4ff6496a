"""Linux perf: in which functions and source lines a worker's CPU time goes.

perf writes its samples into perf.data; `perf script` gives the function of each sample,
and binutils' addr2line the lines of a library that was built with -g: perf's own way to
them takes minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from . import Table, facts, source_line, symbols, tools

DATA = "perf.data"
_HZ = 2000
# rows of a table
_MOST = 15
# characters of a function's name
_LONG = 80


def missing() -> str | None:
    """Why perf cannot be used here; None if it can."""
    if not shutil.which("perf"):
        return (
            "there is no perf here: apt-get install linux-perf (Ubuntu:"
            " linux-tools-generic)"
        )
    with tempfile.TemporaryDirectory(prefix="gdn-") as folder:
        trial = tools.run([*record(Path(folder)), "true"], timeout_s=30)
    if trial and trial.returncode == 0:
        return None
    error = trial.stderr.strip().splitlines()[:1] if trial else []
    return (
        f"perf does not work here {error}: as root, sysctl kernel.perf_event_paranoid=1"
    )


def record(folder: Path) -> tuple[str, ...]:
    """The command line before the worker's own. The clock is time.monotonic()'s, so
    that samples outside the calls can be dropped afterwards.
    """
    options = "-q", "-F", str(_HZ), "-k", "CLOCK_MONOTONIC", "-o", str(folder / DATA)
    return ("perf", "record", *options, "--")


class Spot(NamedTuple):
    """Where samples were taken. `library`: the file's path, [kernel.kallsyms], [vdso], ..."""

    address: int
    function: str
    library: str


def read(folder: Path, pid: int, span: tuple[float, float]) -> Counter[Spot]:
    """The number of samples of a process in each function between two times of
    time.monotonic().
    """
    fields = "-F", "pid,time,ip,sym,dso", "--time", f"{span[0]:.6f},{span[1]:.6f}"
    text = tools.output("perf", "script", "-i", folder / DATA, *fields)
    return parsed(text or "", pid)


def parsed(text: str, pid: int) -> Counter[Spot]:
    """Parse the output of `perf script`: "15626 23297.326274:  ffffffff8157ae7d
    clear_page ([kernel.kallsyms])".
    """
    line = rf"^\s*{pid}\s+[\d.]+:\s+([0-9a-f]+)\s+(.+?) \(([/[].*)\)\s*$"
    samples = re.findall(line, text, re.MULTILINE)
    return Counter(Spot(int(at, 16), *where) for at, *where in samples)


def table(spots: Counter[Spot]) -> list[Table]:
    """Functions by their samples; no table without samples."""
    total = spots.total()
    functions = Counter[tuple[str, str]]()
    for spot, n in spots.items():
        functions[_function(spot), Path(spot.library).name] += n
    rows = [(*place, 100 * n / total, n) for place, n in functions.most_common(_MOST)]
    note = (
        f"{total} samples of CPU time; `perf annotate -i {DATA}` shows the instructions"
    )
    return facts.table("functions", rows, note)


def loaded(folder: str) -> dict[str, int]:
    """The libraries of a folder that this process has loaded -> where each begins.
    The kernel tells a path without its links."""
    folder = os.path.realpath(folder)
    libraries: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, *_, path = line.split(maxsplit=5)
        if path.startswith(f"{folder}/"):
            libraries.setdefault(path, int(span.partition("-")[0], 16))
    return libraries


def hot(
    spots: Counter[Spot], libraries: dict[str, int], sources: Mapping[str, str]
) -> list[Table]:
    """The lines of `sources` by the samples in them and in what is inlined there."""
    lines = Counter[tuple[str, int]]()
    for library, begin in libraries.items():
        samples = Counter[int]()
        for spot, n in spots.items():
            if spot.library == library:
                samples[spot.address - begin] += n
        text = tools.output("addr2line", "-aie", library, *map(hex, samples)) or ""
        # an address, then a line for each frame, the innermost first
        for block in text.split("0x")[1:]:
            address, *frames = block.splitlines()
            places = [re.match(r"(?:.*/)?(.+):(\d+)", frame) for frame in frames]
            own = [(p[1], int(p[2])) for p in places if p and p[1] in sources]
            for place in own[:1]:
                lines[place] += samples[int(address, 16)]
    rows = []
    for (file, line), n in lines.most_common(_MOST):
        share = 100 * n / spots.total()
        rows.append((f"{file}:{line}", share, source_line(sources, file, line)))
    return facts.table("cpu.hot", rows)


def _function(spot: Spot) -> str:
    """A function's name, shortened for template instances."""
    if spot.function == "[unknown]":
        waits = ": OpenMP, mostly waiting" if "omp" in Path(spot.library).name else ""
        return f"(no symbol{waits})"
    name = symbols.short(spot.function)
    return name if len(name) <= _LONG else symbols.bare(name)[:_LONG]
