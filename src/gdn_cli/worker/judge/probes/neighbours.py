"""Checks that a sequence's bits depend on nothing but the sequence, for an algo that
promises it (`--batch-invariant`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....catalog.ops import TensorSpec
from .. import check
from .harness import Case


def other_bits(case: Case) -> str | None:
    """1 call with all sequences, and 1 each with up to three sequences alone: the
    first, a middle one, the last.
    """
    op = case.op
    sequences = _sequences(case)
    count = len(sequences)
    if count < 2:
        return None
    whole = case.kept()
    for i in sorted({0, count // 2, count - 1}):
        spans = sequences[i]
        inputs = _parts(op.inputs, case.original, spans)
        if "cu_seqlens" in op.inputs:
            ends = list(op.inputs).index("cu_seqlens")
            inputs[ends] = inputs[ends] - inputs[ends][0]
        sizes = {axis: span.stop - span.start for axis, span in spans.items()}
        right = _parts(op.outputs, case.expected, spans)
        problem = check.Problem(op, case.axes | sizes, inputs, right, case.in_place)
        own_case = Case(case.kernel, problem)
        alone = own_case.call(own_case.inputs)
        among = _parts(op.outputs, whole, spans)
        for (name, spec), x, y in zip(op.outputs.items(), alone, among, strict=True):
            if spec.keeps:  # of a pool, only the sequence's own slot
                slots = inputs[list(op.inputs).index(spec.keeps)]
                used = slots[slots > 0].long()
                x = x[used]
                y = y[used]
            if not check.same_bits(x, y):
                return (
                    f"{name} of sequence {i} has other bits alone than among {count}: it depends"
                    " on its neighbours"
                )
    return None


def _sequences(case: Case) -> list[dict[str, slice]]:
    """Where each sequence lies on its axes; [] for an op whose sequences cannot be told apart."""
    if "batch_size" in case.axes:
        return [{"batch_size": slice(i, i + 1)} for i in range(case.axes["batch_size"])]
    if not {"num_seqs", "total_seq_len", "len_cu_seqlens"} <= set(case.axes):
        return []
    ends = case.original[list(case.op.inputs).index("cu_seqlens")].tolist()
    return [
        {
            "num_seqs": slice(i, i + 1),
            "total_seq_len": slice(ends[i], ends[i + 1]),
            "len_cu_seqlens": slice(i, i + 2),
        }
        for i in range(case.axes["num_seqs"])
    ]


def _parts(
    specs: Mapping[str, TensorSpec], values: list, spans: dict[str, slice]
) -> list:
    """One sequence's part of each tensor: its rows of the first axis, if sequences share
    that axis.
    """
    parts = []
    for spec, x in zip(specs.values(), values, strict=True):
        first = spec.shape[0] if spec.shape else ""
        shared = first in spans and isinstance(x, torch.Tensor)
        parts.append(x[spans[first]].clone() if shared else x)
    return parts
