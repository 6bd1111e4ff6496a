"""Checks that a sequence's bits depend on nothing but the sequence, for an algo that promises it
(`--batch-invariant`)."""

from __future__ import annotations

import torch

from .. import check
from .harness import Case


def other_bits(case: Case) -> str | None:
    """1 call with all sequences, and 1 each with up to three sequences alone: the
    first, a middle one, the last.
    """
    spans = _spans(case)
    if len(next(iter(spans.values()), [])) < 2:
        return None
    count = len(next(iter(spans.values())))
    whole = case.kept()
    for i in sorted({0, count // 2, count - 1}):
        here = {axis: cut[i] for axis, cut in spans.items()}
        inputs = [
            _part(spec.shape, x, here)
            for spec, x in zip(case.op.inputs.values(), case.original, strict=True)
        ]
        if "cu_seqlens" in case.op.inputs:
            ends = list(case.op.inputs).index("cu_seqlens")
            inputs[ends] = inputs[ends] - inputs[ends][0]
        axes = case.axes | {axis: span.stop - span.start for axis, span in here.items()}
        outputs = [spec.shape for spec in case.op.outputs.values()]
        right = [
            _part(shape, x, here)
            for shape, x in zip(outputs, case.expected, strict=True)
        ]
        one = Case(case.kernel, case.op, axes, inputs, right, case.in_place)
        alone = one.call(one.inputs)
        for (name, spec), x, y in zip(
            case.op.outputs.items(), alone, whole, strict=True
        ):
            if spec.keeps:  # of a pool, only the sequence's own slot
                slots = inputs[list(case.op.inputs).index(spec.keeps)]
                x, y = (z[slots[slots > 0].long()] for z in (x, y))
            if not check.same_bits(x, _part(spec.shape, y, here)):
                return (
                    f"{name} of sequence {i} has other bits alone than among {count}: it depends"
                    " on its neighbours"
                )
    return None


def _spans(case: Case) -> dict[str, list[slice]]:
    """Axis -> where each sequence lies on it; {} for an op whose sequences cannot be told apart."""
    if "batch_size" in case.axes:
        return {"batch_size": [slice(i, i + 1) for i in range(case.axes["batch_size"])]}
    if not {"num_seqs", "total_seq_len", "len_cu_seqlens"} <= set(case.axes):
        return {}
    ends = case.original[list(case.op.inputs).index("cu_seqlens")].tolist()
    sequences = range(case.axes["num_seqs"])
    return {
        "num_seqs": [slice(i, i + 1) for i in sequences],
        "total_seq_len": [slice(ends[i], ends[i + 1]) for i in sequences],
        "len_cu_seqlens": [slice(i, i + 2) for i in sequences],
    }


def _part(shape: tuple[str, ...] | None, x: object, where: dict[str, slice]) -> object:
    """One sequence's part of a tensor: its rows of the first axis, if sequences share that axis."""
    if not shape or shape[0] not in where or not isinstance(x, torch.Tensor):
        return x
    return x[where[shape[0]]].clone()
