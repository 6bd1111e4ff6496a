"""Batch invariance: the bits of a sequence's results are those that it has alone,
whatever else is in the batch.

Every algo whose algo.toml says so, in its batch-invariant build: bits are compared
between calls of one kernel, and the whole batch is held against float64, since that
build has constants of its own.
"""

import functools
import itertools
import math

import helpers
import pytest
import torch
from msgspec import structs
from oracle import error
from rungs import edges
from rungs import test_decode_edges as decode
from rungs import test_prefill_edges as prefill

from gdn_cli.catalog import batch_invariance, pack, registry, tuned_table
from gdn_cli.catalog.expression import condition
from gdn_cli.errors import UsageError

REGISTRY = helpers.REGISTRY
OFFERED = [algo for algo in REGISTRY.algos if batch_invariance.offered(algo)]
TABLES = [algo for algo in OFFERED if algo.tune]

# of the contest's 8 value heads: sizes around the rows of every table
BATCHES = (1, 2, 3, 5, 9, 12, 20, 31, 48, 80, 130, 260)
LENGTHS = (1, 130, 0, 700, 64, 65, 3, 17, 1100, 128, 400, 16, 5000)
LENGTHS += tuple(37 * n % 211 for n in range(40))


def of(op):
    """Parametrizes `algo`: those of the op and of its variants, on a GPU."""
    ops = op, f"{op}_bf16", f"{op}_causal"
    return edges.named([algo for algo in OFFERED if algo.op in ops], "cuda")


@functools.cache
def kernel(algo_name, mode):
    algo = REGISTRY.find(algo_name)
    helpers.needs(algo, mode)
    return helpers.build(batch_invariance.variant(algo, REGISTRY.ops[algo.op]), mode)


def same(some, others):
    return all(map(torch.equal, some, others))


# --- decode

# decode's inputs that have a row for each sequence: not A_log and dt_bias
BY_SEQUENCE = (0, 1, 2, 3, 5, 7)


def decode_call(run, inputs, part):
    some = [x[part].clone() if i in BY_SEQUENCE else x for i, x in enumerate(inputs)]
    return edges.call(run, some)


def decode_differs(run, inputs, batches):
    """Which parts of the batch have other bits than in all of it."""
    whole = decode_call(run, inputs, slice(None))
    parts = [slice(n) for n in batches] + [slice(n - 1, n) for n in batches]
    return [
        part
        for part in parts
        if not same(decode_call(run, inputs, part), [x[part] for x in whole])
    ]


@edges.named([a for a in OFFERED if a.op == "gdn_decode"], "cpu")
def test_decode_on_a_cpu(algo):
    run = kernel(algo.full_name, "cpu")
    assert decode_differs(run, decode.inputs(7, 4, 8), (1, 2, 3, 7)) == []


def right_enough(algo, results, right):
    limits = REGISTRY.ops[algo.op].tolerance.values()
    pairs = zip(results, right, limits, strict=True)
    return all(error(x, y) <= limit for x, y, limit in pairs)


@pytest.mark.parametrize("heads", [(4, 8), (16, 32), (2, 4)])
@of("gdn_decode")
def test_decode(algo, heads):
    inputs = decode.inputs(max(BATCHES), *heads, device="cuda")
    if algo.op == "gdn_decode_bf16":
        inputs[3] = inputs[3].bfloat16()
    run = kernel(algo.full_name, "cuda")
    assert decode_differs(run, inputs, BATCHES) == []
    results = decode_call(run, inputs, slice(None))
    assert right_enough(algo, results, edges.exact_step(*inputs))


# --- prefill


def prefill_call(run, inputs, numbers):
    """The results of these sequences alone, in this order: output and new state of each."""
    q, k, v, state, A_log, a, dt_bias, b, ends, scale = inputs
    spans = [slice(int(ends[n]), int(ends[n + 1])) for n in numbers]
    q, k, v, a, b = (torch.cat([x[span] for span in spans]) for x in (q, k, v, a, b))
    lengths = [span.stop - span.start for span in spans]
    ends = torch.tensor([0, *lengths], device=q.device).cumsum(0)
    given = [q, k, v, state[numbers].clone(), A_log, a, dt_bias, b, ends, scale]
    output, new_state = edges.call(run, given)
    return [[*pair] for pair in zip(output.split(lengths), new_state, strict=True)]


def prefill_differs(run, inputs, groups):
    whole = prefill_call(run, inputs, list(range(len(inputs[3]))))
    found = []
    for group in groups:
        for n, results in zip(group, prefill_call(run, inputs, group), strict=True):
            if not same(results, whole[n]):
                found.append(f"sequence {n} of {len(group)}")
    return found


GROUPS = [[n] for n in range(14)]
GROUPS += [[8, 3, 12], [12, 0], [2, 2], [6, 10, 0, 2]]
GROUPS += [list(range(20)), list(range(52, 3, -1))]


@pytest.mark.parametrize("heads", [(4, 8), (16, 32), (2, 2)])
@of("gdn_prefill")
def test_prefill(algo, heads):
    run = kernel(algo.full_name, "cuda")
    inputs = prefill.inputs(LENGTHS, heads, device="cuda")
    assert prefill_differs(run, inputs, GROUPS) == []
    assert right_enough(algo, edges.call(run, inputs), edges.exact(*inputs))


# --- attention

PARTS = [slice(n) for n in (1, 2, 3, 5, 6, 12)]
PARTS += [slice(n, n + 1) for n in (1, 11, 23)]


@pytest.mark.parametrize("S", [1, 64, 200, 512, 700, 1024, 2048, 4096])
@of("attention_fwd")
def test_attention(algo, S):
    run = kernel(algo.full_name, "cuda")
    g = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(24, 8, S, 64, generator=g, device="cuda").half() for _ in range(3)
    ]

    def output(part):
        some = [x[part].clone() for x in given]
        out = torch.full_like(some[0], math.nan)
        run(some, [out])
        return out

    whole = output(slice(None))
    for part in PARTS:
        assert torch.equal(output(part), whole[part]), part
    wide = (x[:2].double() for x in given)
    causal = "causal" in algo.op
    right = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal)
    assert right_enough(algo, [whole[:2]], [right])


# --- what a batch-invariant build is


def of_table(algo):
    found = batch_invariance.variant(algo, REGISTRY.ops[algo.op])
    assert found.full_name == f"{algo.full_name}@invariant"
    sources = {s["path"]: s["content"] for s in found.solution["sources"]}
    return sources[algo.tune.file]


def tuned_rows(algo):
    return tuned_table.rows(algo.tune, tuned_table.load(algo))


def invariant(algo, **changed):
    """The algo with another [tune.invariant]."""
    table = structs.replace(algo.tune.invariant, **changed)
    return structs.replace(algo, tune=structs.replace(algo.tune, invariant=table))


@pytest.mark.parametrize("algo", TABLES, ids=lambda a: a.full_name)
def test_a_table_holds_what_algo_toml_says(algo):
    table, wanted = batch_invariance.rows(algo), algo.tune.invariant
    assert {row.sms for row in table} == {row.sms for row in tuned_rows(algo)}
    assert all(wanted.constants.items() <= row.constants.items() for row in table)
    if wanted.where:
        holds = condition(wanted.where, algo.tune.constants)
        assert all(holds(row.constants) for row in table)
    name = algo.tune.file
    assert ("#define GDN_BATCH_INVARIANT" in of_table(algo)) == name.endswith(".h")
    assert "GDN_BATCH_INVARIANT" not in (algo.folder / name).read_text()


def test_rows_that_do_not_meet_the_condition_give_way():
    algo = invariant(REGISTRY.find("cuda-v5"), constants={}, where="lanes == 16")
    tuned, table = tuned_rows(algo), batch_invariance.rows(algo)
    assert [row.constants["lanes"] for row in tuned].count(16) < len(tuned)
    assert {row.constants["lanes"] for row in table} == {16}
    for old, following in itertools.pairwise(tuned):
        new = next(row for row in table if old.up_to <= row.up_to)
        kept = old if old.constants["lanes"] == 16 else following
        assert new.constants == kept.constants
    where = "lanes == 8 and rows == 2"
    says = rf"\$.tune.invariant.where: '{where}' leaves no row"
    with pytest.raises(UsageError, match=says):
        batch_invariance.rows(invariant(algo, where=where))


def test_an_algo_that_is_so_anyway_is_its_own_build():
    algo = REGISTRY.find("gdn_decode/cuda-v4")
    assert batch_invariance.variant(algo, REGISTRY.ops["gdn_decode"]) is algo


def test_algos_without_a_batch_invariant_build():
    op = REGISTRY.ops["gdn_decode"]

    def refused(algo, says):
        with pytest.raises(UsageError, match=says):
            batch_invariance.variant(algo, op)

    for name in ("pt-reference", "fi-baseline"):
        says = f"--batch-invariant: gdn_decode/{name} does not say that it can be"
        refused(REGISTRY.find(name), says)
    algo = REGISTRY.find("cuda-v5")
    refused(structs.replace(algo, solution=pack.pack(algo, op)), "does not say")


TUNE = """
[tune]
file = "tuned.py"
size = ["batch_size"]
[tune.constants]
rows = [1, 2]
[tune.invariant]
"""


def write(folder, name, invariant):
    sources = {"main.py": "#", "tuned.py": "#"}
    helpers.write_algo(folder, name, sources, extra=TUNE + invariant)


def test_without_a_tuning(tmp_path):
    write(tmp_path, "mine", "constants = { rows = 1 }")
    write(tmp_path, "yours", 'where = "rows == 1"')
    known = registry.load(str(tmp_path))
    assert '"rows": 1' in of_table(known.find("mine"))
    says = "gdn_decode/yours has no table .*`gdn tune` makes one"
    with pytest.raises(UsageError, match=says):
        batch_invariance.variant(known.find("yours"), known.ops["gdn_decode"])


@pytest.mark.parametrize(
    "wrong, says",
    [
        ("constants = { row = 1 }", "invariant: expected names of rows, got 'row'"),
        ('where = "row == 1"', "invariant.where: expected a condition"),
        ("", "invariant: expected constants, or where"),
    ],
)
def test_algo_toml(tmp_path, wrong, says):
    write(tmp_path, "mine", wrong)
    done = helpers.gdn("run", "--algo", "mine", "--algos", tmp_path)
    assert done.code == 2
    assert says in done.err.replace("\n", " ")


# --- the command line


# Copies, since a BLAS may sum in another order at another address.
INVARIANT = """
import torch
from .right import run as right

def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    def alone(i):
        q1, k1, v1, state1, a1, b1 = (x[i : i + 1].clone() for x in (q, k, v, state, a, b))
        return right(q1, k1, v1, state1, A_log, a1, dt_bias, b1, scale)
    output, new_state = map(torch.cat, zip(*map(alone, range(len(q)))))
    return output, new_state
"""
NOT_INVARIANT = INVARIANT.replace(
    "return output, new_state",
    "return output, new_state * (1 + 2.0**-23) if len(q) > 1 else new_state",
)
PREFILL = """
from .reference import run as right

def run(*inputs):
    output, new_state = right(*inputs)
    return output, new_state * (1 + 2.0**-23) if len(inputs[8]) > 2 else new_state
"""


@pytest.mark.parametrize(
    "command",
    [["run"], pytest.param(["bench", "--seconds", "0.05"], marks=pytest.mark.slow)],
    ids=["run", "bench"],
)
@pytest.mark.slow
def test_a_claim_is_tried(tmp_path, command):
    """One last bit of the state differs in a batch: right by every tolerance."""
    helpers.write_algo(tmp_path, "mine", NOT_INVARIANT, batch_invariant=True)
    helpers.write_algo(tmp_path, "yours", INVARIANT, batch_invariant=True)
    asked = *command, "--algo", "mine,yours", "--algos", tmp_path
    size = "-w", "batch_size=4", "-n", "1", "--json"
    done = helpers.gdn(*asked, *size, "--batch-invariant")
    assert done.code == 1
    assert done.json["options"]["batch_invariant"] is True
    records = {r["algo"]: r for r in done.json["records"]}
    mine = records.pop("mine")
    assert mine["status"] == "wrong"
    assert mine["reason"] == (
        "probe neighbours: new_state of sequence 0 has other bits alone than among 4: it depends"
        " on its neighbours"
    )
    assert "yours" in records
    assert {r["status"] for r in records.values()} == {"passed"}
    assert helpers.gdn(*asked, *size).code == 0


@pytest.mark.slow
def test_prefills_sequences_are_told_apart(tmp_path):
    right = (helpers.OURS / "gdn_prefill" / "pt-reference" / "main.py").read_text()
    how = dict(op="gdn_prefill", batch_invariant=True)
    for name, text in (("mine", PREFILL), ("yours", right)):
        sources = {"main.py": text, "reference.py": right}
        helpers.write_algo(tmp_path, name, sources, **how)
    asked = "--op", "gdn_prefill", "--algo", "mine,yours", "--algos", tmp_path
    stress = "--stress", "-w", "empty-sequences"
    done = helpers.gdn("run", *asked, *stress, "--batch-invariant", "--json")
    mine, yours = done.json["records"]
    assert "has other bits alone than among 4" in mine["reason"]
    assert yours["status"] == "passed"


@pytest.mark.parametrize(
    "asked",
    [["bench", "--algo", "pt-reference"], ["compare", "pt-reference", "pt-compiled"]],
)
def test_a_named_algo_that_cannot_is_a_line(asked):
    done = helpers.gdn(*asked, "--batch-invariant")
    assert done.code == 2
    assert "pt-reference does not say that it can be" in done.err
