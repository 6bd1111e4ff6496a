"""Keys of op files that gdn_decode_packed brought: axes that are expressions, parts,
moves, keeps, in_place_only, defaults.
"""

from __future__ import annotations

import helpers
import pytest

from gdn_cli.catalog import expression, ops, pack
from gdn_cli.catalog.presets import load_preset
from gdn_cli.catalog.workloads import embedded, select, twin
from gdn_cli.errors import UsageError

KNOWN = helpers.REGISTRY
OP = KNOWN.op("gdn_decode_packed")
TOML = """
definition = "toy"
op_type = "toy"
summary = "toy"
reference = "pt-reference"
label = "n={n}"
linear_in = ["x.b"]
in_place = { y = "s" }
in_place_only = true
defaults = { m = "2 * n" }
[axes]
n = "var"
m = "var"
k = 4
row = "2 * k + 1"
[inputs]
x = { shape = ["n", "row"], dtype = "float32", parts = { a = "k", b = "k + 1" }, moves = ["n"] }
s = { shape = ["m", "k"], dtype = "float32", moves = ["n", "k"] }
at = { shape = ["n"], dtype = "int32" }
[outputs]
y = { shape = ["m", "k"], dtype = "float32", keeps = "at" }
[tolerance]
y = 1e-5
"""


def read(folder, old: str = "", new: str = "") -> ops.Op:
    assert old in TOML
    (folder / "toy.toml").write_text(TOML.replace(old, new, 1) if old else TOML)
    return ops.read_op(folder / "toy.toml")


@pytest.mark.parametrize(
    ("text", "value"), [("2 * n + 1", 7), ("(n + m) // 2", 4), (" n ", 3), ("8", 8)]
)
def test_an_expression_is_a_size(text, value):
    assert expression.size(text, {"n": 3, "m": 5}) == value


@pytest.mark.parametrize(("text", "says"), [
    ("n - 3", "it is 0, not a positive whole number"), ("n / 2", "it is 1.5, not a positive"), ("n > 1", "it is True"),
    ("n // 0", "it divides by zero"), ("k", "'k' is not one of n"), ("n(", "it is not valid Python"),
    ("n ** 9", "it has more than names"), ("n.real", "it has more than names"), ("", "it is not valid Python"),
])  # fmt: skip
def test_what_is_no_size_says_why(text, says):
    with pytest.raises(ValueError, match=says):
        expression.size(text, {"n": 3})


def test_a_formula_without_a_value_says_why_wherever_it_is_asked():
    for text, says in (
        ("1 / n", "it divides by zero"),
        ("5 % n", "it divides by zero"),
        (f"{'9' * 400} / 2.5", "large"),
    ):
        for make in (expression.formula, expression.condition):
            with pytest.raises(ValueError, match=says):
                make(text, {"n": 0})({"n": 0})


def test_a_constraint_that_divides_by_zero_at_some_axes_is_one_line(tmp_path):
    op = read(
        tmp_path, "defaults = {", 'constraints = ["m % (n - 3) == 0"]\ndefaults = {'
    )
    assert twin(op, {"n": 2, "m": 4}).axes == {"n": 2, "m": 4}
    with pytest.raises(
        UsageError,
        match=r"toy\.toml: \$\.constraints: 'm % \(n - 3\) == 0': it divides by zero at these",
    ):
        twin(op, {"n": 3, "m": 7})


def test_a_label_is_of_its_axes_or_of_those_that_are_there(tmp_path):
    op = read(tmp_path)
    assert ops.label_of(op, {}) == ("one size", ())
    assert ops.label_of(op, {"z": 3}) == ("z=3", (3.0,)) and ops.label_of(None, {}) == (
        "one size",
        (),
    )
    assert ops.label_of(op, {"n": 2, "m": 4})[0] == op.label.format(n=2, m=4)


def test_a_file_with_all_of_them(tmp_path):
    op = read(tmp_path)
    assert op.axes == {"n": None, "m": None, "k": 4, "row": 9} and op.in_place_only
    assert op.parts("x") == {"a": (0, 4), "b": (4, 9)} and op.parts("s") == {}
    assert op.linear == [(0, 4, 9)] and op.overwrites == {0: 1}
    axes = {"n": 3, "m": 7}
    assert op.shape(op.inputs["x"], axes) == (3, 9) and op.moved(
        op.inputs["x"], axes
    ) == (3,)
    assert op.moved(op.inputs["s"], axes) == (3, 4) and op.moved(
        op.outputs["y"], axes
    ) == (7, 4)


@pytest.mark.parametrize(("old", "new", "says"), [
    ('"2 * k + 1"', '"2 * n + 1"', "$.axes.row: expected a positive whole number or 'var', or an expression of axes"),
    ('"2 * k + 1"', '"k - 4"', "$.axes.row: expected a positive whole number or 'var'"),
    ('b = "k + 1"', 'b = "k"', "$.inputs.x.parts: expected parts that add up to row = 9, got 8"),
    ('b = "k + 1"', 'b = "z"', "$.inputs.x.parts: expected expressions of fixed axes ('z' is not one of k, row)"),
    ('b = "k + 1"', "b = 5", "$.inputs.x.parts.b: expected text, got 5"),
    ('shape = ["n", "row"]', 'shape = ["row", "n"]', "$.inputs.x.parts: expected nothing, except for an input"),
    ('keeps = "at" }', 'parts = { a = "k" } }', "$.outputs.y.parts: expected nothing, except for an input"),
    ('moves = ["n", "k"]', 'moves = ["n", "z"]', "$.inputs.s.moves: expected axes of [axes]: n, m, k, row, got 'z'"),
    ('keeps = "at"', 'keeps = "s"', "$.outputs.y.keeps: expected an input of whole numbers with one axis"),
    ('in_place = { y = "s" }', "", "$.outputs.y.keeps: expected an input of whole numbers with one axis or more"),
    ('"at" }', '"at", keep = 1 }', "$.outputs.y.keep: unknown key; did you mean keeps"),
    ('in_place_only = true', 'in_place_only = 1', "$.in_place_only: expected true or false, got 1"),
    ('"x.b"', '"x.c"', "$.linear_in: expected inputs: x, s, at, x.a, x.b, got 'x.c'"),
    ('m = "2 * n"', 'k = "2 * n"', "$.defaults.k: expected a variable axis: n, m, got '2 * n'"),
    ('m = "2 * n"', 'm = "2 * m"', "$.defaults.m: expected an expression of the other variable axes ('m' is not one"),
])  # fmt: skip
def test_a_fault_is_one_line_with_its_place(old, new, says, tmp_path):
    with pytest.raises(UsageError) as e:
        read(tmp_path, old, new)
    text = str(e.value)
    assert text.startswith(f"{tmp_path / 'toy.toml'}: {says}") and text.isprintable()


def test_in_place_only_needs_a_pair(tmp_path):
    with pytest.raises(
        UsageError,
        match=r"\$\.in_place_only: expected false, without in_place, got True",
    ):
        text = TOML.replace('in_place = { y = "s" }', "").replace(', keeps = "at"', "")
        (tmp_path / "toy.toml").write_text(text)
        ops.read_op(tmp_path / "toy.toml")


# --- gdn_decode_packed


def test_the_packed_row_follows_the_heads():
    for name, size, v in (
        ("", 2048, 1024),
        ("_qk16_v48", 10240, 4096),
        ("_qk2_v6", 1280, 512),
    ):
        op = KNOWN.op(f"gdn_decode_packed{name}")
        assert op.axes["qkv_size"] == size == op.parts("mixed_qkv")["v"][
            1
        ] and op.linear[0] == (
            0,
            v,
            size,
        )
        assert pack.definition(op, KNOWN)["axes"]["qkv_size"] == {
            "type": "const",
            "value": size,
        }
    assert OP.linear == [(0, 1024, 2048), (5, None, None)] and OP.overwrites == {1: 5}


def test_the_pool_of_a_twin_is_twice_the_batch_and_slot_0():
    known = embedded(OP)
    assert [(w.axes["batch_size"], w.axes["pool_size"]) for w in known] == [
        (n, 2 * n + 1) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ]
    (w,) = select(OP, known, chosen=["batch_size=3"])
    assert w.axes == {"batch_size": 3, "pool_size": 7} and w == twin(
        OP, {"batch_size": 3, "pool_size": 7}
    )
    (w,) = select(OP, known, chosen=["batch_size=64"])
    assert w == known[6]
    (w,) = select(OP, known, chosen=["batch_size=64,pool_size=500"])
    assert w.axes == {"batch_size": 64, "pool_size": 500} and w.uuid != known[6].uuid
    with pytest.raises(
        UsageError,
        match="pool_size=8 with batch_size=8; .*give batch_size \\+ 1 or more",
    ):
        select(OP, known, chosen=["batch_size=8,pool_size=8"])
    for name, count in (("quick", 3), ("sweep", 10), ("peers", 27)):
        picked = select(OP, known, preset=load_preset(name))
        assert len(picked) == count and all(
            w.axes["pool_size"] == 2 * w.axes["batch_size"] + 1 for w in picked
        )


def test_the_lengths_of_prefill_are_a_default_too():
    op = KNOWN.op("gdn_prefill")
    assert op.defaults == {"len_cu_seqlens": "num_seqs + 1"}
    assert twin(op, {"total_seq_len": 9, "num_seqs": 2}).axes["len_cu_seqlens"] == 3
    assert twin(op, {"total_seq_len": 9, "len_cu_seqlens": 3}).axes["num_seqs"] == 2
    assert twin(op, {"total_seq_len": 9}) is None


# --- like


def test_an_op_like_another_says_only_what_differs(tmp_path):
    (tmp_path / "toy.toml").write_text(TOML)
    head, half = 'like = "toy"\ndefinition = "half"\n', 'dtype = "float16"\n'
    changed = f"{head}[inputs.s]\n{half}[outputs.y]\n{half}[tolerance]\ny = 1e-3\n"
    (tmp_path / "toy_half.toml").write_text(changed)
    base, half = (
        ops.read_op(tmp_path / f"{name}.toml") for name in ("toy", "toy_half")
    )
    assert (half.name, half.definition, half.tolerance) == (
        "toy_half",
        "half",
        {"y": 1e-3},
    )
    assert (
        half.inputs["s"].dtype == "float16"
        and half.inputs["s"].moves == base.inputs["s"].moves
    )
    assert list(half.inputs) == list(base.inputs) and half.defaults == base.defaults


def test_an_op_like_none_there_is_names_those_that_are(tmp_path):
    (tmp_path / "toy.toml").write_text(TOML)
    (tmp_path / "other.toml").write_text('like = "toys"\ndefinition = "half"\n')
    with pytest.raises(UsageError, match="unknown op 'toys'") as e:
        ops.read_op(tmp_path / "other.toml")
    assert e.value.hint.startswith("did you mean toy? `like` in ")


def test_it_has_the_sizes_of_the_other():
    bf16 = KNOWN.op("gdn_decode_packed_bf16")
    assert [w.axes for w in embedded(bf16)] == [w.axes for w in embedded(OP)]
    preset = load_preset("sweep")
    found = [
        select(op, embedded(op), chosen=[], first=None, preset=preset)
        for op in (OP, bf16)
    ]
    assert [w.axes for w in found[0]] == [w.axes for w in found[1]] != []
