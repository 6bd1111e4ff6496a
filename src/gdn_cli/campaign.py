"""What a command is to do: options -> algos, where each runs, on which workloads -> jobs, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import errors, machine, traceset, workloads
from .errors import UsageError
from .jobs import Job, Outcome, execute
from .pack import definition, pack, read_solution, source_hash
from .presets import Preset
from .records import FLOOR, Document
from .registry import DEFAULT_OP, Algo, Op, Registry
from .timing import TIERS
from .workloads import Workload

NOT_TIMED = "no GPU here, and Triton's interpreter is for checks, not for times"


@dataclass(frozen=True)
class Entry:
    """An algo and where it runs here, or why it cannot."""

    algo: Algo
    place: machine.Place


@dataclass(frozen=True)
class Part:
    """One op's share of a command."""

    op: Op
    entries: list[Entry]
    workloads: list[Workload]
    plan: dict[str, Any]  # how long to measure: timing.Plan's fields


@dataclass(frozen=True)
class Settings:
    """How to run the parts, whatever they are."""

    command: str  # check or bench
    dataset: Path | None = None
    tier: str | None = None
    strict: bool = False
    timeout_s: float = 300.0


def choose(
    registry: Registry, names: str | None, op: str | None, files: list[Path], device: str, *, timed: bool
) -> tuple[list[Entry], bool]:
    """The algos of `--algo` (names, full names, `all`) and packed files; without either, what can run here.

    Returns the entries, and whether the user named them one by one. With `timed`, Triton's interpreter is no place.
    """
    if op:
        registry.op(op)
    algos = [read_solution(file, registry) for file in files]
    for file, algo in zip(files, algos, strict=True):
        if op and algo.op != op:
            raise UsageError(f"{file} is a solution of {algo.op}, not of {op}", hint="drop --op")
    wanted = [name.strip() for name in (names or "").split(",") if name.strip()]
    every = not wanted and not files
    for name in wanted or (["all"] if every else []):
        algos += registry.of(op or DEFAULT_OP) if name == "all" else [registry.find(name, op)]
    entries = []
    for algo in _distinct(algos, registry):
        place = machine.place(algo, device)
        if timed and place.mode == "interpreter":
            place = machine.Place(None, NOT_TIMED, machine.MODAL)
        entries.append(Entry(algo, place))
    if every or "all" in wanted:  # what is broken is among them, and says so
        entries += [
            Entry(Algo(b.op, b.name, "", "", "", False, ()), machine.Place(None, str(b.error)))
            for b in registry.broken
            if b.op == (op or DEFAULT_OP)
        ]
    if every and timed:
        # times of the GPU and of the CPU do not belong side by side: with a GPU here, the GPU's algos
        best = "cuda" if any(e.place.mode == "cuda" for e in entries) else "cpu"
        entries = [e for e in entries if e.place.mode in (None, best)]
    return entries, bool(files) or any(name != "all" for name in wanted)


def _distinct(algos: list[Algo], registry: Registry) -> list[Algo]:
    """One of each, every one with a name of its own: the same file or folder twice is one algo; another one of the
    same name, or with the name of the reference or of the floor that it is compared with, gets a mark behind it."""
    found: dict[tuple[str, str], Algo] = {}
    for algo in algos:
        source = source_hash(algo.solution) if algo.solution else str(algo.folder)
        if (algo.full_name, source) in found:
            continue
        reference = registry.reference(registry.ops[algo.op])
        taken = {a.full_name for a in found.values()} | {f"{algo.op}/{FLOOR}"}
        if algo.full_name in taken or (algo.name == reference.name and algo.folder != reference.folder):
            marked = replace(algo, name=f"{algo.name}@{source[:6] if algo.solution else 'own'}")
        else:
            marked = algo
        found[algo.full_name, source] = marked
    return list(found.values())


def parts(
    registry: Registry,
    entries: list[Entry],
    *,
    chosen: list[str],
    first: int | None,
    preset: Preset | None,
    dataset: Path | None,
    overrides: dict[str, Any],
) -> list[Part]:
    """Group the algos by op, and select the workloads of each op; `overrides` go before the preset's settings."""
    found = []
    for name in dict.fromkeys(e.algo.op for e in entries):
        op = registry.op(name)
        known = traceset.known(op, dataset)
        picked = workloads.select(op, known, chosen=chosen, first=first, preset=preset)
        plan = preset.settings_for(name) if preset else {}
        found.append(Part(op, [e for e in entries if e.algo.op == name], picked, plan | overrides))
    return found


# A line of progress: what runs now, how many of how many workloads are done.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """All that a command will do, known before anything is run or written."""

    jobs: list[Job]
    missing: list[dict[str, Any]]  # algos that cannot run here
    unpackable: list[tuple[str, str, str, str]]  # op, algo, mode, reason


def prepare(registry: Registry, work: list[Part], settings: Settings) -> Plan:
    """Pack everything and choose tiers. An algo that cannot be packed does not stop the others; a wrong tier does."""
    plan = Plan([], [], [])
    for part in work:
        for entry in part.entries:
            if entry.place.mode is None:
                why = {"reason": entry.place.reason, "hint": entry.place.hint}
                plan.missing.append({"op": part.op.name, "algo": entry.algo.name} | why)
        plan.jobs.extend(_jobs(registry, part, settings, plan))
    return plan


def run(plan: Plan, document: Document, progress: Progress) -> None:
    """Run everything, algo after algo, each in its own worker; the document has it all at any moment."""
    document.missing.extend(plan.missing)
    for row in plan.unpackable:
        document.add_unpackable(*row)
    total, done = sum(len(job.workloads) for job in plan.jobs), 0
    for job in plan.jobs:
        name = job.algo.full_name if job.algo else f"{job.op.name}/{FLOOR}"
        progress(name, done, total)
        seen = 0

        def on_record(record: dict, environment: dict, job: Job = job, name: str = name, done: int = done) -> None:
            nonlocal seen
            document.add(job, record, environment)
            seen += 1
            progress(name, done + seen, total)

        outcome = execute(job, on_record)
        if outcome.status != "done":
            document.add(job, _fate(job, outcome, seen), outcome.environment)
        done += len(job.workloads)
    if document.records:
        document.save()


def _fate(job: Job, outcome: Outcome, seen: int) -> dict[str, Any]:
    """The record of an algo that ended before its workloads did."""
    return {
        "workload": {},
        "status": outcome.status,
        "reason": outcome.reason,
        "code": outcome.reply.get("code"),
        "unfinished": len(job.workloads) - seen,
        "tail": outcome.tail,
    }


def _jobs(registry: Registry, part: Part, settings: Settings, plan: Plan) -> Iterator[Job]:
    """One job for each algo that can run; a bench puts the floor and the reference of each mode in front."""
    described = definition(part.op, registry)
    ready = [e for e in part.entries if e.place.mode]
    if settings.command == "bench":
        reference = registry.reference(part.op)
        for mode in dict.fromkeys(e.place.mode for e in ready):
            tier = tier_for(mode, settings.tier)
            yield _job(settings, part, described, "floor", None, mode, tier)
            if not any(e.algo.name == reference.name and e.place.mode == mode for e in ready):
                yield _job(settings, part, described, "bench", reference, mode, tier)
    for entry in ready:
        tier = tier_for(entry.place.mode, settings.tier) if settings.command == "bench" else None
        try:
            yield _job(settings, part, described, settings.command, entry.algo, entry.place.mode, tier)
        except UsageError as e:
            plan.unpackable.append((part.op.name, entry.algo.name, entry.place.mode, str(e)))


def _job(
    settings: Settings, part: Part, described: dict, command: str, algo: Algo | None, mode: str, tier: str | None
) -> Job:
    return Job(
        command=command,
        op=part.op,
        definition=described,
        solution=pack(algo, part.op) if algo else None,
        mode=mode,
        workloads=tuple(part.workloads),
        algo=algo,
        dataset=settings.dataset,
        tier=tier,
        plan=part.plan,
        strict=settings.strict,
        timeout_s=settings.timeout_s,
    )


def tier_for(mode: str, wanted: str | None) -> str:
    """The tier to time a mode in: the user's where it fits, else the best for that mode."""
    fitting = [tier for tier, of in TIERS.items() if of == mode]
    if wanted is None:
        return fitting[0]
    if wanted not in fitting:
        place = {"cuda": "on a GPU", "cpu": "on the CPU"}[mode]
        raise UsageError(f"tier '{wanted}' does not time what runs {place}", hint=f"use {' or '.join(fitting)}")
    return wanted


def exit_code(document: Document, named: bool) -> int:
    """1: an algo failed; 3: none did, but an algo that the user named, the tier or the data cannot be had here."""
    failed = [r for r in document.records if r["status"] != "passed"]
    lacking = [r for r in failed if r["status"] == "tier_unavailable" or r.get("code") == errors.MISSING]
    if len(failed) > len(lacking):
        return errors.FAILED
    if lacking or (document.missing and (named or not document.records)):
        return errors.MISSING
    return errors.OK
