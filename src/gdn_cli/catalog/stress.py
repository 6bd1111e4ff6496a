"""Hard inputs, as configs/<op>.toml declares them in [stress.NAME]. worker/synthetic.py
draws them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..parsing import Positive, Text
from ..schema.numbers import NotNegative, Number
from ..schema.numbers import Positive as PositiveNumber
from ..schema.record_types import Largest, Record

TOKENS = ("total_seq_len", "seq_len")  # the axis along which keys can be alike


class Gates(Struct, frozen=True, forbid_unknown_fields=True):
    """Means of the gates' inputs: A_log N(A_log, 0.25^2), a N(a, 1), b N(b, 1), dt_bias
    N(0, 0.25^2).
    """

    A_log: Number
    a: Number
    b: Number


class Family(Struct, frozen=True, forbid_unknown_fields=True):
    """One [stress.NAME]: axes, and how its values differ from a twin's at these axes."""

    summary: Text
    axes: dict[str, Positive] = {}
    # lengths of packed sequences, instead of axes; 0 is a sequence without tokens
    seq_lens: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    # all different; all keys of a head equal; equal but for signs that alternate along
    # the tokens; or all keys and queries 0
    keys: Literal["own", "equal", "alternating", "zero"] = "own"
    # some rows, the first and the last among them, have no slot: their slot number is
    # 0 or -1
    padding: bool = False
    gates: Gates | None = None
    # the first of every so many tokens has a = 60: the whole state is forgotten there
    forget_every: Annotated[int, Meta(ge=0)] = 0
    # root mean square of the state
    state: NotNegative | None = None
    # how many times larger than a twin's: a factor on q
    logits: Number = 1.0
    # replaces the op's, if no kernel comes closer
    tolerance: PositiveNumber | None = None


def largest(records: Iterable[Record]) -> list[Largest]:
    """For each algo the largest relative Frobenius error on hard inputs, with the
    output and the input that has it; NaN and Inf (None) count as larger than any
    number.
    """
    worst: dict[tuple, Largest] = {}
    for record in records:
        if not (record.workload and record.workload.stress):
            continue
        for output, error in (record.check.errors if record.check else {}).items():
            key = record.op, record.algo, record.mode
            if key not in worst or size(error) > size(worst[key].error):
                worst[key] = Largest(
                    op=record.op,
                    algo=record.algo,
                    mode=record.mode,
                    error=error,
                    output=output,
                    stress=record.workload.stress,
                )
    return list(worst.values())


def size(error: float | None) -> float:
    """A sort key for an error: None is larger than any number."""
    return math.inf if error is None else error
