"""Where the time of a call on the CPU goes: threads, page faults, functions, source
lines, and torch's ops.

Times, counts and functions are from the same calls, which only perf observes, if it is
installed; ops are from calls under torch.profiler.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...machine import inventory
from ...machine.inventory import HERE, Machine
from . import (
    Ask,
    Fact,
    Found,
    Reading,
    Reply,
    Run,
    facts,
    files_in,
    perf,
    torch_profiler,
    turns,
)

_SECONDS = 2.5
_OPS_CALLS = 10


def find(machine: Machine = HERE) -> None:
    """It is always here."""


def runs(ask: Ask, folder: Path) -> list[Run]:
    why = perf.missing()
    # the functions of a C++ algo say more than torch's ops
    ops = bool(why) or ask.language != "cpp"
    params = {"seconds": _SECONDS, "ops": ops, "why": why}
    env = {} if ops else _with_lines(ask)
    return [Run("measure", () if why else perf.record(folder), env, params)]


def _with_lines(ask: Ask) -> dict[str, str]:
    """The environment of builds with -g, which leaves the code as it is: they have a
    cache of their own.
    """
    env = inventory.with_builders(dict(os.environ), "cpu", machine=ask.machine)
    return {
        "CXX": f"{env.get('CXX') or 'c++'} -g",
        "FIB_CACHE_PATH": f"{env['FIB_CACHE_PATH']}-lines",
    }


# --- in the worker


class Answer(Struct):
    """The answer of `inside`. `per_call`: a fact's key -> its value, over all threads,
    by the kernel's accounting (getrusage).
    """

    calls: int
    median_us: float
    per_call: dict[str, float]
    cpus: int
    torch_threads: int
    pid: int
    # of all calls, by time.monotonic()
    span: tuple[float, float]
    # the algo's, and where each begins in memory
    libraries: dict[str, int]
    ops: torch_profiler.Profiled | None = None


# fact's key -> getrusage's field, and its unit in the fact's
_USAGE = {
    "cpu_us": ("ru_utime", 1e6),
    "system_us": ("ru_stime", 1e6),
    "faults_minor": ("ru_minflt", 1),
    "faults_major": ("ru_majflt", 1),
    "switches_voluntary": ("ru_nvcsw", 1),
    "switches_forced": ("ru_nivcsw", 1),
}


def inside(target: Any, seconds: float, ops: bool, why: str | None) -> Answer:
    """`why` is for `read`."""
    import resource

    import torch

    call = target.subject.call
    for _ in range(3):
        call()
    times = []
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.monotonic()
    for _ in turns(sys.maxsize, seconds, least=3):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    span = began, time.monotonic()
    after = resource.getrusage(resource.RUSAGE_SELF)
    per_call = {
        key: (getattr(after, field) - getattr(before, field)) * scale / len(times)
        for key, (field, scale) in _USAGE.items()
    }
    per_call["cpu_us"] += per_call["system_us"]
    return Answer(
        calls=len(times),
        median_us=statistics.median(times),
        per_call=per_call,
        cpus=len(os.sched_getaffinity(0)),
        torch_threads=torch.get_num_threads(),
        pid=os.getpid(),
        span=span,
        libraries=perf.loaded(os.environ["FIB_CACHE_PATH"]),
        ops=torch_profiler.profiled(call, "cpu", _OPS_CALLS) if ops else None,
    )


# --- after the run


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    answer = replies[0].answered(Answer)
    why = replies[0].run.params["why"]
    notes, tables = [], []
    if why:
        notes.append(f"no functions: {why}")
    else:
        spots = perf.read(folder, answer.pid, answer.span)
        tables += perf.table(spots) + perf.hot(spots, answer.libraries, ask.sources)
        if not tables:
            notes.append("no samples fell into the calls")
    if answer.ops:
        tables += torch_profiler.ops_table(answer.ops)
    whole = Found("", tuple(_facts(ask, answer)), tuple(tables))
    return Reading((whole,), tuple(notes), files_in(folder, perf.DATA))


def _facts(ask: Ask, answer: Answer) -> list[Fact]:
    """Figures per call."""
    moved = ask.bytes_in + ask.bytes_out
    threads = (
        f"of {answer.cpus} CPUs, waiting awake counts too; torch uses"
        f" {answer.torch_threads} threads"
    )
    began, end = answer.span
    busy = answer.per_call["cpu_us"] * answer.calls / (end - began) / 1e6
    return [
        facts.fact(
            "time_us", answer.median_us, f"wall, median of {answer.calls} calls"
        ),
        facts.fact("threads_busy", busy, threads),
        facts.fact("rate", moved / answer.median_us / 1e3 if moved else None),
        *(facts.fact(key, value) for key, value in answer.per_call.items()),
    ]
