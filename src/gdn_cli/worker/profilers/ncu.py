"""Tool `ncu`: a kernel's counters, stalls and hot places, by Nsight Compute.

There are two runs, because one cannot give both. `bench-like` measures what fits into a
single pass: time and DRAM bytes of a call after our own flush of L2, as `gdn bench`
times it, in several rounds. `full` replays one call's kernels about forty times for all
metrics: only in the first pass would L2 be as the flush left it, so ncu empties L2
before each pass. An empty L2 has room for what the kernel writes, so bytes written to
DRAM and the time differ from the first run's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...errors import MissingError
from ...machine.inventory import HERE, Machine
from ...parsing import read_toml
from . import (
    Ask,
    Reading,
    Reply,
    Run,
    files_in,
    log_text,
    ncu_facts,
    ncu_reader,
    tools,
    turns,
)
from .ncu_facts import Kernel
from .ncu_reader import Launch

BENCH, FULL = "bench-like", "full"

_ROUNDS = 7
# no further round after this time: a token loop launches thousands of kernels per call
_ROUNDS_S = 10.0
_BENCH_LAUNCHES = 2000
_FULL_LAUNCHES = 20
# kernels of a call to show, the longest ones
_SHOWN = 4

GET_NCU = (
    "install Nsight Compute (with the CUDA toolkit, or the package nsight-compute), or put ncu on"
    " PATH"
)


def find(machine: Machine = HERE) -> None:
    """MissingError if ncu, or the package that reads its reports, is not installed."""
    executable(machine)
    ncu_reader.find(machine)


def executable(machine: Machine = HERE) -> str:
    return tools.first("ncu", "nsight-compute", hint=GET_NCU, machine=machine)


# --- the target processes


def runs(ask: Ask, folder: Path) -> list[Run]:
    metrics = ",".join(ncu_facts.SINGLE_PASS)
    single = ("none", "--launch-count", str(_BENCH_LAUNCHES), "--metrics", metrics)
    caches = "none" if ask.l2 == "warm" else "all"
    full = (caches, "--launch-count", str(_FULL_LAUNCHES), "--set", "full")
    return [
        Run(BENCH, _command(ask, folder / BENCH, *single), params={"rounds": _ROUNDS}),
        Run(
            FULL,
            _command(ask, folder / FULL, *full, "--import-source", "yes"),
            params={"rounds": 1},
        ),
    ]


def _command(ask: Ask, report: Path, *options: str) -> tuple[str, ...]:
    """The command line that writes this report, without its suffix.

    Only the worker's own process is profiled: its child processes (a compiler, a
    helper) do not launch the algo's kernels, and ncu would wait for one that outlives
    the worker. sys.executable is an interpreter, never a launcher that starts another
    process.
    """
    return (
        executable(ask.machine),
        "--target-processes",
        "application-only",
        "--profile-from-start",
        "off",
        "--clock-control",
        ask.clocks,
        "--force-overwrite",
        "--export",
        str(report),
        "--log-file",
        f"{report}.log",
        "--cache-control",
        *options,
    )


class Answer(Struct):
    """The answer of `inside`."""

    rounds: int


def inside(target: Any, rounds: int) -> Answer:
    """Warm up, then in each round flush L2 (or warm it) and let ncu see one call."""
    import torch

    from ..timing.kernels import Flush

    call = target.subject.call
    flush = Flush()
    prepare = call if target.l2 == "warm" else flush
    for _ in range(3):
        flush()
        call()
    answer = Answer(0)
    for _ in turns(rounds, _ROUNDS_S):
        prepare()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        answer.rounds += 1
    return answer


# --- the results


@dataclass(frozen=True)
class _Report:
    """A run's launches, the number of passes that each took, and of rounds."""

    launches: list[Launch]
    passes: int
    rounds: int


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """The kernels with most of a call's time. Raises MissingError or GdnError if a run
    gave no result.
    """
    bench, full = (_report(folder, reply) for reply in replies)
    kernels = _kernels(bench, full.launches)
    shown = kernels[:_SHOWN]
    if len(kernels) == 1:
        findings = [ncu_facts.findings(kernels[0], ask.bytes_in, ask.bytes_out)]
    else:
        call_us = sum(kernel.time_us for kernel in kernels)
        findings = [ncu_facts.call(kernels, ask.bytes_in, ask.bytes_out)]
        findings += [ncu_facts.findings(kernel, 0, 0, call_us) for kernel in shown]
    notes = (_how(ask, bench, full), *_doubts(ask, bench, full, kernels, shown))
    names = f"{FULL}.ncu-rep", f"{BENCH}.ncu-rep", f"{FULL}.log", f"{BENCH}.log"
    return Reading(tuple(findings), notes, files_in(folder, *names))


def _report(folder: Path, reply: Reply) -> _Report:
    name = reply.run.name
    log = log_text(folder / f"{name}.log")
    errors = [
        line for line in log.splitlines() if "==ERROR==" in line or "Error:" in line
    ]
    # ncu's own reason comes first: it ends the target, whose exit then says nothing
    for trouble in read_toml(Path(__file__).with_suffix(".toml"))["trouble"]:
        if re.search(trouble["log"], "\n".join([*errors, *reply.tail])):
            raise MissingError(trouble["message"], hint=trouble["hint"])
    rounds = reply.answered(Answer).rounds
    report = folder / f"{name}.ncu-rep"
    launches = ncu_reader.launches(report) if report.is_file() else []
    if not launches:
        reason = errors[-1] if errors else "does the call launch one in its process?"
        raise MissingError(
            f"no kernel in ncu's report: {reason}",
            hint=f"--tool torch shows what a call does; {ncu_reader.GET_PACKAGE}",
        )
    passes = re.findall(r"(\d+) pass(?:es)?\s*$", log, re.MULTILINE)
    return _Report(launches, max(map(int, passes), default=0), rounds)


def _kernels(bench: _Report, full: list[Launch]) -> list[Kernel]:
    """Each kernel with its rounds and its longest launch in the full run, the one with
    most time first.
    """
    # the ends of rounds are not known if launches were cut off
    count = 1 if _cut(bench) else bench.rounds
    size = max(1, len(bench.launches) // count)
    starts = range(0, len(bench.launches) - size + 1, size)
    rounds = [bench.launches[start : start + size] for start in starts]
    longest = {x.full_name: x for x in sorted(full, key=lambda x: x.ns)}
    kernels = []
    for name in dict.fromkeys(x.full_name for launches in rounds for x in launches):
        own = []
        for launches in rounds:
            if of_name := [x for x in launches if x.full_name == name]:
                own.append(of_name)
        kernels.append(Kernel(own, longest.get(name)))
    return sorted(kernels, key=lambda kernel: -kernel.time_us)


def _cut(bench: _Report) -> bool:
    return len(bench.launches) >= _BENCH_LAUNCHES


def _how(ask: Ask, bench: _Report, full: _Report) -> str:
    """Which figures come from which run."""
    state = (
        "as left by the previous pass" if ask.l2 == "warm" else "emptied before each"
    )
    return (
        f"duration, DRAM and busy SMs: medians of {bench.rounds} rounds, L2 {ask.l2} as in gdn"
        f" bench; everything else: {full.passes} passes of one call, L2 {state}"
    )


def _doubts(
    ask: Ask, bench: _Report, full: _Report, kernels: list[Kernel], shown: list[Kernel]
) -> Iterator[str]:
    if _cut(bench):
        yield f"all figures are for the first {_BENCH_LAUNCHES:,} launches of a call"
    elif len(bench.launches) % bench.rounds:
        yield "doubt: calls differ in how many kernels they launch"
    if bench.passes > 1:
        yield (
            f"doubt: the bench-like run needed {bench.passes} passes a launch here, and"
            " all but the first find L2 warm"
        )
    if ask.clocks != "none":
        yield f"clocks: ncu's --clock-control {ask.clocks}, not as they are in gdn bench"
    if len(full.launches) >= _FULL_LAUNCHES:
        yield f"counters, stalls and hot places: of the first {_FULL_LAUNCHES} launches only"
    if hidden := kernels[len(shown) :]:
        us = sum(kernel.time_us for kernel in hidden)
        yield f"not shown: {len(hidden)} more kernels, {us:.2f} us in all"
    places = [place.name for kernel in shown for place in kernel.places]
    if not places:
        yield "no hot places: ncu's sampler found no warp"
    elif not any(":" in name for name in places):
        yield (
            "no source lines: flashinfer-bench's builder compiles CUDA C++ without -lineinfo;"
            " --tool sass lists the same offsets under the lines' numbers"
        )
