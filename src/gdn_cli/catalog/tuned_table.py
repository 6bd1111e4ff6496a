"""Which constants a kernel uses for which size, by GPU: `tuning.json`, the source file
generated from it, and the candidates for it.

A kernel uses the rows of the GPU whose number of SMs is nearest to its own (the first
of equals), and of these the first with size <= up_to; if algo.toml names a `length`,
also with length <= length_up_to. `nearest` follows the same rule, so that a record can
say whose rows were used. For an algo on a CPU, the CPU's name and the number of CPUs
that the process may use replace the GPU and its SMs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from .. import errors, files
from ..errors import UsageError, unknown
from ..parsing import Json, json_of, read_text
from .expression import condition
from .formats import Source
from .ops import Op
from .pack import pack, source_hash
from .registry import Algo, Tune
from .workloads import Workload

EVIDENCE = "tuning.json"

ENDLESS = 2**63 - 1  # INT64_MAX: the up_to of a GPU's last row
UNTUNED = "untuned"  # the GPU of rows that an author estimated
CANDIDATE = "candidate"  # the GPU of a candidate's only row
MOST = 100_000  # candidates before `where`: more are likely a mistake


Constants = dict[str, int]
# GPU -> its entry in tuning.json: rows are read, the rest is kept
Gpus = dict[str, Json]


@dataclass(frozen=True)
class Row:
    """Constants for this GPU, used up to this size, and up to this length if the table
    has lengths.
    """

    gpu: str
    sms: int
    up_to: int
    constants: Constants
    length_up_to: int | None = None

    def to_json(self) -> dict[str, int | str]:
        row: dict[str, int | str] = {"gpu": self.gpu, "sms": self.sms}
        if self.length_up_to is not None:
            row["length_up_to"] = self.length_up_to
        return row | {"up_to": self.up_to} | self.constants


# --- the file


def render(tune: Tune, rows: Sequence[Row], batch_invariant: bool = False) -> str:
    """The file's whole text. Constants are in the order of algo.toml.
    `batch_invariant`: see batch_invariance.py.
    """
    size = f"size ({' * '.join(tune.size)})"
    if tune.length:
        size = f"length ({' * '.join(tune.length)}) and {size}"
    title = (
        f"Written by `gdn tune`: which constants for which {size}, by GPU. The evidence is in"
        " tuning.json."
    )
    table = []
    for row in rows:
        constants = {name: row.constants[name] for name in tune.constants}
        table.append(replace(row, constants=constants).to_json())
    if tune.file.endswith(".py"):
        lines = "".join(f"    {json.dumps(row)},\n" for row in table)
        return f'"""{title}"""\nTUNED = [\n{lines}]\n'
    lines = ""
    for cells in table:
        lines += f"    {{{', '.join(map(json.dumps, cells.values()))}}},\n"
    up_to = "length_up_to, up_to" if tune.length else "up_to"
    fields = (
        f"const char* gpu; int sms; int64_t {up_to}; int {', '.join(tune.constants)};"
    )
    macro = "#define GDN_BATCH_INVARIANT\n" if batch_invariant else ""
    return f"""\
// {title}
#pragma once
#include <cstdint>
{macro}struct Tuned {{ {fields} }};   // constants in the order of algo.toml
constexpr Tuned TUNED[] = {{
{lines}}};
"""


class _Entry(msgspec.Struct):
    """A GPU's entry in tuning.json: each row is {"gpu", "sms", "up_to"} and the
    constants. Evidence is not listed here.
    """

    rows: list[dict[str, int | str]]


def load(algo: Algo) -> Gpus:
    """The contents of tuning.json in the algo's folder, by GPU; {} without the file.
    UsageError for one that gdn did not write.
    """
    file = algo.own_folder / EVIDENCE
    files.destination(file, within=algo.folder)
    if not file.exists():
        return {}
    try:
        gpus = json_of(read_text(file), file)["gpus"]
        rows(algo.tuning, gpus)
    except (UsageError, ValueError, KeyError, TypeError) as e:
        raise UsageError(
            f"{file} is not what gdn wrote: {errors.one_line(e)}",
            hint="fix it, or move it away",
        ) from None
    return gpus


def times(algo: Algo, gpu: str, tier: str | None, l2: str | None) -> dict[str, float]:
    """The workloads, by uuid, that a GPU's tuning timed in this tier, with the chosen
    constants: us. {} for an algo without such a tuning.
    """
    if algo.tune is None or algo.folder is None:
        return {}
    entry: Any = load(algo).get(gpu)
    if not entry or (entry.get("tier"), entry.get("l2")) != (tier, l2):
        return {}
    timed = entry.get("workloads", [])
    return {workload["uuid"]: workload["chosen_us"] for workload in timed}


def rows(tune: Tune, gpus: Gpus) -> list[Row]:
    """The rows of all GPUs, in the order of the generated file. ValueError, with the
    reason, for rows of another form.
    """
    table = []
    for entry in msgspec.convert(gpus, dict[str, _Entry]).values():
        table += [_row(tune, cells) for cells in entry.rows]
    return table


def _row(tune: Tune, cells: dict[str, int | str]) -> Row:
    gpu = cells.pop("gpu", None)
    numbers = {name: cell for name, cell in cells.items() if isinstance(cell, int)}
    keys = {"sms", "up_to"}
    if tune.length:
        keys.add("length_up_to")
        if gpu == UNTUNED:
            numbers.setdefault("length_up_to", ENDLESS)
    complete = len(numbers) >= len(cells) and keys <= numbers.keys()
    if not isinstance(gpu, str) or not complete:
        raise ValueError(f"a row of '{gpu}' does not have the form that gdn writes")
    fields = {key: numbers.pop(key) for key in keys}
    if gpu != UNTUNED and set(numbers) != set(tune.constants):
        names, wanted = ", ".join(numbers), ", ".join(tune.constants)
        raise ValueError(f"its rows of '{gpu}' hold {names}, algo.toml names {wanted}")
    return Row(gpu, constants=numbers, **fields)


# --- rows


def nearest(rows: Sequence[Row], sms: int) -> list[Row]:
    """The rows that a kernel uses on a GPU with `sms` SMs: those of the nearest GPU,
    the first of equals.
    """
    if not rows:
        return []
    first = min(rows, key=lambda row: abs(row.sms - sms))
    return [row for row in rows if (row.gpu, row.sms) == (first.gpu, first.sms)]


class Size(NamedTuple):
    """The key for looking up a row: the products of the axes of `tune.length` (1 if
    there are none) and `tune.size`.
    """

    length: int
    size: int


def size_of(op: Op, tune: Tune, workload: Workload) -> Size:
    axes = op.fixed | workload.axes
    return Size(
        length=math.prod(axes[axis] for axis in tune.length),
        size=math.prod(axes[axis] for axis in tune.size),
    )


def table(
    tune: Tune, gpu: str, sms: int, chosen: Sequence[tuple[Size, Constants]]
) -> list[Row]:
    """The rows of a GPU, from the constants chosen for the measured sizes, ascending.

    Neighbours with equal constants become one row. The boundary between two measured
    sizes, or lengths, is their geometric mean, rounded down: nothing in between was
    measured, and sizes go up by factors.
    """
    lengths: dict[int, list[tuple[int, Constants]]] = {}
    for size, constants in chosen:
        lengths.setdefault(size.length, []).append((size.size, constants))
    ends = [math.isqrt(a * b) for a, b in itertools.pairwise(lengths)] + [ENDLESS]
    rows = []
    for end, of_length in zip(ends, lengths.values(), strict=False):
        for row in _of_one_length(gpu, sms, of_length):
            rows.append(replace(row, length_up_to=end if tune.length else None))
    return rows


def _of_one_length(
    gpu: str, sms: int, chosen: Sequence[tuple[int, Constants]]
) -> list[Row]:
    rows = []
    for (size, constants), (following, next_constants) in itertools.pairwise(chosen):
        if next_constants != constants:
            rows.append(Row(gpu, sms, math.isqrt(size * following), constants))
    rows.append(Row(gpu, sms, ENDLESS, chosen[-1][1]))
    return rows


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The file's rows with those of one GPU replaced: the other GPUs keep theirs, an
    author's estimates are dropped.

    The GPU keeps its place. A kernel tells GPUs apart only by their number of SMs: of
    two with the same number the last tuned comes first, and is used on both.
    """
    gpu, sms = new[0].gpu, new[0].sms
    old = [row for row in old if row.gpu != UNTUNED]
    places = [i for i, row in enumerate(old) if row.gpu == gpu or row.sms == sms]
    place = min(places, default=len(old))
    above = [row for row in old[:place] if row.gpu != gpu]
    below = [row for row in old[place:] if row.gpu != gpu]
    return [*above, *new, *below]


def built_with(algo: Algo) -> list[Row]:
    """The rows that a tuned algo is built with. None if there is no table: a packed
    solution has no tuning.json, and a candidate has its own rows.

    A row's `gpu` is the one on which it was measured, or "untuned" for an author's estimates.
    """
    if algo.tune is None or algo.solution:
        return []
    try:
        return rows(algo.tune, load(algo))
    except UsageError:
        return []


# --- candidates


def candidates(algo: Algo) -> tuple[list[Constants], int]:
    """The constants of every candidate, in the order of algo.toml, and how many `where` excludes.

    Raises UsageError if none are left, or far too many.
    """
    tune, path = algo.tuning, f"{algo.folder or algo.full_name}/algo.toml"
    count = math.prod(len(values) for values in tune.constants.values())
    if count > MOST:
        raise UsageError(
            f"{path}: [tune.constants] gives {count} candidates",
            hint=f"at most {MOST}: name fewer values",
        )
    holds = condition(tune.where or "1", tune.constants)
    good = []
    for values in itertools.product(*tune.constants.values()):
        constants = dict(zip(tune.constants, values, strict=True))
        try:
            if holds(constants):
                good.append(constants)
        except ValueError as e:
            raise UsageError(f"{path}: $.tune.where: '{tune.where}': {e}") from None
    if not good:
        raise UsageError(f"{path}: $.tune.where: '{tune.where}' leaves no candidate")
    return good, count - len(good)


def narrowed(algo: Algo, only: Sequence[str]) -> Algo:
    """The algo with fewer values to try: each of `only` is "NAME=V[,V...]", with values
    that its algo.toml declares.
    """
    constants = dict(algo.tuning.constants)
    for text in only:
        name, _, values = text.partition("=")
        name = name.strip()
        if name not in constants:
            raise unknown("constant", name, constants)
        declared = {str(value): value for value in constants[name]}
        wanted = [value.strip() for value in values.split(",")]
        if not set(wanted) <= set(declared):
            hint = f"algo.toml declares {name} = {', '.join(declared)}"
            raise UsageError(f"--only {text}: expected values to try", hint=hint)
        constants[name] = tuple(
            declared[value] for value in declared if value in wanted
        )
    tune = structs.replace(algo.tuning, constants=constants)
    return structs.replace(algo, tune=tune)


def label(constants: Constants) -> str:
    return ",".join(f"{name}={value}" for name, value in constants.items())


def candidate(algo: Algo, op: Op, constants: Constants) -> Algo:
    """The algo with these constants at every size; its folder is not changed."""
    tune = algo.tuning
    row = Row(CANDIDATE, 0, ENDLESS, constants, ENDLESS if tune.length else None)
    name = f"{algo.name}[{label(constants)}]"
    return with_table(algo, op, name, render(tune, [row]))


def with_table(algo: Algo, op: Op, name: str, table: str) -> Algo:
    """The algo under another name, with another table's text instead of its own; its
    folder is not changed.
    """
    solution = pack(algo, op, name=f"{op.name}-{name}")
    generated: Source = {"path": algo.tuning.file, "content": table}
    sources = [*_handwritten(algo, solution["sources"]), generated]
    sources.sort(key=lambda source: source["path"])
    return structs.replace(algo, name=name, solution=solution | {"sources": sources})


def own_hash(algo: Algo, op: Op) -> str:
    """The hash of the algo's sources without the generated file: a tuning is valid for these."""
    solution = pack(algo, op)
    return source_hash(solution | {"sources": _handwritten(algo, solution["sources"])})


def _handwritten(algo: Algo, sources: list[Source]) -> list[Source]:
    return [source for source in sources if source["path"] != algo.tuning.file]
