"""Writes the results of a tuning: for `--json`, and into the algo's folder."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from .. import files
from ..catalog import tuned_table
from ..catalog.tuned_table import Constants, Row
from ..machine import environment
from ..parsing import Json, lined, to_json
from ..schema.record_types import Comparison, Environment, GpuName
from . import tournament
from .journal import Where
from .search import Plan, State
from .tuning_json import SCHEMA, Evidence, LeftOut, Measured, Ratio, Space


class Timed(Struct):
    """A workload, and the size that its constants are chosen by."""

    uuid: str
    axes: dict[str, int]
    size: int
    length: int | UnsetType = UNSET  # if algo.toml names one


class Tuning(Struct, kw_only=True):
    """`gdn tune`: what was tried, and what was chosen.

    A dry run ends with the workloads.
    """

    command: str = "tune"
    dry_run: bool
    op: str
    algo: str
    file: str  # the generated one
    space: Space
    preset: str | None
    candidates: list[Constants]
    excluded: int  # candidates
    workloads: list[Timed]
    time: str | UnsetType = UNSET
    interrupted: bool | UnsetType = UNSET
    mode: str | UnsetType = UNSET
    tier: str | UnsetType = UNSET
    resumed: int | UnsetType = UNSET  # measurements of an earlier run
    left_out: list[LeftOut] | UnsetType = UNSET
    progress: str | UnsetType = UNSET  # the file from which it resumes
    written: list[str] | UnsetType = UNSET
    result: Evidence | None | UnsetType = UNSET
    commit: str | UnsetType = UNSET
    dirty: bool | UnsetType = UNSET
    in_place: bool | UnsetType = UNSET


def document(plan: Plan, state: State | None = None) -> Tuning:
    """The command's document; without a state, of a dry run."""
    timed = []
    for size, alike in plan.sizes.items():
        length = size.length if plan.tune.length else UNSET
        timed += [Timed(w.uuid, w.axes, size.size, length) for w in alike]

    results: Json = {}
    if state:
        results = {
            "time": state.time,
            "interrupted": state.interrupted,
            "mode": plan.mode,
            "tier": state.settings.tier,
            "resumed": state.journal.kept,
            "left_out": list(state.out.values()),
            "progress": str(state.journal.path),
            "written": state.written,
            "result": state.result,
            "in_place": state.settings.in_place or UNSET,
            **environment.commit(),
        }

    return Tuning(
        dry_run=state is None,
        op=plan.op.name,
        algo=plan.algo.name,
        file=str(plan.algo.own_folder / plan.tune.file),
        space=plan.space,
        preset=plan.preset,
        candidates=list(plan.constants.values()),
        excluded=plan.excluded,
        workloads=timed,
        **results,
    )


def write(state: State) -> None:
    """The generated file and the evidence, each whole or not at all."""
    tune, algo = state.plan.tune, state.plan.algo
    line = state.journal.find(Where)
    env = line.environment if line else Environment()
    new = _rows(state, env)
    gpu, sms = new[0].gpu, new[0].sms
    state.result = _evidence(state, env, new)

    # other GPUs keep theirs
    rows = tuned_table.merge(tuned_table.rows(tune, state.held), new)
    measured = state.held | {gpu: to_json(state.result)}
    content = {
        "schema": SCHEMA,
        "algo": algo.full_name,
        "file": tune.file,
        # in the order of the rows
        "gpus": {row.gpu: measured[row.gpu] for row in rows},
    }
    texts = {
        tuned_table.EVIDENCE: lined(content) + "\n",
        tune.file: tuned_table.render(tune, rows),
    }
    for name, text in texts.items():
        path = algo.own_folder / name
        files.write(path, text, within=algo.folder, hint="the measurements are kept")
        state.written.append(str(path))

    alike = [row.gpu for row in rows if row.sms == sms and row.gpu != gpu]
    if alike:
        state.say(
            f"{alike[0]} has as many SMs as {gpu}: kernels tell them apart by that only, and use"
            f" {gpu}'s"
        )


def _rows(state: State, env: Environment) -> list[Row]:
    """The rows of the GPU, or of the CPU, that was measured."""
    gpu, sms = env.gpu, env.sms
    if sms is None:
        gpu, sms = env.cpu, env.cpus

    assert gpu is not None and sms is not None
    chosen = [(c.size, state.plan.constants[c.chosen]) for c in state.choices]
    return tuned_table.table(state.plan.tune, gpu, sms, chosen)


def _evidence(state: State, env: Environment, rows: list[Row]) -> Evidence:
    plan = state.plan
    conditions: dict[str, Any] = state.settings.conditions | environment.commit()
    if plan.mode != "cuda":
        conditions["l2"] = None

    return Evidence(
        gpu=rows[0].gpu,
        sms=rows[0].sms,
        driver=env.driver,
        cuda=env.cuda,
        threads=env.threads,
        versions=env.versions,
        source_hash=tuned_table.own_hash(plan.algo, plan.op),
        date=state.time,
        preset=plan.preset,
        space=plan.space,
        doubts=list(state.doubts.values()),
        left_out=list(state.out.values()),
        rows=[row.to_json() for row in rows],
        workloads=_measured(state),
        **conditions,
    )


def _measured(state: State) -> list[Measured]:
    plan, constants = state.plan, state.plan.constants
    measured = []
    for choice in state.choices:
        size = choice.size
        gpu = state.homes[size]
        final = tournament.final(state.meetings[size], choice.fastest)
        for w in plan.sizes[size]:
            workload = Measured(
                uuid=w.uuid,
                axes=w.axes,
                size=size.size,
                length=size.length if plan.tune.length else None,
                gpu=GpuName(**gpu.to_json()) if gpu else None,
                chosen=constants[choice.chosen],
                chosen_us=final.us[w.uuid][choice.chosen],
                fastest=constants[choice.fastest],
                second=constants[choice.second] if choice.second else None,
                ratio=_ratio(choice.ahead),
                ratio_of_chosen=_ratio(choice.behind),
            )
            measured.append(workload)
    return measured


def _ratio(comparison: Comparison | None) -> Ratio | None:
    if comparison is None:
        return None

    return comparison.ratio, comparison.low, comparison.high
