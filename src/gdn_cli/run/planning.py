"""What a command is to do: options -> algos, where each runs, on which workloads ->
jobs, which execute.py runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from ..catalog import official, trace_set, workloads
from ..catalog.official import Harness
from ..catalog.ops import Op
from ..catalog.pack import definition, pack, read_solution, source_hash
from ..catalog.presets import Preset
from ..catalog.registry import DEFAULT_OP, Algo, Registry
from ..catalog.registry import names as listed
from ..catalog.tiers import FLOORS, TIERS
from ..catalog.workloads import Workload
from ..errors import UsageError
from ..machine import gpu_sharing, inventory
from ..machine.inventory import Gpu, Machine
from ..parsing import Json
from ..schema.record_types import Missing
from ..worker.request import PlanFields
from .jobs import Job

# (algo, --device) -> where it runs on the machine in question: Machine.place for this one.
Placing = Callable[[Algo, str], inventory.Place]

# for each workload: the harness starts processes, and times the reference too
_JUDGE_S = 30.0
NOT_TIMED = "no GPU here, and Triton's interpreter is for checks, not for times"


@dataclass(frozen=True)
class Entry:
    """An algo and where it runs here, or why it cannot."""

    algo: Algo
    place: inventory.Place


@dataclass(frozen=True)
class Part:
    """One op's share of a command."""

    op: Op
    entries: list[Entry]
    workloads: list[Workload]
    plan: PlanFields  # how long to measure
    scored: bool = False  # whether these workloads make a contest's score
    gpu: Gpu | None = None  # the one that this share runs on


@dataclass(frozen=True)
class Settings:
    """How to run the parts, whatever they are."""

    command: str  # check, bench, floor or compare
    dataset: Path | None = None
    # empty: the mode's default, or a reported substitute if that is not available
    tiers: tuple[str, ...] = ()
    strict: bool = False
    timeout_s: float = 300.0
    # to spread the parts over; empty: the one that CUDA chooses
    gpus: tuple[Gpu, ...] = ()
    place: Placing = inventory.HERE.place
    sandbox: bool = False
    in_place: bool = False  # outputs overwrite the inputs, where their ops allow it
    # the algos are batch-invariant builds, and are checked for it
    batch_invariant: bool = False
    machine: Machine = inventory.HERE


def choose(
    registry: Registry,
    names: str | None,
    op: str | None,
    files: list[Path],
    device: str,
    *,
    timed: bool,
    place: Placing = inventory.HERE.place,
) -> tuple[list[Entry], bool]:
    """The algos of `--algo` (names, full names, `all`) and packed files; without
    either, what can run here.

    Returns the entries, and whether the user named them one by one. With `timed`,
    Triton's interpreter does not count; `place` says where an algo can run.
    """
    op = registry.op(op).name if op else None
    algos = [read_solution(file, registry) for file in files]
    for file, algo in zip(files, algos, strict=True):
        if op and algo.op != op:
            raise UsageError(
                f"{file} is a solution of {algo.op}, not of {op}", hint="drop --op"
            )
    wanted = listed(names)
    every = not wanted and not files
    for name in wanted or (["all"] if every else []):
        algos += (
            registry.of(op or DEFAULT_OP)
            if name == "all"
            else [registry.find(name, op)]
        )
    entries = [
        _entry(algo, place(algo, device), timed) for algo in _distinct(algos, registry)
    ]
    # includes algos whose algo.toml is broken, to report them
    if every or "all" in wanted:
        unread = {
            "summary": "",
            "language": "",
            "entry_point": "",
            "destination_passing": False,
            "modes": (),
        }
        entries += [
            Entry(
                Algo(op=b.op, name=b.name, **unread),
                inventory.Place(None, str(b.error)),
            )
            for b in registry.broken
            if b.op == registry.op(op or DEFAULT_OP).family
        ]
    if every and timed:
        # times of the GPU and of the CPU cannot be compared: with a GPU here, only the GPU's algos
        best = "cuda" if any(e.place.mode == "cuda" for e in entries) else "cpu"
        entries = [e for e in entries if e.place.mode in (None, best)]
    return entries, bool(files) or any(name != "all" for name in wanted)


def rivals(
    registry: Registry,
    names: list[str],
    op: str | None,
    device: str,
    place: Placing = inventory.HERE.place,
) -> list[Entry]:
    """The algos of a comparison in the order in which they were named: names, full
    names, packed files.

    An algo named twice is compared with itself, as `NAME@2`. All must be of one op.
    """
    entries: list[Entry] = []
    for name in names:
        algo = (
            read_solution(Path(name), registry)
            if name.endswith(".json")
            else registry.find(name, op)
        )
        if entries and algo.op != entries[0].algo.op:
            first = entries[0].algo.full_name
            raise UsageError(
                f"{first} and {algo.full_name} are of different ops",
                hint="--op says which is meant",
            )
        taken = [e.algo.name for e in entries]
        if algo.name in taken:
            count = 1 + sum(
                t == algo.name or t.startswith(f"{algo.name}@") for t in taken
            )
            algo = structs.replace(algo, name=f"{algo.name}@{count}")
        entries.append(_entry(algo, place(algo, device), timed=True))
    return entries


def _entry(algo: Algo, place: inventory.Place, timed: bool) -> Entry:
    """An algo's entry. With `timed`, Triton's interpreter does not count: its times
    mean nothing.
    """
    nowhere = timed and place.mode == "interpreter"
    return Entry(
        algo, inventory.Place(None, NOT_TIMED, inventory.MODAL) if nowhere else place
    )


def anywhere(
    registry: Registry,
    op: str | None,
    device: str,
    place: Placing = inventory.HERE.place,
) -> list[Entry]:
    """Floors need no algo: return the op's reference as a placeholder, so that a device
    is chosen.
    """
    algo = registry.reference(registry.op(op or DEFAULT_OP))
    return [Entry(algo, place(algo, device))]


def _distinct(algos: list[Algo], registry: Registry) -> list[Algo]:
    """Algos with distinct names: the same file or folder twice is one algo; another
    algo of the same name, or with the name of the reference or of a floor, gets a mark
    appended to its name.
    """
    found: dict[tuple[str, str], Algo] = {}
    for algo in algos:
        source = source_hash(algo.solution) if algo.solution else str(algo.folder)
        if (algo.full_name, source) in found:
            continue
        reference = registry.reference(registry.ops[algo.op])
        taken = {a.full_name for a in found.values()} | {
            f"{algo.op}/{floor}" for floor in FLOORS
        }
        if algo.full_name in taken or (
            algo.name == reference.name and algo.folder != reference.folder
        ):
            marked = structs.replace(
                algo, name=f"{algo.name}@{source[:6] if algo.solution else 'own'}"
            )
        else:
            marked = algo
        found[algo.full_name, source] = marked
    return list(found.values())


def hard(
    registry: Registry, entries: list[Entry], chosen: list[str], first: int | None
) -> list[Part]:
    """Group the algos by op, with each op's hard inputs: all, or those chosen by name."""
    ops = map(registry.op, dict.fromkeys(e.algo.op for e in entries))
    return [
        Part(
            op,
            [e for e in entries if e.algo.op == op.name],
            workloads.stressed(op, chosen, first),
            {},
        )
        for op in ops
    ]


def parts(
    registry: Registry,
    entries: list[Entry],
    *,
    chosen: list[str],
    first: int | None,
    preset: Preset | None,
    dataset: Path | None,
    overrides: PlanFields,
) -> list[Part]:
    """Group the algos by op, and select the workloads of each op; `overrides` replace
    the preset's settings.
    """
    found = []
    for name in dict.fromkeys(e.algo.op for e in entries):
        op = registry.op(name)
        known = trace_set.known(op, dataset)
        picked = workloads.select(op, known, chosen=chosen, first=first, preset=preset)
        plan = preset.settings_for(name) if preset else {}
        # part of the set gives no score, and the contest has no score for other ops
        scored = (
            bool(preset and preset.scored)
            and not (chosen or first)
            and op.definition in workloads.contest()
        )
        found.append(
            Part(
                op,
                [e for e in entries if e.algo.op == name],
                picked,
                plan | overrides,
                scored,
            )
        )
    return found


@dataclass(frozen=True)
class Plan:
    """All that a command will do, known before anything is run or written."""

    jobs: list[Job]
    missing: list[Missing]  # algos that cannot run here
    unpackable: list[tuple[str, str, str, str]]  # op, algo, mode, reason
    # `key` of a job, or (op, uuid) of a workload -> position of its records, whenever they arrive
    order: dict[tuple[str, ...], int] = field(default_factory=dict)


def prepare(registry: Registry, work: list[Part], settings: Settings) -> Plan:
    """Pack everything and choose tiers. An algo that cannot be packed does not stop the
    others; a wrong tier does.
    """
    plan = Plan([], [], [])
    for part in work:
        for entry in part.entries:
            if entry.place.mode is None:
                why = {"reason": entry.place.reason, "hint": entry.place.hint}
                plan.missing.append(
                    Missing(op=part.op.name, algo=entry.algo.name, **why)
                )
        made = [
            job
            for share in _shares(part, settings.gpus)
            for job in _jobs(registry, share, settings, plan)
        ]
        plan.jobs.extend(_in_order(part, made, plan))
    if len(settings.gpus) > 1:
        apart = gpu_sharing.cpus(
            list(dict.fromkeys(job.gpu for job in plan.jobs)), settings.machine
        )
        plan.jobs[:] = [replace(job, cpus=apart[job.gpu]) for job in plan.jobs]
        # each once, even with several GPUs
        plan.unpackable[:] = dict.fromkeys(plan.unpackable)
    return plan


def added(job: Job) -> Job:
    """The same job as one that the user did not ask for."""
    return replace(job, added=True)


def judged(plan: Plan, harness: Harness) -> None:
    """Add to the plan of a bench that the contest's harness judges each algo that was
    asked for. UsageError for none that it could judge.
    """
    mine = [job for job in plan.jobs if job.command == "bench" and not job.added]
    able = [job for job in mine if job.mode == "cuda" and not job.algo.setup]
    if mine and not able:
        raise UsageError("flashinfer-bench judges on a GPU only", hint=inventory.MODAL)
    for job in able:
        plan.jobs.append(
            replace(
                job,
                command="official",
                tiers=(official.TIER,),
                official=harness,
                fallback=False,
                timeout_s=job.timeout_s + _JUDGE_S * len(job.workloads),
            )
        )


def _shares(part: Part, gpus: Sequence[Gpu]) -> list[Part]:
    """Each GPU's share of a part, such that everything that is compared is measured on one GPU.

    With at least as many algos as GPUs, or GPUs of different kinds, each algo goes to
    one GPU, with all workloads. With fewer, each workload does, with all algos;
    workloads that share a row of the table stay together. Either way each GPU measures
    its own floors and references (see _jobs).
    """
    if not gpus:
        return [part]
    ready = [e for e in part.entries if e.place.mode]
    able = {i: (1, [g for g in gpus if g.fits(e.algo)]) for i, e in enumerate(ready)}
    usable = [g for g in gpus if any(g in gs for _, gs in able.values())]
    if len(ready) < len(usable) and len({g.name for g in usable}) == 1:
        labels = [part.op.label.format(**w.axes) for w in part.workloads]
        to = gpu_sharing.deal(
            {label: (labels.count(label), usable) for label in labels}
        )
        mine = {
            g: [
                w
                for w, label in zip(part.workloads, labels, strict=True)
                if to[label] == g
            ]
            for g in usable
        }
        return [
            replace(part, entries=ready, workloads=ws, gpu=g)
            for g, ws in mine.items()
            if ws
        ]
    on = gpu_sharing.deal(able)
    split = {g: [e for i, e in enumerate(ready) if on[i] == g] for g in usable}
    return [
        replace(part, entries=entries, gpu=g) for g, entries in split.items() if entries
    ]


def _in_order(part: Part, made: list[Job], plan: Plan) -> list[Job]:
    """Order jobs as a single GPU would run them, and number them, so that records can
    be sorted even when GPUs finish out of order.
    """
    named = [e.algo.name for e in part.entries]
    modes = list(dict.fromkeys(job.mode for job in made))

    def turn(job: Job) -> tuple[int, int, bool]:
        if job.algo is None or job.added:
            return -1, modes.index(job.mode), job.added
        return named.index(job.algo.name), 0, False

    found = sorted(made, key=turn)
    for place in [*map(key, found), *((part.op.name, w.uuid) for w in part.workloads)]:
        plan.order.setdefault(place, len(plan.order))
    return found


def key(job: Job) -> tuple[str, str, str]:
    """Sort key of a job; jobs that run the same algo on several GPUs share it."""
    return job.op.name, job.mode, name(job)


def name(job: Job) -> str:
    """The job's name for a user."""
    if job.rivals:
        return " : ".join(algo.name for algo, _ in job.rivals)
    if job.official:
        return f"{job.algo.full_name}, {job.official.words}"
    return job.algo.full_name if job.algo else f"{job.op.name}, floors"


def _jobs(
    registry: Registry, part: Part, settings: Settings, plan: Plan
) -> Iterator[Job]:
    """One job for each algo that can run; a bench runs the floors and the references of
    each mode first.
    """
    make = partial(_job, settings, part, definition(part.op, registry))
    ready = [e for e in part.entries if e.place.mode]
    modes = list(dict.fromkeys(e.place.mode for e in ready))
    if settings.command == "compare":
        yield from _comparisons(make, part, ready, plan)
        return
    if settings.command == "floor":
        yield from (make("floor", None, mode) for mode in modes)
        return
    for mode in modes if settings.command == "bench" else []:
        yield make("floor", None, mode)
        for algo in _yardsticks(registry, part, mode, settings):
            if not any(
                e.algo.name == algo.name and e.place.mode == mode for e in ready
            ):
                yield replace(
                    make("bench", algo, mode), added=True, batch_invariant=False
                )
    for entry in ready:
        try:
            yield make(settings.command, entry.algo, entry.place.mode)
        except UsageError as e:
            plan.unpackable.append(
                (part.op.name, entry.algo.name, entry.place.mode, str(e))
            )


def _yardsticks(
    registry: Registry, part: Part, mode: str, settings: Settings
) -> list[Algo]:
    """The algos that an op's algos are measured against: its reference, and its
    baseline if a score is asked for.
    """
    found = [registry.reference(part.op)]
    if settings.in_place or part.op.in_place_only:
        return [algo for algo in found if algo.destination_passing]
    if part.scored and part.op.baseline:
        baseline = registry.find(part.op.baseline, part.op.name)
        if settings.place(baseline, mode).mode == mode and (
            part.gpu is None or part.gpu.fits(baseline)
        ):
            found.append(baseline)
    return found


def _comparisons(
    make: Callable[..., Job], part: Part, ready: list[Entry], plan: Plan
) -> Iterator[Job]:
    """One job for all algos that run in the same mode."""
    for mode in dict.fromkeys(e.place.mode for e in ready):
        rivals = []
        for entry in ready:
            try:
                if entry.place.mode == mode:
                    rivals.append((entry.algo, pack(entry.algo, part.op)))
            except UsageError as e:
                plan.unpackable.append((part.op.name, entry.algo.name, mode, str(e)))
        if rivals:
            yield replace(make("compare", None, mode), rivals=tuple(rivals))


def _job(
    settings: Settings,
    part: Part,
    described: Json,
    command: str,
    algo: Algo | None,
    mode: str,
) -> Job:
    timed = command != "check"
    return Job(
        command=command,
        op=part.op,
        definition=described,
        solution=pack(algo, part.op) if algo else None,
        mode=mode,
        workloads=tuple(part.workloads),
        algo=algo,
        dataset=settings.dataset,
        tiers=tiers_for(mode, settings.tiers, command) if timed else (),
        plan=part.plan,
        fallback=timed
        and not settings.tiers
        and not settings.strict
        and command != "compare",
        strict=settings.strict,
        sandbox=settings.sandbox,
        in_place=settings.in_place,
        batch_invariant=settings.batch_invariant,
        timeout_s=settings.timeout_s,
        gpu=part.gpu,
        machine=settings.machine,
    )


def tiers_for(
    mode: str, wanted: tuple[str, ...], command: str = "bench"
) -> tuple[str, ...]:
    """The tiers to time a mode in: the user's that fit it, else the first that does.
    `all` means all that fit.
    """
    able = {
        "floor": lambda tier: tier.floors,
        "compare": lambda tier: tier.interleaves,
    }.get(command, lambda tier: True)
    fitting = [name for name, tier in TIERS.items() if tier.mode == mode]
    chosen = (
        fitting if "all" in wanted else [name for name in wanted if name in fitting]
    )
    if not wanted:
        chosen = fitting[:1]
    if not chosen:
        place = {"cuda": "on a GPU", "cpu": "on the CPU"}[mode]
        hint = f"use {' or '.join(fitting)}"
        raise UsageError(
            f"tier '{','.join(wanted)}' cannot time algos {place}", hint=hint
        )
    kept = tuple(dict.fromkeys(name for name in chosen if able(TIERS[name])))
    if not kept and command == "compare":
        takes_turns = ", ".join(name for name in fitting if TIERS[name].interleaves)
        raise UsageError(
            f"calls of several algos cannot take turns in {', '.join(chosen)}",
            hint=f"use {takes_turns}",
        )
    return kept
