"""Tensors of workloads: drawn as twins, read from a data set folder, and written into one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import uuid
import weakref

import helpers
import msgspec
import numpy as np
import oracle
import pytest
import torch
from safetensors.torch import save_file

from gdn_cli import parsing
from gdn_cli.catalog import pack
from gdn_cli.catalog.trace_set import from_folder
from gdn_cli.catalog.workloads import Workload, contest, embedded, select
from gdn_cli.errors import MissingError, UsageError
from gdn_cli.worker import trace_set_writer
from gdn_cli.worker.judge import check, synthetic
from gdn_cli.worker.judge.dataset import drawn, load_inputs

REGISTRY = helpers.REGISTRY
OPS = REGISTRY.ops
DECODE, PREFILL, ATTENTION = OPS["gdn_decode"], OPS["gdn_prefill"], OPS["attention_fwd"]


def pick(op, chosen) -> Workload:
    return select(op, embedded(op), chosen=[chosen])[0]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        tensor.contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:12]


def bits(values: list) -> list:
    """All that two lists of inputs must have in common."""
    return [
        (x.dtype, x.shape, digest(x)) if isinstance(x, torch.Tensor) else x
        for x in values
    ]


def same_bits(one: list, other: list) -> bool:
    return bits(one) == bits(other)


def data_workload(op=DECODE, inputs=None, **axes) -> Workload:
    return Workload("0", axes or {"batch_size": 1}, 0, "dataset", inputs or {})


def tensor(path, key) -> dict:
    return {"type": "safetensors", "path": str(path), "tensor_key": key}


# --- twins


def test_a_twins_bits_never_change():
    """Results on record are of these tensors. Whoever changes a draw raises
    twins.VERSION, and these with it.
    """
    x = synthetic.inputs(DECODE, embedded(DECODE)[0])
    digests = (
        "67a88bc6a7a2 c1555e6f388e b6acc1495ee8 db1440c225d8 a91d2b6c85fc a612e9d6fdce"
    )
    assert [digest(x[n]) for n in "q k v state a b".split()] == digests.split()
    assert x["A_log"][:2].tolist() == pytest.approx([2.73930359, 2.51388144], rel=2e-7)
    biases = x["dt_bias"][:2].tolist()
    assert biases == pytest.approx([-6.64300871, -5.78985262], rel=2e-7)
    q = synthetic.draw(ATTENTION, embedded(ATTENTION)[0], "q")
    assert digest(q) == "e2b95aefeb51"
    assert synthetic.sequence_lengths(embedded(PREFILL)[72]) == (236, 22, 138, 5)


@pytest.mark.parametrize(
    ("op", "chosen"),
    [(DECODE, "batch_size=3"), (PREFILL, "24"), (ATTENTION, "seq_len=5")],
)
def test_twins_repeat_whatever_the_order_and_differ_otherwise(op, chosen):
    w = pick(op, chosen)
    first = load_inputs(op, w)
    alone = [synthetic.draw(op, w, name) for name in reversed(op.inputs)][::-1]
    assert same_bits(first, load_inputs(op, w)) and same_bits(first, alone)
    other = load_inputs(op, Workload(str(uuid.uuid4()), w.axes))
    tensors = [x for x in first + other if check.is_float(x)]
    # each from a stream of its own
    assert len({digest(x) for x in tensors}) == len(tensors)


def test_gates_are_mamba2s():
    calls = [(DECODE, w) for w in embedded(DECODE)]
    calls += [(PREFILL, w) for w in embedded(PREFILL)[:46]]

    def all_of(name):
        drawn = [synthetic.draw(op, w, name) for op, w in calls]
        return torch.stack(drawn).double()

    A = all_of("A_log").exp()
    log_dt = torch.nn.functional.softplus(all_of("dt_bias")).log10()
    # uniform: the ends are nearly reached, the mean is within five standard errors
    for x, low, high in ((A, 1, 16), (log_dt, -3, -1)):
        room = (high - low) / 50
        assert (
            low - 1e-5 <= x.min() < low + room and high - room < x.max() <= high + 1e-5
        )
        error = (high - low) / math.sqrt(12 * x.numel())
        assert abs(x.mean() - (low + high) / 2) < 5 * error


def test_a_twins_state_is_as_large_as_the_recurrence_makes_it():
    """The state neither grows nor dies along the tokens; half the outputs are below the
    official tolerance of 0.01.
    """
    x = load_inputs(PREFILL, pick(PREFILL, "seq_lens=4x139"))
    before = x[list(PREFILL.inputs).index("state")].double().square().mean().sqrt()
    output, after = oracle.gdn_prefill(*x)
    assert 0.5 < np.sqrt((after**2).mean()) / before < 2
    assert 0.003 < np.median(np.abs(output)) < 0.03


# --- sequence lengths


def test_lengths_fill_the_axes_of_every_prefill_workload():
    for w in embedded(PREFILL):
        lengths = synthetic.sequence_lengths(w)
        assert len(lengths) == w.axes["num_seqs"] and min(lengths) >= 1, w
        assert sum(lengths) == w.axes["total_seq_len"], w
        ends = synthetic.draw(PREFILL, w, "cu_seqlens")
        assert ends.dtype == torch.int64 and ends[0] == 0
        assert tuple(ends.diff().tolist()) == lengths


@pytest.mark.parametrize(
    "total, count",
    [(1, 1), (5, 5), (6, 5), (100, 99), (3, 2), (100_000, 2), (32768, 1), (9, 4)],
)
def test_lengths_fill_odd_axes_too(total, count):
    for i in range(20):
        axes = {"total_seq_len": total, "num_seqs": count, "len_cu_seqlens": count + 1}
        lengths = synthetic.sequence_lengths(Workload(f"odd {i}", axes))
        assert len(lengths) == count and sum(lengths) == total and min(lengths) >= 1


def test_given_lengths_are_taken_as_they_are():
    w = pick(PREFILL, "seq_lens=5+1+2x3")
    assert load_inputs(PREFILL, w)[8].tolist() == [0, 5, 6, 9, 12]
    again = msgspec.convert(json.loads(json.dumps(parsing.to_json(w))), Workload)
    assert load_inputs(PREFILL, again)[8].tolist() == [0, 5, 6, 9, 12]


def statistics(workloads) -> dict[str, float]:
    lengths = np.array([n for w in workloads for n in synthetic.sequence_lengths(w)])
    counts = np.histogram(lengths, [1, 33, 129, 513, 2049, 1 << 20])[0]
    published = contest()[PREFILL.definition].sequence_lengths
    percents = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    figures = {name: np.percentile(lengths, p) for name, p in percents.items()}
    return figures | dict(zip(published["buckets"], counts, strict=True))


def published() -> dict[str, float]:
    stats = dict(contest()[PREFILL.definition].sequence_lengths)
    names = "p50 p90 p95 p99 max".split()
    return {name: stats[name] for name in names} | stats["buckets"]


def test_lengths_of_the_contests_twins_have_the_published_statistics():
    """Percentiles within 5 %, bucket counts within 3 of 797."""
    got, want = statistics(embedded(PREFILL)), published()
    for name, value in want.items():
        room = 3 if "-" in name or "+" in name else 0.05 * value
        assert abs(got[name] - value) <= room, (name, got[name], value)
    buckets = [name for name in want if "-" in name or "+" in name]
    assert len(buckets) == 5 and sum(got[name] for name in buckets) == 797


# --- a folder, written and read

SMALL = {
    "gdn_decode": ["1", "batch_size=2"],
    "gdn_prefill": ["24", "seq_lens=1+9"],
    "gdn_prefill_packed": ["total_seq_len=3,num_seqs=1"],
    "gdn_prefill_packed_bf16": ["total_seq_len=3,num_seqs=1"],
    "gdn_prefill_packed_f16": ["total_seq_len=3,num_seqs=1"],
    "attention_fwd": ["seq_len=128"],
    "attention_fwd_causal": ["seq_len=128"],
}
for name, op in OPS.items():
    SMALL[name] = [pick(op, chosen) for chosen in SMALL.get(name, ["0"])]
COUNT = sum(map(len, SMALL.values()))


def write(root, workloads=SMALL, solutions=True, **more):
    ops = [OPS[name] for name in workloads]
    packed = [pack.pack(REGISTRY.reference(op), op) for op in ops] if solutions else []
    definitions = [pack.definition(op, REGISTRY) for op in ops]
    return trace_set_writer.build(root, ops, workloads, packed, definitions, **more)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "new" / "set"
    steps = []
    report = write(root, progress=lambda *step: steps.append(step))
    return root, report, steps


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written[0], tmp_path / "set")


def blobs(root) -> list:
    return sorted((root / "blob").rglob("*.safetensors"))


def test_a_written_folder_gives_the_twins_back_bit_by_bit(written):
    root, report, steps = written
    size = sum(path.stat().st_size for path in blobs(root))
    counts = {"written": COUNT, "kept": 0, "solutions": len(SMALL)}
    assert report == counts | {"bytes": size}
    assert [step[:2] for step in steps] == [(i, COUNT) for i in range(COUNT + 1)]
    assert steps[1][2] == "gdn_decode B=2"
    for name, twin_workloads in SMALL.items():
        op = OPS[name]
        read = from_folder(op, root)
        for i, (w, t) in enumerate(zip(read, twin_workloads, strict=True)):
            assert (w.uuid, w.axes, w.index) == (t.uuid, t.axes, i)
            assert w.origin == "dataset" and drawn(op, w) == []
            assert same_bits(load_inputs(op, w, "cpu", root), load_inputs(op, t))


def test_flashinfer_bench_loads_what_is_written(written):
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.data import TraceSet

    root, *_ = written
    ts = TraceSet.from_path(str(root))
    names = {op.definition for op in OPS.values()}
    assert set(ts.definitions) == set(ts.workloads) == set(ts.solutions) == names
    assert ts.get_solution("gdn_decode-pt-reference").author == "gdn" and not ts.traces
    for name, twin_workloads in SMALL.items():
        op = OPS[name]
        definition = ts.definitions[op.definition]
        for trace, t in zip(ts.workloads[op.definition], twin_workloads, strict=True):
            tensors = load_safetensors(definition, trace.workload, root)
            values = gen_inputs(definition, trace.workload, "cpu", tensors)
            assert same_bits(values, load_inputs(op, t))


def test_a_second_run_keeps_whole_blobs_and_repairs_the_others(folder):
    first, second, third, *_ = blobs(folder)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()[:4000]) for p in blobs(folder)}
    os.truncate(first, first.stat().st_size - 1)
    second.unlink()
    third.write_bytes(third.read_bytes().replace(b" version 1", b" version 0"))
    report = write(folder)
    assert (report["written"], report["kept"]) == (3, COUNT - 3)
    for p, (mtime, start) in before.items():
        repaired = p in (first, second, third)
        assert (p.stat().st_mtime_ns != mtime) == repaired
        assert p.read_bytes()[:4000] == start
    assert b" version 1" in third.read_bytes()


def test_a_run_broken_off_leaves_no_row_without_its_blob(tmp_path, monkeypatch):
    root = tmp_path / "set"
    real = trace_set_writer.safetensors.torch.save_file

    def stop(tensors, path, metadata):
        if not blobs(root):
            return real(tensors, path, metadata=metadata)
        real({"half": tensors["q"]}, path, metadata=metadata)
        raise KeyboardInterrupt

    monkeypatch.setattr(trace_set_writer.safetensors.torch, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        write(root)
    assert len(blobs(root)) == 1
    assert not [p for p in root.rglob("*") if p.suffix in (".jsonl", ".part")]
    monkeypatch.setattr(trace_set_writer.safetensors.torch, "save_file", real)
    assert write(root)["kept"] == 1
    read = load_inputs(DECODE, from_folder(DECODE, root)[1], "cpu", root)
    assert same_bits(read, load_inputs(DECODE, SMALL["gdn_decode"][1]))


def test_one_workload_is_in_memory_at_a_time(tmp_path, monkeypatch):
    real, alive = synthetic.inputs, []

    def watched(op, w):
        assert not any(ref() is not None for ref in alive)
        x = real(op, w)
        alive.extend(weakref.ref(t) for t in x.values() if isinstance(t, torch.Tensor))
        return x

    monkeypatch.setattr(synthetic, "inputs", watched)
    write(tmp_path / "set")
    count = 0
    for name, some in SMALL.items():
        specs = OPS[name].inputs.values()
        count += len(some) * sum(spec.shape is not None for spec in specs)
    assert len(alive) == count


def tree(root) -> dict:
    return {p: p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path, written):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="is not empty, and .* did not write it"):
        write(tmp_path / "notes")
    assert {p.name for p in tree(tmp_path / "notes")} == {"thesis.txt"}

    # the contest's own data set has our uuids: writing there would replace its tensors
    theirs = shutil.copytree(written[0], tmp_path / "theirs")
    (theirs / trace_set_writer.MARKER).unlink()
    os.truncate(blobs(theirs)[0], 100)
    before = tree(theirs)
    with pytest.raises(UsageError, match="did not write it; .*nothing was changed"):
        write(theirs)
    assert tree(theirs) == before

    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="file is a file"):
        write(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot write .*file/below"):
        write(tmp_path / "file" / "below")


def test_only_twins_are_written(written, tmp_path):
    with pytest.raises(UsageError, match="only twins are written"):
        write(tmp_path / "set", {"gdn_decode": from_folder(DECODE, written[0])})
    assert not (tmp_path / "set").exists()


# --- what can be wrong with a data set's tensors


def test_random_and_absent_inputs_are_drawn_as_the_twin_has_them():
    """Blindly drawn, cu_seqlens would point anywhere and keys would overflow the state."""
    axes = {"total_seq_len": 40, "num_seqs": 3, "len_cu_seqlens": 4}
    inputs = {name: {"type": "random"} for name in ("cu_seqlens", "k")}
    inputs["scale"] = {"type": "scalar", "value": 0.25}
    w = Workload("any name", axes, 0, "dataset", inputs)
    got = load_inputs(PREFILL, w)
    twins = load_inputs(PREFILL, Workload("any name", axes))
    assert same_bits(got[:9], twins[:9]) and got[9] == 0.25
    assert got[8][0] == 0 and got[8][-1] == 40
    assert drawn(PREFILL, w) == [name for name in PREFILL.inputs if name != "scale"]
    assert drawn(PREFILL, Workload("any name", axes)) == list(PREFILL.inputs)


def test_tensors_are_found_by_their_key_and_path(tmp_path):
    want = torch.arange(8, dtype=torch.float32)
    save_file({"first": want, "second": want + 1}, tmp_path / "x.safetensors")
    for path in ("x.safetensors", "./x.safetensors"):
        inputs = {"A_log": tensor(path, "second"), "dt_bias": tensor(path, "first")}
        values = load_inputs(DECODE, data_workload(inputs=inputs), "cpu", tmp_path)
        assert torch.equal(values[4], want + 1) and torch.equal(values[6], want)


def header(text: bytes, more: bytes = b""):
    data = len(text).to_bytes(8, "little") + text + more
    return lambda path: path.write_bytes(data)


BROKEN = "{path}: cut short, or not a safetensors file: "


GOOD = {"A_log": torch.zeros(8), "b": torch.zeros(1, 1, 8, dtype=torch.bfloat16)}


def cut(n):
    return lambda path: path.write_bytes(path.read_bytes()[:n])


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
# the eight numbers of A_log begin after a hole
HOLE = b'{"A_log":{"dtype":"F32","shape":[8],"data_offsets":[32,64]}}'


def saved(**tensors):
    return lambda path: save_file(tensors, path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.unlink(), "{path}: No such file or directory; the data set is not complete"),
        (lambda path: path.write_text(POINTER), "{path}: a git-LFS pointer"),
        (cut(-1), BROKEN),
        (cut(0), BROKEN),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), BROKEN),
        (lambda path: path.write_bytes(b"<html>not found</html>" * 9), BROKEN),
        (header(HOLE, bytes(64)), "{path}: "),
        (saved(x=torch.zeros(2)), "'A_log' is no tensor, {op} at batch_size=1 has a F32 of shape (8,)"),
        (saved(A_log=torch.zeros(4)), "'A_log' is a F32 of shape (4,), {op} at batch_size=1 has a F32 of shape (8,)"),
        (saved(A_log=torch.zeros(8).half()), "'A_log' is a F16 of shape (8,), {op}"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a plain file"),
    ],
)  # fmt: skip
def test_a_spoiled_file_is_one_clear_line(tmp_path, spoil, says):
    path = tmp_path / "blob.safetensors"
    save_file(GOOD, path)
    w = data_workload(inputs={name: tensor("blob.safetensors", name) for name in GOOD})
    assert torch.equal(load_inputs(DECODE, w, "cpu", tmp_path)[4], GOOD["A_log"])
    spoil(path)
    with pytest.raises(MissingError) as e:
        load_inputs(DECODE, w, "cpu", tmp_path)
    assert says.format(path=path, op=DECODE.definition) in str(e.value)
    assert e.value.code == 3 and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "spec", "says"),
    [
        ("scale", tensor("x", "scale"), "input scale must be a scalar, as in"),
        (
            "q",
            {"type": "scalar", "value": 1.0},
            "input q must be a tensor, as in",
        ),
        ("A_log", None, "that is not given; name its folder: --dataset DIR"),
    ],
)
def test_inputs_of_the_wrong_kind(name, spec, says, tmp_path):
    save_file({"scale": torch.zeros(())}, tmp_path / "x")
    workload = data_workload(inputs={name: spec or tensor("x", name)})
    with pytest.raises(MissingError, match=says):
        load_inputs(DECODE, workload, "cpu", tmp_path if spec else None)


@pytest.mark.parametrize(
    ("ends", "what"),
    [
        ([0, 3, 9], "goes from 0 to 9"),
        ([1, 3, 10], "goes from 1 to 10"),
        ([0, 12, 10], "falls from 12 to 10 at sequence 1"),
        ([0, -3, 10], "falls from 0 to -3 at sequence 0"),
        ([0, 12, 20], "goes from 0 to 20"),
    ],
)
def test_cu_seqlens_that_point_outside_never_reach_a_kernel(tmp_path, ends, what):
    axes = {"total_seq_len": 10, "num_seqs": 2, "len_cu_seqlens": 3}
    w = Workload("0", axes, 0, "dataset", {"cu_seqlens": tensor("x", "c")})
    save_file({"c": torch.tensor([0, 0, 10])}, tmp_path / "x")
    # an empty sequence is no fault
    assert load_inputs(PREFILL, w, "cpu", tmp_path)[8].tolist() == [0, 0, 10]
    save_file({"c": torch.tensor(ends)}, tmp_path / "x")
    with pytest.raises(MissingError) as e:
        load_inputs(PREFILL, w, "cpu", tmp_path)
    assert str(e.value).startswith("workload 0: cu_seqlens must rise from 0 to ")
    assert str(e.value).endswith(what)


def test_a_twin_whose_lengths_are_not_its_axes_never_reaches_a_kernel():
    axes = {"total_seq_len": 10, "num_seqs": 2, "len_cu_seqlens": 3}
    w = Workload("0", axes, seq_lens=(3, 9))
    with pytest.raises(MissingError, match="^workload 0: cu_seqlens .* from 0 to 12$"):
        load_inputs(PREFILL, w)


def test_tensors_begin_at_a_cache_line(monkeypatch):
    """numpy's begin anywhere, which costs a kernel on the CPU up to a third of its time."""
    op = REGISTRY.ops["gdn_decode"]
    draw = synthetic.draw

    def shifted(op, workload, name):
        value = draw(op, workload, name)
        if not isinstance(value, torch.Tensor):
            return value
        room = torch.empty(value.numel() + 64, dtype=value.dtype)
        at = (16 - room.data_ptr() % 64) % 64 // value.element_size() or 1
        return room[at : at + value.numel()].view(value.shape).copy_(value)

    monkeypatch.setattr(synthetic, "draw", shifted)
    (workload,) = select(op, embedded(op), chosen=["0"])
    for name, x in zip(op.inputs, load_inputs(op, workload), strict=True):
        if isinstance(x, torch.Tensor):
            assert x.data_ptr() % 64 == 0 and torch.equal(x, draw(op, workload, name))
