"""Where the time of a call on the CPU goes: threads, page faults, functions, source lines, and torch's ops.

Times and counts are of calls that nothing else looks at but perf, where it is there; functions come from perf's samples
of the same loop run again, ops from calls below torch.profiler.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import paths
from ..errors import MissingError
from ..machine.inventory import HERE, Machine
from . import Ask, Fact, Found, Reading, Reply, Run, kept, perf, torch_profiler

_COUNTED_S, _SAMPLED_S = 1.0, 2.5  # seconds of calls: counted, then sampled
_OPS_CALLS = 10


def find(machine: Machine = HERE) -> None:
    if os.name != "posix":
        raise MissingError(f"the cpu profile needs getrusage, which {sys.platform} has not", hint="run it on Linux")


def runs(ask: Ask, folder: Path) -> list[Run]:
    compiled, why = ask.solution["spec"]["language"] == "cpp", perf.missing()
    env = _with_lines() if compiled else {}
    params = {"do": "measure", "why": why, "ops": not compiled or why is not None}
    params |= {"counted_s": _COUNTED_S, "sampled_s": 0.0 if why else _SAMPLED_S, "cache": env.get("FIB_CACHE_PATH")}
    measure = Run("measure", () if why else perf.record(folder), env, params)
    # built first, so that no compiler is sampled
    return [Run("build", env=env, params={"do": "build"}), measure] if compiled else [measure]


def _with_lines() -> dict[str, str]:
    """An environment in which the builder compiles with -g, which changes no code, into a cache of its own."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    cache = os.environ.get("FIB_CACHE_PATH") or str(paths.builds_dir() / f"{python}-cpu")
    return {"CXX": f"{os.environ.get('CXX') or 'c++'} -g", "FIB_CACHE_PATH": f"{cache}-lines"}


# --- in the worker ------------------------------------------------------------------------------------------------


def inside(target: Any, params: dict[str, Any]) -> dict[str, Any]:
    if params["do"] == "build":
        return {"built": bool(target.kernel)}
    import torch

    call = target.subject.call
    for _ in range(3):
        call()
    answer: dict[str, Any] = {
        "counted": counted(call, params["counted_s"]),
        "cpus": _cpus(),
        "torch_threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }
    if params["sampled_s"]:
        began = time.monotonic()
        _calls(call, params["sampled_s"])
        answer |= {"span": [began, time.monotonic()], "mapped": _mapped(params["cache"])}
    if params["ops"]:
        answer["ops"] = torch_profiler.profiled(call, "cpu", _OPS_CALLS)
    return answer


def _mapped(cache: str | None) -> dict[str, int]:
    """Libraries of the build cache that are loaded here, and where the first byte of each lies."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines() if cache else []:
        span, _, _, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith(f"{cache}/"):
            found.setdefault(path[0], int(span.partition("-")[0], 16))
    return found


def _cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _calls(call: Callable[[], Any], seconds: float) -> list[float]:
    """Calls until the time is over, at least three: microseconds of each."""
    times: list[float] = []
    now = time.perf_counter_ns()
    end = now + int(seconds * 1e9)
    while len(times) < 3 or now < end:
        start = time.perf_counter_ns()
        call()
        now = time.perf_counter_ns()
        times.append((now - start) / 1e3)
    return times


_COUNTS = {"ru_minflt": "minor", "ru_majflt": "major", "ru_nvcsw": "voluntary", "ru_nivcsw": "involuntary"}


def counted(call: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """What calls cost by the kernel's books, of all threads (getrusage): wall and CPU microseconds, and counts."""
    import resource

    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter_ns()
    times = _calls(call, seconds)
    wall_us, after = (time.perf_counter_ns() - began) / 1e3, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "calls": len(times),
        "wall_us": wall_us,
        "median_us": statistics.median(times),
        "user_us": (after.ru_utime - before.ru_utime) * 1e6,
        "system_us": (after.ru_stime - before.ru_stime) * 1e6,
    } | {name: getattr(after, key) - getattr(before, key) for key, name in _COUNTS.items()}


# --- afterwards ---------------------------------------------------------------------------------------------------


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    for reply in replies:
        torch_profiler.answer_of(reply)
    answer, params = replies[-1].answer, replies[-1].run.params
    notes, tables = [], []
    if params["why"]:
        notes.append(f"no functions: {params['why']}")
    else:
        sources = {Path(s["path"]).name: s["content"] for s in ask.solution["sources"]}
        spots = perf.read(folder, answer["pid"], answer["span"])
        tables += perf.tables(spots, perf.Code(answer["mapped"], sources))
        if not tables:
            notes.append("no samples fell into the calls")
    if "ops" in answer:
        tables.append(torch_profiler.ops_table(answer["ops"]))
    found = Found("", tuple(facts(ask, answer)), tuple(tables))
    return Reading((found,), tuple(notes), kept(folder, perf.DATA))


def facts(ask: Ask, answer: dict[str, Any]) -> list[Fact]:
    """Figures per call."""
    seen = answer["counted"]
    calls, time_us = seen["calls"], seen["median_us"]
    cpu_us = seen["user_us"] + seen["system_us"]
    moved = ask.bytes_in + ask.bytes_out
    threads = f"of {answer['cpus']} CPUs, waiting awake counts too"
    if ask.solution["spec"]["language"] != "cpp":
        threads += f"; torch uses {answer['torch_threads']} threads"
    made = [
        Fact("time_us", "duration", time_us, "us", "time", f"wall, median of {calls} calls", "lower"),
        Fact("cpu_us", "CPU time", cpu_us / calls, "us", "time", "all threads, per call", "lower"),
        Fact("system_us", "CPU time in the kernel", seen["system_us"] / calls, "us", "time", "per call", "lower"),
        Fact("threads_busy", "threads busy", cpu_us / seen["wall_us"], "x", "time", threads),
        Fact("rate", "rate", moved / time_us / 1e3 if moved else None, "GB/s", "memory", "each tensor once", "higher"),
    ]
    for key, label, name, note in (
        ("faults_minor", "page faults, minor", "minor", "new or unmapped pages"),
        ("faults_major", "page faults, major", "major", "read from disk"),
        ("switches_voluntary", "switches, waiting", "voluntary", "a thread went to sleep"),
        ("switches_forced", "switches, forced", "involuntary", "another thread took the CPU"),
    ):
        group = "memory" if name in ("minor", "major") else "threads"
        made.append(Fact(key, label, seen[name] / calls, "count", group, f"per call: {note}", "lower"))
    return made
