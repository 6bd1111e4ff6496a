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
from . import Ask, Fact, Found, Reading, Reply, Run, facts, kept, log_text, tools
from .sanitizer_log import Finding, Log, parse

_TOOL = "compute-sanitizer"
_GENERAL = (
    "--target-processes=application-only",  # no compiler that an algo may start
    # importing torch from a cold disk takes longer than its ten seconds; the run has a
    # limit
    "--launch-timeout=0",
    "--destroy-on-device-error=kernel",  # kernels after a fault are checked as well
    "--check-exit-code=no",  # the reply says how it ended
    "--show-backtrace=device",
    "--demangle=simple",
    "--print-limit=1000",  # errors that are written out; all are counted
)


class Check(Struct, frozen=True):
    """One of the tool's checks: see sanitizer.toml."""

    looks_for: str
    nouns: tuple[str, str]
    where: str
    options: tuple[str, ...] = ()


_KNOWN = read_toml(Path(__file__).with_suffix(".toml"))
CHECKS = msgspec.convert(_KNOWN["checks"], dict[str, Check])


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
    for place in tools.executables(_TOOL, machine=machine):
        if _whole(place.resolve().parent):
            return place
    raise MissingError(
        f"no {_TOOL} here",
        hint="it comes with the CUDA toolkit; or `pip install 'nvidia-cuda-sanitizer-api>=13.5'`",
    )


def _whole(folder: Path) -> bool:
    """PyPI's wheel of CUDA 13.0 has the command without the launcher that it needs to
    start a process.
    """
    launchers = (
        folder / "TreeLauncherSubreaper",
        folder.parent / _TOOL / "TreeLauncherSubreaper",
    )
    return folder.parent.parent.name != "nvidia" or any(
        path.is_file() for path in launchers
    )


def runs(ask: Ask, folder: Path) -> list[Run]:
    tool = str(executable(ask.machine))
    # it replaces % sequences by process ids and variables
    log = f"{folder}/".replace("%", "%%")
    return [
        Run(
            check,
            wrap=(
                tool,
                f"--tool={check}",
                f"--log-file={log}{check}.log",
                *_GENERAL,
                *CHECKS[check].options,
            ),
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        for check in checks(ask.checks)
    ]


# --- in the worker


class Answer(Struct):
    """The answer of `inside`. `buffers`: name of a tensor -> [address, bytes]; `error`:
    a CUDA fault, in one line.
    """

    buffers: dict[str, tuple[int, int]] = {}
    attached: bool | None = None
    error: str | None = None


def inside(target: Any) -> Answer:
    """One call on outputs that are uninitialised, except for those that overwrite an input."""
    import torch

    subject = target.subject
    outputs = [
        x if any(x is y for y in subject.inputs) else torch.empty_like(x)
        for x in subject.outputs
    ]
    call = subject.rebuild(subject.inputs, outputs)
    tensors = zip(
        [*target.op.inputs, *target.op.outputs],
        [*subject.inputs, *outputs],
        strict=True,
    )
    answer = Answer(
        {
            name: (x.data_ptr(), x.nbytes)
            for name, x in tensors
            if isinstance(x, torch.Tensor)
        }
    )
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
        with open("/proc/self/maps") as maps:
            return any("/libsanitizer" in line for line in maps)
    except OSError:
        return None


# --- verdicts


@dataclass(frozen=True)
class _Verdict:
    check: str
    log: Log
    cannot: str | None = None  # why there is none
    hint: str | None = None

    def __str__(self) -> str:
        if self.cannot:
            return f"not run: {self.cannot}"
        counts = [(self.log.errors, "error"), (self.log.warnings, "warning")]
        return (
            ", ".join(_count(n, noun, f"{noun}s") for n, noun in counts if n) or "clean"
        )

    @property
    def failed(self) -> str | None:
        if self.cannot or not self.log.errors:
            return None
        words = CHECKS[self.check]
        kernels = dict.fromkeys(
            f.kernel for f in self.log.findings if f.error and f.kernel
        )
        at = (
            f" {words.where} {', '.join(f'`{kernel}`' for kernel in kernels)}"
            if kernels
            else ""
        )
        return f"{self.check}: {_count(self.log.errors, *words.nouns)}{at}"


def _count(n: int, one: str, several: str) -> str:
    return f"{n:,} {one if n == 1 else several}"


def _verdict(reply: Reply, text: str) -> _Verdict:
    """The verdict of a check from its run's log and the way its process ended."""
    check, answer = reply.run.name, reply.said(Answer)
    log = parse(text, answer.buffers)
    if log.shown:  # valid whatever happened afterwards
        if not log.whole:
            log.errors, log.warnings = log.shown, len(log.findings) - log.shown
        return _Verdict(check, log)
    for known in _KNOWN["cannot"]:
        if said := next(
            (remark for remark in log.remarks if known["log"] in remark), None
        ):
            cause = known["cause"]
            more = f" ({said})" if "itself failed" in cause else ""
            died = (
                f": {reply.reason}" if "ended before" in cause and reply.reason else ""
            )
            return _Verdict(check, log, f"{cause}{more}{died}", known["hint"])
    if reply.status != "done":
        return _Verdict(check, log, reply.reason or reply.status)
    if answer.attached is False:
        return _Verdict(
            check,
            log,
            f"{_TOOL} did not attach to the process",
            "another version of it may",
        )
    if not log.whole:
        return _Verdict(check, log, "its log has no summary")
    failed = answer.error and not log.errors
    return _Verdict(check, log, f"the call failed: {answer.error}" if failed else None)


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """A verdict for each check; MissingError if there is none at all."""
    verdicts = [
        _verdict(reply, log_text(folder / f"{reply.run.name}.log")) for reply in replies
    ]
    if all(v.cannot for v in verdicts):
        first = verdicts[0]
        raise MissingError(f"{_TOOL} gave no verdict: {first.cannot}", hint=first.hint)
    told = (
        Fact(
            v.check,
            v.check,
            None if v.cannot else str(v),
            group="checks",
            note=str(v) if v.cannot else "",
        )
        for v in verdicts
    )
    tables = (
        *facts.table(
            "checks", ((v.check, str(v), CHECKS[v.check].looks_for) for v in verdicts)
        ),
        *facts.table("findings", (row for v in verdicts for row in _rows(v))),
    )
    return Reading(
        (Found("", tuple(told), tables),),
        notes=tuple(_notes(verdicts)),
        files=kept(
            folder,
            *(f"{v.check}.log" for v in sorted(verdicts, key=lambda v: not v.failed)),
        ),
        failed="; ".join(v.failed for v in verdicts if v.failed) or None,
    )


def _rows(verdict: _Verdict) -> Iterator[tuple[str | int, ...]]:
    """Findings of one kind at one place become one row, with the first one's thread and address."""
    groups: dict[tuple[bool, str, str, str], list[Finding]] = {}
    for f in verdict.log.findings:
        groups.setdefault((f.error, f.what, f.kernel, f.where), []).append(f)
    for (error, what, kernel, where), found in groups.items():
        what = what if error else f"{what} (warning)"
        times = sum(f.times for f in found)
        yield (
            verdict.check,
            what,
            kernel,
            where,
            found[0].thread,
            found[0].address,
            times,
        )


def _notes(verdicts: list[_Verdict]) -> Iterator[str]:
    yield (
        "one call on this workload for each check, every tensor followed by 64 KiB of unused"
        " memory"
    )
    for v in verdicts:
        if v.cannot:
            yield f"{v.check} was not run: {v.cannot}{f'; {v.hint}' if v.hint else ''}"
        elif v.check != "racecheck" and (more := v.log.errors - v.log.shown) > 0:
            yield (
                f"{v.check}: {more:,} of its {v.log.errors:,} errors are counted but not in"
                " the log"
            )
    by = {v.check: v.log for v in verdicts if not v.cannot}
    races = by.get("racecheck", Log())
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
    if by.get("synccheck", Log()).errors:
        yield (
            "synccheck also reports warps that use one named barrier from different places, which"
            " PTX allows"
        )
