"""Workloads: the calls to make of an op, and how a user picks some. Imports neither
torch nor numpy.

A workload is axes and, for a FlashInfer-Trace folder, the files of its tensors. The
contest's 54 decode and 100 prefill workloads are embedded as twins: real uuids and
axes, tensors drawn from the uuid (see `twins`). Ops that the contest does not have get
their own twins: OWN.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from msgspec import Struct, convert
from msgspec.structs import replace

from .. import paths
from ..errors import UsageError, unknown
from ..parsing import Json, Positive, read_json
from .expression import condition, size
from .formats import Input
from .ops import Op, label_names
from .presets import Preset, parse_seq_lens, presets_file

# The axes of ops that are not in the contest: one workload for each size along one axis.
_LENGTHS = [{"batch_size": 1, "seq_len": n} for n in (128, 256, 512, 1024, 2048, 4096)]
_VERIFY = [(1, 4), (4, 4), (16, 4), (64, 4), (1, 2), (16, 2), (1, 8), (16, 8)]
OWN: dict[str, list[dict[str, int]]] = {
    "attention_fwd": _LENGTHS,
    "attention_fwd_causal": _LENGTHS,
    "gdn_decode_bf16": [
        {"batch_size": n} for n in (1, 2, 4, 8, 16, 32, 48, 64, 128, 256)
    ],
    "gdn_decode_packed": [
        {"batch_size": n, "pool_size": 2 * n + 1}
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ],
    "gdn_mtp": [
        {"batch_size": n, "seq_len": t, "pool_size": 2 * n + 1} for n, t in _VERIFY
    ],
    "gdn_mtp_packed": [
        {"batch_size": n, "seq_len": t, "pool_size": n * t + 1} for n, t in _VERIFY
    ],
    "gdn_prefill_packed": [
        {
            "total_seq_len": t,
            "num_seqs": n,
            "len_cu_seqlens": n + 1,
            "pool_size": 2 * n + 1,
        }
        for t, n in (
            (64, 1),
            (512, 1),
            (2048, 1),
            (8192, 1),
            (1000, 3),
            (2048, 8),
            (8192, 8),
            (8192, 32),
            (4096, 64),
        )
    ],
}
# Generated twins get their uuid from this and their axes: the same axes have the same
# tensors everywhere.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "gdn:workload")


class Workload(Struct, frozen=True):
    """The axes and inputs of one call."""

    uuid: str
    axes: dict[str, Positive]  # the op's variable axes, all of them
    # place in the contest's (or the folder's) order; None for a generated twin
    index: int | None = None
    # "twin": tensors drawn from the uuid; "dataset": a FlashInfer-Trace folder's
    origin: str = "twin"
    # FlashInfer-Trace input specs, for origin "dataset"
    inputs: dict[str, Input] | None = None
    seq_lens: tuple[int, ...] | None = None  # prefill twins made for given lengths
    stress: str | None = None  # the op's family of hard inputs, if the tensors are hard


# --- embedded


class Contest(Struct):
    """The contest's workloads of a definition, in dataset order."""

    workloads: list[Workload]
    sequence_lengths: Json = {}  # published statistics


@cache
def contest() -> dict[str, Contest]:
    """data/contest.json, by definition."""
    found = read_json(Path(__file__).parent / "data" / "contest.json")
    return convert(found["definitions"], dict[str, Contest])


def embedded(op: Op) -> list[Workload]:
    """The contest's workloads of this op as twins, in data set order; those of OWN for
    an op that it does not have.
    """
    if found := contest().get(op.definition):
        return [replace(w, index=i) for i, w in enumerate(found.workloads)]
    if found := contest().get(op.family_definition):  # the same axes at other heads
        sizes = list({tuple(w.axes.items()): w.axes for w in found.workloads}.values())
    else:
        sizes = OWN.get(op.family) or OWN.get(op.like or "", [])
    return [Workload(_uuid(op, one), dict(one), index=i) for i, one in enumerate(sizes)]


def _uuid(
    op: Op, axes: Mapping[str, int], seq_lens: Sequence[int] | None = None
) -> str:
    parts = {"seq_lens": "+".join(map(str, seq_lens))} if seq_lens else axes
    return str(
        uuid.uuid5(
            _NAMESPACE,
            f"{op.definition}?" + "&".join(f"{k}={parts[k]}" for k in sorted(parts)),
        )
    )


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
    if "num_seqs" in axes:
        if axes["len_cu_seqlens"] != axes["num_seqs"] + 1:
            raise UsageError(
                f"len_cu_seqlens={axes['len_cu_seqlens']} with num_seqs={axes['num_seqs']}",
                hint="len_cu_seqlens is num_seqs + 1: leave it out",
            )
        if not 1 <= axes["num_seqs"] <= axes["total_seq_len"]:
            raise UsageError(
                f"num_seqs={axes['num_seqs']} sequences do not fit"
                f" total_seq_len={axes['total_seq_len']}",
                hint="each sequence has at least one token",
            )
    for rows, pool in op.slots.items():
        count, (slots, *_) = op.inputs[rows].shape, op.outputs[pool].shape
        if op.shape(op.outputs[pool], axes)[0] <= prod(op.shape(op.inputs[rows], axes)):
            raise UsageError(
                f"{slots}={axes[slots]} with"
                f" {', '.join(f'{axis}={axes[axis]}' for axis in count)}",
                hint=(
                    "each row has its own slot, and slot 0 is for padding: give"
                    f" {' * '.join(count)} + 1 or more"
                ),
            )
    known = op.fixed | axes
    for text in op.constraints:
        try:
            holds = condition(text, known)
        except ValueError:
            continue  # of tensors' values, not of axes alone
        try:
            held = holds(known)
        except ValueError as e:
            raise _undefined(op, "constraints", text, e) from None
        if not held:
            given = ", ".join(
                f"{axis}={axes[axis]}" for axis in op.var_axes if axis in text
            )
            raise UsageError(f"{op.name}: {given}", hint=f"expected {text}")
    axes = {name: axes[name] for name in op.var_axes}
    if seq_lens is not None and len(seq_lens) == 1:
        seq_lens = None  # one sequence: the axes determine it, and the twin is the same
    return Workload(
        _uuid(op, axes, seq_lens),
        axes,
        seq_lens=None if seq_lens is None else tuple(seq_lens),
    )


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
    found = []
    for name in [n for n in op.stress if n in names or not names][:first]:
        family = op.stress[name]
        axes, lengths = family.axes, family.seq_lens
        if lengths is not None:
            axes = {"total_seq_len": sum(lengths), "num_seqs": len(lengths)}
            for axis, text in op.defaults.items():
                try:
                    axes[axis] = size(text, axes)
                except ValueError as e:
                    raise _undefined(op, f"defaults.{axis}", text, e) from None
        made = uuid.uuid5(_NAMESPACE, f"{op.definition}?stress={name}")
        found.append(
            Workload(
                str(made),
                {axis: axes[axis] for axis in op.var_axes},
                seq_lens=lengths,
                stress=name,
            )
        )
    return found


def _undefined(op: Op, key: str, text: str, why: ValueError) -> UsageError:
    file = paths.CONFIGS_DIR / f"{op.family}.toml"
    return UsageError(f"{file}: $.{key}: '{text}': {why} at these axes")


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
      least 4 hex digits, or an axis
            filter ("batch_size=64", "total_seq_len=8192,num_seqs=1", or as tables have
            it: "B=64", "T=8192 N=1"). Digits that are a valid index are an index. The
            result is the union in the order of the data set. Axes that no workload has,
            but that leave none open (decode: batch_size; attention: seq_len, batch_size
            is 1 if not given; prefill: total_seq_len and num_seqs, or
            "seq_lens=4x2048"), give a twin drawn at those axes, after the others; also
            with a data set folder (the twin's origin says so).
    first   only this many of the result, from its start.
    preset  its workloads, in its order; if `chosen` is given too, that selects, and the
      preset only gives settings.
    """
    if first is not None and first < 1:
        raise UsageError(f"-n {first}", hint="expected 1 or more")
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
    # "3,7" is two indices; within an axis filter the comma means "and"
    tokens = [
        t.strip()
        for text in chosen
        for t in ([text] if "=" in text else text.split(","))
    ]
    for token in tokens:
        if "=" in token:
            wanted, seq_lens = _parse_filter(op, token)
            found = _having(op, workloads, wanted, seq_lens)
            if isinstance(found, Workload):
                twins[found.uuid] = found
            else:
                places.update(found)
        else:
            places.update(_named(op, workloads, token))
    return [workloads[i] for i in sorted(places)] + list(twins.values())


def _named(op: Op, workloads: Sequence[Workload], token: str) -> list[int]:
    """Positions of an index, a range, or a uuid prefix."""
    count = len(workloads)
    if m := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", token):
        low, high = int(m[1]), int(m[2] or m[1])
        if low <= high < count:
            return list(range(low, high + 1))
    if exact := [i for i, w in enumerate(workloads) if w.uuid == token]:
        return exact
    found = [
        i
        for i, w in enumerate(workloads)
        if len(token) >= 4 and w.uuid.lower().startswith(token.lower())
    ]
    if len(found) > 1:
        names = [workloads[i].uuid for i in found[:8]] + ["..."] * (len(found) > 8)
        fits = f"uuid prefix '{token}' fits {len(found)} workloads of {op.name}: {', '.join(names)}"
        raise UsageError(fits, hint="give more digits")
    if not found:
        indices = f"indices 0-{count - 1}" if count else "no indices"
        has = f": its {count} workloads have {indices}" if m else ""
        what = f"an index 0-{count - 1}, a range such as 0-9, " if count else ""
        hint = (
            f"expected {what}a uuid prefix of at least 4 hex digits, or an axis filter such as"
            f" {op.var_axes[0]}=64"
        )
        raise UsageError(f"no workload '{token}' of {op.name}{has}", hint=hint)
    return found


def _parse_filter(op: Op, token: str) -> tuple[dict[str, int], tuple[int, ...] | None]:
    wanted: dict[str, int] = {}
    seq_lens = None
    named = label_names(op)
    for part in re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", token)):
        axis, _, text = part.partition("=")
        axis = axis if axis in op.axes else named.get(axis, axis)
        if axis == "seq_lens" and "num_seqs" in op.var_axes:
            if not (seq_lens := parse_seq_lens(text)):
                raise UsageError(
                    f"seq_lens='{text}'",
                    hint="expected lengths such as seq_lens=4x2048 or 1024+7168",
                )
            continue
        if op.axes.get(axis) is not None:
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
        wanted[axis] = int(text)
    if seq_lens and wanted:
        raise UsageError(
            f"'{token}': seq_lens allows no other axes",
            hint="it fixes total_seq_len and num_seqs",
        )
    return wanted, seq_lens


def _having(
    op: Op,
    workloads: Sequence[Workload],
    wanted: Mapping[str, int],
    seq_lens: tuple[int, ...] | None,
) -> list[int] | Workload:
    """Positions of the workloads with these axes, else the twin drawn at them."""
    made = twin(op, wanted, seq_lens)
    # lengths decide, not axes: only the twin itself has them
    if made and made.seq_lens:
        found = [i for i, w in enumerate(workloads) if w.uuid == made.uuid]
    else:
        axes = made.axes if seq_lens else wanted
        found = [
            i
            for i, w in enumerate(workloads)
            if all(w.axes.get(k) == v for k, v in axes.items())
        ]
    if found or made:
        return found or made
    axes = ", ".join(f"{k}={v}" for k, v in wanted.items())
    missing = [
        a
        for a in op.var_axes
        if a not in wanted and a not in (*op.defaults, "batch_size")
    ]
    missing = missing or [a for a in op.var_axes if a not in wanted]
    raise UsageError(
        f"no workload of {op.name} has {axes}",
        hint=(
            f"there are {present(workloads, wanted)}; add {' and '.join(missing)} for a twin"
            " drawn at those axes"
        ),
    )


def present(
    workloads: Sequence[Workload], axes: Mapping[str, Any] | Sequence[str]
) -> str:
    """The values that axes have in the workloads, for a message: "batch_size 1, 4, 8"."""
    texts = []
    for axis in axes:
        values = [
            str(v) for v in sorted({w.axes[axis] for w in workloads if axis in w.axes})
        ]
        if len(values) > 12:
            values = [*values[:8], "...", f"{values[-1]} ({len(values)} values)"]
        texts.append(f"{axis} {', '.join(values) or '(none)'}")
    return "; ".join(texts)


def _preset(op: Op, workloads: Sequence[Workload], preset: Preset) -> list[Workload]:
    where = f"{presets_file()}: $.{preset.name}.workloads"
    entries = preset.workloads.get(op.family) or preset.workloads.get(op.like or "")
    if not entries:
        raise UsageError(
            f"{where}: no workloads for {op.family}, it has"
            f" {', '.join(preset.workloads) or 'none'}"
        )
    if entries == "all":
        return list(workloads)
    picked: dict[str, Workload] = {}
    for i, entry in enumerate(entries):
        for axis in entry:
            if axis not in op.var_axes and not (
                axis == "seq_lens" and "num_seqs" in op.var_axes
            ):
                raise UsageError(
                    f"{where}.{op.name}[{i}].{axis}: expected an axis of {op.name}:"
                    f" {', '.join(op.var_axes)}"
                )
        seq_lens = parse_seq_lens(entry["seq_lens"]) if "seq_lens" in entry else None
        try:
            found = _having(
                op,
                workloads,
                {k: v for k, v in entry.items() if k != "seq_lens"},
                seq_lens,
            )
        except UsageError as e:
            raise UsageError(
                f"{where}.{op.name}[{i}]: {e.message}", hint=e.hint
            ) from None
        workload = found if isinstance(found, Workload) else workloads[found[0]]
        picked[workload.uuid] = workload
    return list(picked.values())
