"""`gdn profile`: one algo on one workload under one tool -> a folder with the results.

First a plain worker surveys the algo: is it right, how long does it take, how long does
a plain copy of its bytes take, which kernels does a call run? Then the tool's target
processes run: workers too, with the tool's command line before theirs. The tool's
findings, the survey and the verdict go into `profile.json`, next to the tool's files.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, structs

from .. import errors, files, paths
from ..catalog.formats import Definition, Solution
from ..catalog.ops import Op
from ..catalog.pack import definition, pack, source_hash
from ..catalog.registry import Algo, Registry
from ..catalog.workloads import Workload
from ..errors import GdnError, MissingError, UsageError
from ..machine import environment, locks
from ..machine.inventory import HERE, Machine
from ..parsing import Json, decode, read_json
from ..records.store import dumps
from ..run import planning
from ..run.jobs import Job, execute
from ..schema.profile_types import Listed, Profile, Reading, Survey, Verdict
from ..schema.record_types import Call, Environment, Record, Status
from ..worker import messages, profilers
from ..worker.profilers import Ask, Reply, Run
from ..worker.request import Options, PlanFields, Profiling, Timing
from . import bottleneck

_FILE = "profile.json"


@dataclass(frozen=True)
class Settings:
    """How to profile. `folder` holds a folder for each profile."""

    tool: str
    folder: Path
    l2: str = "cold"
    clocks: str = "none"
    archs: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    dataset: Path | None = None
    # at most, for each time that the survey measures
    seconds: float | None = None
    timeout_s: float = 300.0

    @property
    def timed(self) -> bool:
        return profilers.TOOLS[self.tool].timed


@dataclass(frozen=True)
class Subject:
    """An algo on a workload. `mode` is None for a tool that only compiles."""

    op: Op
    algo: Algo
    mode: str | None
    workload: Workload
    definition: Definition
    solution: Solution

    @property
    def label(self) -> str:
        return self.op.label.format(**self.workload.axes)


def subjects(
    registry: Registry,
    names: list[str],
    op: str | None,
    tool: str | None,
    workload: str | None,
    dataset: Path | None,
    device: str = "auto",
    place: planning.Placing = HERE.place,
) -> tuple[str, list[Subject]]:
    """The tool (default: cpu if the first algo runs on the CPU, else ncu), and the
    subject for each name.

    Raises UsageError and MissingError if a tool cannot be used for an algo, or the algo
    cannot run here.
    """
    if tool is None:
        first = planning.rivals(registry, names[:1], op, device, place)[0]
        tool = "cpu" if first.place.mode == "cpu" else "ncu"
    modes = profilers.TOOLS[tool].modes
    if len(modes) == 1:
        device = modes[0]
    entries = planning.rivals(registry, names, op, device, place)
    which = planning.Selected([workload] if workload else None, 1, dataset=dataset)
    (part,) = planning.select(registry, entries, which)
    subjects = []
    for entry in part.entries:
        mode = _mode(tool, entry) if modes else None
        contract, solution = definition(part.op, registry), pack(entry.algo, part.op)
        subjects.append(
            Subject(part.op, entry.algo, mode, part.workloads[0], contract, solution)
        )
    return tool, subjects


def _mode(tool: str, entry: planning.Entry) -> str:
    """Where the algo runs under the tool."""
    algo, place = entry.algo, entry.place
    modes = profilers.TOOLS[tool].modes
    if place.mode in modes:
        return place.mode
    if not set(modes) & set(algo.modes):
        device = "a GPU" if modes == ("cuda",) else "a CPU"
        raise UsageError(
            f"--tool {tool} is for algos on {device}, and {algo.full_name} does not run there",
            hint="use --tool torch, which is for both",
        )
    hint = place.hint
    if algo.language in ("cuda", "triton"):
        hint = f"{hint}; --tool sass needs no GPU"
    raise MissingError(f"{algo.full_name} cannot run here: {place.reason}", hint=hint)


def sent(subject: Subject, settings: Settings) -> Json:
    """A subject and how to profile it, as JSON for another machine."""
    algo = structs.replace(subject.algo, folder=None, shares=(), solution=None)
    away = {
        "subject": replace(subject, algo=algo),
        "settings": replace(settings, folder=Path()),
    }
    return msgspec.to_builtins(away, enc_hook=str)


def received(request: Json, folder: Path) -> tuple[Subject, Settings]:
    """The inverse of `sent`; the profile is to go into `folder`."""
    # the hook is for paths
    convert = partial(msgspec.convert, dec_hook=lambda form, value: form(value))
    settings = convert(request["settings"], Settings)
    return convert(request["subject"], Subject), replace(settings, folder=folder)


# The process that runs now, and how many of how many are done.
Progress = Callable[..., None]


def run(
    subject: Subject,
    settings: Settings,
    progress: Progress,
    say: Callable[[str], None],
    machine: Machine = HERE,
) -> Profile:
    """Profile one subject; `profile.json` in its folder holds the returned profile.

    Raises GdnError if there is no result at all; the folder is then removed.
    """
    profilers.module(settings.tool).find(machine)
    # named so that a user can find it: when, what, on which GPU, with which tool
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    words = [stamp, subject.op.name, subject.algo.name, subject.label, settings.tool]
    folder = new_folder(settings.folder, words)
    try:
        with contextlib.ExitStack() as held:
            if subject.mode == "cuda" and settings.timed:
                gpu = machine.gpus()[0]
                held.enter_context(locks.gpu(gpu.uuid, say, f"GPU {gpu.index}"))
            profile = _Session(subject, settings, folder, progress, machine).profile()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return keep(folder, profile)


def keep(folder: Path, profile: Profile) -> Profile:
    """Write a profile into its folder. Returns it with its path, or, if it could not be
    written, with the reason in `unkept`: it can still be shown.
    """
    profile = structs.replace(profile, folder=UNSET, unkept=UNSET)
    text = dumps(msgspec.to_builtins(profile)) + "\n"
    try:
        files.write(folder / _FILE, text, hint=None)
    except GdnError as e:
        profile.unkept = f"the profile could not be kept: {e.message}"
    profile.folder = str(folder.absolute())
    return profile


def new_folder(parent: Path, words: list[str]) -> Path:
    """A new folder in `parent`, named from these words; UsageError if none can be made."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "", "-".join(words).replace(" ", "-"))
    folder = (parent / name).absolute()
    try:
        if parent == paths.profiles_dir():
            paths.make(parent)
        parent.mkdir(parents=True, exist_ok=True)
        for i in count(2):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
            folder = folder.with_name(f"{name}-{i}")
    except OSError as e:
        hint = "--out DIR or GDN_HOME names another place"
        raise files.failure(parent, e, hint) from None
    return folder


@dataclass(frozen=True)
class _Session:
    """The processes of one profile."""

    subject: Subject
    settings: Settings
    folder: Path
    progress: Progress
    machine: Machine

    def profile(self) -> Profile:
        subject, settings = self.subject, self.settings
        tool = profilers.module(settings.tool)
        name = f"{subject.algo.full_name} {subject.label}"
        profile = self._empty()
        self.progress(name, 0, 1, False, "survey")
        if subject.mode is not None:
            self._survey(profile)
        survey = profile.survey
        ask = Ask(
            subject.solution,
            settings.l2,
            settings.clocks,
            settings.archs,
            settings.checks,
            bytes_in=survey.bytes_in if survey else 0,
            bytes_out=survey.bytes_out if survey else 0,
            specific=subject.algo.specific,
            machine=self.machine,
        )
        replies = []
        runs = tool.runs(ask, self.folder)
        for i, target in enumerate(runs, 1):
            phase = f"{settings.tool} {target.name}"
            self.progress(name, i, len(runs) + 1, False, phase)
            replies.append(self._reply(target))
        profile.reading = tool.read(ask, self.folder, replies)
        failed = profile.reading.failed
        if failed and profile.passed:
            profile.status, profile.reason = Status.FAILED, failed
        profile.verdict = _verdict(profile)
        return profile

    def _empty(self) -> Profile:
        """The profile before anything was measured."""
        subject = self.subject
        workload = subject.workload
        return Profile(
            name=self.folder.name,
            time=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            tool=self.settings.tool,
            op=subject.op.name,
            algo=subject.algo.name,
            source_hash=source_hash(subject.solution),
            mode=subject.mode,
            l2=self.settings.l2 if subject.mode == "cuda" else None,
            workload=Call(
                uuid=workload.uuid,
                axes=workload.axes,
                index=workload.index,
                origin=workload.origin,
            ),
            label=subject.label,
            environment=Environment(),
            status=Status.PASSED,
            reason=None,
            survey=None,
            verdict=None,
            reading=Reading(),
            **environment.commit(),
        )

    def _survey(self, profile: Profile) -> None:
        """Fill in the results of a plain worker."""
        settings = self.settings
        plan: PlanFields = {"l2": settings.l2}
        if settings.seconds:
            plan["seconds"] = settings.seconds
        job = self._job(Profiling("survey", l2=settings.l2))
        tiers = planning.tiers_for(job.mode, ()) if settings.timed else ()
        outcome = execute(job.asking(timing=Timing(tiers, plan, fallback=True)))
        record = next(iter(outcome.records), None)
        end = record or outcome
        # without a time the profile cannot be interpreted
        if settings.timed and (record is None or record.timing is None):
            tail = f" ({outcome.tail[-1][:160]})" if outcome.tail and not record else ""
            first, *rest = (end.reason or end.status.value).splitlines()
            raise GdnError(
                f"{self.subject.algo.full_name}: {first}{tail}",
                code=end.code or outcome.code or errors.FAILED,
                hint="\n  ".join(rest) or None,
            )
        profile.survey = _survey_of(record) if record else None
        profile.environment = outcome.environment or profile.environment
        profile.status, profile.reason = end.status, end.reason

    def _reply(self, target: Run) -> Reply:
        """Run one target process under the tool."""
        job = self._job(
            Profiling(self.settings.tool, target.params, self.settings.l2),
            wrap=target.wrap,
            env=target.env,
        )
        outcome = execute(job)
        record = next(iter(outcome.records), None)
        end = record if record and not record.passed else outcome
        answer = record.answer if record else None
        tail = tuple(outcome.tail)
        return Reply(target, end.status.value, end.reason, answer, tail, end.code)

    def _job(self, task: Profiling, **process: Any) -> Job:
        subject, dataset = self.subject, self.settings.dataset
        return Job.of(
            "profile",
            subject.op,
            subject.definition,
            subject.mode or "cpu",
            [subject.workload],
            [(subject.algo, subject.solution)],
            options=Options(dataset=str(dataset.absolute()) if dataset else None),
            profile=task,
            timeout_s=self.settings.timeout_s,
            machine=self.machine,
            **process,
        )


def _survey_of(record: Record) -> Survey | None:
    """The parts of a survey's record that a profile keeps."""
    if record.answer is None:
        return None
    answer = msgspec.convert(record.answer, messages.Survey)
    survey = Survey(bytes_in=answer.bytes_in, bytes_out=answer.bytes_out)
    timing, floors = record.timing, answer.floors
    if timing is None or floors is None:
        return survey
    large_us = floors.large_us
    return structs.replace(
        survey,
        tier=record.tier or UNSET,
        time_us=timing.median_us,
        span_us=timing.span_us,
        launches=timing.kernels,
        copy_us=floors.copy_us,
        empty_us=floors.empty_us,
        large_rate=floors.large_bytes / large_us / 1e3 if large_us else None,
        bytes_moved=answer.bytes_in + answer.bytes_out,
        ran=answer.ran,
        doubts=record.doubts or [],
    )


# --- stored profiles


def load(path: Path) -> Profile | None:
    """A stored profile, from its folder or its file; None if it is not one.
    MissingError, with the file's name, for a profile.json that is damaged, or that this
    gdn cannot read.
    """
    file = path / _FILE if path.is_dir() else path
    if not file.exists():
        return None
    damaged = partial(MissingError, hint="delete its folder, or profile again")
    try:
        profile = decode(read_json(file, damaged), Profile, file, damaged)
    except GdnError:
        # a packed solution, anything
        if file.name != _FILE:
            return None
        raise
    reading = profile.reading
    names = profilers.files_in(file.parent, *reading.files)
    profile.reading = structs.replace(reading, files=names)
    profile.verdict = _verdict(profile)
    profile.folder = str(file.parent.absolute())
    return profile


def _verdict(profile: Profile) -> Verdict | None:
    """The verdict of this gdn version on the stored figures."""
    tool = profilers.TOOLS.get(profile.tool)
    if tool and not tool.timed:
        return None
    return bottleneck.judge(profile.survey, profile.reading.found)


def find(name: str, folder: Path) -> Profile | None:
    """The stored profile of that name in `folder`, or at that path; None if there is none."""
    return load(folder / name) or load(Path(name))


def kept(folder: Path, damaged: Callable[[str], None]) -> list[Listed]:
    """The rows of `gdn profile --list`: each profile in `folder` and its subfolders.
    `damaged` gets a line for each that cannot be read.
    """
    rows = []
    for file in sorted(folder.glob(f"*/{_FILE}")) + sorted(folder.glob("*.json")):
        try:
            profile = load(file)
        except GdnError as e:
            damaged(str(e))
            continue
        if profile:
            survey, verdict = profile.survey, profile.verdict
            listed = Listed(
                profile.name,
                profile.time,
                profile.tool,
                profile.op,
                profile.algo,
                profile.label,
                profile.status,
                bottleneck.known(survey.time_us) if survey else None,
                verdict.bound if verdict else None,
                profile.environment.device,
                str(file.parent if file.name == _FILE else file),
            )
            rows.append(listed)
    return rows


def exit_code(profiles: list[Profile]) -> int:
    """1 if an algo is wrong, or failed the tool's own check; 3 if a profile could not be stored."""
    if not all(p.passed for p in profiles):
        return errors.FAILED
    return errors.MISSING if any(p.unkept for p in profiles) else errors.OK
