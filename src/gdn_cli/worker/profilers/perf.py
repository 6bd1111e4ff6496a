"""Linux perf: in which functions and source lines a worker's CPU time goes.

perf writes its samples into perf.data; `perf script` gives the function of each sample,
addr2line the source line of those in a library that was built with -g.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import Table, facts, source_line, symbols, tools

DATA = "perf.data"
INSTALL = (
    "perf would show functions and source lines: apt-get install linux-perf (Ubuntu:"
    " linux-tools-generic)"
)
_HZ = 2000
_MOST = 15  # rows of a table
_LEAST = 0.5  # % of the samples: smaller rows are put together
_LONG = 80  # characters of a function's name


def missing() -> str | None:
    """Why perf cannot be used here; None if it can."""
    if not shutil.which("perf"):
        return f"there is no perf here. {INSTALL}"
    with tempfile.TemporaryDirectory(prefix="gdn-") as folder:
        for command in (*record(Path(folder)), "true"), _script(Path(folder)):
            if (done := tools.run(command, timeout_s=30)) is None:
                return "perf does not work here"
            if done.returncode:
                said = next(
                    (
                        line.strip(" :")
                        for line in done.stderr.splitlines()
                        if line.strip()
                    ),
                    "it fails",
                )
                return (
                    f"perf is not permitted here ({said[:80]}): as root, sysctl"
                    " kernel.perf_event_paranoid=1"
                )
    return None


def record(folder: Path) -> tuple[str, ...]:
    """The command line before the worker's own. The clock is time.monotonic()'s, so
    that samples outside the calls can be dropped afterwards.
    """
    return (
        "perf",
        "record",
        "-q",
        "-F",
        str(_HZ),
        "-k",
        "CLOCK_MONOTONIC",
        "-o",
        str(folder / DATA),
        "--",
    )


def _script(folder: Path) -> tuple[str, ...]:
    return ("perf", "script", "-i", str(folder / DATA), "-F", "pid,time,ip,sym,dso")


class Spot(NamedTuple):
    """Where samples were taken. `pc`: the program counter, None in the operating
    system's kernel.
    """

    function: str
    library: str  # the file's path, [kernel.kallsyms], [vdso], ...
    pc: int | None


def read(folder: Path, pid: int, span: tuple[float, float]) -> Counter[Spot]:
    """The number of samples of a process at each place between two times of time.monotonic()."""
    done = tools.run([*_script(folder), "--time", f"{span[0]:.6f},{span[1]:.6f}"])
    return parsed(done.stdout if done else "", pid)


def parsed(text: str, pid: int) -> Counter[Spot]:
    """Parse the output of `perf script`: "15626 23297.326274:  ffffffff8157ae7d
    clear_page ([kernel.kallsyms])".
    """
    found: Counter[Spot] = Counter()
    for line in text.splitlines():
        m = re.match(r"\s*(\d+)\s+[\d.]+:\s+([0-9a-f]+)\s+(.+?) \(([/[].*)\)\s*$", line)
        if m and int(m[1]) == pid:
            pc = int(m[2], 16)
            # the upper half of the addresses is the kernel's
            found[Spot(m[3], m[4], None) if pc >> 63 else Spot(m[3], m[4], pc)] += 1
    return found


def tables(spots: Counter[Spot], code: Code) -> list[Table]:
    """Functions by their samples, and source lines if there are any. Empty without samples."""
    total = spots.total()
    functions: Counter[tuple[str, str]] = Counter()
    for spot, n in spots.items():
        functions[_function(spot), Path(spot.library).name] += n
    rows = [
        (*where, 100 * n / total, n)
        for where, n in functions.most_common(_MOST)
        if 100 * n / total >= _LEAST
    ]
    if rows and (rest := total - sum(row[-1] for row in rows)) > 0:
        rows.append(("(all others)", "", 100 * rest / total, rest))
    hot = (
        (where, 100 * n / total, function, code.text(where))
        for (where, function), n in code.lines(spots).most_common(_MOST)
        if 100 * n / total >= _LEAST
    )
    return [
        *facts.table("functions", rows, f"{total} samples of CPU time"),
        *facts.table("cpu.hot", hot),
    ]


def _function(spot: Spot) -> str:
    if spot.function == "[unknown]":
        return (
            "(no symbol: OpenMP, mostly waiting)"
            if "omp" in Path(spot.library).name
            else "(no symbol)"
        )
    return readable(symbols.short(spot.function))


def readable(name: str) -> str:
    """A function's name, shortened for template instances: torch's loops are named
    after their kernel.
    """
    if len(name) <= _LONG:
        return name
    if m := re.search(r"at::native::(?:[A-Z]\w*::)?(\w*kernel\w*)", name):
        return f"at::native::{m[1]}"
    outer = name.split("<", 1)[0] + "<...>"
    return outer if len(outer) <= _LONG else outer[: _LONG - 3] + "..."


@dataclass(frozen=True)
class Code:
    """Code built with -g, and its addresses in the process."""

    mapped: dict[str, int]  # address of the first byte of a library
    sources: dict[str, str]  # the algo's own, by file name

    def lines(self, spots: Counter[Spot]) -> Counter[tuple[str, str]]:
        """Samples by ("file:line", function): at the innermost line in one of the
        algo's own files. Empty without addr2line.
        """
        found: Counter[tuple[str, str]] = Counter()
        for library, base in self.mapped.items():
            mine = {
                spot.pc - base: n
                for spot, n in spots.items()
                if spot.library == library and spot.pc
            }
            for at, frames in _frames(library, list(mine)).items():
                own = [
                    frame
                    for frame in frames
                    if frame[0].partition(":")[0] in self.sources
                ]
                found[(own or frames)[0]] += mine[at]
        return found

    def text(self, where: str) -> str:
        """The source text of "file:line", "" if it is not the algo's own."""
        name, _, line = where.rpartition(":")
        return source_line(self.sources, name, int(line))


def _frames(library: str, addresses: list[int]) -> dict[int, list[tuple[str, str]]]:
    """("file:line", function) of each of a library's addresses, an inlined function's
    before its caller's.
    """
    done = tools.run(
        ["addr2line", "-a", "-i", "-f", "-C", "-e", library],
        stdin="\n".join(map(hex, addresses)),
    )
    found: dict[int, list[tuple[str, str]]] = {}
    # an address, then two lines for each frame: its function and its position
    for address, rest in re.findall(
        r"^(0x[0-9a-f]+)\n((?:(?!0x).*\n?)*)", done.stdout if done else "", re.M
    ):
        pairs = re.findall(r"(.+)\n(.+):(\d+)(?: \(.*)?$", rest, re.M)
        if pairs:
            names = [
                (f"{Path(file).name}:{line}", readable(symbols.short(name)))
                for name, file, line in pairs
            ]
            found[int(address, 16)] = names
    return found
