"""Workloads: the calls to make of an op, and how a user picks some. Imports neither
torch nor numpy.

A workload is axes and, for a FlashInfer-Trace folder, the files of its tensors. The
contest's 54 decode and 100 prefill workloads are embedded as twins: real uuids and
axes, tensors drawn from the uuid (see `twin`). Ops that the contest does not have get
twins at the `workloads` of their file.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path

from msgspec import Struct, convert
from msgspec.structs import replace

from ..errors import UsageError, unknown
from ..parsing import Json, Positive, read_json
from ..units import listed
from .expression import condition, size
from .formats import Input
from .ops import Op, label_names
from .presets import Preset

# Generated twins get their uuid from this and their axes: the same axes have the same
# tensors everywhere.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "gdn:workload")


class Workload(Struct, frozen=True):
    """The axes and inputs of one call."""

    uuid: str
    # the op's variable axes, all of them
    axes: dict[str, Positive]
    # place in the contest's (or the folder's) order; None for a generated twin
    index: int | None = None
    # "twin": tensors drawn from the uuid; "dataset": a FlashInfer-Trace folder's
    origin: str = "twin"
    # FlashInfer-Trace input specs, for origin "dataset"
    inputs: dict[str, Input] | None = None
    # prefill twins made for given lengths
    seq_lens: tuple[int, ...] | None = None
    # the op's family of hard inputs, if the tensors are hard
    stress: str | None = None


# --- embedded


class Contest(Struct):
    """The contest's workloads of a definition, in dataset order."""

    workloads: list[Workload]
    # published statistics
    sequence_lengths: Json = {}


@cache
def contest() -> dict[str, Contest]:
    """data/contest.json, by definition."""
    content = read_json(Path(__file__).parent / "data" / "contest.json")
    return convert(content["definitions"], dict[str, Contest])


def embedded(op: Op) -> list[Workload]:
    """The contest's workloads of this op as twins, in data set order; those of its file
    for an op that the contest does not have.
    """
    if exact := contest().get(op.definition):
        return [replace(w, index=i) for i, w in enumerate(exact.workloads)]
    sizes = list(op.workloads)
    if family := contest().get(op.family_definition):  # the same axes at other heads
        sizes = []
        for workload in family.workloads:
            if workload.axes not in sizes:
                sizes.append(workload.axes)
    return [Workload(_uuid(op, axes), axes, index=i) for i, axes in enumerate(sizes)]


def _uuid(
    op: Op, axes: Mapping[str, int], seq_lens: Sequence[int] | None = None
) -> str:
    parts: Mapping[str, object] = axes
    if seq_lens:
        parts = {"seq_lens": "+".join(map(str, seq_lens))}
    query = "&".join(f"{key}={parts[key]}" for key in sorted(parts))
    return str(uuid.uuid5(_NAMESPACE, f"{op.definition}?{query}"))


def twin(
    op: Op, wanted: Mapping[str, int], seq_lens: Sequence[int] | None = None
) -> Workload | None:
    """A twin at axes that no workload has, or None if `wanted` leaves an axis open.

    batch_size may be left out (1) if another axis is given, and an axis of the op's
    `defaults` if those in its expression are given.
    """
    axes = dict(wanted)
    if seq_lens is not None:
        axes |= {"total_seq_len": sum(seq_lens), "num_seqs": len(seq_lens)}
    if "len_cu_seqlens" in axes:
        axes.setdefault("num_seqs", axes["len_cu_seqlens"] - 1)
    if axes and "batch_size" in op.var_axes:
        axes.setdefault("batch_size", 1)
    for name, text in op.defaults.items():
        with suppress(ValueError):  # it needs an axis that was left open
            axes.setdefault(name, size(text, axes))
    if set(axes) != set(op.var_axes):
        return None
    if not 1 <= axes.get("num_seqs", 1) <= axes.get("total_seq_len", 1):
        raise UsageError(
            f"num_seqs={axes['num_seqs']} sequences do not fit"
            f" total_seq_len={axes['total_seq_len']}",
            hint="each sequence has at least one token",
        )
    for rows, pool in op.slots.items():
        _check_slots(op, axes, rows, pool)
    sizes = op.fixed | axes
    for text in op.constraints:
        try:
            holds = condition(text, sizes)
        except ValueError:
            continue  # of tensors' values, not of axes alone
        try:
            fits = holds(sizes)
        except ValueError as e:
            file = f"configs/{op.family}.toml"
            raise UsageError(
                f"{file}: $.constraints: '{text}': {e} at these axes"
            ) from None
        if not fits:
            given = in_words({axis: axes[axis] for axis in op.var_axes if axis in text})
            raise UsageError(f"{op.name}: {given}", hint=f"expected {text}")
    axes = {name: axes[name] for name in op.var_axes}
    # one sequence: the axes determine it, and the twin is the same
    lengths = tuple(seq_lens) if seq_lens and len(seq_lens) > 1 else None
    return Workload(_uuid(op, axes, lengths), axes, seq_lens=lengths)


def _check_slots(op: Op, axes: Mapping[str, int], rows: str, pool: str) -> None:
    """UsageError for a pool with too few slots for the rows."""
    names = op.inputs[rows].axes
    slots = op.outputs[pool].axes[0]
    if axes[slots] <= prod(op.shape(op.inputs[rows], axes)):
        raise UsageError(
            f"{slots}={axes[slots]} with {in_words({name: axes[name] for name in names})}",
            hint="each row has its own slot, and slot 0 is for padding: give"
            f" {' * '.join(names)} + 1 or more",
        )


def in_words(axes: Mapping[str, int]) -> str:
    """batch_size=64, num_slots=65."""
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def stressed(
    op: Op, names: Sequence[str] = (), first: int | None = None
) -> list[Workload]:
    """One workload for each of the op's families of hard inputs, or for the named ones;
    only the `first` so many.
    """
    for name in names:
        if name not in op.stress:
            raise unknown(f"hard input of {op.name}", name, op.stress)
    if not op.stress:
        raise UsageError(
            f"{op.name} declares no hard inputs",
            hint=f"[stress.NAME] in configs/{op.family}.toml does",
        )
    workloads = []
    for name in [n for n in op.stress if n in names or not names][:first]:
        family = op.stress[name]
        axes, lengths = family.axes, family.seq_lens
        if lengths is not None:
            axes = {"total_seq_len": sum(lengths), "num_seqs": len(lengths)}
            for axis, text in op.defaults.items():
                axes[axis] = size(text, axes)
        axes = {axis: axes[axis] for axis in op.var_axes}
        id_ = str(uuid.uuid5(_NAMESPACE, f"{op.definition}?stress={name}"))
        workloads.append(Workload(id_, axes, seq_lens=lengths, stress=name))
    return workloads


# --- selecting


def select(
    op: Op,
    workloads: Sequence[Workload],
    *,
    chosen: Sequence[str] = (),
    first: int | None = None,
    preset: Preset | None = None,
) -> list[Workload]:
    """The workloads that `--workload`, `-n` and `--preset` select; a UsageError says
    what exists instead.

    chosen  each one of: an index ("12"), a range of them ("0-9"), a uuid prefix of at
            least 4 hex digits, or an axis filter ("batch_size=64", "B=64", "T=8192 N=1",
            "seq_lens=4x2048"). Digits that are a valid index are an index. The result
            is the union in the order of the data set. Axes that no workload has, but
            that leave none open, give a twin drawn at those axes, after the others;
            also with a data set folder (the twin's origin says so)
    first   only this many of the result, from its start
    preset  its workloads, in its order; if `chosen` is given too, that selects, and the
            preset only gives settings
    """
    if chosen:
        picked = _union(op, workloads, chosen)
    elif preset is not None:
        picked = _preset(op, workloads, preset)
    else:
        picked = list(workloads)
    if not picked:
        raise UsageError(
            f"{op.name} has no workloads of its own",
            hint=f"name axes: --workload {','.join(f'{axis}=...' for axis in op.var_axes)}",
        )
    return picked[:first]


def _union(
    op: Op, workloads: Sequence[Workload], chosen: Sequence[str]
) -> list[Workload]:
    places: set[int] = set()
    twins: dict[str, Workload] = {}
    for text in chosen:
        if "=" in text:
            for workload in _at_axes(op, workloads, *_parse_filter(op, text.strip())):
                if workload in workloads:
                    places.add(workloads.index(workload))
                else:
                    twins[workload.uuid] = workload
            continue
        # "3,7" is two indices; within an axis filter the comma means "and"
        for token in text.split(","):
            places.update(_positions(op, workloads, token.strip()))
    return [workloads[i] for i in sorted(places)] + list(twins.values())


def _positions(op: Op, workloads: Sequence[Workload], token: str) -> Sequence[int]:
    """Positions of an index, a range, or a uuid prefix."""
    count = len(workloads)
    numbers = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", token)
    if numbers:
        low, high = int(numbers[1]), int(numbers[2] or numbers[1])
        if low <= high < count:
            return range(low, high + 1)
    ids = [workload.uuid for workload in workloads]
    if token in ids:
        return [i for i, id_ in enumerate(ids) if id_ == token]
    prefix = token.lower() if len(token) >= 4 else None
    fits = [i for i, id_ in enumerate(ids) if prefix and id_.lower().startswith(prefix)]
    if len(fits) > 1:
        raise UsageError(
            f"uuid prefix '{token}' fits {len(fits)} workloads of {op.name}:"
            f" {listed([ids[i] for i in fits], most=8)}",
            hint="give more digits",
        )
    if not fits:
        raise UsageError(
            f"no workload '{token}' of {op.name}: its {count} workloads have indices"
            f" 0-{count - 1}",
            hint="expected an index, a range such as 0-9, a uuid prefix of at least 4"
            f" hex digits, or an axis filter such as {op.var_axes[0]}=64",
        )
    return fits


Lengths = tuple[int, ...] | None


def _parse_filter(op: Op, token: str) -> tuple[dict[str, int], Lengths]:
    axes: dict[str, int] = {}
    seq_lens: Lengths = None
    short = label_names(op)
    for part in re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", token)):
        name, _, text = part.partition("=")
        axis = name if name in op.axes else short.get(name, name)
        if axis == "seq_lens" and "num_seqs" in op.var_axes:
            seq_lens = _parse_lengths(text)
            if not seq_lens:
                raise UsageError(
                    f"seq_lens='{text}'",
                    hint="expected lengths such as seq_lens=4x2048 or 1024+7168",
                )
            continue
        if axis in op.fixed:
            raise UsageError(
                f"axis '{axis}' of {op.name} is always {op.axes[axis]}",
                hint=f"choose by {', '.join(op.var_axes)}",
            )
        if axis not in op.axes:
            raise unknown(f"axis of {op.name}", axis, op.var_axes)
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < 1:
            raise UsageError(
                f"axis {axis}='{text}'",
                hint=f"expected a positive whole number, such as {axis}=64",
            )
        axes[axis] = int(text)
    if seq_lens and axes:
        raise UsageError(
            f"'{token}': seq_lens allows no other axes",
            hint="it fixes total_seq_len and num_seqs",
        )
    return axes, seq_lens


def _parse_lengths(text: str) -> tuple[int, ...] | None:
    """ "4x2048" -> four sequences of 2048, "1024+7168" -> two, and combinations; None if
    the text is neither.
    """
    lens: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(?:([1-9]\d{0,5})\s*x\s*)?([1-9]\d{0,8})\s*", part)
        if not match:
            return None
        lens += [int(match[2])] * int(match[1] or 1)
    return tuple(lens)


def _at_axes(
    op: Op, workloads: Sequence[Workload], axes: Mapping[str, int], seq_lens: Lengths
) -> list[Workload]:
    """The workloads with these axes, else the twin drawn at them."""
    drawn = twin(op, axes, seq_lens)
    if drawn and drawn.seq_lens:
        # lengths decide, not axes: only the twin itself has them
        matches = [w for w in workloads if w.uuid == drawn.uuid]
    else:
        wanted = drawn.axes if drawn and seq_lens else axes
        matches = [w for w in workloads if wanted and wanted.items() <= w.axes.items()]
    if matches:
        return matches
    if drawn:
        return [drawn]
    missing = [axis for axis in op.var_axes if axis not in axes]
    needed = [axis for axis in missing if axis not in (*op.defaults, "batch_size")]
    raise UsageError(
        f"no workload of {op.name} has {in_words(axes)}",
        hint=f"add {' and '.join(needed or missing)} for a twin drawn at those axes;"
        " `gdn data list` shows what there is",
    )


def _preset(op: Op, workloads: Sequence[Workload], preset: Preset) -> list[Workload]:
    where = f"{preset.files}: $.{preset.name}.workloads"
    names = [op.family, op.like, "*"]
    name = next((name for name in names if name in preset.workloads), None)
    if name is None:
        ops = ", ".join(preset.workloads) or "none"
        raise UsageError(f"{where}: no workloads for {op.family}, it has {ops}")
    entries = preset.workloads[name]
    if entries == "all":
        return list(workloads)
    picked: dict[str, Workload] = {}
    for i, entry in enumerate(entries):
        token = ",".join(f"{axis}={size}" for axis, size in entry.items())
        try:
            workload = _at_axes(op, workloads, *_parse_filter(op, token))[0]
        except UsageError as e:
            message = f"{where}.{op.name}[{i}]: {e.message}"
            raise UsageError(message, hint=e.hint) from None
        picked[workload.uuid] = workload
    return list(picked.values())
