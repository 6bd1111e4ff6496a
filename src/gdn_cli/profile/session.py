"""`gdn profile`: one algo on one workload under one tool -> a folder with the results.

First a plain worker surveys the algo: is it right, how long does it take, how long does
a plain copy of its bytes take, which kernels does a call run? Then the tool's target
processes run: workers too, with the tool's command line before theirs. The tool's
findings, the survey and the verdict go into `profile.json`, next to the tool's files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from .. import errors, files, paths
from ..catalog.formats import Definition, Solution
from ..catalog.ops import Op
from ..catalog.pack import definition, pack, source_hash
from ..catalog.registry import Algo, Registry
from ..catalog.workloads import Workload
from ..errors import GdnError, MissingError, UsageError
from ..machine import environment, locks
from ..machine.inventory import HERE, Machine
from ..parsing import decode, read_json, wrong
from ..records.store import dumps
from ..run import planning
from ..run.jobs import Job, execute
from ..schema.profile_types import Found, Listed, Profile, Survey, Verdict
from ..schema.record_types import Call, Environment, Record, Status
from ..worker import messages, profilers
from ..worker.profilers import Ask, Reply, Run
from ..worker.request import Options, PlanFields, Profiling, Timing
from . import bottleneck

_FILE = "profile.json"
_ELSEWHERE = "--out DIR or GDN_HOME names another place"


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
    seconds: float | None = None  # at most, for each time that the survey measures
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Subject:
    """What is profiled. `mode` is None for a tool that only compiles."""

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
    entries = planning.rivals(
        registry, names, op, modes[0] if len(modes) == 1 else device, place
    )
    part = planning.parts(
        registry,
        entries,
        chosen=[workload] if workload else [],
        first=None if workload else 1,
        preset=None,
        dataset=dataset,
        overrides={},
    )[0]
    found = []
    for entry in part.entries:
        mode = _mode(tool, entry) if modes else None
        solution = pack(entry.algo, part.op)
        found.append(
            Subject(
                part.op,
                entry.algo,
                mode,
                part.workloads[0],
                definition(part.op, registry),
                solution,
            )
        )
    return tool, found


def _mode(tool: str, entry: planning.Entry) -> str:
    """Where the algo runs under the tool."""
    place, wanted = entry.place, profilers.TOOLS[tool].modes
    if place.mode in wanted:
        return place.mode
    able = [
        f"--tool {name}"
        for name, other in profilers.TOOLS.items()
        if set(other.modes) & set(entry.algo.modes)
    ]
    if not set(wanted) & set(entry.algo.modes):
        where = "a GPU" if wanted == ("cuda",) else "a CPU"
        raise UsageError(
            f"--tool {tool} is for algos on {where}, and {entry.algo.full_name} does not run there",
            hint=f"use {' or '.join(able)}",
        )
    compiled = entry.algo.language in ("cuda", "triton") and (
        place.reason or ""
    ).startswith("no GPU here")
    hint = f"{place.hint}; --tool sass needs no GPU" if compiled else place.hint
    raise MissingError(
        f"{entry.algo.full_name} cannot run here: {place.reason}", hint=hint
    )


def sent(subject: Subject, settings: Settings) -> dict[str, Any]:
    """A subject and how to profile it, as JSON for another machine."""
    algo = msgspec.structs.replace(subject.algo, folder=None, shares=(), solution=None)
    away = {
        "subject": replace(subject, algo=algo),
        "settings": replace(settings, folder=Path()),
    }
    return msgspec.to_builtins(away, enc_hook=str)


def received(d: dict[str, Any], folder: Path) -> tuple[Subject, Settings]:
    """The inverse of `sent`; the profile is to go into `folder`."""
    read = partial(msgspec.convert, dec_hook=lambda form, value: form(value))  # paths
    return read(d["subject"], Subject), replace(
        read(d["settings"], Settings), folder=folder
    )


# What runs now, and how many of how many processes are done.
Progress = Callable[[str, int, int], None]


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
    tool = profilers.module(settings.tool)
    tool.find(machine)
    # named so that a user can find it: when, what, on which GPU, with which tool
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    words = [stamp, subject.op.name, subject.algo.name, subject.label, settings.tool]
    folder = new_folder(settings.folder, words)
    try:
        with contextlib.ExitStack() as held:
            if subject.mode == "cuda" and profilers.TOOLS[settings.tool].timed:
                gpu = machine.gpus()[0]
                held.enter_context(locks.gpu(gpu.uuid, say, f"GPU {gpu.index}"))
            profile = _profiled(subject, settings, folder, progress, machine)
    except BaseException as e:
        shutil.rmtree(folder, ignore_errors=True)
        # a tool's files did not fit on the disk
        if isinstance(e, OSError) and e.errno in files.MACHINE:
            raise files.failure(e.filename or folder, e, _ELSEWHERE) from None
        raise
    return keep(folder, profile)


def keep(folder: Path, profile: Profile) -> Profile:
    """Write a profile into its folder. Returns it with its path, or, if it could not be
    written, with the reason in `unkept`: it can still be shown.
    """
    profile = msgspec.structs.replace(
        profile, folder=msgspec.UNSET, unkept=msgspec.UNSET
    )
    try:
        files.write(
            folder / _FILE, dumps(msgspec.to_builtins(profile)) + "\n", hint=None
        )
    except GdnError as e:
        profile.unkept = f"the profile could not be kept: {e.message}"
    profile.folder = str(folder.absolute())
    return profile


def _profiled(
    subject: Subject,
    settings: Settings,
    folder: Path,
    progress: Progress,
    machine: Machine,
) -> Profile:
    tool = profilers.module(settings.tool)
    name = f"{subject.algo.full_name} {subject.label}"
    progress(f"{name}: survey", 0, 1)
    survey, origin, status, reason = _survey(subject, settings, machine)
    must = (survey.bytes_in, survey.bytes_out) if survey else (0, 0)
    asked = (settings.l2, settings.clocks, settings.archs, settings.checks)
    ask = Ask(
        subject.solution, *asked, *must, specific=subject.algo.specific, machine=machine
    )
    replies = []
    runs = tool.runs(ask, folder)
    for i, each in enumerate(runs):
        progress(f"{name}: {settings.tool} {each.name}", i + 1, len(runs) + 1)
        replies.append(_ran(subject, settings, each, machine))
    reading, workload = tool.read(ask, folder, replies), subject.workload
    if reading.failed and status is Status.PASSED:
        status, reason = Status.FAILED, reading.failed
    return Profile(
        name=folder.name,
        time=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **environment.commit(),
        tool=settings.tool,
        op=subject.op.name,
        algo=subject.algo.name,
        source_hash=source_hash(subject.solution),
        mode=subject.mode,
        l2=settings.l2 if subject.mode == "cuda" else None,
        workload=Call(
            uuid=workload.uuid,
            axes=workload.axes,
            index=workload.index,
            origin=workload.origin,
        ),
        label=subject.label,
        environment=origin or Environment(),
        status=status,
        reason=reason,
        survey=survey,
        verdict=_verdict(settings.tool, survey, reading.found),
        reading=reading,
    )


def new_folder(parent: Path, words: list[str]) -> Path:
    """A new folder in `parent`, named from these words; UsageError if none can be made."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "", "-".join(words).replace(" ", "-"))
    marks = ("", *(f"-{i}" for i in range(2, 1000)))
    try:
        paths.make(parent) if parent == paths.profiles_dir() else parent.mkdir(
            parents=True, exist_ok=True
        )
        for folder in ((parent / (name + mark)).absolute() for mark in marks):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as e:
        raise files.failure(parent, e, _ELSEWHERE) from None
    raise UsageError(
        f"{parent} is full of {name}", hint="--out DIR names another place"
    )


# --- the processes


def _survey(
    subject: Subject, settings: Settings, machine: Machine
) -> tuple[Survey | None, Environment | None, Status, str | None]:
    """A plain worker's results: the survey, its environment, the status and the reason."""
    if subject.mode is None:  # a tool that only compiles
        return None, None, Status.PASSED, None
    timed = profilers.TOOLS[settings.tool].timed
    plan: PlanFields = {"l2": settings.l2}
    if settings.seconds:
        plan["seconds"] = settings.seconds
    tiers = planning.tiers_for(subject.mode, ()) if timed else ()
    job = _job(subject, settings, Profiling("survey", l2=settings.l2), machine)
    job = job.asking(timing=Timing(tiers, plan, fallback=True))
    outcome = execute(job)
    record = next(iter(outcome.records), None)
    status, reason = (
        (record.status, record.reason) if record else (outcome.status, outcome.reason)
    )
    # without a time the profile cannot be interpreted
    if timed and (record is None or record.timing is None):
        code = record and record.code or outcome.code or errors.FAILED
        tail = f" ({outcome.tail[-1][:160]})" if outcome.tail and not record else ""
        first, *rest = (reason or status.value).splitlines()
        raise GdnError(
            f"{subject.algo.full_name}: {first}{tail}",
            code=code,
            hint="\n  ".join(rest) or None,
        )
    return _surveyed(record) if record else None, outcome.environment, status, reason


def _surveyed(record: Record) -> Survey | None:
    """The parts of a survey's record that a profile keeps."""
    if record.answer is None:
        return None
    said, timing = msgspec.convert(record.answer, messages.Survey), record.timing
    if timing is None:
        return Survey(bytes_in=said.bytes_in, bytes_out=said.bytes_out)
    floors = said.floors
    return Survey(
        bytes_in=said.bytes_in,
        bytes_out=said.bytes_out,
        tier=record.tier,
        time_us=timing.median_us,
        span_us=timing.span_us,
        launches=timing.kernels,
        copy_us=floors.copy_us,
        empty_us=floors.empty_us,
        large_rate=floors.large_bytes / floors.large_us / 1e3
        if floors.large_us
        else None,
        bytes_moved=said.bytes_in + said.bytes_out,
        ran=said.ran,
        doubts=record.doubts or [],
    )


def _ran(subject: Subject, settings: Settings, each: Run, machine: Machine) -> Reply:
    """Run one target process under the tool."""
    asked = Profiling(settings.tool, each.params, settings.l2)
    outcome = execute(
        replace(_job(subject, settings, asked, machine), wrap=each.wrap, env=each.env)
    )
    record = next(iter(outcome.records), None)
    fate = record if record and not record.passed else outcome
    answer = record.answer if record else None
    return Reply(
        each, fate.status.value, fate.reason, answer, tuple(outcome.tail), fate.code
    )


def _job(
    subject: Subject, settings: Settings, asked: Profiling, machine: Machine
) -> Job:
    dataset = settings.dataset
    return Job.of(
        "profile",
        subject.op,
        subject.definition,
        subject.mode or "cpu",
        [subject.workload],
        [(subject.algo, subject.solution)],
        options=Options(dataset=str(dataset.absolute()) if dataset else None),
        profile=asked,
        timeout_s=settings.timeout_s,
        machine=machine,
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
        if profile.tool not in profilers.TOOLS:
            raise wrong(
                file,
                ["tool"],
                f"one of {', '.join(profilers.TOOLS)}",
                profile.tool,
                damaged,
            )
    except GdnError:
        if file.name != _FILE:  # a packed solution, anything
            return None
        raise
    reading = profile.reading
    profile.reading = msgspec.structs.replace(
        reading, files=profilers.kept(file.parent, *reading.files)
    )
    profile.verdict = _verdict(profile.tool, profile.survey, reading.found)
    profile.folder = str(file.parent.absolute())
    return profile


def _verdict(
    tool: str, survey: Survey | None, found: tuple[Found, ...]
) -> Verdict | None:
    """The verdict of this gdn version on the stored figures."""
    return bottleneck.judge(survey, found) if profilers.TOOLS[tool].timed else None


def find(name: str, folder: Path) -> Profile | None:
    """The stored profile of that name in `folder`, or at that path; None if there is none."""
    paths_ = (
        [Path(name)]
        if os.sep in name or name.endswith(".json")
        else [folder / name, Path(name)]
    )
    return next((found for path in paths_ if (found := load(path))), None)


def kept(folder: Path, damaged: Callable[[str], None]) -> list[Listed]:
    """The rows of `gdn profile --list`: each profile in `folder` and its subfolders.
    `damaged` gets a line for each that cannot be read.
    """
    rows = []
    for file in sorted(folder.glob(f"*/{_FILE}")) + sorted(folder.glob("*.json")):
        try:
            p = load(file)
        except GdnError as e:
            damaged(str(e))
            continue
        if p:
            us, bound = (
                p.survey and p.survey.time_us or None,
                p.verdict and p.verdict.bound,
            )
            place = str(file.parent if file.name == _FILE else file)
            head = p.name, p.time, p.tool, p.op, p.algo, p.label, p.status
            rows.append(Listed(*head, us, bound, p.environment.device, place))
    return rows


def exit_code(profiles: list[Profile]) -> int:
    """1 if an algo is wrong, or failed the tool's own check; 3 if a profile could not be stored."""
    if not all(p.passed for p in profiles):
        return errors.FAILED
    return errors.MISSING if any(p.unkept for p in profiles) else errors.OK
