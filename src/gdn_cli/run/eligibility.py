"""Which of a command's algos an option allows: those that cannot do it are named with
the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..catalog import batch_invariance
from ..catalog.registry import Algo, Registry
from ..errors import UsageError
from ..machine import inventory
from .planning import Entry


def overwriting(
    registry: Registry,
    entries: list[Entry],
    named: bool,
    in_place: bool = True,
    timed: bool = True,
) -> list[Entry]:
    """The entries that can make in-place calls, if `in_place` asks for these
    or their op is always in place.

    UsageError for an op that has no in-place call, and for an algo that cannot make one
    if the user `named` it; otherwise the algo is reported as unable to run. Where
    nothing is `timed`, an algo of an op that is always in place may return its results:
    they are checked as they are.
    """
    for name in dict.fromkeys(e.algo.op for e in entries):
        if in_place and not registry.op(name).in_place:
            able = ", ".join(op.name for op in registry.ops.values() if op.in_place)
            raise UsageError(
                f"--in-place: {name} declares no output that may be an input",
                hint=f"{able} do",
            )

    def why_not(algo: Algo) -> str | None:
        if not (in_place or timed and registry.op(algo.op).in_place_only):
            return None

        reason = "--in-place" if in_place else f"{algo.op} is timed in place"
        if algo.setup:
            return f"{reason}: {algo.full_name} keeps data that its setup made from the inputs"
        if not algo.destination_passing:
            return (
                f"{reason}: {algo.full_name} returns its results, and cannot write into given"
                " buffers"
            )
        return None

    hint = (
        "destination_passing = true in algo.toml, with a kernel that reads each element before it"
        " writes it"
    )
    return _without(entries, why_not, hint, named)


def sanitized(entries: list[Entry], named: bool) -> list[Entry]:
    """The entries in C++, for `--sanitize`."""

    def why_not(algo: Algo) -> str | None:
        if algo.language == "cpp":
            return None
        return f"--sanitize is for C++, {algo.name} is {algo.language}"

    hint = "CUDA: --emulate, or `gdn profile ALGO --tool sanitizer` on a GPU"
    return _without(entries, why_not, hint, named)


def batch_invariant(
    registry: Registry, entries: list[Entry], named: bool
) -> list[Entry]:
    """The batch-invariant builds, for `--batch-invariant`. UsageError for an algo that
    has none if the user `named` it; otherwise the algo is reported as unable to run.
    """
    able = _without(entries, batch_invariance.why_not, batch_invariance.HOW, named)
    return [_variant(registry, entry) if entry.place.mode else entry for entry in able]


def _variant(registry: Registry, entry: Entry) -> Entry:
    op = registry.op(entry.algo.op)
    return replace(entry, algo=batch_invariance.variant(entry.algo, op))


def beside_batch_invariant(registry: Registry, entries: list[Entry]) -> list[Entry]:
    """The rivals of a comparison, each followed by its batch-invariant build if it has
    one that differs.
    """
    if not any(batch_invariance.offered(entry.algo) for entry in entries):
        why = batch_invariance.why_not(entries[0].algo) or ""
        raise UsageError(why, hint=batch_invariance.HOW)
    result = []

    for entry in entries:
        result.append(entry)
        if batch_invariance.offered(entry.algo):
            variant = _variant(registry, entry)
            if variant.algo != entry.algo:
                result.append(variant)

    return result


def _without(
    entries: list[Entry], why_not: Callable[[Algo], str | None], hint: str, named: bool
) -> list[Entry]:
    result = []
    for entry in entries:
        why = why_not(entry.algo) if named or entry.place.mode else None
        if why and named:
            raise UsageError(why, hint=hint)
        if why:
            entry = replace(entry, place=inventory.Place(None, why, hint))
        result.append(entry)
    return result
