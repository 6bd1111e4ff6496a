"""The file that `gdn tune` generates: which constants a kernel takes for which size, by GPU; and the candidates for it.

A kernel takes the rows of the GPU whose number of SMs is nearest to its own (the first of equals), and of these the
first with size <= up_to. `nearest` is the same rule, so that a record can say whose rows were used. Where an algo runs
on a CPU, the CPU's name and the number of CPUs that the process may use stand for the GPU and its SMs.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import UsageError, unknown
from .expression import condition
from .pack import pack, source_hash
from .record_types import Environment
from .registry import Algo, Op, Tune
from .workloads import Workload

ENDLESS = 2**63 - 1  # INT64_MAX: the up_to of a GPU's last row
UNTUNED = "untuned"  # the GPU of rows that an author estimated
CANDIDATE = "candidate"  # the GPU of the one row that a candidate is tried with
MOST = 1000  # candidates: more are a mistake, not a space to search


@dataclass(frozen=True)
class Row:
    """These constants hold on this GPU up to this size."""

    gpu: str
    sms: int
    up_to: int
    constants: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {"gpu": self.gpu, "sms": self.sms, "up_to": self.up_to, **self.constants}


# --- the file -----------------------------------------------------------------------------------------------------


def render(tune: Tune, rows: Sequence[Row]) -> str:
    """The file's whole text. Constants stand in the order of algo.toml."""
    size = " * ".join(tune.size)
    what = f"Written by `gdn tune`: which constants for which size ({size}), by GPU. The evidence is in tuning.json."
    table = [{"gpu": r.gpu, "sms": r.sms, "up_to": r.up_to} | {n: r.constants[n] for n in tune.constants} for r in rows]
    if tune.file.endswith(".py"):
        lines = [f'"""{what}"""', "TUNED = [", *(f"    {json.dumps(row)}," for row in table), "]"]
    else:
        fields = f"const char* gpu; int sms; int64_t up_to; int {', '.join(tune.constants)};"
        lines = [
            f"// {what}",
            "#pragma once",
            "#include <cstdint>",
            f"struct Tuned {{ {fields} }};   // constants in the order of algo.toml",
            "constexpr Tuned TUNED[] = {",
            *(f"    {{{', '.join(json.dumps(value) for value in row.values())}}}," for row in table),
            "};",
        ]
    return "\n".join(lines) + "\n"


def parse(tune: Tune, text: str) -> list[Row]:
    """The rows of a generated file; ValueError, with what is wrong, for one that `gdn tune` would not understand."""
    rows = _parse_python(text) if tune.file.endswith(".py") else _parse_cpp(text)
    found = []
    for row in rows:
        gpu, sms, up_to = (row.pop(key, None) for key in ("gpu", "sms", "up_to"))
        if not isinstance(gpu, str) or any(type(n) is not int for n in (sms, up_to, *row.values())):
            raise ValueError(f"a row of '{gpu}' has not the form that gdn writes")
        if gpu != UNTUNED and set(row) != set(tune.constants):
            there, wanted = ", ".join(row), ", ".join(tune.constants)
            raise ValueError(f"its rows of '{gpu}' hold {there}, algo.toml names {wanted}")
        found.append(Row(gpu, sms, up_to, row))
    return found


def _parse_python(text: str) -> list[dict[str, Any]]:
    try:
        body = ast.parse(text).body
        for node in body:
            if isinstance(node, ast.Assign) and [getattr(t, "id", None) for t in node.targets] == ["TUNED"]:
                rows = ast.literal_eval(node.value)
                if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
                    return rows
    except (SyntaxError, ValueError):
        pass
    raise ValueError("it has no list TUNED of rows")


def _parse_cpp(text: str) -> list[dict[str, Any]]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    struct = re.search(r"struct\s+Tuned\s*\{[^}]*\bup_to\s*;\s*int\s+([\w\s,]+);\s*\}", text)
    table = re.search(r"\bTUNED\s*\[\s*\]\s*=\s*\{(.*?)\}\s*;", text, flags=re.DOTALL)
    if not struct or not table:
        raise ValueError("it has no struct Tuned and table TUNED")
    names = ["gpu", "sms", "up_to", *(name.strip() for name in struct[1].split(","))]
    rows = []
    for row in re.findall(r"\{([^{}]*)\}?", table[1]):
        try:
            literal = re.sub(r"\bINT64_MAX\b", str(ENDLESS), row)
            values = ast.literal_eval("[" + re.sub(r"(?<=\d)[uUlL]+\b", "", literal) + "]")
        except (SyntaxError, ValueError):
            values = []
        if len(values) != len(names):
            raise ValueError(f"its row {{{row.strip()}}} does not fit struct Tuned")
        rows.append(dict(zip(names, values, strict=True)))
    return rows


def dumps(document: dict[str, Any], width: int = 140) -> str:
    """JSON with as much on a line as fits: a candidate, a row."""

    def lines(value: Any, indent: int) -> str:
        flat = json.dumps(value)
        if len(flat) + indent <= width or not isinstance(value, (dict, list)):
            return flat
        space = " " * (indent + 1)
        if isinstance(value, dict):
            inside = [f"{space}{json.dumps(key)}: {lines(v, indent + 1)}" for key, v in value.items()]
            return "{\n" + ",\n".join(inside) + "\n" + " " * indent + "}"
        return "[\n" + ",\n".join(space + lines(v, indent + 1) for v in value) + "\n" + " " * indent + "]"

    return lines(document, 0) + "\n"


# --- rows ---------------------------------------------------------------------------------------------------------


def nearest(rows: Sequence[Row], sms: int) -> list[Row]:
    """The rows that a kernel uses on so many SMs: those of the GPU that is nearest, the first of equals."""
    if not rows:
        return []
    first = min(rows, key=lambda row: abs(row.sms - sms))
    return [row for row in rows if (row.gpu, row.sms) == (first.gpu, first.sms)]


def at(rows: Sequence[Row], size: int) -> Row:
    """The row of one GPU that holds at a size."""
    return next(row for row in rows if size <= row.up_to)


def size_of(op: Op, tune: Tune, workload: Workload) -> int:
    """What the kernel compares with up_to: the product of the axes of `tune.size`."""
    axes = {name: value for name, value in op.axes.items() if value is not None} | workload.axes
    return math.prod(axes[axis] for axis in tune.size)


def table(gpu: str, sms: int, chosen: Sequence[tuple[int, dict[str, int]]]) -> list[Row]:
    """The rows of a GPU from what was chosen for the measured sizes, ascending.

    Neighbours with equal constants are one row. Between two measured sizes the boundary is their geometric middle,
    rounded down: what lies between was not measured, and sizes go up by factors.
    """
    rows = []
    for i, (size, constants) in enumerate(chosen):
        following = chosen[i + 1] if i + 1 < len(chosen) else None
        if following and following[1] == constants:
            continue
        rows.append(Row(gpu, sms, math.isqrt(size * following[0]) if following else ENDLESS, constants))
    return rows


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The file's rows with those of one GPU new: the other GPUs keep theirs, an author's estimates go.

    The GPU keeps its place. A kernel tells GPUs apart by their number of SMs only: of two with as many the one that was
    tuned last stands first, and is used on both.
    """
    gpu, sms = new[0].gpu, new[0].sms
    old = [row for row in old if row.gpu != UNTUNED]
    place = next((i for i, row in enumerate(old) if row.gpu == gpu or row.sms == sms), len(old))
    return [row for row in old[:place] if row.gpu != gpu] + list(new) + [row for row in old[place:] if row.gpu != gpu]


def used(algo: Algo | None, solution: dict[str, Any] | None, environment: Environment) -> Row | None:
    """The first of the rows that a tuned algo takes on the GPU of a worker's environment; None where there is no table.

    Its `gpu` is the one that the rows were measured on, or "untuned" for an author's estimates.
    """
    if algo is None or algo.tune is None or solution is None or environment.sms is None:
        return None
    text = next((s["content"] for s in solution["sources"] if s["path"] == algo.tune.file), "")
    try:
        return next(iter(nearest(parse(algo.tune, text), environment.sms)), None)
    except ValueError:
        return None


# --- candidates -----------------------------------------------------------------------------------------------------


def candidates(algo: Algo) -> tuple[list[dict[str, int]], int]:
    """The constants of every candidate, in the order of algo.toml, and how many `where` leaves out.

    Raises UsageError where that is none, or more than anybody waits for.
    """
    tune, path = algo.tune, algo.folder / "algo.toml"
    count = math.prod(map(len, tune.constants.values()))
    if count > 100 * MOST:
        raise UsageError(f"{path}: [tune.constants] stands for {count} candidates", hint="name fewer values")
    every = [dict(zip(tune.constants, values, strict=True)) for values in itertools.product(*tune.constants.values())]
    kept = every
    if tune.where:
        holds = condition(tune.where, tune.constants)
        try:
            kept = [constants for constants in every if holds(constants)]
        except ZeroDivisionError:
            raise UsageError(f"{path}: key 'tune.where': '{tune.where}' divides by zero") from None
    if not kept:
        raise UsageError(f"{path}: key 'tune.where': '{tune.where}' leaves no candidate")
    if len(kept) > MOST:
        raise UsageError(f"{path}: [tune] stands for {len(kept)} candidates", hint=f"at most {MOST}: name fewer values")
    return kept, len(every) - len(kept)


def narrowed(algo: Algo, only: Sequence[str], where: str | None = None) -> Algo:
    """The algo with fewer values to try: each of `only` is "NAME=V[,V...]", of values that its algo.toml declares;
    `where` is one more condition beside its own."""
    constants = dict(algo.tune.constants)
    condition_ = algo.tune.where
    if where:
        try:
            condition(where, constants)
        except ValueError as e:
            raise UsageError(f"--where '{where}': {e}", hint='such as "rows * warps <= 16"') from None
        condition_ = f"({condition_}) and ({where})" if condition_ else where
    for text in only:
        name, _, values = text.partition("=")
        if (name := name.strip()) not in constants:
            raise unknown("constant", name, constants)
        declared = constants[name]
        wanted = [value.strip() for value in values.split(",")]
        if not set(wanted) <= {str(value) for value in declared}:
            hint = f"algo.toml declares {name} = {', '.join(map(str, declared))}"
            raise UsageError(f"--only {text}: expected values to try", hint=hint)
        constants[name] = tuple(value for value in declared if str(value) in wanted)
    return replace(algo, tune=replace(algo.tune, constants=constants, where=condition_))


def label(constants: dict[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in constants.items())


def candidate(algo: Algo, op: Op, constants: dict[str, int]) -> Algo:
    """The algo as it would be with these constants at every size; its folder is not touched."""
    row = Row(CANDIDATE, 0, ENDLESS, constants)
    name = f"{algo.name}[{label(constants)}]"
    solution = pack(algo, op, name=f"{op.name}-{name}")
    generated = {"path": algo.tune.file, "content": render(algo.tune, [row])}
    sources = sorted([*_own(algo, solution), generated], key=lambda source: source["path"])
    return replace(algo, name=name, solution=solution | {"sources": sources})


def own_hash(algo: Algo, op: Op) -> str:
    """The hash of the algo's sources without the generated file: what a tuning rests on."""
    solution = pack(algo, op)
    return source_hash(solution | {"sources": _own(algo, solution)})


def _own(algo: Algo, solution: dict[str, Any]) -> list[dict[str, str]]:
    return [source for source in solution["sources"] if source["path"] != algo.tune.file]
