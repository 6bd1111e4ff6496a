"""Where the time of a call on the CPU goes: threads, page faults, functions, source
lines, and torch's ops.

Times and counts are from calls that are observed only by perf, if it is installed;
functions come from perf's samples of the same loop run again, ops from calls under
torch.profiler.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from ... import paths
from ...errors import MissingError
from ...machine.inventory import HERE, Machine
from . import Ask, Fact, Found, Reading, Reply, Run, facts, kept, perf, torch_profiler

_COUNTED_S, _SAMPLED_S = 1.0, 2.5  # seconds of calls: counted, then sampled
_OPS_CALLS = 10


def find(machine: Machine = HERE) -> None:
    if os.name != "posix":
        raise MissingError(
            f"the cpu profile needs getrusage, missing on {sys.platform}",
            hint="run it on Linux",
        )


def runs(ask: Ask, folder: Path) -> list[Run]:
    compiled, why = ask.language == "cpp", perf.missing()
    env = _with_lines() if compiled else {}
    params = {
        "counted_s": _COUNTED_S,
        "sampled_s": 0.0 if why else _SAMPLED_S,
        "cache": env.get("FIB_CACHE_PATH"),
    }
    params |= {"ops": not compiled or why is not None, "why": why}
    measure = Run("measure", () if why else perf.record(folder), env, params)
    # built first, so that no compiler is sampled
    return (
        [Run("build", env=env, params={"counted_s": 0.0}), measure]
        if compiled
        else [measure]
    )


def _with_lines() -> dict[str, str]:
    """An environment in which the builder compiles with -g, which does not change the
    code, into a separate cache.
    """
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    cache = os.environ.get("FIB_CACHE_PATH") or str(
        paths.builds_dir() / f"{python}-cpu"
    )
    return {
        "CXX": f"{os.environ.get('CXX') or 'c++'} -g",
        "FIB_CACHE_PATH": f"{cache}-lines",
    }


# --- in the worker


class Counted(Struct):
    """The cost of calls by the kernel's accounting, over all threads (getrusage):
    microseconds and counts, of all calls.
    """

    calls: int
    wall_us: float
    median_us: float
    user_us: float
    system_us: float
    minor: int  # page faults
    major: int
    voluntary: int  # switches to another thread
    involuntary: int


class Answer(Struct):
    """The answer of `inside`; for a run that only builds, just the first field."""

    built: bool = True
    counted: Counted | None = None
    cpus: int = 0
    torch_threads: int = 0
    pid: int = 0
    span: tuple[float, float] | None = None  # of the sampled calls, by time.monotonic()
    mapped: dict[str, int] = {}
    ops: torch_profiler.Profiled | None = None


def inside(
    target: Any,
    counted_s: float,
    sampled_s: float = 0.0,
    cache: str | None = None,
    ops: bool = False,
    why: str = "",
) -> Answer:
    """`why` is for `read`."""
    if not counted_s:
        return Answer(bool(target.kernel))
    import torch

    call = target.subject.call
    for _ in range(3):
        call()
    answer = Answer(
        counted=counted(call, counted_s),
        cpus=_cpus(),
        torch_threads=torch.get_num_threads(),
        pid=os.getpid(),
    )
    if sampled_s:
        began = time.monotonic()
        _calls(call, sampled_s)
        answer.span, answer.mapped = (began, time.monotonic()), _mapped(cache)
    if ops:
        answer.ops = torch_profiler.profiled(call, "cpu", _OPS_CALLS)
    return answer


def _mapped(cache: str | None) -> dict[str, int]:
    """Libraries of the build cache that are loaded here, and the address of the first
    byte of each.
    """
    found: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines() if cache else []:
        span, _, _, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith(f"{cache}/"):
            found.setdefault(path[0], int(span.partition("-")[0], 16))
    return found


def _cpus() -> int:
    """How many CPUs this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def _calls(call: Callable[[], Any], seconds: float) -> list[float]:
    """Call until the time is over, at least three times: microseconds of each call."""
    times: list[float] = []
    now = time.perf_counter_ns()
    end = now + int(seconds * 1e9)
    while len(times) < 3 or now < end:
        start = time.perf_counter_ns()
        call()
        now = time.perf_counter_ns()
        times.append((now - start) / 1e3)
    return times


def counted(call: Callable[[], Any], seconds: float) -> Counted:
    import resource

    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter_ns()
    times = _calls(call, seconds)
    wall_us, after = (
        (time.perf_counter_ns() - began) / 1e3,
        resource.getrusage(resource.RUSAGE_SELF),
    )
    return Counted(
        len(times),
        wall_us,
        statistics.median(times),
        (after.ru_utime - before.ru_utime) * 1e6,
        (after.ru_stime - before.ru_stime) * 1e6,
        after.ru_minflt - before.ru_minflt,
        after.ru_majflt - before.ru_majflt,
        after.ru_nvcsw - before.ru_nvcsw,
        after.ru_nivcsw - before.ru_nivcsw,
    )


# --- after the run


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    answer = [reply.answered(Answer) for reply in replies][-1]
    notes, tables = [], []
    if why := replies[-1].run.params["why"]:
        notes.append(f"no functions: {why}")
    else:
        sources = {Path(path).name: text for path, text in ask.sources.items()}
        spots = perf.read(folder, answer.pid, answer.span)
        tables += perf.tables(spots, perf.Code(answer.mapped, sources))
        if not tables:
            notes.append("no samples fell into the calls")
    if answer.ops:
        tables += torch_profiler.ops_table(answer.ops)
    watched = "" if why else ", under perf"
    return Reading(
        (Found("", _facts(ask, answer, watched), tuple(tables)),),
        tuple(notes),
        kept(folder, perf.DATA),
    )


def _facts(ask: Ask, answer: Answer, watched: str) -> tuple[Fact, ...]:
    """Figures per call. `watched`: by whom, in words."""
    seen = answer.counted
    calls, cpu_us = seen.calls, seen.user_us + seen.system_us
    moved = ask.bytes_in + ask.bytes_out
    threads = f"of {answer.cpus} CPUs, waiting awake counts too"
    if ask.language != "cpp":
        threads += f"; torch uses {answer.torch_threads} threads"
    return (
        facts.fact(
            "time_us", seen.median_us, f"wall, median of {calls} calls{watched}"
        ),
        facts.fact("cpu_us", cpu_us / calls),
        facts.fact("system_us", seen.system_us / calls),
        facts.fact("threads_busy", cpu_us / seen.wall_us, threads),
        facts.fact("rate", moved / seen.median_us / 1e3 if moved else None),
        facts.fact("faults_minor", seen.minor / calls),
        facts.fact("faults_major", seen.major / calls),
        facts.fact("switches_voluntary", seen.voluntary / calls),
        facts.fact("switches_forced", seen.involuntary / calls),
    )
