"""gdn_mtp and gdn_mtp_packed in the worker: what is drawn, what counts as moved, a pool
that no call may change.
"""

from __future__ import annotations

import json
import math
import re

import helpers
import pytest
import torch

from gdn_cli.catalog import pack, trace_set
from gdn_cli.catalog.workloads import embedded, select, stressed, twin
from gdn_cli.errors import MissingError, UsageError
from gdn_cli.worker import trace_set_writer
from gdn_cli.worker.executor import build
from gdn_cli.worker.judge import check, dataset
from gdn_cli.worker.timing import floor

REGISTRY = helpers.REGISTRY
PLAIN, PACKED = (REGISTRY.ops[name] for name in ("gdn_mtp", "gdn_mtp_packed"))
STATE = 8 * 128 * 128 * 4  # bytes of a slot


def drawn(op, **axes) -> dict:
    return dict(zip(op.inputs, dataset.load_inputs(op, twin(op, axes)), strict=True))


# --- tensors and axes


def test_each_token_has_a_slot_of_its_own_and_counts_are_from_1_to_all():
    op = REGISTRY.op("gdn_mtp_packed_qk1_v2")
    x = drawn(op, batch_size=30, seq_len=5)
    slots, counts = x["state_indices"], x["num_accepted_tokens"]
    assert slots.shape == (30, 5) and sorted(slots.flatten().tolist()) == list(
        range(1, 151)
    )
    assert counts.dtype == slots.dtype == torch.int32 and set(counts.tolist()) == {
        1,
        2,
        3,
        4,
        5,
    }
    assert float(x["pool"].std()) == pytest.approx(0.17, rel=0.01)
    assert slots.flatten().tolist() != sorted(slots.flatten().tolist())


def test_sequences_start_from_slots_of_their_own():
    x = drawn(REGISTRY.op("gdn_mtp_qk1_v1"), batch_size=9)
    assert x["q"].shape == (9, 4, 1, 128) and x["initial_state"].shape == (
        19,
        1,
        128,
        128,
    )
    assert (
        len(set(x["initial_state_indices"].tolist())) == 9
        and 1 <= x["initial_state_indices"].min()
    )
    assert float(x["initial_state"].std()) == pytest.approx(0.17, rel=0.01)


def test_padding_is_whole_rows():
    x = dict(
        zip(
            PACKED.inputs,
            dataset.load_inputs(PACKED, stressed(PACKED, ["padding"])[0]),
            strict=True,
        )
    )
    assert [set(row) for row in x["state_indices"][[0, 4, 7]].tolist()] == [
        {0},
        {0},
        {-1},
    ]
    assert (x["state_indices"][[1, 2, 3, 5, 6]] > 0).all()


def test_axes_that_are_not_given():
    assert twin(PACKED, {"batch_size": 3}).axes == {
        "batch_size": 3,
        "seq_len": 4,
        "pool_size": 13,
    }
    assert twin(PLAIN, {"seq_len": 2}).axes == {
        "batch_size": 1,
        "seq_len": 2,
        "pool_size": 3,
    }


@pytest.mark.parametrize(("chosen", "says"), [
    ("seq_len=9", "gdn_mtp_packed: seq_len=9; expected seq_len <= 8"),
    ("seq_len=1", "gdn_mtp_packed: seq_len=1; expected seq_len > 1"),
    ("batch_size=3,pool_size=12", "pool_size=12 with batch_size=3, seq_len=4; each row has its own slot, and slot 0 is "
     "for padding: give batch_size * seq_len + 1 or more"),
])  # fmt: skip
def test_axes_that_cannot_be_are_one_line(chosen, says):
    with pytest.raises(UsageError) as e:
        select(PACKED, embedded(PACKED), chosen=[chosen])
    assert str(e.value) == says


def test_a_folder_may_have_an_optional_input_that_the_op_has_not(tmp_path):
    """As FlashInfer-Trace's definition has it."""
    op = REGISTRY.op("gdn_mtp_qk1_v1")
    work, root = twin(op, {"batch_size": 1, "seq_len": 2}), tmp_path / "set"
    trace_set_writer.build(
        root, [op], {op.name: [work]}, [], [pack.definition(op, REGISTRY)]
    )
    (file,) = (root / "definitions").rglob("*.json")
    definition = json.loads(file.read_text())
    buffer = {
        "shape": ["pool_size", "seq_len", "head_size"],
        "dtype": "float32",
        "optional": True,
    }
    definition["inputs"]["intermediate_states_buffer"] = buffer
    file.write_text(json.dumps(definition))
    (read,) = trace_set.from_folder(op, root)
    assert (read.uuid, read.axes) == (work.uuid, work.axes) and len(
        dataset.load_inputs(op, read, "cpu", root)
    ) == 10
    del buffer["optional"]
    file.write_text(json.dumps(definition))
    with pytest.raises(
        MissingError,
        match="it has q, .*, scale, intermediate_states_buffer; gdn_mtp_qk1",
    ):
        trace_set.from_folder(op, root)


# --- bytes


def test_a_call_moves_the_states_that_it_reads_and_writes():
    for T in (2, 4):
        rest = 2 * 3 * T * (2048 + 8 + 8 + 8 * 128) + 4 * (8 + 8 + 1 + 3)
        small, large = (
            {"batch_size": 3, "seq_len": T, "pool_size": n} for n in (25, 1000)
        )
        assert (
            floor.bytes_moved(PLAIN, small)
            == floor.bytes_moved(PLAIN, large)
            == 3 * STATE + rest
        )
        assert (
            floor.bytes_moved(PACKED, small)
            == floor.bytes_moved(PACKED, large)
            == 3 * (1 + T) * STATE + rest + 12 * T
        )


@pytest.mark.parametrize("op", [PLAIN, PACKED], ids=lambda op: op.name)
def test_the_bytes_in_the_log(op):
    text = (helpers.OURS / op.name / "README.md").read_text(encoding="utf-8")
    for n in (1, 4, 16, 64):
        each = [
            floor.bytes_moved(op, twin(op, {"batch_size": n, "seq_len": t}).axes) / 1024
            for t in (2, 4, 8)
        ]
        assert f"| {n} | " + " | ".join(f"{x:.1f}" for x in each) + " |" in text


# --- a pool that no call may change


class Kernel:
    """The reference, which writes what it is given; then `spoil` changes the pool."""

    destination_passing = True

    def __init__(self, right, spoil) -> None:
        self.right, self.spoil = right, spoil

    def __call__(self, inputs, outputs):
        outputs[0].copy_(self.right.returns(inputs)[0])
        self.spoil(outputs[1], inputs[4])


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda pool, slots: None, None),
    (lambda pool, slots: pool[int(slots[1]), 1, 2].mul_(1 + 1e-6), "final_state: slot [1-6] changed, and no call may"),
    (lambda pool, slots: pool.neg_(), "final_state: slot 0 changed, and no call may change one"),
    (lambda pool, slots: pool[0, 0, 0].fill_(math.nan), "final_state: slot 0 changed, and no call may change one"),
])  # fmt: skip
def test_final_state_keeps_every_bit(spoil, says):
    op = REGISTRY.op("gdn_mtp_qk1_v2")
    axes = {"batch_size": 3, "seq_len": 2, "pool_size": 7}
    inputs = list(drawn(op, **axes).values())
    right = build.reference(pack.definition(op, REGISTRY))
    expected, before = check.oracle(right, inputs), inputs[3].clone()
    problem = check.Problem(op, axes, inputs, expected, op.overwrites)
    verdict = check.check(helpers.local(Kernel(right, spoil)), problem)
    assert verdict.passed == (says is None) and check.same_bits(inputs[3], before)
    if says:
        assert re.match(says, verdict.reason), verdict.reason
