"""Keys of op files that gdn_decode_packed brought: axes that are expressions, parts,
moves, keeps, in_place_only, defaults.
"""

from __future__ import annotations

import helpers
import pytest

from gdn_cli.catalog import expression, ops, pack
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n - 3", "it is 0, not a positive"),
        ("n / 2", "it is 1.5, not a positive"),
        ("n > 1", "it is True"),
        ("n // 0", "it divides by zero"),
        ("5 % (n - 3)", "it divides by zero"),
        (f"{'9' * 400} / 2.5", "too large"),
        ("k", "'k' is not one of n"),
        ("n(", "not valid Python"),
        ("n ** 9", "more than names"),
        ("n.real", "more than names"),
        ("f(n)", "more than names"),
        ("", "not valid Python"),
    ],
)
def test_an_expression_that_is_no_size_says_why(text, says):
    with pytest.raises(ValueError, match=says):
        expression.size(text, {"n": 3})


def test_a_constraint_without_an_answer_is_one_line(tmp_path):
    constraint = 'constraints = ["m % (n - 3) == 0"]\ndefaults = {'
    op = read(tmp_path, "defaults = {", constraint)
    assert twin(op, {"n": 2, "m": 4}).axes == {"n": 2, "m": 4}
    with pytest.raises(UsageError, match=r"toy\.toml: \$\.constraints: .* by zero"):
        twin(op, {"n": 3, "m": 7})


def test_a_label_is_of_its_axes_or_of_those_that_are_there(tmp_path):
    op = read(tmp_path)
    assert ops.label_of(op, {}) == ops.label_of(None, {}) == ("one size", ())
    assert ops.label_of(op, {"z": 3}) == ("z=3", (3.0,))
    assert ops.label_of(op, {"n": 2, "m": 4}) == ("n=2", (2.0,))


def test_a_file_with_all_keys(tmp_path):
    op = read(tmp_path)
    assert op.axes == {"n": None, "m": None, "k": 4, "row": 9} and op.in_place_only
    assert op.parts("x") == {"a": (0, 4), "b": (4, 9)} and op.parts("s") == {}
    assert op.linear == [(0, 4, 9)] and op.overwrites == {0: 1}
    axes = {"n": 3, "m": 7}
    assert op.shape(op.inputs["x"], axes) == (3, 9)
    assert op.moved(op.inputs["x"], axes) == (3,)
    assert op.moved(op.inputs["s"], axes) == (3, 4)
    assert op.moved(op.outputs["y"], axes) == (7, 4)


# --- gdn_decode_packed


@pytest.mark.parametrize(
    ("name", "size", "v"),
    [("", 2048, 1024), ("_qk16_v48", 10240, 4096), ("_qk2_v6", 1280, 512)],
)
def test_the_packed_row_follows_the_heads(name, size, v):
    op = KNOWN.op(f"gdn_decode_packed{name}")
    assert op.axes["qkv_size"] == size and op.parts("mixed_qkv")["v"] == (v, size)
    assert op.linear == [(0, v, size), (5, None, None)] and op.overwrites == {1: 5}
    axis = pack.definition(op, KNOWN)["axes"]["qkv_size"]
    assert axis == {"type": "const", "value": size}


def test_the_pool_of_a_twin_is_twice_the_batch_and_slot_0():
    known = embedded(OP)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert [w.axes for w in known] == [
        {"batch_size": n, "pool_size": 2 * n + 1} for n in sizes
    ]
    (w,) = select(OP, known, chosen=["batch_size=3"])
    assert w == twin(OP, {"batch_size": 3, "pool_size": 7})
    assert select(OP, known, chosen=["batch_size=64"]) == [known[6]]
    (w,) = select(OP, known, chosen=["batch_size=64,pool_size=500"])
    assert w.axes == {"batch_size": 64, "pool_size": 500} and w.uuid != known[6].uuid
    with pytest.raises(UsageError, match="pool_size=8 with batch_size=8; .* \\+ 1 or"):
        select(OP, known, chosen=["batch_size=8,pool_size=8"])


def test_the_lengths_of_prefill_are_a_default_too():
    op = KNOWN.op("gdn_prefill")
    assert op.defaults == {"len_cu_seqlens": "num_seqs + 1"}
    assert twin(op, {"total_seq_len": 9, "num_seqs": 2}).axes["len_cu_seqlens"] == 3
    assert twin(op, {"total_seq_len": 9, "len_cu_seqlens": 3}).axes["num_seqs"] == 2
    assert twin(op, {"total_seq_len": 9}) is None


# --- like


def test_an_op_like_another_says_only_what_differs(tmp_path):
    half = 'dtype = "float16"\n'
    changed = (
        f'like = "toy"\ndefinition = "half"\n[inputs.s]\n{half}[outputs.y]\n{half}'
    )
    changed += "[tolerance]\ny = 1e-3\n"
    (tmp_path / "toy.toml").write_text(TOML)
    (tmp_path / "toy_half.toml").write_text(changed)
    base = ops.read_op(tmp_path / "toy.toml")
    op = ops.read_op(tmp_path / "toy_half.toml")
    assert (op.name, op.definition, op.tolerance) == ("toy_half", "half", {"y": 1e-3})
    assert op.inputs["s"].dtype == "float16"
    assert op.inputs["s"].moves == base.inputs["s"].moves
    assert list(op.inputs) == list(base.inputs) and op.defaults == base.defaults


def test_an_op_may_be_like_one_that_is_like_another(tmp_path):
    (tmp_path / "toy.toml").write_text(TOML)
    (tmp_path / "b.toml").write_text(
        'like = "toy"\ndefinition = "second"\n[tolerance]\ny = 1e-3\n'
    )
    (tmp_path / "c.toml").write_text('like = "b"\ndefinition = "third"\n')
    op = ops.read_op(tmp_path / "c.toml")
    assert (op.definition, op.tolerance) == ("third", {"y": 1e-3})


def test_ops_that_are_like_each_other_are_one_line(tmp_path):
    (tmp_path / "b.toml").write_text('like = "c"\ndefinition = "b"\n')
    (tmp_path / "c.toml").write_text('like = "b"\ndefinition = "c"\n')
    with pytest.raises(UsageError, match="unknown op '[bc]'"):
        ops.read_op(tmp_path / "b.toml")


def test_an_op_like_none_there_is_names_those_that_are(tmp_path):
    (tmp_path / "toy.toml").write_text(TOML)
    (tmp_path / "other.toml").write_text('like = "toys"\ndefinition = "half"\n')
    with pytest.raises(UsageError, match="unknown op 'toys'; did you mean toy"):
        ops.read_op(tmp_path / "other.toml")
