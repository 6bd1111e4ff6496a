"""Profilers: one file per tool (TOOLS says what each is for), around one small target process.

A tool's module has

    find(machine)              raises MissingError, with the fix, if the tool is not available here
    runs(ask, folder)          the target processes that it needs, in order
    inside(target, **params)   the work of a target process: called in the worker, which
      runs under the tool
    read(ask, folder, replies) the results; `replies` are inside's answers, in the order of `runs`

Only `inside` and what it calls import torch. Nothing here starts a process:
profile/session.py does.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import msgspec

from ...catalog.formats import Solution
from ...errors import FAILED, GdnError
from ...machine.inventory import HERE, Machine
from ...parsing import Json
from ...schema.profile_types import Fact, Found, Reading, Table

__all__ = [
    "TOOLS",
    "Ask",
    "Fact",
    "Found",
    "Reading",
    "Reply",
    "Run",
    "Table",
    "Tool",
    "files_in",
    "module",
    "source_line",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Tool:
    """A tool's purpose, and the modes in which an algo can run under it (none: it only
    compiles).
    """

    summary: str
    modes: tuple[str, ...]
    # its figures are times: it waits for other timings on the GPU
    timed: bool = True


TOOLS = {
    "ncu": Tool("counters, stalls and hot lines, by Nsight Compute", ("cuda",)),
    "proton": Tool(
        "kernel times and samples of the program counter, by Triton's profiler",
        ("cuda",),
    ),
    "torch": Tool(
        "what a call does on the host and on the GPU, by torch.profiler",
        ("cuda", "cpu"),
    ),
    "sanitizer": Tool(
        "memory faults and races, by compute-sanitizer", ("cuda",), timed=False
    ),
    "sass": Tool("registers, spills and machine code, compiled only", (), timed=False),
    "cpu": Tool("where a CPU algo's time goes", ("cpu",)),
}


def module(tool: str) -> Any:
    """The module of a tool."""
    # a module named torch would be confused with `import torch`
    name = "torch_profiler" if tool == "torch" else tool
    return importlib.import_module(f".{name}", __package__)


@dataclass(frozen=True)
class Ask:
    """What to profile, and how."""

    solution: Solution
    l2: str = "cold"
    # ncu's --clock-control: none leaves the clocks alone, base locks them
    clocks: str = "none"
    # sass: sm_90a, ...
    archs: tuple[str, ...] = ()
    # sanitizer: memcheck, ...
    checks: tuple[str, ...] = ()
    # bytes that the op must read and write at this workload, each tensor once
    bytes_in: int = 0
    bytes_out: int = 0
    # built for all features of its GPU (executor/build.py)
    specific: bool = False
    machine: Machine = HERE

    @property
    def language(self) -> str:
        return self.solution["spec"]["language"]

    @property
    def sources(self) -> dict[str, str]:
        """Path -> text."""
        return {
            source["path"]: source["content"] for source in self.solution["sources"]
        }


@dataclass(frozen=True)
class Run:
    """One target process: the tool's command line before the worker's, its environment,
    and the parameters of `inside`.
    """

    name: str
    wrap: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    params: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """The outcome of a run. `status`: done, or what happened to a worker that left no
    answer (as in jobs.Outcome).
    """

    run: Run
    status: str
    reason: str | None = None
    # the result of `inside`, as JSON
    answer: Any = None
    # last lines of the process's output
    tail: tuple[str, ...] = ()
    # the exit code, if `inside` was refused
    code: int | None = None

    def partial(self, form: type[T]) -> T:
        """The answer; without one, all its fields have their defaults."""
        return msgspec.convert(self.answer or {}, form)

    def answered(self, form: type[T]) -> T:
        """The answer; GdnError with the reason in one line if there is none."""
        if self.status == "done" and self.answer:
            return self.partial(form)
        reason = (self.reason or self.status).strip().splitlines()[0]
        if self.tail and self.code is None:
            reason += f" ({self.tail[-1][:200]})"
        message = f"the algo's process under the profiler ({self.run.name}): {reason}"
        raise GdnError(message, code=self.code or FAILED)


def turns(most: int, seconds: float, least: int = 1) -> Iterator[int]:
    """Count up to `most`; after `least` only until the time is over."""
    began = perf_counter()
    for i in range(most):
        if i >= least and perf_counter() - began >= seconds:
            return
        yield i


def files_in(folder: Path, *names: str) -> tuple[str, ...]:
    """Those of the names that are files in the folder."""
    return tuple(name for name in names if (folder / name).is_file())


def log_text(path: Path) -> str:
    """The text of a tool's log; "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def source_line(sources: Mapping[str, str], file: str, line: int) -> str:
    """A line of one of the sources' texts, with single spaces; "" if there is none."""
    lines = sources.get(file, "").splitlines()
    return " ".join(lines[line - 1].split()) if 0 < line <= len(lines) else ""
