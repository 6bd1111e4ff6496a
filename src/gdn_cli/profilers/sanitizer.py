"""Memory faults, races, reads of what nothing wrote and barriers gone wrong, by NVIDIA's compute-sanitizer.

One process and one call for each check: the tools exclude each other. All that the process puts on the GPU beside the
call are copies of the inputs and fills, which read nothing, so whatever is reported comes from the call.

Each tensor is an allocation of its own (PyTorch's cache would put several into one, and an overrun between them is no
fault to the driver), with room behind it that belongs to nobody (`--padding`): allocations lie 512 bytes apart, so an
overrun of a tensor that fills its last one would land in the next tensor unseen. The outputs are left unwritten, so
that a read of them counts.

Formats: Compute Sanitizer's user manual, docs.nvidia.com/compute-sanitizer; the wording differs a little by version
(an access "at" or "to" an address, "+0x90 in file:line" behind a function or "0x90 in" before it), and all are read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import MissingError
from . import Ask, Fact, Found, Reading, Reply, Run, Table, kept, tools

CHECKS = {
    "memcheck": "accesses out of bounds, misaligned, or of memory that was given back",
    "racecheck": "threads of a block that race in shared memory",
    "initcheck": "reads of global memory that nothing has written",
    "synccheck": "barriers that not all of their threads reach",
}

_TOOL = "compute-sanitizer"
_PADDING = 65536  # bytes: the state of one head, so that a loop that takes a head too many is seen
_PRINTED = 1000  # errors that are written out; all are counted

_GENERAL = (
    "--target-processes=application-only",  # no compiler that an algo may start
    "--launch-timeout=0",  # importing torch from a cold disk takes longer than its ten seconds; the run has a limit
    "--destroy-on-device-error=kernel",  # the kernels behind a fault are checked as well
    "--check-exit-code=no",  # the reply says how it ended
    "--show-backtrace=device",
    "--demangle=simple",
    f"--print-limit={_PRINTED}",
)
_OPTIONS = {
    # PyTorch asks for some things that fail by design: errors of API calls are no findings
    "memcheck": (f"--padding={_PADDING}", "--leak-check=no", "--report-api-errors=no"),
    "racecheck": ("--racecheck-report=analysis",),
    "initcheck": (),
    "synccheck": (),
}


def checks(names: Iterable[str]) -> tuple[str, ...]:
    """The checks of these names in the order in which they run, all four for none. Raises UsageError."""
    names = list(names)
    for name in names:
        if name not in CHECKS:
            raise errors.unknown("check", name, CHECKS)
    return tuple(check for check in CHECKS if check in names or not names)


def find() -> None:
    executable()


def executable() -> Path:
    """Raises MissingError where there is none that works."""
    for place in tools.executables(_TOOL):
        if _whole(place.resolve().parent):
            return place
    raise MissingError(
        f"no {_TOOL} here",
        hint="it comes with the CUDA toolkit; or `pip install 'nvidia-cuda-sanitizer-api>=13.5'`",
    )


def _whole(folder: Path) -> bool:
    """PyPI's wheel of CUDA 13.0 has the command without the launcher that it starts a process with."""
    launchers = (folder / "TreeLauncherSubreaper", folder.parent / _TOOL / "TreeLauncherSubreaper")
    return folder.parent.parent.name != "nvidia" or any(path.is_file() for path in launchers)


def runs(ask: Ask, folder: Path) -> list[Run]:
    tool = str(executable())
    return [
        Run(
            check,
            wrap=(tool, f"--tool={check}", f"--log-file={_escaped(folder / _log(check))}", *_GENERAL, *_OPTIONS[check]),
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        for check in checks(ask.checks)
    ]


def _log(check: str) -> str:
    return f"{check}.log"


def _escaped(path: Path) -> str:
    return str(path).replace("%", "%%")  # it puts process ids and variables in place of what follows a %


# --- in the worker ------------------------------------------------------------------------------------------------


def inside(target: Any, params: dict[str, Any]) -> dict[str, Any]:
    """One call on outputs that nothing has written. A fault of CUDA is an answer: {"error": its line}."""
    import torch

    subject = target.subject
    outputs = [torch.empty_like(x) for x in subject.outputs]
    call = subject.rebuild(subject.inputs, outputs)
    names = [*target.op.inputs, *target.op.outputs]
    tensors = zip(names, [*subject.inputs, *outputs], strict=True)
    answer: dict[str, Any] = {
        "buffers": {name: [x.data_ptr(), x.nbytes] for name, x in tensors if isinstance(x, torch.Tensor)}
    }
    try:
        call()
        if target.mode == "cuda":
            torch.cuda.synchronize()
    except Exception as e:  # of the algo or of a context that a fault has left unusable: the log says where
        answer["error"] = errors.one_line(e)
    return answer | {"attached": _attached()}


def _attached() -> bool | None:
    """Whether the sanitizer's library is in this process: there are installations that count no error in a process
    that they never looked into. None where that cannot be seen."""
    try:
        with open("/proc/self/maps") as maps:
            return any("/libsanitizer" in line for line in maps)
    except OSError:
        return None


# --- logs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One report of the log, in words."""

    what: str
    kernel: str
    where: str
    thread: str = ""
    address: str = ""
    times: int = 1
    error: bool = True  # False: a warning


@dataclass
class Log:
    """What a log says."""

    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # the tool's own messages
    errors: int = 0
    warnings: int = 0
    whole: bool = False  # it has its summary: the tool came to its end

    @property
    def shown(self) -> int:
        return sum(f.error for f in self.findings)


_LINE = re.compile(r"^={2,} ?(.*?)\s*$")
_NEW = re.compile(r"(?P<function>\S.*?)\+(?P<offset>0x[0-9a-f]+)(?: in (?P<source>\S.*?:\d+))?(?:\.)?$")
_OLD = re.compile(r"(?P<offset>0x[0-9a-f]+) in (?:(?P<source>[^<>()]*?[^:]:\d+):)?(?P<function>.+)$")
_ACCESS = re.compile(r"Invalid __(?P<space>\w+)__ (?P<kind>\S+) of size (?P<size>[\d,]+) bytes")
_UNWRITTEN = re.compile(r"Uninitialized __(?P<space>\w+)__ memory read of size (?P<size>[\d,]+) bytes")
_RACE = re.compile(r"(?P<level>\w+): Race reported between (?P<first>\w+) access at (?P<at>.+)$")
_AND = re.compile(r"and (?P<second>\w+) access at (?P<at>.+?)(?: \[(?P<hazards>[\d,]+) hazards?\])?$")
_BARRIER = re.compile(r"Barrier error detected\. (?P<what>.+?)\.?$")
_ADDRESS = re.compile(r"(?:Address|Access (?:at|to)) (?P<at>0x[0-9a-f]+)(?: is (?P<is>.+))?$")
_NEAREST = re.compile(
    r"and is (?:(?P<away>[\d,]+) bytes (?P<side>before|after)|inside) the nearest allocation "
    r"at (?P<at>0x[0-9a-f]+) of size (?P<size>[\d,]+) bytes"
)
_HOST = re.compile(r"Host API (?:uninitialized )?memory access error")
_SUMMARY = re.compile(r"ERROR SUMMARY: ([\d,]+) errors?$")
_RACES = re.compile(r"RACECHECK SUMMARY: [\d,]+ hazards? displayed \(([\d,]+) errors?, ([\d,]+) warnings?\)")

_BARRIERS = {
    "Divergent thread(s) in warp": "threads of a warp wait at a barrier that others of it do not reach",
    "Divergent thread(s) in block": "threads of a block wait at a barrier that others of it do not reach",
}


def parse(text: str, buffers: dict[str, list[int]] | None = None) -> Log:
    """What a log of any of the four checks says. `buffers` names tensors: name -> [address, bytes]."""
    log, calls, races = Log(), 0, False
    for head, details in _reports(text):
        if m := _SUMMARY.match(head):
            log.errors, log.whole = _int(m[1]), True
        elif m := _RACES.match(head):
            log.errors, log.warnings, log.whole, races = _int(m[1]), _int(m[2]), True, True
        elif head.startswith("Program hit "):  # an API call: counted by the tool, no finding of ours
            calls += 1
        elif m := _RACE.match(head):
            log.findings += _races(m, details)
        elif _HOST.match(head):
            log.findings.append(_copied(details))
        elif any(line.startswith(("at ", "by thread")) for line in details):
            log.findings.append(_fault(head, details, buffers or {}))
        elif "SUMMARY" not in head:
            log.remarks.append(head)
    if log.whole and not races:  # the other tools count API calls and copies among their errors
        log.warnings = len(log.findings) - log.shown
        log.errors = max(0, log.errors - calls - log.warnings)
    return log


def _reports(text: str) -> Iterator[tuple[str, list[str]]]:
    """The unindented lines behind the log's mark, each with the indented ones that follow it."""
    head, details = "", []
    for raw in text.splitlines():
        if not (m := _LINE.match(raw)):
            continue
        line = m[1]
        if line.startswith(" "):
            details.append(line.strip())
            continue
        if head and head != "COMPUTE-SANITIZER":
            yield head, details
        head, details = line, []
    if head and head != "COMPUTE-SANITIZER":
        yield head, details


def _fault(head: str, details: list[str], buffers: dict[str, list[int]]) -> Finding:
    """A report about one place in a kernel."""
    frames = [_place(line[3:]) for line in details if line.startswith("at ")][:1]
    frames += [_place(line.split(":", 1)[1].strip()) for line in details if line.startswith("Device Frame:")]
    places = [where for _, where in frames if where]
    where = " in ".join(dict.fromkeys([places[0], places[-1]])) if places else ""
    thread = next((line[3:] for line in details if line.startswith("by thread")), "")
    kernel = frames[-1][0] if frames else ""
    return Finding(_words(head), kernel, where, thread, _address(details, buffers))


def _words(head: str) -> str:
    if m := _UNWRITTEN.match(head):
        return f"reads {_int(m['size'])} B of {m['space']} memory that nothing wrote"
    if m := _ACCESS.match(head):
        kind = {"read": "reads", "write": "writes", "atomic": "updates"}.get(m["kind"], f"accesses ({m['kind']})")
        return f"{kind} {_int(m['size'])} B of {m['space']} memory"
    if m := _BARRIER.match(head):
        return _BARRIERS.get(m["what"], f"barrier: {m['what'][0].lower()}{m['what'][1:]}")
    return head.rstrip(".")


def _races(head: re.Match, details: list[str]) -> Iterator[Finding]:
    """One finding for each pair of places: a report has the first, and a line for each that races with it."""
    kernel, first = _place(head["at"])
    error = head["level"].lower() == "error"
    for line in details:
        if m := _AND.match(line):
            _, second = _place(m["at"])
            what = f"{head['first'].lower()} and {m['second'].lower()} of the same shared memory race"
            where = " and ".join(dict.fromkeys([first, second]))
            yield Finding(what, kernel, where, times=_int(m["hazards"] or "1"), error=error)


def _copied(details: list[str]) -> Finding:
    """A copy or fill by the host's API. To copy what nothing wrote is no use of it, so only a warning."""
    said = " ".join(details)
    by = m[1] if (m := re.search(r"on access by (\w+)", said)) else "an API call"
    if "Uninitialized" in said:
        return Finding("copies memory that nothing wrote", by, "", error=False)
    return Finding("copies from or to memory that is not allocated", by, "")


def _place(text: str) -> tuple[str, str]:
    """(function, file:line or the offset in its code) of a place as the log has it."""
    m = _NEW.match(text) or _OLD.match(text)
    if not m:
        return _short(text), ""
    return _short(m["function"]), (m["source"] or f"+{m['offset']}").rsplit("/", 1)[-1]


def _short(function: str) -> str:
    """A function's name without its return type, template arguments and parameters."""
    name = function.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    while (inner := re.sub(r"<[^<>]*>", "", name)) != name:
        name = inner
    name = name.split("(")[0].strip()
    return name.split()[-1] if name else function


def _address(details: list[str], buffers: dict[str, list[int]]) -> str:
    """Where the address lies: by the tensor's name where it is one of the call's."""
    access = next((m for line in details if (m := _ADDRESS.match(line))), None)
    nearest = next((m for line in details if (m := _NEAREST.match(line))), None)
    if nearest and nearest["side"]:
        start, size = int(nearest["at"], 16), _int(nearest["size"])
        name = next((name for name, (at, _) in buffers.items() if at == start), f"an allocation of {size} B")
        return f"{_int(nearest['away'])} B {'behind' if nearest['side'] == 'after' else 'before'} {name}"
    if not access:
        return ""
    at, known = int(access["at"], 16), sorted((at, n, name) for name, (at, n) in buffers.items())
    i = bisect_right(known, at, key=lambda b: b[0]) - 1
    inside = f"byte {at - known[i][0]} of {known[i][2]}" if i >= 0 and at < known[i][0] + known[i][1] else ""
    return ", ".join(part for part in (access["is"], inside) if part)


def _int(text: str) -> int:
    return int(text.replace(",", ""))


# --- verdicts -----------------------------------------------------------------------------------------------------

# the log's words, the cause in ours, and the mend
_CANNOT = (
    ("Device not supported", f"{_TOOL} does not know this GPU", "the one of a newer CUDA toolkit may"),
    ("unsupported driver", "the driver is too old for it", f"update the driver, or use an older toolkit's {_TOOL}"),
    ("No attachable process", "it could not reach the process", "it needs a free port from 49152 on"),
    ("Could not connect", "it could not reach the process", "it needs a free port from 49152 on"),
    ("Internal Sanitizer", f"{_TOOL} itself failed", "another version of it may do better"),
    ("Internal error", f"{_TOOL} itself failed", "another version of it may do better"),
    ("before first instrumented", "the process ended before it used the GPU", "see the log"),
)
_NOUNS = {
    "memcheck": ("fault", "faults", "of"),
    "racecheck": ("race", "races", "in the shared memory of"),
    "initcheck": ("read of unwritten memory", "reads of unwritten memory", "by"),
    "synccheck": ("barrier error", "barrier errors", "in"),
}


@dataclass(frozen=True)
class _Verdict:
    check: str
    log: Log
    cannot: str | None = None  # why there is none
    mend: str | None = None

    def __str__(self) -> str:
        if self.cannot:
            return f"not run: {self.cannot}"
        counts = [(self.log.errors, "error"), (self.log.warnings, "warning")]
        return ", ".join(_count(n, noun, f"{noun}s") for n, noun in counts if n) or "clean"

    @property
    def failed(self) -> str | None:
        if self.cannot or not self.log.errors:
            return None
        *nouns, where = _NOUNS[self.check]
        kernels = dict.fromkeys(f.kernel for f in self.log.findings if f.error and f.kernel)
        at = f" {where} {', '.join(f'`{kernel}`' for kernel in kernels)}" if kernels else ""
        return f"{self.check}: {_count(self.log.errors, *nouns)}{at}"


def _count(n: int, one: str, several: str) -> str:
    return f"{n:,} {one if n == 1 else several}"


def _verdict(reply: Reply, text: str) -> _Verdict:
    """What a run's log and its process's end say of its check."""
    check, answer = reply.run.name, reply.answer
    log = parse(text, answer.get("buffers"))
    if log.shown:  # whatever happened afterwards, they are there
        if not log.whole:
            log.errors, log.warnings = log.shown, len(log.findings) - log.shown
        return _Verdict(check, log)
    for words, cause, mend in _CANNOT:
        if said := next((remark for remark in log.remarks if words in remark), None):
            more = f" ({said})" if "itself failed" in cause else ""
            died = f": {reply.reason}" if "ended before" in cause and reply.reason else ""
            return _Verdict(check, log, f"{cause}{more}{died}", mend)
    if reply.status != "done":
        return _Verdict(check, log, reply.reason or reply.status)
    if answer.get("attached") is False:
        return _Verdict(check, log, f"{_TOOL} did not look into the process", "another version of it may")
    if not log.whole:
        return _Verdict(check, log, "its log has no summary")
    if log.errors or not answer.get("error"):
        return _Verdict(check, log)
    return _Verdict(check, log, f"the call failed: {answer['error']}")


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """A verdict for each check; MissingError where not one of them could be had."""
    verdicts = [_verdict(reply, _text(folder / _log(reply.run.name))) for reply in replies]
    if all(v.cannot for v in verdicts):
        first = verdicts[0]
        raise MissingError(f"{_TOOL} gave no verdict: {first.cannot}", hint=first.mend)
    facts = tuple(
        Fact(v.check, v.check, None if v.cannot else str(v), group="checks", note=str(v) if v.cannot else "")
        for v in verdicts
    )
    tables = [
        Table(
            "checks",
            "Checks",
            (("check", ""), ("verdict", ""), ("looks for", "")),
            tuple((v.check, str(v), CHECKS[v.check]) for v in verdicts),
        )
    ]
    if rows := tuple(row for v in verdicts for row in _rows(v)):
        columns = [(name, "") for name in ("check", "what", "kernel", "where", "first thread", "address")]
        tables.append(Table("findings", "Findings", (*columns, ("times", "count")), rows))
    return Reading(
        (Found("", facts, tuple(tables)),),
        notes=tuple(_notes(verdicts)),
        files=kept(folder, *(_log(v.check) for v in sorted(verdicts, key=lambda v: not v.failed))),
        failed="; ".join(v.failed for v in verdicts if v.failed) or None,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _rows(verdict: _Verdict) -> Iterator[tuple[Any, ...]]:
    """Findings of one kind at one place are one row, with the first one's thread and address."""
    groups: dict[tuple, list[Finding]] = {}
    for f in verdict.log.findings:
        groups.setdefault((f.error, f.what, f.kernel, f.where), []).append(f)
    for (error, what, kernel, where), found in groups.items():
        what = what if error else f"{what} (warning)"
        times = sum(f.times for f in found)
        yield verdict.check, what, kernel, where, found[0].thread, found[0].address, times


def _notes(verdicts: list[_Verdict]) -> Iterator[str]:
    yield f"one call on this workload for each check, every tensor with {_PADDING // 1024} KiB of nobody's behind it"
    for v in verdicts:
        if v.cannot:
            yield f"{v.check} was not run: {v.cannot}{f'; {v.mend}' if v.mend else ''}"
        elif v.check != "racecheck" and (more := v.log.errors - v.log.shown) > 0:
            yield f"{v.check}: {more:,} of its {v.log.errors:,} errors are counted but not in the log"
    by = {v.check: v.log for v in verdicts if not v.cannot}
    if "racecheck" in by and by["racecheck"].warnings:
        yield "racecheck warns of hazards that may be meant, among threads of one warp above all: they fail nothing"
    if "racecheck" in by and by["racecheck"].errors:
        yield (
            "racecheck takes a lane's arrival at an mbarrier for that lane's alone: where one arrives for its warp, "
            "behind a __syncwarp, let all of them arrive to see whether a race is left"
        )
    if any("hazards reached" in remark for remark in getattr(by.get("racecheck"), "remarks", ())):
        yield "racecheck met more hazards than it keeps: there may be others"
    if "synccheck" in by and by["synccheck"].errors:
        yield "synccheck also reports warps that meet in one named barrier from different places, which PTX allows"
