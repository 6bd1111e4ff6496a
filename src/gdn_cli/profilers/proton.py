"""Triton's profiler: kernel times of a call from CUPTI's records, and samples of the program counter.

Two processes, since the samples slow the kernels down and their times with it: "times", then "samples". Both leave a
.hatchet file, a tree in JSON, which `proton-viewer` shows. The tree keeps sums: a mean is all there is of a time.

Sources: triton's third_party/proton, of 3.4 to 3.9. The names of source lines were "file:function@line" before they
were "file:line@function"; `mode` came to `proton.start` when "cupti_pcsampling" ceased to be a backend.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import GdnError, MissingError
from ..machine.inventory import HERE, Machine
from . import Ask, Fact, Found, Reading, Reply, Run, Table, kept, source_line, stalls, symbols, torch_profiler

_CALLS, _SAMPLED = 100, 300
_SECONDS = 10.0  # for either, from the first call on
_CALL, _BEFORE = "call", "flush"  # scopes
_MOST = 15  # lines of a table


def find(machine: Machine = HERE) -> None:
    spec = importlib.util.find_spec("triton")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "profiler" / "__init__.py").is_file() and any((Path(place) / "_C").glob("libproton*")):
            return
    what = "the installed triton was built without its profiler" if spec else "triton is missing"
    raise MissingError(f"{what}: no proton", hint="pip install 'triton>=3.4'")


def runs(ask: Ask, folder: Path) -> list[Run]:
    """`path` is without the suffix, which proton appends."""
    return [
        Run("times", params={"path": str(folder / "times"), "calls": _CALLS, "mode": None}),
        Run("samples", params={"path": str(folder / "samples"), "calls": _SAMPLED, "mode": "pcsampling"}),
    ]


# --- in the worker ------------------------------------------------------------------------------------------------


def inside(target: Any, params: dict[str, Any]) -> dict[str, Any]:
    import time

    import torch

    try:
        import triton.profiler as proton
    except (ImportError, OSError) as e:
        raise MissingError(f"triton.profiler cannot be imported ({e})", hint="pip install -U triton") from None
    from ..timing.kernels import Flush

    call = target.subject.call
    before = call if target.l2 == "warm" else Flush()
    try:  # before the first call: proton knows the source lines of what is loaded, and the graphs made, from here on
        _start(proton, params["path"], params["mode"])
    except (RuntimeError, TypeError, ValueError) as e:  # what this Triton, driver or GPU cannot do
        return {"calls": 0, "failed": str(e).splitlines()[0] if str(e) else type(e).__name__}
    for _ in range(3):
        before()
        call()
    torch.cuda.synchronize()
    calls, began = 0, time.perf_counter()
    try:
        while calls < params["calls"] and (calls < 10 or time.perf_counter() - began < _SECONDS):
            with proton.scope(_BEFORE):
                before()
            with proton.scope(_CALL):
                call()
            calls += 1
            if calls % 10 == 0:
                torch.cuda.synchronize()  # so that the clock sees what has been done, not what has been queued
        torch.cuda.synchronize()
    finally:
        proton.finalize()
    return {"calls": calls, "failed": None}


def _start(proton: Any, path: str, mode: str | None) -> None:
    """proton.start in this Triton's words."""
    import inspect

    more = {}
    if mode and "mode" in inspect.signature(proton.start).parameters:
        more["mode"] = mode
    backend = f"cupti_{mode}" if mode and not more else "cupti"
    proton.start(path, context="shadow", backend=backend, **more)


# --- afterwards ---------------------------------------------------------------------------------------------------


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    times, samples = replies
    answer = torch_profiler.answer_of(times)
    if answer["failed"]:
        raise MissingError(
            f"proton cannot start: {answer['failed']}", hint="`gdn profile --tool torch` times kernels too"
        )
    kernels = load(folder / "times.hatchet")
    if not kernels:
        raise MissingError(
            "proton saw no kernel of the call",
            hint="another profiler may hold CUPTI in this process: run without nsys, ncu or compute-sanitizer",
        )
    notes = ["times are means: proton keeps sums only"]
    sampled: dict[str, Kernel] = {}
    if reason := _no_samples(samples):
        notes.append(f"no samples of the program counter: {reason}")
    else:
        sampled = load(folder / "samples.hatchet")
        if not any(kernel.samples for kernel in sampled.values()):
            notes.append("no samples of the program counter fell into the call")
        else:
            notes.append("samples: proton slows kernels down while it takes them; times are from a run without")
    total_ns = sum(kernel.ns for kernel in kernels.values())
    launches = sum(kernel.count for kernel in kernels.values())
    calls = answer["calls"]
    whole = (
        Fact(
            "time_us", "duration", total_ns / calls / 1e3, "us", "time", f"all kernels, mean of {calls} calls", "lower"
        ),
        Fact("launches", "launches", launches / calls, "count", "launch", "per call", "lower"),
    )
    sources = {Path(s["path"]).name: s["content"] for s in ask.solution["sources"]}
    found = [Found("", whole)] if len(kernels) > 1 else []
    for name, kernel in sorted(kernels.items(), key=lambda item: -item[1].ns):
        more = sampled.get(name)
        found.append(Found(name, kernel.facts(calls, total_ns), tuple(more.tables(sources)) if more else ()))
    return Reading(tuple(found), tuple(notes), kept(folder, "times.hatchet", "samples.hatchet"))


def _no_samples(reply: Reply) -> str | None:
    """Why the second run has none, None where it may have some."""
    try:
        return torch_profiler.answer_of(reply)["failed"]
    except GdnError as e:
        return e.message


class Kernel:
    """What a tree holds of one kernel: launches, nanoseconds, samples by stall reason, and those by source line."""

    def __init__(self) -> None:
        self.count, self.ns, self.samples = 0, 0, 0
        self.reasons: dict[str, int] = {}
        self.lines: dict[tuple[str, int], dict[str, int]] = {}

    def facts(self, calls: int, total_ns: int) -> tuple[Fact, ...]:
        each = self.ns / self.count / 1e3 if self.count else None
        share = 100 * self.ns / total_ns if total_ns else None
        return (
            Fact("time_us", "duration", each, "us", "time", f"mean of {self.count} launches", "lower"),
            Fact("share", "share of the call", share, "%", "time"),
            Fact("launches", "launches", self.count / calls, "count", "launch", "per call", "lower"),
        )

    def tables(self, sources: dict[str, str]) -> Iterator[Table]:
        total = sum(self.reasons.values())
        if not total:
            return
        rows = [
            (stalls.label(reason), 100 * n / total, n, stalls.meaning(reason))
            for reason, n in sorted(self.reasons.items(), key=lambda item: -item[1])
            if n
        ]
        columns = (("reason", ""), ("share", "%"), ("samples", "count"), ("meaning", ""))
        note = f"{self.samples} samples of warps; proton has no count of warps that were ready and not selected"
        yield Table("samples", "what the warps did when sampled", columns, tuple(rows), note)
        if self.lines:
            columns = (("where", ""), ("share", "%"), ("main stall", ""), ("source", ""))
            note = "of all samples of the kernel"
            yield Table("hot", "hot lines", columns, tuple(self._hot(total, sources)), note)

    def _hot(self, total: int, sources: dict[str, str]) -> Iterator[tuple[Any, ...]]:
        ranked = sorted(self.lines.items(), key=lambda item: -sum(item[1].values()))
        for (file, line), reasons in ranked[:_MOST]:
            n = sum(reasons.values())
            if not n:
                continue
            source = source_line(sources, Path(file).name, line)
            yield f"{Path(file).name}:{line}", 100 * n / total, stalls.main(reasons), source


def load(path: Path) -> dict[str, Kernel]:
    """The kernels below the calls' scope in a .hatchet file, by their short names; none where there is no file."""
    try:
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise GdnError(f"{path.name} is no JSON: proton was stopped while it wrote it") from None
    found: dict[str, Kernel] = {}
    for root in tree:
        if "frame" in root:  # the last entry tells of the device
            for scope in root["children"]:
                if scope["frame"]["name"] == _CALL:
                    _collect(scope, found, None)
    return {name: kernel for name, kernel in found.items() if kernel.count or kernel.ns or kernel.samples}


def _collect(node: dict[str, Any], found: dict[str, Kernel], kernel: Kernel | None) -> None:
    """Add up what is below a node. Each has its own part only: a kernel's lines are not in the kernel's figures."""
    for child in node["children"]:
        name, metrics = child["frame"]["name"], child["metrics"]
        line, mine = _line(name), kernel
        if line is None and (metrics or any(_line(c["frame"]["name"]) for c in child["children"])):
            mine = found.setdefault(symbols.short(name), Kernel())
        if mine is not None:
            _add(mine, metrics, line)
        _collect(child, found, mine)


def _add(kernel: Kernel, metrics: dict[str, Any], line: tuple[str, int] | None) -> None:
    if line is None:
        kernel.count += int(metrics.get("count", 0))
        kernel.ns += int(metrics.get("time (ns)", 0))
    kernel.samples += int(metrics.get("num_samples", 0))
    for key, n in metrics.items():
        if key.startswith("stalled_"):
            kernel.reasons[key] = kernel.reasons.get(key, 0) + int(n)
            if line:
                at = kernel.lines.setdefault(line, {})
                at[key] = at.get(key, 0) + int(n)


def _line(name: str) -> tuple[str, int] | None:
    """(file, line) of a source line's node, in either of proton's spellings."""
    if m := re.fullmatch(r"(.+):(\d+)@.*", name) or re.fullmatch(r"(.+?):[^:@]*@(\d+)", name):
        return m[1], int(m[2])
    return None
