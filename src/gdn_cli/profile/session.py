"""`gdn profile`: one algo on one workload below one tool -> a folder with all that came of it.

First a plain worker surveys the algo: is it right, how long does it take, how long a plain copy of its bytes, what does
a call run? Then the tool's own target processes, each a worker again, with the tool's command line in front. What the
tool found, the survey and the verdict go into `profile.json`, beside the tool's files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from .. import errors, files, paths, profilers
from ..catalog.pack import definition, pack, source_hash
from ..catalog.registry import Algo, Op, Registry
from ..catalog.workloads import Workload
from ..errors import GdnError, MissingError, UsageError
from ..machine import environment, inventory, locks
from ..parsing import read_json, to_json
from ..profilers import Ask, Reading, Reply, Run
from ..records.messages import Survey
from ..records.request import Profiling
from ..records.store import dumps
from ..run import planning
from ..run.jobs import Job, execute
from ..schema.record_types import Environment, Record, Status
from . import bottleneck

SCHEMA = 1
_FILE = "profile.json"
_ELSEWHERE = "--out DIR or GDN_HOME names another place"


@dataclass(frozen=True)
class Settings:
    """How to profile, whatever it is. `folder` holds a folder for each profile."""

    tool: str
    folder: Path
    l2: str = "cold"
    clocks: str = "none"
    archs: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    dataset: Path | None = None
    seconds: float | None = None  # that the survey samples each time, at most
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Subject:
    """What is profiled. `mode` is None for a tool that compiles and runs nothing."""

    op: Op
    algo: Algo
    mode: str | None
    workload: Workload
    definition: dict[str, Any]
    solution: dict[str, Any]

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
    place: planning.Placing = inventory.place,
) -> tuple[str, list[Subject]]:
    """The tool (without one: cpu where the first algo runs on the CPU, else ncu), and what each name stands for.

    Raises UsageError and MissingError where the tool cannot look at an algo, or the algo cannot run here.
    """
    if tool and tool not in profilers.TOOLS:
        raise errors.unknown("tool", tool, profilers.TOOLS)
    if tool is None:
        first = planning.rivals(registry, names[:1], op, device, place)[0]
        tool = "cpu" if first.place.mode == "cpu" else "ncu"
    modes = profilers.TOOLS[tool].modes
    entries = planning.rivals(registry, names, op, modes[0] if len(modes) == 1 else device, place)
    part = planning.parts(
        registry, entries, chosen=[workload] if workload else [], first=None if workload else 1, preset=None,
        dataset=dataset, overrides={},
    )[0]  # fmt: skip
    found = []
    for entry in part.entries:
        mode = _mode(tool, entry) if modes else None
        solution = pack(entry.algo, part.op)
        found.append(Subject(part.op, entry.algo, mode, part.workloads[0], definition(part.op, registry), solution))
    return tool, found


def _mode(tool: str, entry: planning.Entry) -> str:
    """Where the algo runs below the tool."""
    place, wanted = entry.place, profilers.TOOLS[tool].modes
    if place.mode in wanted:
        return place.mode
    able = [f"--tool {name}" for name, other in profilers.TOOLS.items() if set(other.modes) & set(entry.algo.modes)]
    if not set(wanted) & set(entry.algo.modes):
        where = "a GPU" if wanted == ("cuda",) else "a CPU"
        raise UsageError(
            f"--tool {tool} looks at what runs on {where}, and {entry.algo.full_name} does not",
            hint=f"use {' or '.join(able)}",
        )
    compiled = entry.algo.language in ("cuda", "triton") and not inventory.gpus()
    hint = f"{place.hint}; --tool sass needs no GPU" if compiled and place.hint else place.hint
    raise MissingError(f"{entry.algo.full_name} cannot run here: {place.reason}", hint=hint)


def sent(subject: Subject, settings: Settings) -> dict[str, Any]:
    """A subject and how to profile it, as JSON for another machine."""
    return {
        "op": to_json(subject.op),
        "algo": subject.algo.name,
        "mode": subject.mode,
        "workload": subject.workload.to_json(),
        "definition": subject.definition,
        "solution": subject.solution,
        "settings": asdict(settings) | {"folder": None, "dataset": str(settings.dataset) if settings.dataset else None},
    }


def received(d: dict[str, Any], folder: Path) -> tuple[Subject, Settings]:
    """What `sent` gave; the profile is to go into `folder`."""
    op, solution, spec = msgspec.convert(d["op"], Op), d["solution"], d["solution"]["spec"]
    algo = Algo(
        op=op.name,
        name=d["algo"],
        summary="",
        language=spec["language"],
        entry_point=spec["entry_point"],
        destination_passing=spec["destination_passing_style"],
        modes=(d["mode"],),
        solution=solution,
    )
    subject = Subject(op, algo, d["mode"], msgspec.convert(d["workload"], Workload), d["definition"], solution)
    asked = d["settings"] | {key: tuple(d["settings"][key]) for key in ("archs", "checks")}
    dataset = Path(asked["dataset"]) if asked["dataset"] else None
    return subject, Settings(**asked | {"folder": folder, "dataset": dataset})


# What runs now, how many of how many processes are done.
Progress = Callable[[str, int, int], None]


def run(subject: Subject, settings: Settings, progress: Progress, say: Callable[[str], None]) -> dict[str, Any]:
    """Profile one subject; returns the document, which `profile.json` in its folder holds as well.

    Raises GdnError where nothing could be found out; then no folder is left behind.
    """
    tool = profilers.module(settings.tool)
    tool.find()
    folder = _folder(settings, subject)
    try:
        with contextlib.ExitStack() as held:
            if subject.mode == "cuda" and profilers.TOOLS[settings.tool].timed:
                gpu = inventory.gpus()[0]
                held.enter_context(locks.gpu(gpu.uuid, say, f"GPU {gpu.index}"))
            document = _profiled(subject, settings, folder, progress)
    except BaseException as e:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(e, OSError) and e.errno in files.MACHINE:  # a tool's files did not fit on the disk
            raise files.failure(e.filename or folder, e, _ELSEWHERE) from None
        raise
    return keep(folder, document)


def keep(folder: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Write a profile's document into its folder; returns it with where it lies, and with `unkept`, the one line that
    says why, where it could not be written: it can be shown all the same."""
    try:
        files.write(folder / _FILE, dumps(document) + "\n", hint=None)
    except GdnError as e:
        return _at(folder, document) | {"unkept": f"the profile could not be kept: {e.message}"}
    return _at(folder, document)


def _profiled(subject: Subject, settings: Settings, folder: Path, progress: Progress) -> dict[str, Any]:
    tool = profilers.module(settings.tool)
    name = f"{subject.algo.full_name} {subject.label}"
    progress(f"{name}: survey", 0, 1)
    survey, origin, status, reason = _survey(subject, settings)
    ask = Ask(
        settings.tool, subject.solution, subject.mode, settings.l2, settings.clocks, settings.archs, settings.checks,
        survey.get("bytes_in", 0), survey.get("bytes_out", 0), subject.algo.specific,
    )  # fmt: skip
    replies = []
    runs = tool.runs(ask, folder)
    for i, each in enumerate(runs):
        progress(f"{name}: {settings.tool} {each.name}", i + 1, len(runs) + 1)
        replies.append(_ran(subject, settings, each))
    reading = tool.read(ask, folder, replies)
    if reading.failed and status is Status.PASSED:
        status, reason = Status.FAILED, reading.failed
    document = {
        "schema": SCHEMA,
        "name": folder.name,
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **environment.commit(),
        "tool": settings.tool,
        "op": subject.op.name,
        "algo": subject.algo.name,
        "source_hash": source_hash(subject.solution),
        "mode": subject.mode,
        "l2": settings.l2 if subject.mode == "cuda" else None,
        "workload": {k: v for k, v in subject.workload.to_json().items() if k in ("uuid", "index", "axes", "origin")},
        "label": subject.label,
        "environment": msgspec.to_builtins(origin or Environment()),
        "status": status.value,
        "reason": reason,
        "survey": survey or None,
        "verdict": None,
        "reading": json.loads(json.dumps(reading.to_json())),
    }
    return _judged(document)


def _folder(settings: Settings, subject: Subject) -> Path:
    """Named so that a person finds it again: when, what, on what, by which tool."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return new_folder(settings.folder, [stamp, subject.op.name, subject.algo.name, subject.label, settings.tool])


def new_folder(parent: Path, words: list[str]) -> Path:
    """A new folder in `parent`, called by these words; UsageError where none can be made."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "", "-".join(words).replace(" ", "-"))
    marks = ("", *(f"-{i}" for i in range(2, 1000)))
    try:
        paths.make(parent) if parent == paths.profiles_dir() else parent.mkdir(parents=True, exist_ok=True)
        for folder in ((parent / (name + mark)).absolute() for mark in marks):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as e:
        raise files.failure(parent, e, _ELSEWHERE) from None
    raise UsageError(f"{parent} is full of {name}", hint="--out DIR names another place")


# --- the processes --------------------------------------------------------------------------------------------------


def _survey(subject: Subject, settings: Settings) -> tuple[dict[str, Any], Environment | None, Status, str | None]:
    """What a plain worker says: the survey, where it ran, the status and the reason. {} for a tool that compiles
    only."""
    if subject.mode is None:
        return {}, None, Status.PASSED, None
    timed = profilers.TOOLS[settings.tool].timed
    job = replace(
        _job(subject, settings, Profiling("survey", l2=settings.l2)),
        tiers=planning.tiers_for(subject.mode, ()) if timed else (),
        plan={"l2": settings.l2} | ({"seconds": settings.seconds} if settings.seconds else {}),
        fallback=True,
    )
    outcome = execute(job)
    record = next(iter(outcome.records), None)
    status, reason = (record.status, record.reason) if record else (outcome.status, outcome.reason)
    if timed and (record is None or record.timing is None):  # there is nothing that a profile could be read against
        code = record and record.code or outcome.code or errors.FAILED
        tail = f" ({outcome.tail[-1][:160]})" if outcome.tail and not record else ""
        first, *rest = (reason or status.value).splitlines()
        raise GdnError(f"{subject.algo.full_name}: {first}{tail}", code=code, hint="\n  ".join(rest) or None)
    return _surveyed(record) if record else {}, outcome.environment, status, reason


def _surveyed(record: Record) -> dict[str, Any]:
    """The parts of a survey's record that a profile keeps. Times in microseconds, rates in GB/s."""
    if record.answer is None:
        return {}
    survey = msgspec.convert(record.answer, Survey)
    kept: dict[str, Any] = {"bytes_in": survey.bytes_in, "bytes_out": survey.bytes_out}
    if timing := record.timing:
        floors = survey.floors
        kept |= {
            "tier": record.tier,
            "time_us": timing.median_us,
            "span_us": timing.span_us,
            "launches": timing.kernels,
            "copy_us": floors.copy_us,
            "empty_us": floors.empty_us,
            "large_rate": floors.large_bytes / floors.large_us / 1e3 if floors.large_us else None,
            "bytes_moved": survey.bytes_in + survey.bytes_out,
            "ran": survey.ran,
            "doubts": record.doubts or [],
        }
    return kept


def _ran(subject: Subject, settings: Settings, each: Run) -> Reply:
    """One target process below the tool."""
    asked = Profiling(settings.tool, each.params, settings.l2)
    outcome = execute(replace(_job(subject, settings, asked), wrap=each.wrap, env=each.env))
    record = next(iter(outcome.records), None)
    fate = record if record and not record.passed else outcome
    return Reply(each, fate.status.value, fate.reason, record and record.answer or {}, tuple(outcome.tail))


def _job(subject: Subject, settings: Settings, asked: Profiling) -> Job:
    return Job(
        command="profile",
        op=subject.op,
        definition=subject.definition,
        solution=subject.solution,
        mode=subject.mode or "cpu",
        workloads=(subject.workload,),
        algo=subject.algo,
        dataset=settings.dataset,
        profile=asked,
        timeout_s=settings.timeout_s,
    )


# --- profiles that are kept -----------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any] | None:
    """A kept profile, from its folder or its file; None where that is none. MissingError, with the file's name, for a
    profile.json that is damaged, or that this gdn cannot read."""
    file = path / _FILE if path.is_dir() else path
    if not file.exists():
        return None
    try:
        document = read_json(file, MissingError)
        if document["schema"] != SCHEMA or document["tool"] not in profilers.TOOLS:
            known = f"this gdn reads schema {SCHEMA} of {', '.join(profilers.TOOLS)}"
            raise MissingError(f"{file}: schema {document['schema']!r} of tool {document['tool']!r:.40}; {known}")
        reading = document["reading"]
        document["reading"] = reading | {"files": list(profilers.kept(file.parent, *reading["files"]))}
        return _judged(_at(file.parent, document))
    except GdnError:
        if file.name != _FILE:  # a packed solution, anything
            return None
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        if file.name != _FILE:
            return None
        raise MissingError(
            f"{file} is damaged: {errors.one_line(e)}", hint="delete its folder, or profile again"
        ) from None


def _judged(document: dict[str, Any]) -> dict[str, Any]:
    """With this gdn's verdict on the figures, which are what is kept."""
    timed = profilers.TOOLS[document["tool"]].timed
    found = Reading.from_json(document["reading"]).found
    verdict = bottleneck.judge(document["survey"], found) if timed else None
    return document | {"verdict": verdict.to_json() if verdict else None}


def _at(folder: Path, document: dict[str, Any]) -> dict[str, Any]:
    """With where it lies, which the file itself does not say: it may be moved."""
    return document | {"folder": str(folder.absolute())}


def find(name: str, folder: Path) -> dict[str, Any] | None:
    """The kept profile of that name in `folder`, or of that path; None where there is none."""
    paths_ = [Path(name)] if os.sep in name or name.endswith(".json") else [folder / name, Path(name)]
    return next((found for path in paths_ if (found := load(path))), None)


def kept(folder: Path, damaged: Callable[[str], None]) -> list[dict[str, Any]]:
    """What `gdn profile --list` shows of each profile in `folder`, and in its folders; the newest first. `damaged` gets
    a line for each that cannot be read."""
    rows = []
    for file in sorted(folder.glob(f"*/{_FILE}")) + sorted(folder.glob("*.json")):
        try:
            document = load(file)
        except GdnError as e:
            damaged(str(e))
            continue
        if document:
            verdict, survey = document["verdict"] or {}, document["survey"] or {}
            gpu = environment.device(document["environment"])
            row = {key: document[key] for key in ("name", "time", "tool", "op", "algo", "label", "status")}
            row |= {"time_us": survey.get("time_us"), "bound": verdict.get("bound"), "device": gpu}
            rows.append(row | {"folder": str(file.parent if file.name == _FILE else file)})
    return sorted(rows, key=lambda row: (row["time"], row["name"]), reverse=True)


def exit_code(documents: list[dict[str, Any]]) -> int:
    """1 where an algo is wrong, or failed the tool's own check; 3 where a profile could not be kept."""
    if any(d["status"] != "passed" for d in documents):
        return errors.FAILED
    return errors.MISSING if any("unkept" in d for d in documents) else errors.OK
