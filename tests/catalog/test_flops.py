"""What an op says of its floating-point operations, against counts by hand; and the
peaks that a GPU has.
"""

from __future__ import annotations

import helpers
import pytest

from gdn_cli.catalog import gpus

OPS = helpers.REGISTRY.ops


def gated_delta_step(d: int) -> int:
    """One token of one head, each product and sum counted where it happens."""
    count = 0
    for _ in range(d):  # rows of the state, one for each element of v
        for _ in range(d):
            count += 1  # state *= g
        for _ in range(d):
            count += 2  # the row's product with k
        for _ in range(d):
            count += 2  # row += delta * k
        for _ in range(d):
            count += 2  # the row's product with q
    return count


def attention(s: int, d: int, causal: bool) -> int:
    """One head: q k^T and p v."""
    return sum(
        2 * d + 2 * d for i in range(s) for j in range(s) if not causal or j <= i
    )


STEP = gated_delta_step(128)
VERIFY = {"batch_size": 3, "seq_len": 4, "pool_size": 13}
PREFILL = {"total_seq_len": 5, "num_seqs": 2, "len_cu_seqlens": 3}
ATTENTION = {"batch_size": 2, "seq_len": 16}


@pytest.mark.parametrize(
    ("op", "axes", "count", "peak"),
    [
        ("gdn_decode", {"batch_size": 3}, 3 * 8 * 114688, "fp32"),
        ("gdn_decode_bf16", {"batch_size": 3}, 3 * 8 * STEP, "fp32"),
        ("gdn_decode_packed", {"batch_size": 3}, 3 * 8 * STEP, "fp32"),
        ("gdn_layer", {"batch_size": 3}, 3 * 8 * STEP, "fp32"),
        ("gdn_layer_post_conv", VERIFY, 3 * 4 * 8 * STEP, "fp32"),
        ("gdn_mtp", VERIFY, 3 * 4 * 8 * STEP, "fp32"),
        ("gdn_mtp_packed", VERIFY, 3 * 4 * 8 * STEP, "fp32"),
        ("gdn_prefill", PREFILL, 5 * 8 * STEP, "tensor"),
        ("attention_fwd", ATTENTION, 2 * 8 * attention(16, 64, False), "tensor"),
        ("attention_fwd_causal", ATTENTION, 2 * 8 * attention(16, 64, True), "tensor"),
        ("attention_fwd", {"batch_size": 2}, None, "tensor"),
    ],
)
def test_operations_of_the_definition(op, axes, count, peak):
    assert (OPS[op].work(axes), OPS[op].peak) == (count, peak)


@pytest.mark.parametrize(
    ("device", "tensor", "fp32"),
    [("NVIDIA H200", 989.5, 67), ("NVIDIA H200, GPU 1", 989.5, 67), ("NVIDIA B200 (Modal)", 2250, 80),
     ("NVIDIA A100-SXM4-80GB", 312, 19.5), ("NVIDIA H100 80GB HBM3", 989.5, 67)],
)  # fmt: skip
def test_peaks(device, tensor, fp32):
    found = gpus.peaks_of(device)
    assert (found.rate("tensor"), found.rate("fp32")) == (tensor, fp32)
    assert "NVIDIA" in found.source


def test_a_gpu_that_is_not_known_has_no_peaks():
    assert gpus.peaks_of("NVIDIA H20") is gpus.peaks_of("GPU (not named)") is None
