"""Tool `nsys`: what a call does on the host and on the GPU, on one time line, by Nsight Systems.

The calls are those of `gdn bench`: each after a write of all of L2 (or none), which
also hides the host's part. Each is an NVTX range, so its API calls and, through their
correlation ids, the GPU work that they started can be told apart: the flush and the
waiting between calls are in no figure.

nsys writes to stdout, where the target process writes its reply: a shell separates the
two with files.

Formats: the reports cuda_gpu_trace, cuda_api_trace and nvtx_pushpop_trace of `nsys
stats` as CSV, named so since 2023.1: docs.nvidia.com/nsight-systems, "Statistical
Reports Shipped With Nsight Systems".
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ...errors import MissingError
from ...machine.inventory import HERE, Machine
from . import (
    Ask,
    Found,
    Reading,
    Reply,
    Run,
    facts,
    kept,
    log_text,
    tools,
    torch_profiler,
)

CALLS = 50
GET_NSYS = (
    "install Nsight Systems (the package nsight-systems-cli of NVIDIA's repository), or put nsys"
    " on PATH"
)

_RANGE = "gdn_call"
_REPORTS = ("cuda_gpu_trace", "cuda_api_trace", "nvtx_pushpop_trace")
_STATS_S = 120.0

_OPTIONS = (
    "--trace=cuda,nvtx",
    "--sample=none",  # these two need permissions that a user seldom has
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",  # a graph's kernels one by one
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--force-overwrite=true",
)
# the request and the reply go through files: nsys may read the one and writes into the other
_APART = """
tool=$1 folder=$2; shift 2
cat > "$folder/.request"
"$tool" profile {options} --output="$folder/report" \\
  sh -c 'folder=$1; shift; exec "$@" < "$folder/.request" > "$folder/.reply"' \\
  target "$folder" "$@" < /dev/null > "$folder/nsys.log"
code=$?
cat "$folder/.reply"
rm -f "$folder/.request" "$folder/.reply"
exit $code
"""


def find(machine: Machine = HERE) -> None:
    """MissingError if nsys is not installed."""
    _nsys(machine)


def _nsys(machine: Machine = HERE) -> str:
    return tools.first(
        "nsys",
        "nsight-systems/*/bin/nsys",
        "nsight-systems-cli/*/bin/nsys",
        hint=GET_NSYS,
        machine=machine,
    )


def runs(ask: Ask, folder: Path) -> list[Run]:
    script = _APART.format(options=" ".join(_OPTIONS))
    return [
        Run(
            "trace",
            ("sh", "-c", script, "nsys", _nsys(ask.machine), str(folder)),
            params={"calls": CALLS},
        )
    ]


def inside(target: Any, calls: int) -> dict[str, int]:
    """The calls between the profiler's start and stop, each in its own range."""
    import torch

    from ..timing.kernels import Flush

    before: Callable[[], Any] = Flush() if target.l2 == "cold" else lambda: None

    def some(count: int) -> None:
        for _ in range(count):
            before()
            torch.cuda.nvtx.range_push(_RANGE)
            target.subject.call()
            torch.cuda.nvtx.range_pop()
            torch.cuda.synchronize()

    some(3)
    torch.cuda.cudart().cudaProfilerStart()
    some(calls)
    torch.cuda.cudart().cudaProfilerStop()
    return {"calls": calls}


# --- reports


@dataclass(frozen=True)
class Event:
    """A range, an API call or a piece of work on the GPU. Times in nanoseconds."""

    name: str
    start: int
    ns: int
    correlation: str = ""
    megabytes: float | None = None

    @property
    def end(self) -> int:
        return self.start + self.ns

    @property
    def kernel(self) -> bool:
        return not self.name.startswith("[CUDA ")


@dataclass
class Call:
    """One call: its range on the host, and the work started in it."""

    range: Event
    api: list[Event]
    gpu: list[Event]

    @property
    def kernels(self) -> list[Event]:
        return [e for e in self.gpu if e.kernel]

    @property
    def copies(self) -> list[Event]:
        return [e for e in self.gpu if not e.kernel]

    @property
    def busy_ns(self) -> int:
        return torch_profiler.busy((e.start, e.ns) for e in self.gpu)

    @property
    def span_ns(self) -> int:
        return (
            max(e.end for e in self.gpu) - min(e.start for e in self.gpu)
            if self.gpu
            else 0
        )


def _events(folder: Path, report: str) -> list[Event]:
    """A report's rows, without nsys's output before the header. Raises MissingError."""
    path = folder / f"report_{report}.csv"
    lines = path.read_text(errors="replace").splitlines()
    start = next(
        (
            i
            for i, line in enumerate(lines)
            if line.lstrip('"').startswith("Start (ns)")
        ),
        None,
    )
    if start is None:
        raise MissingError(
            f"nsys: nothing in {path.name}",
            hint="the calls were not seen; nsys.log may say why",
        )
    try:
        return [
            _event(row) for row in csv.DictReader(lines[start:]) if row["Duration (ns)"]
        ]
    except KeyError as e:
        raise MissingError(
            f"nsys: {path.name} has no column {e}",
            hint=f"another version may; {GET_NSYS}",
        ) from None


def _event(row: dict[str, str]) -> Event:
    start, ns, size = (
        (row.get(key) or "").replace(",", "")
        for key in ("Start (ns)", "Duration (ns)", "Bytes (MB)")
    )
    # in the API's report, in the GPU's
    number = row.get("CorrID") or row.get("CorrId") or ""
    return Event(
        row["Name"].lstrip(":"),
        round(float(start)),
        round(float(ns)),
        number,
        float(size) if size else None,
    )


def calls(folder: Path) -> list[Call]:
    """The calls of the reports in the folder, in order."""
    gpu, api, ranges = (_events(folder, report) for report in _REPORTS)
    found = sorted(
        (Call(r, [], []) for r in ranges if r.name == _RANGE),
        key=lambda call: call.range.start,
    )
    work = defaultdict(list)
    for e in gpu:
        work[e.correlation].append(e)
    for e in api:
        call = next((c for c in found if c.range.start <= e.start <= c.range.end), None)
        if call is not None:
            call.api.append(e)
            call.gpu += work.get(e.correlation, [])
    return found


# --- reading


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """Raises MissingError if nsys made no report or none of the calls is in it."""
    (reply,) = replies
    said = "\n".join([log_text(folder / "nsys.log"), *reply.tail])
    if reply.status != "done":
        raise _failed(reply.reason or reply.status, said)
    if not (folder / "report.nsys-rep").is_file():
        raise _failed("it left no report", said)
    _stats(folder)
    found = calls(folder)
    if not any(call.gpu for call in found):
        raise MissingError(
            "nsys saw no work of the calls on the GPU", hint="nsys.log may say why"
        )
    return Reading(
        (_whole(found), *_kernels(found)),
        notes=(
            (
                f"{len(found)} calls; nsys costs the host a microsecond or more for each API call"
                " that it records"
            ),
            "open report.nsys-rep with nsys-ui for the time line",
        ),
        files=kept(
            folder,
            "report.nsys-rep",
            "nsys.log",
            *(f"report_{name}.csv" for name in _REPORTS),
        ),
    )


def _stats(folder: Path) -> None:
    """Write the reports as CSV, next to the recording."""
    command = [
        _nsys(),
        "stats",
        "--force-export=true",
        "--force-overwrite=true",
        "--format=csv",
        f"--output={folder / 'report'}",
        f"--report={','.join(_REPORTS)}",
        str(folder / "report.nsys-rep"),
    ]
    done = tools.run(command, timeout_s=_STATS_S)
    if done is None:
        raise MissingError(
            f"nsys did not read its report in {_STATS_S:.0f} s", hint=GET_NSYS
        )
    # larger than the recording, and easy to make again
    (folder / "report.sqlite").unlink(missing_ok=True)
    missing = [
        name for name in _REPORTS if not (folder / f"report_{name}.csv").is_file()
    ]
    if done.returncode or missing:
        raise _failed(
            f"no report {', '.join(missing)}" if missing else "stats",
            done.stdout + done.stderr,
        )


def _failed(what: str, said: str) -> MissingError:
    """One line with the fix, from nsys's output."""
    if "hasn't been installed" in said:  # a CUDA toolkit's placeholder for it
        return MissingError(
            "nsys here is only a placeholder of the CUDA toolkit", hint=GET_NSYS
        )
    if re.search(r"unrecogni[sz]ed option|could not be found|[Uu]nknown report", said):
        return MissingError(
            "this nsys is too old: it does not know the options used", hint=GET_NSYS
        )
    lines = [
        line.strip()
        for line in said.splitlines()
        if re.search(r"error|fail|cannot", line, re.I)
    ]
    return MissingError(
        f"nsys: {what}{f': {lines[-1][:200]}' if lines and lines[-1] not in what else ''}"
    )


def _whole(found: list[Call]) -> Found:
    """The call: times, counts, and its kernels, API calls and copies."""
    sizes = {
        e.name: e.megabytes * 1e6
        for c in found
        for e in c.gpu
        if e.megabytes is not None
    }
    copies = _rows(c.copies for c in found)
    return Found(
        "",
        (
            facts.fact(
                "time_us", median(c.busy_ns for c in found) / 1e3, "the GPU is busy"
            ),
            facts.fact("span_us", median(c.span_ns for c in found) / 1e3),
            facts.fact("gap_us", median(c.span_ns - c.busy_ns for c in found) / 1e3),
            facts.fact(
                "host_us", median(c.range.ns for c in found) / 1e3, "until it returns"
            ),
            facts.fact("launches", fmean(len(c.kernels) for c in found)),
            facts.fact("api_calls", fmean(len(c.api) for c in found)),
        ),
        (
            *facts.table("nsys.kernels", _rows(c.kernels for c in found)),
            *facts.table("copies", ((*row, sizes.get(row[0])) for row in copies)),
            *facts.table("api", _rows(c.api for c in found)),
        ),
    )


def _rows(calls: Iterable[list[Event]]) -> list[tuple[str, float, float, float]]:
    """(name, how often in a call, median time, time in a call), largest first."""
    found, times = list(calls), defaultdict(list)
    for e in (e for events in found for e in events):
        times[e.name].append(e.ns)
    made = [
        (n, len(ns) / len(found), median(ns) / 1e3, sum(ns) / len(found) / 1e3)
        for n, ns in times.items()
    ]
    return sorted(made, key=lambda row: -row[3])


def _kernels(found: list[Call]) -> list[Found]:
    """The kernels of a call. `share`: of the time of all of its kernels."""
    made = _rows(c.kernels for c in found)
    total = sum(row[3] for row in made)
    return [
        Found(
            name,
            (
                facts.fact("time_us", us, "median"),
                facts.fact("share", 100 * a_call / total),
                facts.fact("launches", times, "in a call"),
            ),
        )
        for name, times, us, a_call in made
    ]
