"""Inputs that are hard, as configs/<op>.toml declares them: [stress.NAME]. Imports no torch; twins.py draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from .errors import UsageError

TOKENS = ("total_seq_len", "seq_len")  # the axis along which keys can be alike


class Gates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the gates' inputs are drawn around: A_log N(A_log, 0.25^2), a N(a, 1), b N(b, 1), dt_bias N(0, 0.25^2)."""

    A_log: float
    a: float
    b: float


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [stress.NAME]: axes, and what differs from the values that a twin at them would have.

    keys          each its own; all of a head alike; alike but for their signs, which alternate along the tokens
    forget_every  of so many tokens the first has a = 60: all that was kept is forgotten there
    state         root mean square of the state
    logits        times as large as a twin's: a factor on q
    tolerance     in place of the op's, where no kernel comes closer
    """

    summary: str
    axes: dict[str, int] = {}
    seq_lens: tuple[int, ...] | None = None  # of packed sequences, in place of axes; 0 is one without tokens
    keys: Literal["own", "equal", "alternating"] = "own"
    gates: Gates | None = None
    forget_every: int = 0
    state: float | None = None
    logits: float = 1.0
    tolerance: float | None = None


def families(path: Path, tables: Mapping[str, Any], axes: Mapping[str, int | None]) -> dict[str, Family]:
    """The families of an op with these axes (None: variable); a UsageError names file and key."""
    found = {}
    for name, table in tables.items():
        try:
            found[name] = msgspec.convert(table, Family)
        except msgspec.ValidationError as e:
            what, _, where = str(e).partition(" - at `$")
            raise UsageError(f"{path}: key 'stress.{name}{where.rstrip('`')}': {what}") from None
        if why := _fault(found[name], axes):
            raise UsageError(f"{path}: key 'stress.{name}.{why[0]}': expected {why[1]}")
    return found


def _fault(family: Family, axes: Mapping[str, int | None]) -> tuple[str, str] | None:
    """(key, what was expected there), or None."""
    variable = [name for name, value in axes.items() if value is None]
    if "num_seqs" in variable:
        if not family.seq_lens or min(family.seq_lens) < 0 or family.axes:
            return "seq_lens", "lengths such as [0, 1, 64], and no axes"
    elif family.seq_lens is not None or set(family.axes) != set(variable) or min(family.axes.values()) < 1:
        return "axes", f"a positive whole number for each of {', '.join(variable)}"
    if family.keys != "own" and not any(name in TOKENS for name in variable):
        return "keys", "'own': this op has one token a sequence"
    if family.forget_every < 0:
        return "forget_every", "a number of tokens"
    if family.tolerance is not None and not family.tolerance > 0:
        return "tolerance", "a positive number"
    return None


def largest(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each algo's checks of hard inputs the largest relative Frobenius error, with the output and the input that it
    is of; a result that is no number is larger than any (None)."""
    found: dict[tuple, dict[str, Any]] = {}
    for record in records:
        if not (family := (record.get("workload") or {}).get("stress")):
            continue
        for output, error in ((record.get("check") or {}).get("errors") or {}).items():
            key = record["op"], record["algo"], record["mode"]
            known = found.get(key)
            if known is None or size(error) > size(known["error"]):
                head = {"op": record["op"], "algo": record["algo"], "mode": record["mode"]}
                found[key] = head | {"error": error, "output": output, "stress": family}
    return list(found.values())


def size(error: float | None) -> float:
    """What sorts an error: None is larger than any."""
    return math.inf if error is None else error
