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

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ... import errors, units
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
    options: tuple[str, ...] = ()
    caution: str = ""


CHECKS = msgspec.convert(
    read_toml(Path(__file__).with_suffix(".toml")), dict[str, Check]
)


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


def executable(machine: Machine = HERE) -> str:
    hint = "it comes with the CUDA toolkit; or `pip install 'nvidia-cuda-sanitizer-api>=13.5'`"
    return tools.first(_TOOL, hint=hint, machine=machine)


def runs(ask: Ask, folder: Path) -> list[Run]:
    tool = executable(ask.machine)
    # it replaces % sequences by process ids and variables
    log = f"{folder}/".replace("%", "%%")
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    targets = []
    for check in checks(ask.checks):
        options = f"--tool={check}", f"--log-file={log}{check}.log", *_GENERAL
        targets.append(Run(check, (tool, *options, *CHECKS[check].options), env))
    return targets


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

    @property
    def words(self) -> str:
        if self.cannot:
            return f"not run: {self.cannot}"
        counts = {"error": self.log.errors, "warning": self.log.warnings}
        texts = [units.count(n, noun) for noun, n in counts.items() if n]
        return ", ".join(texts) or "clean"

    @property
    def failed(self) -> bool:
        return bool(self.log.errors and not self.cannot)

    @property
    def fact(self) -> Fact:
        if self.cannot:
            return Fact(self.check, self.check, None, group="checks", note=self.words)
        return Fact(self.check, self.check, self.words, group="checks")


def _verdict(reply: Reply, text: str) -> _Verdict:
    """The verdict of a check from its run's log and the way its process ended."""
    log = parse(text)
    # findings are valid whatever happened afterwards
    cannot = "" if log.shown else _obstacle(reply, log)
    return _Verdict(reply.run.name, log, cannot)


def _obstacle(reply: Reply, log: Log) -> str:
    """Why a run without a finding gives no verdict; empty if it does."""
    ended = reply.reason or reply.status
    troubles = [text for text in log.remarks if re.search(r"\berror\b", text, re.I)]
    if troubles and reply.status == "done":
        return troubles[0]
    if troubles:
        return f"{troubles[0]} ({ended})"
    if reply.status != "done":
        return ended
    answer = reply.partial(Answer)
    if answer.attached is False:
        return f"{_TOOL} did not attach to the process"
    if not log.whole:
        return "its log has no summary"
    if answer.error and not log.errors:
        return f"the call failed: {answer.error}"
    return ""


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """A verdict for each check; MissingError if there is none at all."""
    verdicts = [
        _verdict(reply, log_text(folder / f"{reply.run.name}.log")) for reply in replies
    ]
    if all(v.cannot for v in verdicts):
        raise MissingError(
            f"{_TOOL} gave no verdict: {verdicts[0].cannot}",
            hint=f"another version of {_TOOL} may, from a newer CUDA toolkit",
        )
    checked = [(v.check, v.words, CHECKS[v.check].looks_for) for v in verdicts]
    findings = [
        (v.check, finding.words, finding.kernel, times)
        for v in verdicts
        for finding, times in v.log.findings.items()
    ]
    tables = (*facts.table("checks", checked), *facts.table("findings", findings))
    whole = Found("", tuple(v.fact for v in verdicts), tables)
    notes = [
        "one call on this workload for each check, every tensor followed by 64 KiB of unused"
        " memory; the logs have each place, thread and address"
    ]
    for v in verdicts:
        notes += [f"{v.check}: {remark}" for remark in v.log.remarks]
        if v.log.findings and CHECKS[v.check].caution:
            notes.append(f"{v.check}: {CHECKS[v.check].caution}")
    failures = []
    for v in verdicts:
        if v.failed:
            kernels = {f.kernel: None for f in v.log.findings if f.error and f.kernel}
            where = f" in {', '.join(kernels)}" if kernels else ""
            failures.append(f"{v.check}: {units.count(v.log.errors, 'error')}{where}")
    # the one to open comes first
    logs = [f"{v.check}.log" for v in sorted(verdicts, key=lambda v: not v.failed)]
    return Reading(
        (whole,), tuple(notes), files_in(folder, *logs), "; ".join(failures) or None
    )
