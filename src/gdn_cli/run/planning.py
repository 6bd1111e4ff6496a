"""What a command is to do: options -> algos, where each runs, on which workloads ->
jobs, which execute.py runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from ..catalog import official, presets, trace_set, workloads
from ..catalog.formats import Solution
from ..catalog.official import Harness
from ..catalog.ops import Op
from ..catalog.pack import definition, pack, read_solution, source_hash
from ..catalog.presets import Preset
from ..catalog.registry import DEFAULT_OP, Algo, Broken, Registry
from ..catalog.registry import names as listed
from ..catalog.tiers import FLOORS, TIERS
from ..catalog.workloads import Workload
from ..errors import UsageError
from ..machine import gpu_sharing, inventory
from ..machine.inventory import Gpu, Machine
from ..schema.record_types import Missing, Record, Status
from ..worker import profilers
from ..worker.request import Options, PlanFields, Timing
from . import revision
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
    gpu: Gpu | None = None  # the one that this share runs on


@dataclass(frozen=True)
class Settings:
    """How to run the parts, whatever they are. `options` goes to every worker as it is."""

    command: str  # check, bench, floor or compare
    options: Options = field(default_factory=Options)
    # empty: the mode's default, or a reported substitute if that is not available
    tiers: tuple[str, ...] = ()
    timeout_s: float = 300.0
    # to spread the parts over; empty: the one that CUDA chooses
    gpus: tuple[Gpu, ...] = ()
    place: Placing = inventory.HERE.place
    machine: Machine = inventory.HERE


@dataclass(frozen=True)
class Selected:
    """The options that choose workloads."""

    workload: list[str] | None = None
    n: int | None = None
    preset: str | None = None
    dataset: Path | None = None
    stress: bool = False
    smallest: bool = False  # of these the smallest alone


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
    algos = [read_solution(file, registry) for file in files]
    op = registry.op(op).name if op else None

    for algo in algos:
        if op and algo.op != op:
            raise UsageError(
                f"{algo.name} is of {algo.op}, not of {op}", hint="drop --op"
            )

    every = names is None and not files
    wanted = ["all"] if every else listed(names)

    for name in wanted:
        if name == "all":
            algos += registry.algos_of(op or DEFAULT_OP)
        else:
            algos.append(registry.find(name, op))

    entries = [
        _entry(algo, place(algo, device), timed) for algo in _distinct(algos, registry)
    ]
    if "all" in wanted:  # those whose algo.toml is broken too, to report them
        family = registry.op(op or DEFAULT_OP).family
        entries += [_broken(b) for b in registry.broken if b.op == family]

    if every and timed:
        # times of the GPU and of the CPU cannot be compared: with a GPU here, only the GPU's algos
        modes = {entry.place.mode for entry in entries}
        best = "cuda" if "cuda" in modes else "cpu"
        entries = [entry for entry in entries if entry.place.mode in (None, best)]
    return entries, bool(files) or any(name != "all" for name in wanted)


def _broken(broken: Broken) -> Entry:
    """The entry of an algo whose algo.toml cannot be read."""
    algo = Algo(
        op=broken.op,
        name=broken.name,
        summary="",
        language="python",
        entry_point="",
        destination_passing=False,
        modes=(),
    )
    return Entry(algo, inventory.Place(None, str(broken.error)))


def rivals(
    registry: Registry,
    names: list[str],
    op: str | None,
    device: str,
    place: Placing = inventory.HERE.place,
) -> list[Entry]:
    """The algos of a comparison in the order in which they were named: names, full
    names, packed files, NAME@REVISION.

    An algo named twice is compared with itself, as `NAME@2`. All must be of one op.
    """
    entries: list[Entry] = []
    times: Counter[str] = Counter()

    for name in names:
        if name.endswith(".json"):
            algo = read_solution(Path(name), registry)
        else:
            algo = revision.find(registry, name, op)
        if entries and algo.op != entries[0].algo.op:
            first = entries[0].algo.full_name
            raise UsageError(
                f"{first} and {algo.full_name} are of different ops",
                hint="--op says which is meant",
            )
        times[algo.name] += 1
        if times[algo.name] > 1:
            algo = structs.replace(algo, name=f"{algo.name}@{times[algo.name]}")
        entries.append(_entry(algo, place(algo, device), timed=True))

    return entries


def _entry(algo: Algo, place: inventory.Place, timed: bool) -> Entry:
    """An algo's entry. With `timed`, Triton's interpreter does not count: its times
    mean nothing.
    """
    if timed and place.mode == "interpreter":
        place = inventory.Place(None, NOT_TIMED, inventory.GET_GPU)
    return Entry(algo, place)


def _distinct(algos: list[Algo], registry: Registry) -> list[Algo]:
    """Algos with distinct names: the same file or folder twice is one algo; another
    algo of the same name, or with the name of the reference or of a floor, gets a mark
    appended to its name.
    """
    distinct: dict[tuple[str, str], Algo] = {}
    floors = {f"{op}/{floor}" for op in registry.ops for floor in FLOORS}

    for algo in algos:
        source = source_hash(algo.solution) if algo.solution else str(algo.folder)
        key = algo.full_name, source
        if key in distinct:
            continue
        reference = registry.reference(registry.ops[algo.op])
        taken = {other.full_name for other in distinct.values()} | floors
        poses = algo.name == reference.name and algo.folder != reference.folder
        if poses or algo.full_name in taken:
            mark = source[:6] if algo.solution else "own"
            algo = structs.replace(algo, name=f"{algo.name}@{mark}")
        distinct[key] = algo

    return list(distinct.values())


def preset_of(
    which: Selected, otherwise: str | None = "quick"
) -> tuple[str | None, Preset | None]:
    """The preset in use, as (name, preset): `otherwise` if no option chooses workloads."""
    if which.stress and (which.preset or which.dataset):
        hint = "--workload NAME chooses among the hard inputs"
        raise UsageError("--stress excludes --preset and --dataset", hint=hint)
    chosen = which.workload or which.n or which.dataset or which.stress
    name = which.preset or (None if chosen else otherwise)
    return name, presets.load_preset(name) if name else None


def contest_preset(which: Selected) -> tuple[str, Preset]:
    """The chosen preset with the contest's run counts; all contest workloads by default."""
    name = which.preset or "contest"
    counts = presets.load_preset("contest").settings
    return name, structs.replace(presets.load_preset(name), settings=counts)


def select(
    registry: Registry,
    entries: list[Entry],
    which: Selected,
    preset: Preset | None = None,
    overrides: PlanFields | None = None,
) -> list[Part]:
    """Group the algos by op, each op with its workloads or its hard inputs.
    `overrides` replace the preset's settings.
    """
    by_op: dict[str, list[Entry]] = {}

    for entry in entries:
        by_op.setdefault(entry.algo.op, []).append(entry)

    chosen = which.workload or []
    parts = []

    for name, of_op in by_op.items():
        op = registry.op(name)
        if which.stress:
            hard = workloads.stressed(op, chosen, which.n)
            parts.append(Part(op, of_op, hard, {}))
            continue
        known = trace_set.known(op, which.dataset)
        picked = workloads.select(
            op, known, chosen=chosen, first=which.n, preset=preset
        )
        if which.smallest:
            picked = [min(picked, key=lambda w: math.prod(w.axes.values()))]
        plan: Any = preset.settings_for(op.name) if preset else {}
        parts.append(Part(op, of_op, picked, plan | (overrides or {})))

    return parts


@dataclass(frozen=True)
class Plan:
    """All that a command will do, known before anything is run or written."""

    jobs: list[Job] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)  # algos that cannot run here
    unpackable: list[Record] = field(default_factory=list)
    # `key` of a job, or (op, uuid) of a workload -> position of its records, whenever they arrive
    order: dict[tuple[str | None, ...], int] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)


def prepare(registry: Registry, parts: list[Part], settings: Settings) -> Plan:
    """Pack everything and choose tiers. An algo that cannot be packed does not stop the
    others; a wrong tier does.
    """
    plan = Plan(parts=parts)

    for part in parts:
        plan.missing.extend(_missing(part))
        jobs: list[Job] = []
        for share in _shares(part, settings.gpus):
            jobs += _jobs(registry, share, settings, plan)
        plan.jobs.extend(_in_order(part, jobs, plan))

    if len(settings.gpus) > 1:
        gpus = list(dict.fromkeys(job.gpu for job in plan.jobs if job.gpu))
        cpus = gpu_sharing.cpus(gpus, settings.machine)
        plan.jobs[:] = [
            replace(job, cpus=cpus[job.gpu]) if job.gpu else job for job in plan.jobs
        ]
    return plan


def _missing(part: Part) -> Iterator[Missing]:
    for entry in part.entries:
        if entry.place.mode is None:
            yield Missing(
                op=part.op.name,
                algo=entry.algo.name,
                reason=entry.place.reason,
                hint=entry.place.hint,
            )


def add_judge(plan: Plan, harness: Harness) -> None:
    """Add to the plan of a bench that the contest's harness judges each algo that was
    asked for. UsageError for none that it could judge.
    """
    benches = [job for job in plan.jobs if job.command == "bench" and not job.added]
    able = [job for job in benches if job.mode == "cuda" and not job.request.setup]
    if benches and not able:
        raise UsageError(
            "flashinfer-bench judges on a GPU only", hint=inventory.GET_GPU
        )

    for job in able:
        timing = structs.replace(
            job.request.timing, tiers=(official.TIER,), fallback=False
        )
        judge = job.asking(command="official", timing=timing, official=harness)
        timeout_s = job.timeout_s + _JUDGE_S * len(job.workloads)
        plan.jobs.append(replace(judge, timeout_s=timeout_s))


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
    candidates: dict[int, tuple[int, list[Gpu]]] = {}
    fitting: set[Gpu] = set()

    for i, entry in enumerate(ready):
        fit = [gpu for gpu in gpus if gpu.fits(entry.algo)]
        candidates[i] = 1, fit
        fitting.update(fit)

    usable = [gpu for gpu in gpus if gpu in fitting]
    if len(ready) < len(usable) and len({gpu.name for gpu in usable}) == 1:
        return _by_workload(replace(part, entries=ready), usable)
    gpu_of = gpu_sharing.deal(candidates)
    shares = []

    for gpu in usable:
        entries = [entry for i, entry in enumerate(ready) if gpu_of[i] == gpu]
        if entries:
            shares.append(replace(part, entries=entries, gpu=gpu))

    return shares


def _by_workload(part: Part, gpus: list[Gpu]) -> list[Part]:
    labels = [part.op.label.format(**w.axes) for w in part.workloads]
    gpu_of = gpu_sharing.deal({label: (labels.count(label), gpus) for label in labels})
    shares = []
    for gpu in gpus:
        labelled = zip(part.workloads, labels, strict=True)
        share = [workload for workload, label in labelled if gpu_of[label] == gpu]
        if share:
            shares.append(replace(part, workloads=share, gpu=gpu))
    return shares


def _in_order(part: Part, jobs: list[Job], plan: Plan) -> list[Job]:
    """Order jobs as a single GPU would run them, and number them, so that records can
    be sorted even when GPUs finish out of order.
    """
    named = [e.algo.name for e in part.entries]
    modes = list(dict.fromkeys(job.mode for job in jobs))

    def turn(job: Job) -> tuple[int, int, bool]:
        if job.algo is None or job.added:
            return -1, modes.index(job.mode), job.added
        return named.index(job.algo.name), 0, False

    ordered = sorted(jobs, key=turn)
    workloads_ = [(part.op.name, w.uuid) for w in part.workloads]

    for place in [*map(key, ordered), *workloads_]:
        plan.order.setdefault(place, len(plan.order))

    return ordered


def key(job: Job) -> tuple[str, str, str]:
    """Sort key of a job; jobs that run the same algo on several GPUs share it."""
    return job.op.name, job.mode, name(job)


def name(job: Job) -> str:
    """The job's name for a user."""
    if job.request.rivals:
        return " : ".join(job.names)
    if job.algo is None:
        return f"{job.op.name}, floors"
    if job.request.official:
        return f"{job.algo.full_name}, {job.request.official.words}"
    return job.algo.full_name


def _jobs(
    registry: Registry, part: Part, settings: Settings, plan: Plan
) -> Iterator[Job]:
    """One job for each algo that can run; a bench runs the floors and the references of
    each mode first. A comparison has one job for all algos that run in the same mode.
    """
    op = part.op
    described = definition(op, registry)

    def make(
        command: str,
        mode: str,
        algos: Sequence[tuple[Algo, Solution]] = (),
        options: Options = settings.options,
    ) -> Job:
        timed = command != "check"
        substitute = timed and command != "compare" and not options.strict
        tiers = tiers_for(mode, settings.tiers, command) if timed else ()
        env = {}
        workloads_ = part.workloads
        if mode == inventory.COMPILED:
            ((algo, _),) = algos
            env = _compiling(algo, settings.machine)
            mode, workloads_ = "cpu", []
        return Job.of(
            command,
            op,
            described,
            mode,
            workloads_,
            algos,
            env=env,
            options=options,
            timing=Timing(tiers, part.plan, substitute and not settings.tiers),
            timeout_s=settings.timeout_s,
            gpu=part.gpu,
            machine=settings.machine,
        )

    command = settings.command
    by_mode: dict[str, list[tuple[Algo, Solution]]] = {}
    names: set[tuple[str, str]] = set()

    for entry in part.entries:
        mode = entry.place.mode
        algo = entry.algo
        if mode is None:
            continue
        packed = by_mode.setdefault(mode, [])
        names.add((mode, algo.name))
        try:
            if command != "floor":
                packed.append((algo, pack(algo, op)))
        except UsageError as e:
            _cannot_pack(plan, op, algo, mode, str(e))

    if command == "compare":
        for mode, rivals in by_mode.items():
            if rivals:
                yield make("compare", mode, rivals)
        return

    for mode in by_mode if command in ("bench", "floor") else ():
        yield make("floor", mode)
        for algo in _yardsticks(registry, part, mode, settings):
            if (mode, algo.name) not in names:
                alone = structs.replace(settings.options, batch_invariant=False)
                job = make("bench", mode, [(algo, pack(algo, op))], alone)
                yield replace(job, added=True)

    for mode, packed in by_mode.items():
        for pair in packed:
            yield make(command, mode, [pair])


def _compiling(algo: Algo, machine: Machine) -> dict[str, str]:
    """The environment in which CUDA is compiled without a GPU."""
    sass = profilers.module("sass")
    least = inventory.specific(algo.capability or "0.0")
    arch = sass.parse_arch(least or sass.here("cuda", algo.specific, machine))
    env: dict[str, str] = sass.environment(arch, "cuda", machine)
    return env


def _cannot_pack(plan: Plan, op: Op, algo: Algo, mode: str, reason: str) -> None:
    record = Record(
        op=op.name,
        algo=algo.name,
        source_hash=None,
        mode=mode,
        tier=None,
        workload=None,
        status=Status.UNPACKABLE,
        reason=reason,
    )
    if record not in plan.unpackable:  # once, even with several GPUs
        plan.unpackable.append(record)


def _yardsticks(
    registry: Registry, part: Part, mode: str, settings: Settings
) -> list[Algo]:
    """The algos that an op's algos are measured against: in a bench its reference."""
    if settings.command != "bench":
        return []
    reference = registry.reference(part.op)
    if settings.options.in_place or part.op.in_place_only:
        return [reference] if reference.destination_passing else []
    return [reference]


def tiers_for(
    mode: str, wanted: tuple[str, ...], command: str = "bench"
) -> tuple[str, ...]:
    """The tiers to time a mode in: the user's that fit it, else the first that does.
    `all` means all that fit.
    """
    fitting = [name for name, tier in TIERS.items() if tier.mode == mode]
    chosen = [name for name in wanted or fitting[:1] if name in fitting]
    if "all" in wanted:
        chosen = fitting

    if not chosen:
        place = {"cuda": "on a GPU", "cpu": "on the CPU"}[mode]
        hint = f"use {' or '.join(fitting)}"
        raise UsageError(
            f"tier '{','.join(wanted)}' cannot time algos {place}", hint=hint
        )
    if command == "floor":
        chosen = [name for name in chosen if TIERS[name].floors]

    if command == "compare":
        able = [name for name in fitting if TIERS[name].interleaves]
        if not set(chosen) & set(able):
            raise UsageError(
                f"calls of several algos cannot take turns in {', '.join(chosen)}",
                hint=f"use {', '.join(able)}",
            )
        chosen = [name for name in chosen if name in able]
    return tuple(dict.fromkeys(chosen))
