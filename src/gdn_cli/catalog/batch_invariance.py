"""The batch-invariant build of an algo: the bits of a sequence's results do not depend on its neighbours, on how many
they are, nor on its place among them.

A tuned kernel takes other constants at other sizes, and sums in another order with some of them: a sequence alone then
rounds differently than in a batch. Serving engines and trainers compare such bits (Thinking Machines, "Defeating
Nondeterminism in LLM Inference", 2025). algo.toml says what an algo has to offer:

    batch_invariant = true                          it is so as it is
    [tune.invariant] constants = { lanes = 16 }     in each row of its table these constants, which decide the order
    [tune.invariant] where = "keys == 128"          rows that do not meet it give way to the next of their length

The table so made stands in place of the tuned one. In a C++ header `#define GDN_BATCH_INVARIANT` says so to a kernel
that decides more by size than its table does. tests/kernels/test_batch_invariance.py holds every claim.
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
MARK = "@invariant"  # behind the name of such a build, in records and tables


def offered(algo: Algo) -> bool:
    """Whether algo.toml says how the algo is batch-invariant. A packed solution says nothing of it."""
    return algo.solution is None and (algo.batch_invariant or bool(algo.tune and algo.tune.invariant))


def why_not(algo: Algo) -> str | None:
    """What is to be said of an algo that offers it not."""
    return None if offered(algo) else f"--batch-invariant: {algo.full_name} does not say that it can be"


def variant(algo: Algo, op: Op) -> Algo:
    """The batch-invariant build: the algo itself where it is always so. Its folder is not touched.

    UsageError for an algo that has none to offer, or no table to make one of.
    """
    if not offered(algo):
        raise UsageError(why_not(algo), hint=HOW)
    if algo.batch_invariant:
        return algo
    table = tuned_table.render(algo.tune, rows(algo), batch_invariant=True)
    return tuned_table.with_table(algo, op, f"{algo.name}{MARK}", table)


def rows(algo: Algo) -> list[Row]:
    """The rows of the table, of each GPU that the algo was tuned on."""
    tune, wanted = algo.tune, algo.tune.invariant
    path = algo.folder / "algo.toml"
    tuned = [
        replace(row, constants=row.constants | wanted.constants)
        for row in tuned_table.rows(tune, tuned_table.load(algo))
    ]
    if not tuned and set(wanted.constants) == set(tune.constants):
        tuned = [Row("any", 0, ENDLESS, dict(wanted.constants), ENDLESS if tune.length else None)]
    if not tuned or any(set(row.constants) != set(tune.constants) for row in tuned):
        hint = "`gdn tune` measures it"
        raise UsageError(f"{algo.full_name} has no table of constants to make a batch-invariant one of", hint=hint)
    holds = condition(wanted.where, tune.constants) if wanted.where else lambda _: True
    found: list[Row] = []
    for _, group in itertools.groupby(tuned, lambda row: (row.gpu, row.sms, row.length_up_to)):
        of_length = list(group)
        good = [holds(row.constants) for row in of_length]
        if not any(good):
            what = tuned_table.label(of_length[0].constants)
            raise UsageError(f"{path}: $.tune.invariant.where: '{wanted.where}' leaves no row, not {what}")
        for i, row in enumerate(of_length):
            at = next(j for j in (*range(i, len(good)), *range(i, -1, -1)) if good[j])
            found.append(replace(row, constants=of_length[at].constants))
    fits = condition(tune.where, tune.constants) if tune.where else lambda _: True
    for row in found:
        if not fits(row.constants):
            what = tuned_table.label(row.constants)
            raise UsageError(f"{path}: $.tune.invariant: [tune] `where` leaves out {what}")
    return _merged(found)


def _merged(rows: list[Row]) -> list[Row]:
    """Of neighbours that differ in nothing but the size, or but the length, the last."""
    for ends in ("up_to", "length_up_to"):
        kept: list[Row] = []
        for row in rows:
            if kept and replace(kept[-1], **{ends: getattr(row, ends)}) == row:
                kept.pop()
            kept.append(row)
        rows = kept
    return rows
