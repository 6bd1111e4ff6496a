"""Tool `ncu`: a kernel's counters, stalls and hot places, by Nsight Compute.

There are two runs, because one cannot give both. `bench-like` measures what fits into a
single pass: time and DRAM bytes of a call after our own flush of L2, as `gdn bench`
times it, in several rounds. `full` replays one call's kernels about forty times for all
metrics: only in the first pass would L2 be as the flush left it, so ncu empties L2
before each pass. An empty L2 has room for what the kernel writes, so bytes written to
DRAM and the time differ from the first run's. For CUDA C++ an earlier run compiles once
more, for the source lines (ncu_lines.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ...errors import GdnError, MissingError
from ...machine.inventory import HERE, Machine
from ...parsing import read_toml
from . import (
    Ask,
    Reading,
    Reply,
    Run,
    kept,
    log_text,
    ncu_facts,
    ncu_lines,
    ncu_reader,
    sass,
    symbols,
    tools,
)
from .ncu_facts import Kernel
from .ncu_reader import Launch

BENCH, FULL = "bench-like", "full"

# One pass on an H200: more counters of one unit than it has registers would need a second pass.
METRICS = (
    ncu_facts.TIME,
    ncu_facts.READ,
    ncu_facts.WRITTEN,
    ncu_facts.READ_PEAK,
    ncu_facts.WRITTEN_PEAK,
    ncu_facts.ACTIVE,
    ncu_facts.ELAPSED,
    ncu_facts.INSTRUCTIONS,
)

_ROUNDS = 7
# no further round after this time: a token loop launches thousands of kernels per call
_ROUNDS_S = 10.0
_BENCH_LAUNCHES = 2000
_FULL_LAUNCHES = 20
# kernels of a call to show: this many, or those with this share of its time
_SHOWN, _MOST = 4, 0.95

GET_NCU = (
    "install Nsight Compute (with the CUDA toolkit, or the package nsight-compute), or put ncu on"
    " PATH"
)


def find(machine: Machine = HERE) -> None:
    """MissingError if ncu, or the package that reads its reports, is not installed."""
    _ncu(machine)
    ncu_reader.find(machine)


def _ncu(machine: Machine = HERE) -> str:
    return tools.first("ncu", "nsight-compute/*/ncu", hint=GET_NCU, machine=machine)


# --- the target processes


def runs(ask: Ask, folder: Path) -> list[Run]:
    """The two processes.

    Only the worker's own process is profiled: its child processes (a compiler, a
    helper) do not launch the algo's kernels, and ncu would wait for one that outlives
    the worker. sys.executable is an interpreter, never a launcher that starts another
    process.
    """

    def command(name: str, *options: str) -> tuple[str, ...]:
        return (
            _ncu(ask.machine),
            "--target-processes",
            "application-only",
            "--profile-from-start",
            "off",
            "--clock-control",
            ask.clocks,
            "--force-overwrite",
            "--export",
            str(folder / name),
            "--log-file",
            str(folder / f"{name}.log"),
            "--cache-control",
            *options,
        )

    single = (
        "none",
        "--launch-count",
        str(_BENCH_LAUNCHES),
        "--metrics",
        ",".join(METRICS),
    )
    caches = "none" if ask.l2 == "warm" else "all"
    full = (
        caches,
        "--launch-count",
        str(_FULL_LAUNCHES),
        "--set",
        "full",
        "--import-source",
        "yes",
    )
    return [
        *ncu_lines.runs(ask, folder),
        Run(BENCH, command(BENCH, *single), params={"rounds": _ROUNDS}),
        Run(FULL, command(FULL, *full), params={"rounds": 1}),
    ]


def inside(target: Any, rounds: int = 0, **lines: str) -> dict[str, int] | sass.Answer:
    """Warm up, then in each round flush L2 (or warm it) and let ncu see one call.
    Returns the number of rounds. Without rounds it is the run of ncu_lines.
    """
    if not rounds:
        return sass.inside(target, **lines)
    import torch

    from ..timing.kernels import Flush

    call, flush = target.subject.call, Flush()
    before = call if target.l2 == "warm" else flush
    for _ in range(3):
        flush()
        call()
    began, done = perf_counter(), 0
    while done < rounds and (not done or perf_counter() - began < _ROUNDS_S):
        before()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        done += 1
    return {"rounds": done}


# --- the results


@dataclass(frozen=True)
class _Report:
    """A run's launches, and what its log says about them."""

    launches: list[Launch]
    passes: int | None
    rounds: int


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """The kernels with most of a call's time. Raises MissingError or GdnError if a run
    gave no result.
    """
    compiled = next(
        (reply for reply in replies if reply.run.name == ncu_lines.NAME), None
    )
    bench, full = (_report(folder, reply) for reply in replies if reply is not compiled)
    rounds, doubts = _rounds(bench)
    launches = ncu_lines.lent(ask, folder, compiled, full.launches)
    kernels = sorted(_kernels(rounds, launches), key=lambda kernel: -kernel.time_us)
    shown = _most(kernels)
    must, call_us = (
        (ask.bytes_in, ask.bytes_out),
        sum(kernel.time_us for kernel in kernels),
    )
    if len(kernels) == 1:
        found = [ncu_facts.found(kernels[0], *must)]
    else:
        found = [
            ncu_facts.call(kernels, *must),
            *(ncu_facts.found(kernel, 0, 0, call_us) for kernel in shown),
        ]
    notes = [
        _how(ask, bench, full),
        *doubts,
        *_doubts(ask, bench, full, kernels, shown),
    ]
    if launches is not full.launches and any(kernel.lines for kernel in shown):
        notes.append(
            "source lines: from a build with -lineinfo, whose instructions are identical to those"
            " that ran"
        )
    files = kept(
        folder, f"{FULL}.ncu-rep", f"{BENCH}.ncu-rep", f"{FULL}.log", f"{BENCH}.log"
    )
    return Reading(tuple(found), tuple(notes), files)


def _report(folder: Path, reply: Reply) -> _Report:
    name = reply.run.name
    log = log_text(folder / f"{name}.log")
    if trouble := _trouble(log, reply):
        raise trouble
    report = folder / f"{name}.ncu-rep"
    if not report.is_file():
        said = _lines(*reply.tail, log) or ["no reason given"]
        raise MissingError(f"ncu left no report: {said[-1]}")
    passes = [int(n) for n in re.findall(r"(\d+) pass(?:es)?\s*$", log, re.MULTILINE)]
    launches = ncu_reader.launches(report)
    if not launches and passes:  # the log has kernels
        raise MissingError(
            f"ncu-report finds no kernel in {report.name}", hint=ncu_reader.GET_PACKAGE
        )
    if not launches:
        raise _nothing()
    rounds = reply.said(dict[str, int]).get("rounds") or reply.run.params["rounds"]
    return _Report(launches, max(passes, default=None), rounds)


def _rounds(
    report: _Report,
) -> tuple[dict[str, tuple[tuple[Launch, ...], ...]], list[str]]:
    """Kernel -> its launches in each round, in the order in which the kernels first
    ran; and doubts.
    """
    count, doubts = report.rounds, []
    if len(report.launches) >= _BENCH_LAUNCHES:  # the ends of rounds are not known
        count = 1
        doubts.append(
            "a call launches very many kernels: all figures are for the first"
            f" {_BENCH_LAUNCHES:,} launches"
        )
    by_name: dict[str, list[Launch]] = {}
    for launch in report.launches:
        by_name.setdefault(launch.full_name, []).append(launch)
    rounds, uneven = {}, []
    for name, launches in by_name.items():
        each = max(1, round(len(launches) / count))
        rounds[name] = tuple(
            tuple(launches[i : i + each])
            for i in range(0, len(launches) - each + 1, each)
        )
        if len(launches) != each * count:
            uneven.append(symbols.short(name))
    if uneven:
        doubts.append(f"doubt: calls differ in how often they launch {_list(uneven)}")
    return rounds, doubts


def _kernels(
    rounds: dict[str, tuple[tuple[Launch, ...], ...]], full: list[Launch]
) -> list[Kernel]:
    """Each kernel with its rounds and, if the full run has it, its longest launch there."""
    longest: dict[str, Launch] = {}
    for launch in sorted(
        full, key=lambda launch: -(launch.number(ncu_facts.TIME) or 0)
    ):
        longest.setdefault(launch.full_name, launch)
    return [
        Kernel(name, rounds.get(name, ()), longest.get(name))
        for name in dict.fromkeys([*rounds, *longest])
    ]


def _most(kernels: list[Kernel]) -> list[Kernel]:
    """The first few, up to those that take nearly all of the time."""
    total, before = sum(kernel.time_us for kernel in kernels), 0.0
    shown = []
    for kernel in kernels[:_SHOWN]:
        if shown and before >= _MOST * total:
            break
        shown.append(kernel)
        before += kernel.time_us
    return shown


def _how(ask: Ask, bench: _Report, full: _Report) -> str:
    """Which figures come from which run."""
    state = (
        "L2 warmed by the same call"
        if ask.l2 == "warm"
        else "L2 flushed before each, as gdn bench does"
    )
    replay = (
        "L2 as left by the previous pass"
        if ask.l2 == "warm"
        else "L2 emptied before each"
    )
    passes = f"{full.passes} passes" if full.passes else "several passes"
    rounds = "1 round" if bench.rounds == 1 else f"medians of {bench.rounds} rounds"
    return (
        f"duration, DRAM and busy SMs: {rounds}, {state}; everything else: {passes} of one call,"
        f" {replay}"
    )


def _doubts(
    ask: Ask, bench: _Report, full: _Report, kernels: list[Kernel], shown: list[Kernel]
) -> Iterator[str]:
    if bench.passes and bench.passes > 1:
        first = f"the bench-like run needed {bench.passes} passes a launch here"
        yield f"doubt: {first}, and all but the first find L2 warm"
    if ask.clocks != "none":
        yield f"clocks: ncu's --clock-control {ask.clocks}, not as they are in gdn bench"
    if len(full.launches) >= _FULL_LAUNCHES:
        yield (
            f"counters, stalls and hot places: of the first {_FULL_LAUNCHES} launches of a call"
            " only"
        )
    if len(kernels) > 1 and ask.l2 != "warm":
        yield (
            "each kernel's cache figures are with L2 emptied before it, not as left by the"
            " previous kernel"
        )
    if hidden := kernels[len(shown) :]:
        total = sum(kernel.time_us for kernel in kernels) or 1.0
        share = sum(kernel.time_us for kernel in hidden) / total
        names = _list([kernel.name for kernel in hidden])
        yield f"not shown: {len(hidden)} more kernels with {share:.1%} of the time: {names}"
    if any(kernel.hot and not kernel.lines for kernel in shown):
        why = "the kernel was compiled without them"
        if ask.language in ("cuda", "cpp"):
            why = "flashinfer-bench's builder compiles CUDA C++ without -lineinfo"
        yield (
            f"no source lines: {why}; hot places are machine instructions, which --tool sass"
            " lists"
        )
    elif not any(kernel.hot for kernel in shown):
        yield "no hot places: ncu's sampler found no warp"


def _list(names: list[str]) -> str:
    few = [
        name if len(name) <= 60 else f"{name[:57]}..." for name in dict.fromkeys(names)
    ]
    return ", ".join(few[:3]) + (f" and {len(few) - 3} more" if len(few) > 3 else "")


# --- what can go wrong


def _nothing() -> MissingError:
    what = "ncu saw no kernel: the call launches none in its own process"
    return MissingError(what, hint="--tool torch shows what a call does")


def _trouble(log: str, reply: Reply) -> GdnError | None:
    """Why a run gave no result. ncu's own reason comes first: it ends the target, whose
    exit then says nothing.
    """
    said = "\n".join(
        line for line in log.splitlines() if "==ERROR==" in line or "Error:" in line
    )
    for known in read_toml(Path(__file__).with_suffix(".toml"))["trouble"]:
        if re.search(known["log"], said + "\n".join(reply.tail)):
            return MissingError(known["message"], hint=known["hint"])
    if reply.status != "done":
        first = _lines(reply.reason or "")[:1] or [reply.status.replace("_", " ")]
        last = [
            line
            for line in _lines(*reply.tail)[-1:]
            if line not in (reply.reason or "")
        ]
        return GdnError(
            f"the process under ncu: {first[0]}{f' ({last[0]})' if last else ''}"
        )
    if "No kernels were profiled" in log:
        return _nothing()
    if "Failed to profile" in said:
        return MissingError(f"ncu could not profile the kernel: {_lines(said)[0]}")
    return None


def _lines(*texts: str) -> list[str]:
    """The text after ncu's marks."""
    bare = (
        re.sub(r"^==\w+==\s*", "", line.strip())[:200]
        for text in texts
        for line in text.splitlines()
    )
    return [line for line in bare if line]
