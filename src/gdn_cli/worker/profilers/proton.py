"""Triton's profiler: kernel times of a call from CUPTI's records, and samples of the
program counter.

There are two processes, because taking samples slows the kernels down: "times", then
"samples". Both leave a .hatchet file, a tree in JSON, which `proton-viewer` shows. The
tree keeps only sums, so times are means.

Sources: triton's third_party/proton, versions 3.4 to 3.9. Source lines used to be named
"file:function@line", now "file:line@function"; `mode` was added to `proton.start` when
"cupti_pcsampling" was removed as a backend.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
from msgspec import Struct

from ...errors import GdnError, MissingError
from ...machine.inventory import HERE, Machine
from . import (
    Ask,
    Fact,
    Found,
    Reading,
    Reply,
    Run,
    Table,
    facts,
    kept,
    source_line,
    stalls,
    symbols,
)

_CALLS, _SAMPLED = 100, 300
_SECONDS = 10.0  # for each process, from the first call on
_CALL, _BEFORE = "call", "flush"  # scopes
_MOST = 15  # lines of a table


def find(machine: Machine = HERE) -> None:
    spec = importlib.util.find_spec("triton")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "profiler" / "__init__.py").is_file() and any(
            (Path(place) / "_C").glob("libproton*")
        ):
            return
    what = (
        "the installed triton was built without its profiler"
        if spec
        else "triton is missing"
    )
    raise MissingError(f"{what}: no proton", hint="pip install 'triton>=3.4'")


def runs(ask: Ask, folder: Path) -> list[Run]:
    """`path` is without the suffix, which proton appends."""
    return [
        Run(
            "times",
            params={"path": str(folder / "times"), "calls": _CALLS, "mode": None},
        ),
        Run(
            "samples",
            params={
                "path": str(folder / "samples"),
                "calls": _SAMPLED,
                "mode": "pcsampling",
            },
        ),
    ]


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
    before = call if target.l2 == "warm" else Flush()
    # before the first call: proton knows the source lines only of later loads and
    # graphs
    try:
        _start(proton, path, mode)
    # not supported by this Triton, driver or GPU
    except (RuntimeError, TypeError, ValueError) as e:
        return Answer(0, str(e).splitlines()[0] if str(e) else type(e).__name__)
    for _ in range(3):
        before()
        call()
    torch.cuda.synchronize()
    done, began = 0, perf_counter()
    try:
        while done < calls and (done < 10 or perf_counter() - began < _SECONDS):
            with proton.scope(_BEFORE):
                before()
            with proton.scope(_CALL):
                call()
            done += 1
            if done % 10 == 0:
                # so that the clock measures finished work, not queued work
                torch.cuda.synchronize()
        torch.cuda.synchronize()
    finally:
        proton.finalize()
    return Answer(done)


def _start(proton: Any, path: str, mode: str | None) -> None:
    """proton.start with this Triton's parameters."""
    if mode and "mode" in inspect.signature(proton.start).parameters:
        proton.start(path, context="shadow", backend="cupti", mode=mode)
    else:
        proton.start(
            path, context="shadow", backend=f"cupti_{mode}" if mode else "cupti"
        )


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
            hint=(
                "another profiler may hold CUPTI in this process: run without nsys, ncu or"
                " compute-sanitizer"
            ),
        )
    sampled: dict[str, Kernel] = {}
    if reason := _no_samples(samples):
        note = f"no samples of the program counter: {reason}"
    else:
        sampled = load(folder / "samples.hatchet")
        note = "no samples of the program counter fell into the call"
        if any(kernel.samples for kernel in sampled.values()):
            note = (
                "samples: proton slows kernels down while it takes them; times are from a run"
                " without"
            )
    total_ns = sum(kernel.ns for kernel in kernels.values())
    launches = sum(kernel.count for kernel in kernels.values())
    whole = (
        facts.fact(
            "time_us",
            total_ns / answer.calls / 1e3,
            f"all kernels, mean of {answer.calls} calls",
        ),
        facts.fact("launches", launches / answer.calls, "per call"),
    )
    sources = {Path(path).name: text for path, text in ask.sources.items()}
    found = [Found("", whole)] if len(kernels) > 1 else []
    for name, kernel in sorted(kernels.items(), key=lambda item: -item[1].ns):
        tables = sampled.get(name, Kernel()).tables(sources)
        found.append(Found(name, kernel.facts(answer.calls, total_ns), tuple(tables)))
    notes = ("times are means: proton keeps sums only", note)
    return Reading(
        tuple(found), notes, kept(folder, "times.hatchet", "samples.hatchet")
    )


def _no_samples(reply: Reply) -> str | None:
    """Why the second run has no samples; None if it may have some."""
    try:
        return reply.answered(Answer).failed
    except GdnError as e:
        return e.message


class Kernel:
    """A tree's values for one kernel: launches, nanoseconds, samples by stall reason
    and by source line.
    """

    def __init__(self) -> None:
        self.count, self.ns, self.samples = 0, 0, 0
        self.reasons: Counter[str] = Counter()
        self.lines: dict[tuple[str, int], Counter[str]] = {}

    def facts(self, calls: int, total_ns: int) -> tuple[Fact, ...]:
        each = self.ns / self.count / 1e3 if self.count else None
        return (
            facts.fact("time_us", each, f"mean of {self.count} launches"),
            facts.fact("share", 100 * self.ns / total_ns if total_ns else None),
            facts.fact("launches", self.count / calls, "per call"),
        )

    def tables(self, sources: dict[str, str]) -> list[Table]:
        total = self.reasons.total()
        reasons = (
            (stalls.of(reason).label, 100 * n / total, n, stalls.of(reason).meaning)
            for reason, n in self.reasons.most_common()
            if n
        )
        ranked = sorted(self.lines.items(), key=lambda item: -item[1].total())
        hot = (
            (
                f"{Path(file).name}:{line}",
                100 * at.total() / total,
                stalls.main(at),
                _text(sources, file, line),
            )
            for (file, line), at in ranked[:_MOST]
            if at.total()
        )
        note = (
            f"{self.samples} samples of warps; proton has no count of warps that were ready and"
            " not selected"
        )
        return [*facts.table("samples", reasons, note), *facts.table("hot", hot)]


def _text(sources: dict[str, str], file: str, line: int) -> str:
    return source_line(sources, Path(file).name, line)


class Frame(Struct, frozen=True):
    name: str = ""


class Node(Struct):
    """A node of the tree. Each has only its own part: a kernel's figures do not include
    its lines.
    """

    frame: Frame = Frame()  # the last root, which describes the device, has none
    children: list[Node] = []
    metrics: dict[str, int | float | str | None] = {}


def load(path: Path) -> dict[str, Kernel]:
    """The kernels under the calls' scope in a .hatchet file, by their short names; none
    if there is no file.
    """
    try:
        tree = msgspec.json.decode(path.read_bytes(), type=list[Node])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError:
        raise GdnError(
            f"{path.name} is not valid: proton was stopped while writing it"
        ) from None
    found: dict[str, Kernel] = {}
    for scope in (
        scope for root in tree for scope in root.children if scope.frame.name == _CALL
    ):
        _collect(scope, found, None)
    return {
        name: kernel
        for name, kernel in found.items()
        if kernel.count or kernel.ns or kernel.samples
    }


def _collect(node: Node, found: dict[str, Kernel], kernel: Kernel | None) -> None:
    """Add up everything under a node."""
    for child in node.children:
        line, mine = _line(child.frame.name), kernel
        if line is None and (
            child.metrics or any(_line(c.frame.name) for c in child.children)
        ):
            mine = found.setdefault(symbols.short(child.frame.name), Kernel())
        if mine is not None:
            _add(mine, child.metrics, line)
        _collect(child, found, mine)


def _add(
    kernel: Kernel,
    metrics: dict[str, int | float | str | None],
    line: tuple[str, int] | None,
) -> None:
    if line is None:
        kernel.count += int(metrics.get("count", 0))
        kernel.ns += int(metrics.get("time (ns)", 0))
    kernel.samples += int(metrics.get("num_samples", 0))
    reasons = {key: int(n) for key, n in metrics.items() if key.startswith("stalled_")}
    kernel.reasons.update(reasons)
    if line and reasons:
        kernel.lines.setdefault(line, Counter()).update(reasons)


def _line(name: str) -> tuple[str, int] | None:
    """(file, line) of a source line's node, in either of proton's spellings."""
    if m := re.fullmatch(r"(.+):(\d+)@.*", name) or re.fullmatch(
        r"(.+?):[^:@]*@(\d+)", name
    ):
        return m[1], int(m[2])
    return None
