"""Memory faults, races, reads of uninitialised memory and wrong barriers, by NVIDIA's
compute-sanitizer.

One process and one call for each check, because the tools exclude each other. Apart
from the call the process only runs copies of the inputs and fills on the GPU, which do
not read, so every report comes from the call.

Each tensor is a separate allocation (PyTorch's cache would put several into one, where
the driver does not see an overrun between them), followed by unused memory
(`--padding`): allocations are 512 bytes apart, so an overrun of a tensor that fills its
last 512 bytes would reach the next tensor unnoticed. The outputs are left
uninitialised, so that reading them is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ... import errors
from ...errors import MissingError
from ...machine.inventory import HERE, Machine
from ...parsing import read_toml
from . import Ask, Fact, Found, Reading, Reply, Run, facts, files_in, log_text, tools
from .sanitizer_log import Log, parse

_TOOL = "compute-sanitizer"
_GENERAL = (
    # no compiler that an algo may start
    "--target-processes=application-only",
    # importing torch from a cold disk takes longer than its ten seconds; the run has a
    # limit
    "--launch-timeout=0",
    # kernels after a fault are checked as well
    "--destroy-on-device-error=kernel",
    # the reply says how it ended
    "--check-exit-code=no",
    "--show-backtrace=device",
    "--demangle=simple",
    # errors that are written out; all are counted
    "--print-limit=1000",
)


class Check(Struct, frozen=True):
    """One of the tool's checks: see sanitizer.toml."""

    looks_for: str
    nouns: tuple[str, str]
    where: str
    options: tuple[str, ...] = ()


_TEXTS = read_toml(Path(__file__).with_suffix(".toml"))
CHECKS = msgspec.convert(_TEXTS["checks"], dict[str, Check])


def checks(names: Iterable[str]) -> tuple[str, ...]:
    """The checks of these names in the order in which they run; all four without names.
    Raises UsageError.
    """
    names = list(names)
    for name in names:
        if name not in CHECKS:
            raise errors.unknown("check", name, CHECKS)
    return tuple(check for check in CHECKS if check in names or not names)


def find(machine: Machine = HERE) -> None:
    executable(machine)


def executable(machine: Machine = HERE) -> Path:
    """Raises MissingError if there is none that works."""
    for path in tools.executables(_TOOL, machine=machine):
        if _has_launcher(path.resolve().parent):
            return path
    raise MissingError(
        f"no {_TOOL} here",
        hint="it comes with the CUDA toolkit; or `pip install 'nvidia-cuda-sanitizer-api>=13.5'`",
    )


def _has_launcher(folder: Path) -> bool:
    """PyPI's wheel of CUDA 13.0 has the command without the launcher that it needs to
    start a process.
    """
    if folder.parent.parent.name != "nvidia":
        return True
    folders = folder, folder.parent / _TOOL
    return any((path / "TreeLauncherSubreaper").is_file() for path in folders)


def runs(ask: Ask, folder: Path) -> list[Run]:
    tool = str(executable(ask.machine))
    # it replaces % sequences by process ids and variables
    log = f"{folder}/".replace("%", "%%")
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found = []
    for check in checks(ask.checks):
        options = f"--tool={check}", f"--log-file={log}{check}.log", *_GENERAL
        found.append(Run(check, (tool, *options, *CHECKS[check].options), env))
    return found


# --- in the worker


class Answer(Struct):
    """The answer of `inside`; `error`: a CUDA fault, in one line."""

    attached: bool | None = None
    error: str | None = None


def inside(target: Any) -> Answer:
    """One call on outputs that are uninitialised, except for those that overwrite an input."""
    import torch

    subject = target.subject
    inputs = {id(x) for x in subject.inputs}
    outputs = [x if id(x) in inputs else torch.empty_like(x) for x in subject.outputs]
    call = subject.rebuild(subject.inputs, outputs)
    answer = Answer()
    try:
        call()
        if target.mode == "cuda":
            torch.cuda.synchronize()
    # of the algo, or of a context made unusable by a fault: the log says where
    except Exception as e:
        answer.error = errors.one_line(e)
    answer.attached = _attached()
    return answer


def _attached() -> bool | None:
    """Whether the sanitizer's library is in this process: some installations report no
    errors for a process that they never attached to. None if that cannot be seen.
    """
    try:
        return "/libsanitizer" in Path("/proc/self/maps").read_text()
    except OSError:
        return None


# --- verdicts


@dataclass(frozen=True)
class _Verdict:
    check: str
    log: Log
    # why there is no verdict
    cannot: str = ""
    hint: str = ""

    def __str__(self) -> str:
        if self.cannot:
            return f"not run: {self.cannot}"
        counts = [
            _count(n, noun, f"{noun}s")
            for n, noun in ((self.log.errors, "error"), (self.log.warnings, "warning"))
            if n
        ]
        return ", ".join(counts) or "clean"

    @property
    def failed(self) -> str:
        """What the check found, in words; "" if nothing."""
        if self.cannot or not self.log.errors:
            return ""
        words = CHECKS[self.check]
        kernels = {f.kernel: f"`{f.kernel}`" for f in self.log.findings if f.error}
        kernels.pop("", None)
        at = f" {words.where} {', '.join(kernels.values())}" if kernels else ""
        return f"{self.check}: {_count(self.log.errors, *words.nouns)}{at}"


def _count(n: int, noun: str, plural: str) -> str:
    return f"{n:,} {noun if n == 1 else plural}"


def _verdict(reply: Reply, text: str) -> _Verdict:
    """The verdict of a check from its run's log and the way its process ended."""
    log = parse(text)
    # findings are valid whatever happened afterwards
    if log.shown:
        if not log.whole:
            log.errors = log.shown
            log.warnings = log.findings.total() - log.shown
        return _Verdict(reply.run.name, log)
    return _Verdict(reply.run.name, log, *_obstacle(reply, log))


def _obstacle(reply: Reply, log: Log) -> tuple[str, str]:
    """Why a run without a finding gives no verdict, and a hint; empty if it does."""
    ended = reply.reason or reply.status
    for known in _TEXTS["cannot"]:
        for remark in log.remarks:
            if known["log"] in remark:
                cause = known["cause"].format(remark=remark, ended=ended)
                return cause, known["hint"]
    if reply.status != "done":
        return ended, ""
    answer = reply.partial(Answer)
    if answer.attached is False:
        return f"{_TOOL} did not attach to the process", "another version of it may"
    if not log.whole:
        return "its log has no summary", ""
    if answer.error and not log.errors:
        return f"the call failed: {answer.error}", ""
    return "", ""


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """A verdict for each check; MissingError if there is none at all."""
    verdicts = [
        _verdict(reply, log_text(folder / f"{reply.run.name}.log")) for reply in replies
    ]
    if all(v.cannot for v in verdicts):
        first = verdicts[0]
        raise MissingError(
            f"{_TOOL} gave no verdict: {first.cannot}", hint=first.hint or None
        )
    made = [_fact(v) for v in verdicts]
    checked = [(v.check, str(v), CHECKS[v.check].looks_for) for v in verdicts]
    findings = [
        (v.check, finding.words, finding.kernel, times)
        for v in verdicts
        for finding, times in v.log.findings.items()
    ]
    tables = (*facts.table("checks", checked), *facts.table("findings", findings))
    # the one to open comes first
    logs = [f"{v.check}.log" for v in sorted(verdicts, key=lambda v: not v.failed)]
    failures = [v.failed for v in verdicts if v.failed]
    return Reading(
        (Found("", tuple(made), tables),),
        tuple(_notes(verdicts)),
        files_in(folder, *logs),
        "; ".join(failures) or None,
    )


def _fact(verdict: _Verdict) -> Fact:
    text = str(verdict)
    if verdict.cannot:
        return Fact(verdict.check, verdict.check, None, group="checks", note=text)
    return Fact(verdict.check, verdict.check, text, group="checks")


def _notes(verdicts: list[_Verdict]) -> Iterator[str]:
    yield (
        "one call on this workload for each check, every tensor followed by 64 KiB of unused"
        " memory"
    )
    yield "the logs have each place, thread and address"
    for v in verdicts:
        hidden = v.log.errors - v.log.shown
        if v.cannot:
            hint = f"; {v.hint}" if v.hint else ""
            yield f"{v.check} was not run: {v.cannot}{hint}"
        elif v.check != "racecheck" and hidden > 0:
            yield (
                f"{v.check}: {hidden:,} of its {v.log.errors:,} errors are counted but not in"
                " the log"
            )
    logs = {v.check: v.log for v in verdicts if not v.cannot}
    races = logs.get("racecheck", Log())
    if races.warnings:
        yield (
            "racecheck's warnings, mostly among threads of one warp, may be intended: they do not"
            " fail the check"
        )
    if races.errors:
        yield (
            "racecheck counts a lane's arrival at an mbarrier for that lane only: if one lane"
            " arrives for its warp, after a __syncwarp, let all lanes arrive to see whether a"
            " race remains"
        )
    if any("hazards reached" in remark for remark in races.remarks):
        yield "racecheck found more hazards than it can store: there may be others"
    if logs.get("synccheck", Log()).errors:
        yield (
            "synccheck also reports warps that use one named barrier from different places, which"
            " PTX allows"
        )
