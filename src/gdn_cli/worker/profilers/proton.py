"""Triton's profiler: kernel times of a call from CUPTI's records, and samples of the
program counter.

There are two processes, because taking samples slows the kernels down: "times", then
"samples". Both leave a .hatchet file, a tree in JSON, which `proton-viewer` shows. The
tree keeps only sums, so times are means.

Sources: triton's third_party/proton, versions 3.4 to 3.9. Source lines used to be named
"file:function@line", now "file:line@function". Before 3.5 there are no samples here: a
backend of its own took them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...errors import GdnError, MissingError, one_line
from ...machine.inventory import HERE, Machine
from ...parsing import Json
from . import (
    Ask,
    Fact,
    Found,
    Reading,
    Reply,
    Run,
    Table,
    facts,
    files_in,
    source_line,
    stalls,
    symbols,
    turns,
)

_CALLS, _SAMPLED = 100, 300
# for each process, from the first call on
_SECONDS = 10.0
# scopes
_CALL, _BEFORE = "call", "flush"
# lines of a table
_MOST = 15


def find(machine: Machine = HERE) -> None:
    if not machine.has_package("triton"):
        raise MissingError("triton is missing: no proton", hint="pip install triton")


def runs(ask: Ask, folder: Path) -> list[Run]:
    """`path` is without the suffix, which proton appends."""
    times = {"path": str(folder / "times"), "calls": _CALLS, "mode": None}
    samples = {"path": str(folder / "samples"), "calls": _SAMPLED, "mode": "pcsampling"}
    return [Run("times", params=times), Run("samples", params=samples)]


# --- in the worker


class Answer(Struct):
    """The answer of `inside`; `failed`: why proton cannot start."""

    calls: int
    failed: str | None = None


def inside(target: Any, path: str, calls: int, mode: str | None) -> Answer:
    import torch

    try:
        import triton.profiler as proton
    except (ImportError, OSError) as e:
        raise MissingError(
            f"triton.profiler cannot be imported ({e})", hint="pip install -U triton"
        ) from None
    from ..timing.kernels import Flush

    call = target.subject.call
    prepare = call if target.l2 == "warm" else Flush()
    options = {"mode": mode} if mode else {}
    # before the first call: proton knows the source lines only of later loads and
    # graphs
    try:
        proton.start(path, context="shadow", backend="cupti", **options)
    # not supported by this Triton, driver or GPU
    except (RuntimeError, TypeError, ValueError) as e:
        return Answer(0, one_line(e))
    for _ in range(3):
        prepare()
        call()
    torch.cuda.synchronize()
    answer = Answer(0)
    try:
        for _ in turns(calls, _SECONDS, least=10):
            with proton.scope(_BEFORE):
                prepare()
            with proton.scope(_CALL):
                call()
            answer.calls += 1
            # so that the clock measures finished work, not queued work
            if answer.calls % 10 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
    finally:
        proton.finalize()
    return answer


# --- after the run


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    times, samples = replies
    answer = times.answered(Answer)
    if answer.failed:
        raise MissingError(
            f"proton cannot start: {answer.failed}",
            hint="`gdn profile --tool torch` times kernels too",
        )
    kernels = load(folder / "times.hatchet")
    if not kernels:
        raise MissingError(
            "proton saw no kernel of the call",
            hint="another profiler may hold CUPTI in this process: run without it",
        )
    try:
        failed = samples.answered(Answer).failed
    except GdnError as e:
        failed = e.message
    sampled = {} if failed else load(folder / "samples.hatchet")
    notes = ["times are means: proton keeps sums only"]
    if not any(kernel.reasons for kernel in sampled.values()):
        reason = failed or "none fell into the call"
        notes.append(f"no samples of the program counter: {reason}")
    findings = []
    total_ns = sum(kernel.ns for kernel in kernels.values())
    if len(kernels) > 1:
        time_note = f"all kernels, mean of {answer.calls} calls"
        launches = sum(kernel.count for kernel in kernels.values()) / answer.calls
        time = facts.fact("time_us", total_ns / answer.calls / 1e3, time_note)
        findings.append(Found("", (time, facts.fact("launches", launches, "per call"))))
    sources = {Path(path).name: text for path, text in ask.sources.items()}
    for name, kernel in sorted(kernels.items(), key=lambda item: -item[1].ns):
        tables = sampled.get(name, Kernel()).tables(sources)
        figures = kernel.facts(answer.calls, total_ns)
        findings.append(Found(name, tuple(figures), tuple(tables)))
    names = files_in(folder, "times.hatchet", "samples.hatchet")
    return Reading(tuple(findings), tuple(notes), names)


@dataclass
class Kernel:
    """A tree's values for one kernel: launches, nanoseconds, samples by stall reason
    and by source line.
    """

    count: int = 0
    ns: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    lines: dict[tuple[str, int], Counter[str]] = field(default_factory=dict)

    def facts(self, calls: int, total_ns: int) -> list[Fact]:
        mean_us = self.ns / self.count / 1e3 if self.count else None
        return [
            facts.fact("time_us", mean_us, f"mean of {self.count} launches"),
            facts.fact("share", 100 * self.ns / total_ns if total_ns else None),
            facts.fact("launches", self.count / calls, "per call"),
        ]

    def tables(self, sources: dict[str, str]) -> list[Table]:
        total = self.reasons.total()
        reasons = []
        for reason, n in self.reasons.most_common():
            words = stalls.texts(reason)
            reasons.append((words.label, 100 * n / total, n, words.meaning))
        hot = []
        ranked = sorted(self.lines.items(), key=lambda item: -item[1].total())
        for (path, line), waits in ranked[:_MOST]:
            file, share = Path(path).name, 100 * waits.total() / total
            text = source_line(sources, file, line)
            hot.append((f"{file}:{line}", share, stalls.main(waits), text))
        return [*facts.table("samples", reasons), *facts.table("hot", hot)]


class Frame(Struct, frozen=True):
    name: str = ""


class Node(Struct):
    """A node of the tree. Each has only its own part: a kernel's figures do not include
    its lines.
    """

    # the last root, which describes the device, has none
    frame: Frame = Frame()
    children: list[Node] = []
    metrics: Json = {}


def load(path: Path) -> dict[str, Kernel]:
    """The kernels under the calls' scope in a .hatchet file, by their short names; none
    if there is no file.
    """
    if not path.is_file():
        return {}
    try:
        tree = msgspec.json.decode(path.read_bytes(), type=list[Node])
    except msgspec.DecodeError:
        raise GdnError(
            f"{path.name} is not valid: proton was stopped while writing it"
        ) from None
    kernels: dict[str, Kernel] = {}
    for root in tree:
        for scope in root.children:
            if scope.frame.name == _CALL:
                _collect(scope, kernels, Kernel())
    return {name: k for name, k in kernels.items() if k.count or k.ns or k.reasons}


def _collect(node: Node, kernels: dict[str, Kernel], parent: Kernel) -> None:
    """Add up everything under a node, which is a part of `parent`: a source line of a
    kernel, or else a kernel or something that has no figures.
    """
    for child in node.children:
        metrics = child.metrics
        reasons = {
            key: int(n)
            for key, n in metrics.items()
            if key.startswith("stalled_") and n
        }
        if line := _line(child.frame.name):
            kernel = parent
            kernel.lines.setdefault(line, Counter()).update(reasons)
        else:
            kernel = kernels.setdefault(symbols.short(child.frame.name), Kernel())
            kernel.count += int(metrics.get("count", 0))
            kernel.ns += int(metrics.get("time (ns)", 0))
        kernel.reasons.update(reasons)
        _collect(child, kernels, kernel)


def _line(name: str) -> tuple[str, int] | None:
    """(file, line) of a source line's node, in either of proton's spellings."""
    for spelling in (r"(.+):(\d+)@.*", r"(.+?):[^:@]*@(\d+)"):
        if match := re.fullmatch(spelling, name):
            return match[1], int(match[2])
    return None
