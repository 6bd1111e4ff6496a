"""The batch-invariant build of an algo: the bits of a sequence's results do not depend
on its neighbours, on their number, or on its place among them.

A tuned kernel uses other constants at other sizes, and some of them change the order of
its sums: a sequence alone then rounds differently than in a batch. Serving engines and
trainers compare such bits (Thinking Machines, "Defeating Nondeterminism in LLM
Inference", 2025). algo.toml says how an algo can be batch-invariant:

    batch_invariant = true                          it always is
    [tune.invariant] constants = { lanes = 16 }     these constants, which decide the
      order, in every row of its table
    [tune.invariant] where = "keys == 128"          rows that do not meet it are
      replaced by the next of their length

That table replaces the tuned one. In a C++ header `#define GDN_BATCH_INVARIANT` tells a
kernel that decides more by size than its table does.
tests/rungs/test_batch_invariance.py checks every claim.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..errors import UsageError
from . import tuned_table
from .expression import condition
from .ops import Op
from .registry import Algo
from .tuned_table import ENDLESS, Row

HOW = "batch_invariant or [tune.invariant] in its algo.toml says how"
MARK = "@invariant"  # appended to the name of the build, in records and tables


def offered(algo: Algo) -> bool:
    """Whether algo.toml says how the algo is batch-invariant. A packed solution does not say."""
    declared = algo.batch_invariant or bool(algo.tune and algo.tune.invariant)
    return declared and algo.solution is None


def why_not(algo: Algo) -> str | None:
    """The reason why an algo has no batch-invariant build; None if it has one."""
    if offered(algo):
        return None
    return f"--batch-invariant: {algo.full_name} does not say that it can be"


def variant(algo: Algo, op: Op) -> Algo:
    """The batch-invariant build: the algo itself if it always is. Its folder is not changed.

    UsageError for an algo that does not offer one, or has no table to make one from.
    """
    if reason := why_not(algo):
        raise UsageError(reason, hint=HOW)
    if algo.batch_invariant:
        return algo
    table = tuned_table.render(algo.tuning, rows(algo), batch_invariant=True)
    return tuned_table.with_table(algo, op, f"{algo.name}{MARK}", table)


def rows(algo: Algo) -> list[Row]:
    """The rows of the table, for each GPU that the algo was tuned on."""
    tune = algo.tuning
    invariant = tune.invariant
    assert invariant
    path = algo.own_folder / "algo.toml"
    table = []
    for row in tuned_table.rows(tune, tuned_table.load(algo)):
        table.append(replace(row, constants=row.constants | invariant.constants))
    if not table:
        length = ENDLESS if tune.length else None
        table = [Row("any", 0, ENDLESS, dict(invariant.constants), length)]
    if any(set(row.constants) != set(tune.constants) for row in table):
        raise UsageError(
            f"{algo.full_name} has no table of constants to make a batch-invariant one from",
            hint="`gdn tune` makes one",
        )
    holds = condition(invariant.where or "1", tune.constants)
    chosen = []
    for _, group in itertools.groupby(
        table, lambda row: (row.gpu, row.sms, row.length_up_to)
    ):
        candidates = list(group)
        good = [i for i, row in enumerate(candidates) if holds(row.constants)]
        if not good:
            constants = tuned_table.label(candidates[0].constants)
            raise UsageError(
                f"{path}: $.tune.invariant.where: '{invariant.where}' leaves no row, not"
                f" {constants}"
            )
        for i, row in enumerate(candidates):
            # the next one that meets the condition, else the last before it
            place = min((j for j in good if j >= i), default=good[-1])
            chosen.append(replace(row, constants=candidates[place].constants))
    return _merged(chosen)


def _merged(rows: list[Row]) -> list[Row]:
    """Rows without those whose next neighbour differs only in the size, or only in the length."""
    for ends in ("up_to", "length_up_to"):
        merged: list[Row] = []
        for row in rows:
            if merged and replace(merged[-1], **{ends: getattr(row, ends)}) == row:
                merged.pop()
            merged.append(row)
        rows = merged
    return rows
