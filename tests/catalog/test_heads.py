"""One op at several numbers of heads: made from one file, found by name, judged by the
family's reference.
"""

from __future__ import annotations

import helpers
import pytest

from gdn_cli.catalog import pack, registry
from gdn_cli.catalog.ops import Heads
from gdn_cli.catalog.presets import load_preset
from gdn_cli.catalog.workloads import embedded, select
from gdn_cli.errors import UsageError

KNOWN = helpers.REGISTRY


@pytest.mark.parametrize(
    ("text", "heads"), [("4/8", (4, 8)), ("16/16", (16, 16)), (" 2 / 6 ", (2, 6))]
)
def test_heads_are_read(text, heads):
    assert Heads.parse(text) == heads
    assert Heads.parse(str(Heads.parse(text))) == heads


@pytest.mark.parametrize(
    "text", ["", "8", "4/6", "0/8", "8/0", "8/4", "4/8/16", "-4/8", "4000/8000", "a/b"]
)
def test_heads_that_make_no_sense_are_refused(text):
    with pytest.raises(
        UsageError, match="the second a multiple of the first, such as 4/8"
    ):
        Heads.parse(text)


@pytest.mark.parametrize("family", ["gdn_decode", "gdn_decode_bf16", "gdn_prefill"])
def test_an_op_at_other_heads_differs_in_names_and_in_three_axes(family):
    own, other = KNOWN.op(family), KNOWN.op(f"{family}_qk16_v48")
    axes = ("num_q_heads", "num_k_heads", "num_v_heads")
    assert [other.axes[a] for a in axes] == [16, 16, 48]
    assert {k: v for k, v in own.axes.items() if k not in axes} == {
        k: v for k, v in other.axes.items() if k not in axes
    }
    assert (
        other.name == f"{family}_qk16_v48"
        and other.family == own.family == own.name == family
    )
    assert (
        other.definition == f"{family}_qk16_v48_d128_k_last"
        and own.definition == f"{family}_qk4_v8_d128_k_last"
    )
    assert "16 query/key heads, 48 value heads" in other.summary
    assert (other.inputs, other.outputs, other.tolerance) == (
        own.inputs,
        own.outputs,
        own.tolerance,
    )


def test_its_own_heads_are_no_other_op():
    assert KNOWN.op("gdn_decode_qk4_v8") == KNOWN.op("gdn_decode")
    assert (
        "gdn_decode_qk4_v6" not in KNOWN.ops and "attention_fwd_qk4_v8" not in KNOWN.ops
    )
    # who goes through the ops sees each family once
    assert not any("_qk" in name for name in KNOWN.ops)
    assert KNOWN.ops.get("gdn_decode_qk4_v6", 7) == 7
    with pytest.raises(UsageError, match="unknown op 'gdn_decode_qk4_v6'"):
        KNOWN.op("gdn_decode_qk4_v6")


def test_a_definition_leads_to_its_op():
    found = {
        d: KNOWN.ops.of_definition(d)
        for d in ("gdn_prefill_qk16_v32_d128_k_last", "gdn_decode_qk4_v8_d128_k_last")
    }
    assert [op.name for op in found.values()] == ["gdn_prefill_qk16_v32", "gdn_decode"]
    for unknown in (
        "gdn_decode_qk4_v8_d64_k_last",
        "gdn_mystery_qk4_v8_d128_k_last",
        "gdn_decode_qk4_v6_d128_k_last",
        "",
    ):
        assert KNOWN.ops.of_definition(unknown) is None


def test_algos_of_a_family_serve_all_its_heads():
    algo = KNOWN.find("cuda-chunk", "gdn_prefill_qk16_v64")
    assert (
        algo.full_name == "gdn_prefill_qk16_v64/cuda-chunk"
        and algo.folder == KNOWN.find("cuda-chunk").folder
    )
    assert KNOWN.find("gdn_prefill_qk16_v64/cuda-chunk") == algo
    assert [a.name for a in KNOWN.algos_of("gdn_prefill_qk16_v64")] == [
        a.name for a in KNOWN.algos_of("gdn_prefill")
    ]
    op = KNOWN.op(algo.op)
    assert KNOWN.reference(op).full_name == "gdn_prefill_qk16_v64/pt-reference"
    made = pack.definition(op, KNOWN)
    assert made["name"] == op.definition and made["axes"]["num_v_heads"]["value"] == 64
    assert pack.pack(algo, op)["definition"] == op.definition


def test_heads_of_the_command_line_hold_for_all_that_is_found():
    known = registry.load(heads="16/32")
    assert known.find("cpp-v1").full_name == "gdn_decode_qk16_v32/cpp-v1"
    assert known.find("flashqla", "gdn_prefill").op == "gdn_prefill_qk16_v32"
    assert (
        known.op("gdn_decode_bf16").definition == "gdn_decode_bf16_qk16_v32_d128_k_last"
    )
    assert {a.op for a in known.algos_of("gdn_decode")} == {"gdn_decode_qk16_v32"}
    with pytest.raises(UsageError, match="attention_fwd has one number of heads"):
        known.op("attention_fwd")
    assert registry.load(heads="4/8").find("cpp-v1").full_name == "gdn_decode/cpp-v1"


def test_an_algo_may_be_built_for_some_heads_only(tmp_path, write_algo):
    write_algo(tmp_path, "narrow", "def run(): ...", heads=["4/8"])
    known = registry.load(str(tmp_path))
    assert known.find("narrow").op == "gdn_decode"
    assert "narrow" not in [a.name for a in known.algos_of("gdn_decode_qk8_v16")]
    with pytest.raises(
        UsageError, match="narrow takes 4/8 heads, not those of gdn_decode_qk8_v16"
    ):
        known.find("narrow", "gdn_decode_qk8_v16")


def test_twins_have_the_contests_axes_and_tensors_of_their_own():
    own, other = KNOWN.op("gdn_decode"), KNOWN.op("gdn_decode_qk8_v16")
    assert [w.axes["batch_size"] for w in embedded(other)] == [1, 4, 8, 16, 32, 48, 64]
    assert not {w.uuid for w in embedded(own)} & {w.uuid for w in embedded(other)}
    prefill = embedded(KNOWN.op("gdn_prefill_qk16_v32"))
    assert {tuple(w.axes.items()) for w in prefill} == {
        tuple(w.axes.items()) for w in embedded(KNOWN.op("gdn_prefill"))
    }
    sweep = load_preset("sweep")
    assert [w.axes for w in select(other, embedded(other), preset=sweep)] == [
        w.axes for w in select(own, embedded(own), preset=sweep)
    ]
