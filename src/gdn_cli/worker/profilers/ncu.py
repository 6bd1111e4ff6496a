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
from collections.abc import Iterator, Sequence
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
    files_in,
    log_text,
    ncu_facts,
    ncu_reader,
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
_SHOWN = 4
_SHOWN_SHARE = 0.95

GET_NCU = (
    "install Nsight Compute (with the CUDA toolkit, or the package nsight-compute), or put ncu on"
    " PATH"
)

Rounds = tuple[tuple[Launch, ...], ...]


def find(machine: Machine = HERE) -> None:
    """MissingError if ncu, or the package that reads its reports, is not installed."""
    executable(machine)
    ncu_reader.find(machine)


def executable(machine: Machine = HERE) -> str:
    return tools.first("ncu", "nsight-compute/*/ncu", hint=GET_NCU, machine=machine)


# --- the target processes


def runs(ask: Ask, folder: Path) -> list[Run]:
    metrics = ",".join(METRICS)
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


def inside(target: Any, rounds: int) -> dict[str, int]:
    """Warm up, then in each round flush L2 (or warm it) and let ncu see one call.
    Returns the number of rounds.
    """
    import torch

    from ..timing.kernels import Flush

    call = target.subject.call
    flush = Flush()
    prepare = call if target.l2 == "warm" else flush
    for _ in range(3):
        flush()
        call()
    began = perf_counter()
    done = 0
    while done < rounds and (not done or perf_counter() - began < _ROUNDS_S):
        prepare()
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
    passes: int
    rounds: int


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """The kernels with most of a call's time. Raises MissingError or GdnError if a run
    gave no result.
    """
    bench, full = (_report(folder, reply) for reply in replies)
    rounds, doubts = _rounds(bench)
    kernels = _kernels(rounds, full.launches)
    shown = _longest(kernels)
    if len(kernels) == 1:
        found = [ncu_facts.found(kernels[0], ask.bytes_in, ask.bytes_out)]
    else:
        call_us = sum(kernel.time_us for kernel in kernels)
        found = [ncu_facts.call(kernels, ask.bytes_in, ask.bytes_out)]
        found += [ncu_facts.found(kernel, 0, 0, call_us) for kernel in shown]
    notes = [
        _how(ask, bench, full),
        *doubts,
        *_doubts(ask, bench, full, kernels, shown),
    ]
    names = f"{FULL}.ncu-rep", f"{BENCH}.ncu-rep", f"{FULL}.log", f"{BENCH}.log"
    return Reading(tuple(found), tuple(notes), files_in(folder, *names))


def _report(folder: Path, reply: Reply) -> _Report:
    name = reply.run.name
    log = log_text(folder / f"{name}.log")
    if trouble := _trouble(log, reply):
        raise trouble
    report = folder / f"{name}.ncu-rep"
    if not report.is_file():
        lines = _lines(*reply.tail, log) or ["no reason given"]
        raise MissingError(f"ncu left no report: {lines[-1]}")
    passes = [int(n) for n in re.findall(r"(\d+) pass(?:es)?\s*$", log, re.MULTILINE)]
    launches = ncu_reader.launches(report)
    # the log has kernels
    if not launches and passes:
        raise MissingError(
            f"ncu-report finds no kernel in {report.name}", hint=ncu_reader.GET_PACKAGE
        )
    if not launches:
        raise _no_kernel()
    rounds = (reply.answer or reply.run.params)["rounds"]
    return _Report(launches, max(passes, default=0), rounds)


def _rounds(report: _Report) -> tuple[dict[str, Rounds], list[str]]:
    """Kernel -> its launches in each round, in the order in which the kernels first
    ran; and doubts.
    """
    count = report.rounds
    doubts = []
    # the ends of rounds are not known
    if len(report.launches) >= _BENCH_LAUNCHES:
        count = 1
        doubts.append(
            "a call launches very many kernels: all figures are for the first"
            f" {_BENCH_LAUNCHES:,} launches"
        )
    by_name: dict[str, list[Launch]] = {}
    for launch in report.launches:
        by_name.setdefault(launch.full_name, []).append(launch)
    rounds: dict[str, Rounds] = {}
    uneven = []
    for name, launches in by_name.items():
        size = max(1, round(len(launches) / count))
        starts = range(0, len(launches) - size + 1, size)
        rounds[name] = tuple(tuple(launches[i : i + size]) for i in starts)
        if len(launches) != size * count:
            uneven.append(symbols.short(name))
    if uneven:
        doubts.append(f"doubt: calls differ in how often they launch {_list(uneven)}")
    return rounds, doubts


def _kernels(rounds: dict[str, Rounds], full: list[Launch]) -> list[Kernel]:
    """Each kernel with its rounds and its longest launch in the full run, the one with
    most time first. One that only the full run saw has that launch as its round.
    """
    longest: dict[str, Launch] = {}
    for launch in sorted(full, key=lambda launch: -launch.ns):
        longest.setdefault(launch.full_name, launch)
    kernels = [Kernel(name, each, longest.get(name)) for name, each in rounds.items()]
    kernels += [
        Kernel(name, ((launch,),), launch)
        for name, launch in longest.items()
        if name not in rounds
    ]
    return sorted(kernels, key=lambda kernel: -kernel.time_us)


def _longest(kernels: list[Kernel]) -> list[Kernel]:
    """The first few, up to those that take nearly all of the time."""
    limit = _SHOWN_SHARE * sum(kernel.time_us for kernel in kernels)
    shown: list[Kernel] = []
    for kernel in kernels[:_SHOWN]:
        if shown and sum(k.time_us for k in shown) >= limit:
            break
        shown.append(kernel)
    return shown


def _how(ask: Ask, bench: _Report, full: _Report) -> str:
    """Which figures come from which run."""
    state, replay = (
        "L2 flushed before each, as gdn bench does",
        "L2 emptied before each",
    )
    if ask.l2 == "warm":
        state, replay = "L2 warmed by the same call", "L2 as left by the previous pass"
    rounds = "1 round" if bench.rounds == 1 else f"medians of {bench.rounds} rounds"
    return (
        f"duration, DRAM and busy SMs: {rounds}, {state}; everything else:"
        f" {full.passes or 'several'} passes of one call, {replay}"
    )


def _doubts(
    ask: Ask, bench: _Report, full: _Report, kernels: list[Kernel], shown: list[Kernel]
) -> Iterator[str]:
    if bench.passes > 1:
        yield (
            f"doubt: the bench-like run needed {bench.passes} passes a launch here, and"
            " all but the first find L2 warm"
        )
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
    if not any(kernel.hot for kernel in shown):
        yield "no hot places: ncu's sampler found no warp"
    elif any(kernel.hot and not kernel.lines for kernel in shown):
        why = "the kernel was compiled without them"
        if ask.language in ("cuda", "cpp"):
            why = "flashinfer-bench's builder compiles CUDA C++ without -lineinfo"
        yield (
            f"no source lines: {why}; hot places are offsets in the machine code, which --tool"
            " sass lists under its source lines"
        )


def _list(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    short = [name if len(name) <= 60 else f"{name[:57]}..." for name in unique[:3]]
    more = f" and {len(unique) - 3} more" if len(unique) > 3 else ""
    return ", ".join(short) + more


# --- what can go wrong


def _no_kernel() -> MissingError:
    return MissingError(
        "ncu saw no kernel: the call launches none in its own process",
        hint="--tool torch shows what a call does",
    )


def _trouble(log: str, reply: Reply) -> GdnError | None:
    """Why a run gave no result. ncu's own reason comes first: it ends the target, whose
    exit then says nothing.
    """
    errors = [
        line for line in log.splitlines() if "==ERROR==" in line or "Error:" in line
    ]
    text = "\n".join([*errors, *reply.tail])
    for known in read_toml(Path(__file__).with_suffix(".toml"))["trouble"]:
        if re.search(known["log"], text):
            return MissingError(known["message"], hint=known["hint"])
    if reply.status != "done":
        reason = reply.reason or reply.status.replace("_", " ")
        last = _lines(*reply.tail)[-1:]
        more = f" ({last[0]})" if last and last[0] not in reason else ""
        return GdnError(f"the process under ncu: {_lines(reason)[0]}{more}")
    if "No kernels were profiled" in log:
        return _no_kernel()
    if any("Failed to profile" in line for line in errors):
        return MissingError(f"ncu could not profile the kernel: {_lines(*errors)[0]}")
    return None


def _lines(*texts: str) -> list[str]:
    """The lines that are not empty, without ncu's marks."""
    lines = [line.strip() for line in "\n".join(texts).splitlines()]
    bare = [re.sub(r"^==\w+==\s*", "", line)[:200] for line in lines]
    return [line for line in bare if line]
