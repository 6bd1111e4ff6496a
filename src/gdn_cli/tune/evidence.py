"""The results of a tuning, for `--json`, the terminal and the algo's folder. Times are
in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, to_builtins

from .. import files
from ..catalog import tuned_table
from ..catalog.tuned_table import Constants, Row, Size
from ..machine import environment
from ..parsing import Json, lined, to_json
from ..schema.record_types import Comparison, Environment, GpuName
from .journal import Space, Where
from .search import LeftOut, Plan, State
from .tournament import Choice

SCHEMA = 1
Ratio = tuple[float, float, float]  # a ratio and its interval


class Measured(Struct, kw_only=True, omit_defaults=True):
    """A workload with the constants chosen for its size. A candidate's time is from the
    last round that it was in.
    """

    uuid: str
    axes: dict[str, int]
    size: int
    length: int | None = None  # if algo.toml names one
    gpu: GpuName | None = None  # on which it was timed
    chosen: Constants
    chosen_us: float
    fastest: Constants
    second: Constants | None
    ratio: Ratio | None  # of the second's time to the fastest's
    # for the neighbouring size's constants: no measurable slowdown
    ratio_of_chosen: Ratio | None = None
    # constants, us and round, the fastest first
    candidates: list[dict[str, int | float]]


class Evidence(Struct, kw_only=True, omit_defaults=True):
    """The evidence for one GPU's rows, as in tuning.json."""

    gpu: str  # or a CPU's name, with the CPUs that the process may use for its SMs
    sms: int
    driver: str | None = None
    cuda: str | None = None
    threads: int | None = None
    versions: dict[str, str]
    commit: str | None = None
    dirty: bool | None = None
    source_hash: str
    date: str
    tier: str
    l2: str | None
    in_place: bool = False
    seconds: float
    target: float
    preset: str | None
    space: Space
    doubts: list[str]
    left_out: list[LeftOut]
    rows: list[dict[str, int | str]]
    workloads: list[Measured]


def document(plan: Plan, state: State | None = None) -> Json:
    """The command's document; without a state, of a dry run."""
    sizes = [(size, w) for size, workloads in plan.sizes.items() for w in workloads]
    found = {"command": "tune", "dry_run": state is None}
    if state:
        found |= {
            "time": state.time,
            **environment.commit(),
            "interrupted": state.interrupted,
            "mode": plan.mode,
        }
        found |= {"tier": state.settings.tier} | (
            {"in_place": True} if state.settings.in_place else {}
        )
    found |= {
        "op": plan.op.name,
        "algo": plan.algo.name,
        "file": str(plan.algo.folder / plan.algo.tune.file),
        "space": plan.space,
        "preset": plan.preset,
        "candidates": list(plan.constants.values()),
        "excluded": plan.excluded,
        "workloads": [
            {"uuid": w.uuid, "axes": w.axes, **_looked_up(plan, size)}
            for size, w in sizes
        ],
    }
    if state:
        found |= {"resumed": state.journal.kept, "left_out": list(state.out.values())}
        found |= {
            "progress": str(state.journal.path),
            "written": state.written,
            "result": state.result,
        }
    return to_builtins(found)


def _looked_up(plan: Plan, size: Size) -> dict[str, int]:
    return size._asdict() if plan.algo.tune.length else {"size": size.size}


def write(state: State) -> None:
    """The generated file and the evidence, each whole or not at all."""
    tune, folder, new = state.plan.algo.tune, state.plan.algo.folder, _rows(state)
    gpu, sms = new[0].gpu, new[0].sms
    state.result = _evidence(state, new)
    rows = tuned_table.merge(tuned_table.rows(tune, state.held), new)
    measured = state.held | {gpu: to_json(state.result)}
    held = {row.gpu: measured[row.gpu] for row in rows}  # in the order of the rows
    whole = {
        "schema": SCHEMA,
        "algo": state.plan.algo.full_name,
        "file": tune.file,
        "gpus": held,
    }
    for file, text in (
        (tuned_table.EVIDENCE, lined(whole) + "\n"),
        (tune.file, tuned_table.render(tune, rows)),
    ):
        files.write(
            folder / file, text, within=folder, hint="the measurements are kept"
        )
        state.written.append(str(folder / file))
    if alike := [row.gpu for row in rows if row.sms == sms and row.gpu != gpu]:
        state.say(
            f"{alike[0]} has as many SMs as {gpu}: kernels tell them apart by that only, and use"
            f" {gpu}'s"
        )


def _environment(state: State) -> Environment:
    line = state.journal.find(Where)
    return line.environment if line else Environment()


def _rows(state: State) -> list[Row]:
    env = _environment(state)
    gpu, sms = (env.gpu, env.sms) if env.sms is not None else (env.cpu, env.cpus)
    chosen = [(c.size, state.plan.constants[c.chosen]) for c in state.choices]
    return tuned_table.table(state.plan.algo.tune, gpu, sms, chosen)


def _evidence(state: State, rows: list[Row]) -> Evidence:
    plan, s, env = state.plan, state.settings, _environment(state)
    where = {
        name: getattr(env, name) for name in ("driver", "cuda", "threads", "versions")
    }
    how = {name: getattr(s, name) for name in ("tier", "in_place", "seconds", "target")}
    return Evidence(
        gpu=rows[0].gpu,
        sms=rows[0].sms,
        source_hash=tuned_table.own_hash(plan.algo, plan.op),
        date=state.time,
        l2=s.l2 if plan.mode == "cuda" else None,
        preset=plan.preset,
        space=plan.space,
        doubts=list(state.doubts.values()),
        left_out=list(state.out.values()),
        rows=[row.to_json() for row in rows],
        workloads=[row for choice in state.choices for row in _measured(state, choice)],
        **where,
        **environment.commit(),
        **how,
    )


def _measured(state: State, choice: Choice) -> Iterator[Measured]:
    """The workloads of a size."""
    constants, gpu, tune = (
        state.plan.constants,
        state.homes[choice.size],
        state.plan.algo.tune,
    )
    for w in state.plan.sizes[choice.size]:
        times: dict[str, tuple[int, float]] = {}
        for meeting in sorted(state.meetings[choice.size], key=lambda m: m.round):
            times |= {
                name: (meeting.round, us)
                for name, us in meeting.us[w.uuid].items()
                if name not in state.out
            }
        order = sorted(times.items(), key=lambda item: (-item[1][0], item[1][1]))
        yield Measured(
            uuid=w.uuid,
            axes=w.axes,
            size=choice.size.size,
            length=choice.size.length if tune.length else None,
            gpu=GpuName(**gpu.to_json()) if gpu else None,
            chosen=constants[choice.chosen],
            chosen_us=times[choice.chosen][1],
            fastest=constants[choice.fastest],
            second=constants[choice.second] if choice.second else None,
            ratio=_ratio(choice.ahead),
            ratio_of_chosen=_ratio(choice.behind),
            candidates=[
                constants[name] | {"us": us, "round": number}
                for name, (number, us) in order
            ],
        )


def _ratio(comparison: Comparison | None) -> Ratio | None:
    return (comparison.ratio, comparison.low, comparison.high) if comparison else None
