"""`gdn run --stress`: inputs have the properties that their names say, and the
reference is right on each of them.
"""

from __future__ import annotations

import building
import helpers
import oracle
import pytest
import torch
from msgspec.structs import replace

from gdn_cli.catalog import stress, workloads
from gdn_cli.errors import UsageError
from gdn_cli.schema.record_types import Check
from gdn_cli.worker.judge import check, dataset

REGISTRY = helpers.REGISTRY
EVERY = [(op.name, name) for op in REGISTRY.ops.values() for name in op.stress]
MOST = 150  # tokens that the oracle's loops are given


def named(part: str) -> list[tuple[str, str]]:
    return [(op, name) for op, name in EVERY if part in name]


def drawn(op_name: str, name: str, most: int | None = None) -> dict:
    """Input -> tensor; `most` shortens a long sequence."""
    op = REGISTRY.ops[op_name]
    if most and op.stress[name].seq_lens and max(op.stress[name].seq_lens) > most:
        family = replace(op.stress[name], seq_lens=(most,))
        op = replace(op, stress={name: family})
    (workload,) = workloads.stressed(op, [name])
    return dict(zip(op.inputs, dataset.load_inputs(op, workload), strict=True))


def gates(x: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, beta) in float64."""
    t = x["a"].double() + x["dt_bias"].double()
    softplus = torch.nn.functional.softplus(t, threshold=1e9)
    return torch.exp(-x["A_log"].double().exp() * softplus), x["b"].double().sigmoid()


# --- the inputs


def test_every_op_has_some_and_a_name_is_the_same_tensors_everywhere():
    assert all(op.stress for op in REGISTRY.ops.values())
    one, two = (drawn("gdn_prefill", "equal-keys", 20) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in list(one)[:-1])
    uuids = [w.uuid for op in REGISTRY.ops.values() for w in workloads.stressed(op)]
    assert len(set(uuids)) == len(uuids) == len(EVERY)


@pytest.mark.parametrize(("op", "name"), named("nothing-decays"))
def test_nothing_decays(op, name):
    g, beta = gates(drawn(op, name, MOST))
    assert 1 - 1e-4 < g.min() and beta.min() > 0.9


@pytest.mark.parametrize("op", ["gdn_decode", "gdn_decode_bf16", "gdn_prefill"])
def test_gates_at_their_ends(op):
    assert gates(drawn(op, "strong-decay"))[0].float().max() == 0
    beta = gates(drawn(op, "nothing-written"))[1].max()
    assert 0 < beta < torch.finfo(torch.float32).tiny


def test_decay_that_is_slow_and_decay_that_is_sudden():
    g, _ = gates(drawn("gdn_decode", "slow-decay"))
    assert 0.99 < g.median() < 1 - 1e-5
    for name in ("sudden-decay", "equal-keys-sudden-decay"):
        g, _ = gates(drawn("gdn_prefill", name))
        assert g[::10].max() < 1e-30 and 0.6 < g[1:10].median() < 0.99


@pytest.mark.parametrize(("op", "name"), named("equal-keys"))
def test_keys_are_equal(op, name):
    k = drawn(op, name, MOST)["k"]
    tokens = k.unbind(2) if k.dim() == 4 else k.unbind(0)
    assert len(tokens) > 60 and all(torch.equal(tokens[0], other) for other in tokens)
    assert tokens[0].abs().max() > 0


@pytest.mark.parametrize("name", ["alternating-signs", "alternating-signs-long"])
def test_signs_alternate(name):
    k = drawn("gdn_prefill", name, MOST)["k"]
    assert torch.equal(k[1:], -k[:-1]) and k[0].abs().max() > 0


@pytest.mark.parametrize(("op", "name", "rms"), [
    ("gdn_decode", "zero-state", 0), ("gdn_decode", "large-state", 1e6), ("gdn_decode_bf16", "large-state", 1e6),
    ("gdn_prefill", "large-state", 1e6), ("gdn_prefill", "equal-keys", 0),
])  # fmt: skip
def test_states(op, name, rms):
    squares = drawn(op, name, MOST)["state"].double().square()
    assert float(squares.mean().sqrt()) == pytest.approx(rms, rel=0.02)


def test_lengths_of_none_and_one_and_around_chunks():

    def lengths(name):
        return drawn("gdn_prefill", name)["cu_seqlens"].diff().tolist()

    assert lengths("empty-sequences") == [0, 0, 3, 0]
    assert lengths("one-token") == [1, 1, 1]
    borders = {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129}
    assert borders <= set(lengths("chunk-borders"))


def test_logits_are_large():
    x = drawn("attention_fwd", "large-logits")
    logits = (x["q"].double() @ x["k"].double().mT / 8).std()
    assert 25 < logits < 35 and torch.isfinite(x["q"]).all()


@pytest.fixture(scope="module")
def references():
    ops = REGISTRY.ops
    return {name: helpers.built(f"{name}/pt-reference", "cpu")[1] for name in ops}


@pytest.mark.parametrize(("op", "name"), EVERY)
@pytest.mark.sampled(7)
def test_the_reference_is_the_oracle(op, name, references):
    x = drawn(op, name, MOST if name.endswith("-long") else None)
    if op.startswith("attention"):
        x = {key: value[:, :1] for key, value in x.items()}  # heads are alike
    right = getattr(oracle, op)(*x.values())
    found = check.oracle(references[op], list(x.values()))
    assert check.finite(found)
    right = right if isinstance(right, tuple) else [right]
    for mine, exact in zip(found, right, strict=True):
        assert oracle.error(mine, exact) < 1e-9


# --- declaring and choosing them


def test_they_are_chosen_by_name():
    op = REGISTRY.ops["gdn_decode"]

    def names(*given, **more):
        return [w.stress for w in workloads.stressed(op, *given, **more)]

    assert names(["zero-state", "strong-decay"]) == ["strong-decay", "zero-state"]
    assert names(first=2) == list(op.stress)[:2]
    with pytest.raises(UsageError, match="'zero-stat'; did you mean zero-state"):
        workloads.stressed(op, ["zero-stat"])
    with pytest.raises(UsageError, match="gdn_decode declares no hard inputs"):
        workloads.stressed(replace(op, stress={}))


# --- the results

NAN = f"""
from .right import run as right
def run({helpers.DECODE_ARGS}):
    y, s = right({helpers.DECODE_ARGS})
    return (y, s * float("nan")) if float(state.abs().max()) == 0 else (y * 1.01, s)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory, gdn):
    folder = tmp_path_factory.mktemp("algos")
    helpers.write_algo(folder, "off", NAN)
    args = "run --stress --algo pt-reference,off -w zero-state -w large-state --device cpu".split()
    return gdn(*args, "--algos", folder, "--json"), gdn(*args, "--algos", folder)


@pytest.mark.slow
def test_errors_of_every_algo_and_the_largest_of_each(ran):
    found = {(r["algo"], r["workload"]["stress"]): r for r in ran[0].json["records"]}
    assert len(found) == 4
    for (algo, _), record in found.items():
        assert record["status"] == ("wrong" if algo == "off" else "passed")
    errors = found["off", "large-state"]["check"]["errors"]
    assert errors["output"] == pytest.approx(0.01, rel=0.2)
    largest = {row["algo"]: row for row in ran[0].json["largest"]}
    assert largest["off"]["error"] is None and largest["off"]["stress"] == "zero-state"
    assert largest["off"]["output"] == "new_state"
    assert largest["pt-reference"]["output"] == "output"
    assert ran[0].code == ran[1].code == 1 and ran[0].json["options"]["stress"] is True


@pytest.mark.slow
def test_they_are_shown_side_by_side(ran):
    lines = [line.split() for line in ran[1].out.splitlines()]
    heads = [i for i, line in enumerate(lines) if line[:1] == ["input"]]
    assert [lines[i][-1] for i in heads] == ["off"]
    relative = {row[0]: row[1:] for row in lines[heads[0] + 1 : heads[0] + 3]}
    assert set(relative) == {"zero-state", "large-state"}
    assert relative["large-state"][1:] == ["1.0e-02", "!"]
    assert float(relative["large-state"][0]) < 5e-3
    assert relative["zero-state"][1:] == ["no", "number", "!"]
    assert "off no number new_state zero-state 1e-05".split() in lines


def test_the_contests_rule_does_not_decide_on_hard_inputs():
    from worker.judge.test_in_place import TOY, Steps

    x, s = torch.full((4,), 1e6), torch.tensor([1.0, 1e6, 1e6, 1e6])
    right = [(x + s).double(), (2 * s).double() + torch.tensor([0.5, 0, 0, 0])]
    problem = check.Problem(TOY, {"n": 4}, [x, s], right)
    for rule in (True, False):
        verdict = check.check(helpers.local(Steps(False)), problem, rule)
        assert verdict.passed is not rule and not verdict.official


def test_the_largest_is_of_hard_inputs_alone():
    about = {"mode": "cpu", "check": Check(errors={"y": 2.0})}
    usual = building.record("a", **about)
    assert stress.largest([usual, building.record("a", uuid=None)]) == []
    (largest,) = stress.largest([building.record("a", **about, stress="s"), usual])
    assert (largest.op, largest.algo, largest.mode) == ("gdn_decode", "a", "cpu")
    assert (largest.error, largest.output, largest.stress) == (2.0, "y", "s")
