"""Batch invariance: the bits of a sequence's results are those that it has alone,
whatever else is in the batch.

Every algo whose algo.toml says so, in its batch-invariant build: bits are compared
between calls of one kernel, and the whole batch is held against float64, since that
build has constants of its own.
"""

from __future__ import annotations

import functools
import itertools

import helpers
import pytest
import torch
from kernels import test_decode_edges as decode
from kernels import test_prefill_edges as prefill
from msgspec import structs

from gdn_cli.catalog import batch_invariance, pack, tuned_table
from gdn_cli.catalog.expression import condition
from gdn_cli.errors import UsageError
from gdn_cli.machine import inventory

REGISTRY = helpers.REGISTRY
OFFERED = [algo for algo in REGISTRY.algos if batch_invariance.offered(algo)]
ON_CPU = [algo for algo in OFFERED if "cpu" in algo.modes]
TABLES = [algo for algo in OFFERED if algo.tune]

# of the contest's 8 value heads: sizes around the rows of every table
BATCHES = (1, 2, 3, 5, 9, 12, 20, 31, 48, 80, 130, 260)
LENGTHS = (
    1,
    130,
    0,
    700,
    64,
    65,
    3,
    17,
    1100,
    128,
    400,
    16,
    5000,
    *(37 * n % 211 for n in range(40)),
)


def of(op: str) -> list:
    return [algo for algo in OFFERED if algo.op in (op, f"{op}_bf16", f"{op}_causal")]


@functools.cache
def kernel(full_name: str, mode: str):
    algo = REGISTRY.find(full_name)
    if (place := inventory.HERE.place(algo, mode)).mode != mode:
        pytest.skip(place.reason)
    return helpers.build(batch_invariance.variant(algo, REGISTRY.ops[algo.op]), mode)


def call(run, inputs: list, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    for x in outputs:
        x.fill_(float("nan"))
    run(inputs, outputs)
    return outputs


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


# --- decode

# decode's inputs that have a row for each sequence: not A_log and dt_bias
BY_SEQUENCE = (0, 1, 2, 3, 5, 7)


def decode_call(run, inputs: list, first: int, end: int) -> list[torch.Tensor]:
    some = [
        x[first:end].clone() if i in BY_SEQUENCE else x for i, x in enumerate(inputs)
    ]
    return call(run, some, [torch.empty_like(some[2]), torch.empty_like(some[3])])


def decode_differs(run, inputs: list, batches) -> list[str]:
    """Which parts of the batch have other bits than in all of it."""
    whole = decode_call(run, inputs, 0, len(inputs[0]))
    parts = [(0, n) for n in batches] + [(n - 1, n) for n in batches]
    return [
        f"{first}:{end} of {len(inputs[0])}"
        for first, end in parts
        if not same(decode_call(run, inputs, first, end), [y[first:end] for y in whole])
    ]


@pytest.mark.parametrize(
    "algo", [a for a in ON_CPU if a.op == "gdn_decode"], ids=lambda a: a.name
)
def test_decode_on_a_cpu(algo):
    assert (
        decode_differs(
            kernel(algo.full_name, "cpu"), decode.inputs(7, 4, 8), (1, 2, 3, 7)
        )
        == []
    )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 8), (16, 32), (2, 4)])
@pytest.mark.parametrize("algo", of("gdn_decode"), ids=lambda a: a.name)
def test_decode(algo, heads):
    inputs = decode.inputs(max(BATCHES), *heads, device="cuda")
    if algo.op == "gdn_decode_bf16":
        inputs[3] = inputs[3].bfloat16()
    run = kernel(algo.full_name, "cuda")
    assert decode_differs(run, inputs, BATCHES) == []
    limits = REGISTRY.ops[algo.op].tolerance.values()
    results = zip(
        decode_call(run, inputs, 0, max(BATCHES)),
        decode.exact(*inputs),
        limits,
        strict=True,
    )
    assert all(decode.error(x, right) <= limit for x, right, limit in results)


# --- prefill


def prefill_call(
    run, inputs: list, of_sequences: list[int]
) -> list[list[torch.Tensor]]:
    """The results of these sequences alone, in this order: output and new state of each."""
    q, k, v, state, A_log, a, dt_bias, b, ends, scale = inputs
    spans = [slice(int(ends[n]), int(ends[n + 1])) for n in of_sequences]
    q, k, v, a, b = (torch.cat([x[span] for span in spans]) for x in (q, k, v, a, b))
    ends = torch.tensor(
        [0, *(span.stop - span.start for span in spans)], device=q.device
    ).cumsum(0)
    given = [q, k, v, state[of_sequences].clone(), A_log, a, dt_bias, b, ends, scale]
    output, new_state = call(
        run, given, [torch.empty_like(v), torch.empty_like(given[3])]
    )
    return [
        [output[ends[i] : ends[i + 1]], new_state[i]] for i in range(len(of_sequences))
    ]


def prefill_differs(run, inputs: list, groups: list[list[int]]) -> list[str]:
    whole = prefill_call(run, inputs, list(range(len(inputs[3]))))
    found = []
    for group in groups:
        for n, results in zip(group, prefill_call(run, inputs, group), strict=True):
            if not same(results, whole[n]):
                found.append(f"sequence {n} of {len(group)}")
    return found


GROUPS = [[n] for n in range(14)]
GROUPS += [
    [8, 3, 12],
    [12, 0],
    list(range(20)),
    list(range(52, 3, -1)),
    [2, 2],
    [6, 10, 0, 2],
]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 8), (16, 32), (2, 2)])
@pytest.mark.parametrize("algo", of("gdn_prefill"), ids=lambda a: a.name)
def test_prefill(algo, heads):
    run, inputs = (
        kernel(algo.full_name, "cuda"),
        prefill.inputs(LENGTHS, heads, device="cuda"),
    )
    assert prefill_differs(run, inputs, GROUPS) == []
    results = call(
        run, inputs, [torch.empty_like(inputs[2]), torch.empty_like(inputs[3])]
    )
    limits = prefill.OP.tolerance.values()
    results = zip(results, prefill.exact(*inputs), limits, strict=True)
    assert all(decode.error(x, right) <= limit for x, right, limit in results)


# --- attention


@pytest.mark.gpu
@pytest.mark.parametrize("S", [1, 64, 200, 512, 700, 1024, 2048, 4096])
@pytest.mark.parametrize("algo", of("attention_fwd"), ids=lambda a: a.name)
def test_attention(algo, S):
    run, B = kernel(algo.full_name, "cuda"), 24
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(B, 8, S, 64, generator=g, device="cuda").half() for _ in range(3)
    )
    (whole,) = call(run, [q, k, v], [torch.empty_like(q)])
    for part in [slice(0, n) for n in (1, 2, 3, 5, 6, 12)] + [
        slice(n, n + 1) for n in (1, 11, 23)
    ]:
        some = [x[part].clone() for x in (q, k, v)]
        assert torch.equal(
            call(run, some, [torch.empty_like(some[0])])[0], whole[part]
        ), part
    mask = (
        torch.ones(S, S, device="cuda", dtype=torch.bool).tril()
        if "causal" in algo.op
        else None
    )
    right = torch.nn.functional.scaled_dot_product_attention(
        *(x[:2].double() for x in (q, k, v)), attn_mask=mask
    )
    assert decode.error(whole[:2], right) <= REGISTRY.ops[algo.op].tolerance["output"]


# --- what a batch-invariant build is


def of_table(algo) -> str:
    found = batch_invariance.variant(algo, REGISTRY.ops[algo.op])
    assert found.full_name == f"{algo.full_name}@invariant"
    return next(
        s["content"] for s in found.solution["sources"] if s["path"] == algo.tune.file
    )


@pytest.mark.parametrize("algo", TABLES, ids=lambda a: a.full_name)
def test_a_table_holds_what_algo_toml_says(algo):
    table, tuned = (
        batch_invariance.rows(algo),
        tuned_table.rows(algo.tune, tuned_table.load(algo)),
    )
    wanted = algo.tune.invariant
    assert {row.sms for row in table} == {row.sms for row in tuned}
    assert all(wanted.constants.items() <= row.constants.items() for row in table)
    holds = (
        condition(wanted.where, algo.tune.constants) if wanted.where else lambda _: True
    )
    assert all(holds(row.constants) for row in table)
    assert ("#define GDN_BATCH_INVARIANT" in of_table(algo)) == algo.tune.file.endswith(
        ".h"
    )
    assert "GDN_BATCH_INVARIANT" not in (algo.folder / algo.tune.file).read_text()


def test_rows_that_do_not_meet_the_condition_give_way():
    algo = REGISTRY.find("cuda-v5")
    invariant = structs.replace(algo.tune.invariant, constants={}, where="lanes == 16")
    algo = structs.replace(algo, tune=structs.replace(algo.tune, invariant=invariant))
    tuned = tuned_table.rows(algo.tune, tuned_table.load(algo))
    table = batch_invariance.rows(algo)
    assert [row.constants["lanes"] for row in tuned].count(16) < len(tuned)
    assert {row.constants["lanes"] for row in table} == {16}
    for old, following in itertools.pairwise(tuned):
        (new,) = [row for row in table if old.up_to <= row.up_to][:1]
        assert (
            new.constants
            == (old if old.constants["lanes"] == 16 else following).constants
        )
    none = structs.replace(algo.tune.invariant, where="lanes == 8 and rows == 2")
    with pytest.raises(
        UsageError,
        match=r"\$.tune.invariant.where: 'lanes == 8 and rows == 2' leaves no row",
    ):
        batch_invariance.rows(
            structs.replace(algo, tune=structs.replace(algo.tune, invariant=none))
        )


def test_an_algo_that_is_so_anyway_is_its_own_build():
    algo = REGISTRY.find("gdn_decode/cuda-v4")
    assert batch_invariance.variant(algo, REGISTRY.ops["gdn_decode"]) is algo


def test_algos_without_a_batch_invariant_build():
    op = REGISTRY.ops["gdn_decode"]
    for name in ("pt-reference", "fi-baseline"):
        with pytest.raises(
            UsageError,
            match=f"--batch-invariant: gdn_decode/{name} does not say that it can be",
        ):
            batch_invariance.variant(REGISTRY.find(name), op)
    algo = REGISTRY.find("cuda-v5")
    packed = structs.replace(algo, solution=pack.pack(algo, op))
    with pytest.raises(UsageError, match="does not say"):
        batch_invariance.variant(packed, op)


def test_without_a_tuning(tmp_path):
    tune = """
[tune]
file = "tuned.py"
size = ["batch_size"]
[tune.constants]
rows = [1, 2]
[tune.invariant]
constants = { rows = 1 }
"""
    helpers.write_algo(tmp_path, "mine", {"main.py": "#", "tuned.py": "#"}, extra=tune)
    tune = tune.replace("constants = {", 'where = "rows == 1" # ')
    helpers.write_algo(tmp_path, "yours", {"main.py": "#", "tuned.py": "#"}, extra=tune)
    from gdn_cli.catalog import registry

    known = registry.load(str(tmp_path))
    assert '"rows": 1' in of_table(known.find("mine"))
    with pytest.raises(
        UsageError, match="gdn_decode/yours has no table .*`gdn tune` makes one"
    ):
        batch_invariance.variant(known.find("yours"), known.ops["gdn_decode"])


@pytest.mark.parametrize(
    "wrong, says",
    [
        ("constants = { row = 1 }", "invariant: expected names of rows, got 'row'"),
        ('where = "row == 1"', "invariant.where: expected a condition"),
        ("", "invariant: expected constants, or where"),
        ("sizes = 3", "$.tune.invariant"),
    ],
)
def test_algo_toml(tmp_path, wrong, says):
    tune = [
        "[tune]",
        'file = "tuned.py"',
        'size = ["batch_size"]',
        "[tune.constants]",
        "rows = [1, 2]",
    ]
    extra = "\n".join([*tune, "[tune.invariant]", wrong])
    helpers.write_algo(tmp_path, "mine", {"main.py": "#", "tuned.py": "#"}, extra=extra)
    done = helpers.gdn("run", "--algo", "mine", "--algos", tmp_path)
    assert done.code == 2 and says in done.err.replace("\n", " "), done.err


# --- the command line


def test_run_and_bench_take_the_build(tmp_path):
    done = helpers.gdn(
        "run", "--algo", "cpp-v1", "--batch-invariant", "-n", "1", "--json"
    )
    assert done.code == 0 and [r["algo"] for r in done.json["records"]] == ["cpp-v1"]
    assert done.json["options"]["batch_invariant"] is True


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
def test_a_claim_is_tried(tmp_path, command):
    """One last bit of the state differs in a batch: right by every tolerance."""
    helpers.write_algo(tmp_path, "mine", NOT_INVARIANT, batch_invariant=True)
    helpers.write_algo(tmp_path, "yours", INVARIANT, batch_invariant=True)
    asked = [
        *command,
        "--algo",
        "mine,yours",
        "--algos",
        tmp_path,
        "-w",
        "batch_size=4",
        "-n",
        "1",
        "--json",
    ]
    done = helpers.gdn(*asked, "--batch-invariant")
    records = {r["algo"]: r for r in done.json["records"]}
    assert (
        done.code == 1
        and records["mine"]["status"] == "wrong"
        and records["yours"]["status"] == "passed"
    )
    said = (
        "probe neighbours: new_state of sequence 0 has other bits alone than among 4: it depends"
        " on its neighbours"
    )
    assert records["mine"]["reason"] == said
    assert all(r["status"] == "passed" for r in records.values() if r["algo"] != "mine")
    assert helpers.gdn(*asked).code == 0


def test_prefills_sequences_are_told_apart(tmp_path):
    right = (helpers.OURS / "gdn_prefill" / "pt-reference" / "main.py").read_text()
    for name, text in (("mine", PREFILL), ("yours", right)):
        sources = {"main.py": text, "reference.py": right}
        helpers.write_algo(
            tmp_path, name, sources, op="gdn_prefill", batch_invariant=True
        )
    done = helpers.gdn(
        "run", "--op", "gdn_prefill", "--algo", "mine,yours", "--algos", tmp_path, "--stress", "-w", "empty-sequences",
        "--batch-invariant", "--json",
    )  # fmt: skip
    mine, yours = done.json["records"]
    assert (
        "has other bits alone than among 4" in mine["reason"]
        and yours["status"] == "passed"
    )


def test_a_named_algo_that_cannot_is_a_line():
    done = helpers.gdn("bench", "--algo", "pt-reference", "--batch-invariant")
    assert done.code == 2 and "pt-reference does not say that it can be" in done.err
    done = helpers.gdn("compare", "pt-reference", "pt-compiled", "--batch-invariant")
    assert done.code == 2 and "does not say that it can be" in done.err
    done = helpers.gdn("compare", "cpp-v1", "--batch-invariant")
    assert done.code == 2 and "one algo is not enough to compare" in done.err
