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
from gdn_cli.worker.judge import synthetic
from gdn_cli.worker.judge.dataset import blob_header, drawn, load_inputs

REGISTRY = helpers.REGISTRY
OPS = REGISTRY.ops
DECODE, PREFILL, ATTENTION = OPS["gdn_decode"], OPS["gdn_prefill"], OPS["attention_fwd"]


def pick(op, chosen) -> Workload:
    return select(op, embedded(op), chosen=[chosen])[0]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        tensor.contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:12]


def same_bits(one: list, other: list) -> bool:
    return len(one) == len(other) and all(
        (
            a == b
            if isinstance(a, float)
            else a.dtype == b.dtype and a.shape == b.shape and digest(a) == digest(b)
        )
        for a, b in zip(one, other, strict=True)
    )


# --- twins


def test_a_twins_bits_never_change():
    """Results on record are of these tensors. Whoever changes a draw raises
    twins.VERSION, and these with it.
    """
    x = synthetic.inputs(DECODE, embedded(DECODE)[0])
    assert {n: digest(x[n]) for n in ("q", "k", "v", "state", "a", "b")} == {
        "q": "67a88bc6a7a2",
        "k": "c1555e6f388e",
        "v": "b6acc1495ee8",
        "state": "db1440c225d8",
        "a": "a91d2b6c85fc",
        "b": "a612e9d6fdce",
    }
    torch.testing.assert_close(
        x["A_log"][:2], torch.tensor([2.73930359, 2.51388144]), rtol=2e-7, atol=0
    )
    torch.testing.assert_close(
        x["dt_bias"][:2], torch.tensor([-6.64300871, -5.78985262]), rtol=2e-7, atol=0
    )
    assert (
        digest(synthetic.draw(ATTENTION, embedded(ATTENTION)[0], "q")) == "e2b95aefeb51"
    )
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
    tensors = [
        t for t in first if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    others = [t for t in other if isinstance(t, torch.Tensor) and t.is_floating_point()]
    # each from a stream of its own
    assert len({digest(t) for t in tensors + others}) == len(tensors) * 2


@pytest.mark.parametrize(
    ("op", "chosen"),
    [
        (DECODE, "batch_size=3"),
        (PREFILL, "total_seq_len=37,num_seqs=5"),
        (ATTENTION, "seq_len=5,batch_size=2"),
    ],
)
def test_twins_have_the_definitions_shapes_and_dtypes(op, chosen):
    w = pick(op, chosen)
    values = load_inputs(op, w)
    assert len(values) == len(op.inputs)
    for value, (name, spec) in zip(values, op.inputs.items(), strict=True):
        if spec.shape is None:
            assert name == "scale" and value == 1 / math.sqrt(128)
        else:
            assert (
                value.shape == op.shape(spec, w.axes)
                and str(value.dtype) == f"torch.{spec.dtype}"
            ), name
            assert value.is_contiguous() and value.device.type == "cpu"


def is_normal(x: torch.Tensor) -> bool:
    """Mean, spread, tail and fourth moment of N(0, 1), within five standard errors."""
    x, n = x.double().flatten(), x.numel()
    return (
        abs(x.mean()) < 5 / math.sqrt(n)
        and abs(x.var() - 1) < 5 * math.sqrt(2 / n)
        and abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
        and abs((x.abs() > 2).double().mean() - 0.0455) < 5 * math.sqrt(0.0455 / n)
    )


def test_gdn_tensors_are_normal_and_keys_have_length_one():
    x = synthetic.inputs(DECODE, pick(DECODE, "batch_size=32"))
    assert all(is_normal(x[name]) for name in ("v", "a", "b"))
    assert is_normal(x["state"] / 0.17)
    for name in ("q", "k"):
        norms = x[name].double().norm(dim=-1)
        # 128 roundings of up to 2^-9 each nearly cancel
        assert (norms - 1).abs().max() < 2e-3
        assert (norms - 1).abs().max() > 0  # of bf16 values
        assert is_normal(x[name].double() * math.sqrt(128))
    # q and k are independent
    assert abs((x["q"].double() * x["k"].double()).sum(-1).mean()) < 0.05
    y = synthetic.inputs(PREFILL, pick(PREFILL, "total_seq_len=300,num_seqs=2"))
    assert is_normal(y["state"] / 0.17) and is_normal(y["v"])
    assert (y["k"].double().norm(dim=-1) - 1).abs().max() < 2e-3
    assert is_normal(synthetic.draw(ATTENTION, pick(ATTENTION, "seq_len=128"), "k"))


def test_gates_are_mamba2s():
    ws = embedded(DECODE) + embedded(PREFILL)[:46]
    ops = [DECODE] * 54 + [PREFILL] * 46
    A = (
        torch.stack(
            [synthetic.draw(op, w, "A_log") for op, w in zip(ops, ws, strict=True)]
        )
        .double()
        .exp()
    )
    dt_bias = torch.stack(
        [synthetic.draw(op, w, "dt_bias") for op, w in zip(ops, ws, strict=True)]
    ).double()
    log_dt = torch.nn.functional.softplus(dt_bias).log10()
    n = A.numel()
    assert n == 800
    # uniform: mean and spread within five standard errors, and the ends are nearly reached
    assert 1 <= A.min() < 1.2 and 15.8 < A.max() <= 16 + 1e-5
    assert abs(A.mean() - 8.5) < 5 * 15 / math.sqrt(12 * n)
    assert -3 - 1e-5 <= log_dt.min() < -2.97 and -1.03 < log_dt.max() <= -1 + 1e-5
    assert abs(log_dt.mean() + 2) < 5 * 2 / math.sqrt(12 * n)
    assert abs(log_dt.std() - 2 / math.sqrt(12)) < 0.05


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
        assert (
            ends.dtype == torch.int64
            and ends[0] == 0
            and tuple(ends.diff().tolist()) == lengths
        )


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
    figures = {f"p{p}": float(np.percentile(lengths, p)) for p in (50, 90, 95, 99)} | {
        "max": int(lengths.max())
    }
    return figures | dict(zip(published["buckets"], map(int, counts), strict=True))


def published() -> dict[str, float]:
    stats = contest()[PREFILL.definition].sequence_lengths
    return {k: stats[k] for k in ("p50", "p90", "p95", "p99", "max")} | stats["buckets"]


def test_the_published_figures_are_all_there():
    assert published() == {
        "p50": 41,
        "p90": 662,
        "p95": 1131,
        "p99": 2822,
        "max": 5637,
        "1-32": 338,
        "33-128": 254,
        "129-512": 112,
        "513-2048": 74,
        "2049+": 19,
    }


def test_lengths_of_the_contests_twins_have_the_published_statistics():
    """Percentiles within 5 %, bucket counts within 3 of 797."""
    got, want = statistics(embedded(PREFILL)), published()
    for name, value in want.items():
        room = 3 if "-" in name or "+" in name else 0.05 * value
        assert abs(got[name] - value) <= room, (name, got[name], value)
    assert (
        sum(got[b] for b in ("1-32", "33-128", "129-512", "513-2048", "2049+")) == 797
    )


def test_the_statistics_are_the_methods_not_one_seeds():
    """Averaged over 20 other sets of uuids: percentiles and bucket counts within 10 %."""
    sets = [
        statistics(
            [
                Workload(str(uuid.uuid5(uuid.UUID(w.uuid), str(i))), w.axes)
                for w in embedded(PREFILL)
            ]
        )
        for i in range(20)
    ]
    for name, value in published().items():
        mean = sum(s[name] for s in sets) / len(sets)
        assert abs(mean - value) <= 0.1 * value, (name, mean, value)


# --- a folder, written and read

SMALL = {
    "gdn_decode": [pick(DECODE, "1"), pick(DECODE, "batch_size=2")],
    "gdn_decode_bf16": [pick(OPS["gdn_decode_bf16"], "0")],
    "gdn_decode_packed": [pick(OPS["gdn_decode_packed"], "0")],
    "gdn_decode_packed_bf16": [pick(OPS["gdn_decode_packed_bf16"], "0")],
    "gdn_mtp": [pick(OPS["gdn_mtp"], "0")],
    "gdn_mtp_bf16": [pick(OPS["gdn_mtp_bf16"], "0")],
    "gdn_mtp_packed": [pick(OPS["gdn_mtp_packed"], "0")],
    "gdn_mtp_packed_bf16": [pick(OPS["gdn_mtp_packed_bf16"], "0")],
    "gdn_prefill": [pick(PREFILL, "24"), pick(PREFILL, "seq_lens=1+9")],
    "gdn_prefill_packed": [
        pick(OPS["gdn_prefill_packed"], "total_seq_len=3,num_seqs=1")
    ],
    "gdn_prefill_packed_bf16": [
        pick(OPS["gdn_prefill_packed_bf16"], "total_seq_len=3,num_seqs=1")
    ],
    "attention_fwd": [pick(ATTENTION, "seq_len=128")],
    "attention_fwd_causal": [pick(OPS["attention_fwd_causal"], "seq_len=128")],
}
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
    assert report == {
        "written": COUNT,
        "kept": 0,
        "bytes": sum(p.stat().st_size for p in blobs(root)),
        "solutions": len(SMALL),
    }
    assert [step[:2] for step in steps] == [
        (i, COUNT) for i in range(COUNT + 1)
    ] and steps[1][2] == "gdn_decode B=2"
    for name, twin_workloads in SMALL.items():
        op = OPS[name]
        read = from_folder(op, root)
        assert [(w.uuid, w.axes, w.index) for w in read] == [
            (w.uuid, w.axes, i) for i, w in enumerate(twin_workloads)
        ]
        for w, t in zip(read, twin_workloads, strict=True):
            assert w.origin == "dataset" and drawn(op, w) == []
            assert same_bits(load_inputs(op, w, "cpu", root), load_inputs(op, t))


def test_flashinfer_bench_loads_what_is_written(written):
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.data import TraceSet

    root, *_ = written
    ts = TraceSet.from_path(str(root))
    assert (
        set(ts.definitions)
        == set(ts.workloads)
        == set(ts.solutions)
        == {op.definition for op in OPS.values()}
    )
    assert ts.get_solution("gdn_decode-pt-reference").author == "gdn" and not ts.traces
    for name, twin_workloads in SMALL.items():
        op = OPS[name]
        definition = ts.definitions[op.definition]
        for trace, t in zip(ts.workloads[op.definition], twin_workloads, strict=True):
            tensors = load_safetensors(definition, trace.workload, root)
            values = gen_inputs(definition, trace.workload, "cpu", tensors)
            assert same_bits(values, load_inputs(op, t))


def test_the_layout_is_flashinfer_traces(written):
    root, *_ = written
    d, u = DECODE.definition, SMALL["gdn_decode"][0].uuid
    for path in (
        f"definitions/gdn/{d}.json",
        f"workloads/gdn/{d}.jsonl",
        f"blob/workloads/gdn/{d}/{u}.safetensors",
        f"solutions/gdn/gdn/{d}/gdn_decode-pt-reference.json",
    ):
        assert (root / path).is_file(), path
    row = json.loads((root / f"workloads/gdn/{d}.jsonl").read_text().split("\n")[0])
    assert (
        list(row) == ["definition", "workload", "solution", "evaluation"]
        and row["solution"] is None
    )
    assert row["workload"]["inputs"]["scale"] == {
        "type": "scalar",
        "value": 1 / math.sqrt(128),
    }
    assert row["workload"]["inputs"]["q"] == {
        "type": "safetensors",
        "path": f"blob/workloads/gdn/{d}/{u}.safetensors",
        "tensor_key": "q",
    }
    assert not [p for p in root.rglob("*") if p.name.endswith(".part")]


def test_a_second_run_keeps_whole_blobs_and_repairs_the_others(folder):
    first, second, third, fourth, *_ = blobs(folder)
    before = {
        p: (p.stat().st_mtime_ns, digest(torch.tensor(list(p.read_bytes()[:4000]))))
        for p in blobs(folder)
    }
    os.truncate(first, first.stat().st_size - 1)
    second.unlink()
    third.write_bytes(third.read_bytes().replace(b" version 1", b" version 0"))
    save_file({"q": torch.zeros(4)}, fourth, metadata=blob_header(fourth)[1])
    report = write(folder)
    assert (report["written"], report["kept"]) == (4, COUNT - 4)
    for p, (mtime, start) in before.items():
        assert (p.stat().st_mtime_ns == mtime) == (
            p not in (first, second, third, fourth)
        )
        assert digest(torch.tensor(list(p.read_bytes()[:4000]))) == start
    assert b" version 1" in third.read_bytes()


def test_a_run_broken_off_leaves_no_row_without_its_blob(tmp_path, monkeypatch):
    root = tmp_path / "set"
    real = trace_set_writer.safetensors.torch.save_file

    def stop(tensors, path, metadata):
        real(
            {"half": tensors["q"]} if blobs(root) else tensors, path, metadata=metadata
        )
        if blobs(root):
            raise KeyboardInterrupt

    monkeypatch.setattr(trace_set_writer.safetensors.torch, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        write(root)
    assert (
        len(blobs(root)) == 1
        and not list(root.rglob("*.jsonl"))
        and not list(root.rglob("*.part"))
    )
    monkeypatch.setattr(trace_set_writer.safetensors.torch, "save_file", real)
    assert write(root)["kept"] == 1
    again = from_folder(DECODE, root)[1]
    assert same_bits(
        load_inputs(DECODE, again, "cpu", root),
        load_inputs(DECODE, SMALL["gdn_decode"][1]),
    )


def test_one_workload_is_in_memory_at_a_time(tmp_path, monkeypatch):
    real, alive = synthetic.inputs, []

    def watched(op, w):
        assert not [name for name, ref in alive if ref() is not None]
        x = real(op, w)
        alive.extend(
            (name, weakref.ref(t))
            for name, t in x.items()
            if isinstance(t, torch.Tensor)
        )
        return x

    monkeypatch.setattr(synthetic, "inputs", watched)
    write(tmp_path / "set")
    tensors = [
        spec
        for name, some in SMALL.items()
        for spec in OPS[name].inputs.values()
        for _ in some
        if spec.shape
    ]
    assert len(alive) == len(tensors)


def tree(root) -> dict:
    return {p: p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path, written):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(
        UsageError, match="is not empty, and `gdn data build` did not write it"
    ):
        write(tmp_path / "notes")
    assert {p.name for p in tree(tmp_path / "notes")} == {"thesis.txt"}

    # the contest's own data set has our uuids: writing there would replace its tensors
    theirs = shutil.copytree(written[0], tmp_path / "theirs")
    (theirs / trace_set_writer.MARKER).unlink()
    os.truncate(blobs(theirs)[0], 100)
    before = tree(theirs)
    with pytest.raises(
        UsageError,
        match="did not write it; name a new or empty folder; nothing was changed",
    ):
        write(theirs)
    assert tree(theirs) == before

    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="file is a file; name a new or empty folder"):
        write(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot write .*file/below"):
        write(tmp_path / "file" / "below")


def test_too_small_a_disk_is_reported_before_anything_is_drawn(
    tmp_path, monkeypatch, folder
):
    def free(n):
        usage = type(shutil.disk_usage("/"))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10 * n, 9 * n, n))

    everything = {name: embedded(op) for name, op in OPS.items()}
    free(10**9)
    with pytest.raises(
        MissingError,
        match=r"set2: the tensors need [34]\.\d\d GB, 1\.00 GB are free; free some",
    ):
        write(tmp_path / "set2", everything)
    assert not blobs(tmp_path / "set2")
    free(17 << 20)  # existing blobs need no more room
    assert write(folder)["kept"] == COUNT


def test_only_twins_are_written(written, tmp_path):
    with pytest.raises(
        UsageError,
        match="is from a data set; only twins are written; leave --dataset out",
    ):
        write(tmp_path / "set", {"gdn_decode": from_folder(DECODE, written[0])})
    assert not (tmp_path / "set").exists()


def test_a_solution_is_there_once(folder):
    definitions = [pack.definition(DECODE, REGISTRY)]
    good = pack.pack(REGISTRY.reference(DECODE), DECODE)

    def build(root, *solutions):
        return trace_set_writer.build(
            root,
            [DECODE],
            {"gdn_decode": SMALL["gdn_decode"][:1]},
            solutions,
            definitions,
        )

    assert build(folder, good, good)["solutions"] == 1
    with pytest.raises(
        UsageError,
        match="pt-reference.json: has a solution called 'gdn_decode-pt-reference' already",
    ):
        build(folder, good | {"author": "someone"})


# --- what can be wrong with a data set's tensors


def data_workload(op=DECODE, inputs=None, **axes) -> Workload:
    return Workload("0", axes or {"batch_size": 1}, 0, "dataset", inputs or {})


def tensor(path, key) -> dict:
    return {"type": "safetensors", "path": str(path), "tensor_key": key}


def test_random_and_absent_inputs_are_drawn_as_the_twin_has_them():
    """Blindly drawn, cu_seqlens would point anywhere and keys would overflow the state."""
    axes = {"total_seq_len": 40, "num_seqs": 3, "len_cu_seqlens": 4}
    inputs = {
        "cu_seqlens": {"type": "random"},
        "k": {"type": "random"},
        "scale": {"type": "scalar", "value": 0.25},
    }
    w = Workload("any name", axes, 0, "dataset", inputs)
    got = load_inputs(PREFILL, w)
    assert (
        same_bits(got[:9], load_inputs(PREFILL, Workload("any name", axes))[:9])
        and got[9] == 0.25
    )
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


def header(text: bytes):
    return lambda path: path.write_bytes(len(text).to_bytes(8, "little") + text)


GOOD = {"A_log": torch.zeros(8), "b": torch.zeros(1, 1, 8, dtype=torch.bfloat16)}


def cut(n):
    return lambda path: path.write_bytes(path.read_bytes()[:n])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda path: path.unlink(),
            "no such file: {path}; the data set is not complete",
        ),
        (
            lambda path: path.write_text(
                "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
            ),
            "{path}: a git-LFS pointer, the data itself was not downloaded; run `git lfs pull`",
        ),
        *(
            (spoil, "{path}: cut short, or not a safetensors file: ")
            for spoil in (
                cut(-1),
                cut(100),
                cut(5),
                cut(0),
                lambda path: path.write_bytes(path.read_bytes() + b"more"),
                lambda path: path.write_bytes(b"<html>not found</html>" * 9),
                header(b"{{{{"),
                header(b"[]"),
            )
        ),
        (
            lambda path: save_file({"x": torch.zeros(2), "y": torch.zeros(2)}, path),
            "{path}: no tensor 'A_log' for input A_log; it has x, y",
        ),
        (
            lambda path: save_file(GOOD | {"A_log": torch.zeros(4)}, path),
            (
                "{path}: tensor 'A_log' has shape [4], gdn_decode_qk4_v8_d128_k_last at"
                " batch_size=1 has [8]"
            ),
        ),
        (
            lambda path: save_file(
                GOOD | {"b": torch.zeros(8, dtype=torch.bfloat16)}, path
            ),
            (
                "{path}: tensor 'b' has shape [8], gdn_decode_qk4_v8_d128_k_last at batch_size=1"
                " has [1, 1, 8]"
            ),
        ),
        (
            lambda path: save_file(
                GOOD | {"A_log": torch.zeros(8, dtype=torch.float16)}, path
            ),
            "{path}: tensor 'A_log' is F16, gdn_decode_qk4_v8_d128_k_last has F32",
        ),
        (
            lambda path: (path.unlink(), path.mkdir()),
            "path 'blob.safetensors' is not a plain file",
        ),
    ],
)
def test_a_spoiled_file_is_one_clear_line(tmp_path, spoil, says):
    path = tmp_path / "blob.safetensors"
    save_file(GOOD, path)
    w = data_workload(inputs={name: tensor("blob.safetensors", name) for name in GOOD})
    assert torch.equal(load_inputs(DECODE, w, "cpu", tmp_path)[4], GOOD["A_log"])
    spoil(path)
    with pytest.raises(MissingError) as e:
        load_inputs(DECODE, w, "cpu", tmp_path)
    assert (
        says.format(path=path) in str(e.value)
        and e.value.code == 3
        and "\n" not in str(e.value)
    )


def test_offsets_that_lie_are_caught(tmp_path):
    """A header that leaves a hole."""
    header = json.dumps(
        {"A_log": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]}}
    ).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(MissingError, match=str(tmp_path / "x")) as e:
        load_inputs(
            DECODE,
            data_workload(inputs={"A_log": tensor("x", "A_log")}),
            "cpu",
            tmp_path,
        )
    assert "\n" not in str(e.value)


def test_inputs_of_the_wrong_kind(tmp_path):
    save_file({"scale": torch.zeros(())}, tmp_path / "x")
    with pytest.raises(
        MissingError,
        match="tensor 'scale' for input scale, which is a scalar in gdn_decode",
    ):
        load_inputs(
            DECODE,
            data_workload(inputs={"scale": tensor("x", "scale")}),
            "cpu",
            tmp_path,
        )
    with pytest.raises(
        MissingError,
        match="input q is a scalar, gdn_decode_qk4_v8_d128_k_last has a tensor there",
    ):
        load_inputs(
            DECODE,
            data_workload(inputs={"q": {"type": "scalar", "value": 1.0}}),
            "cpu",
            tmp_path,
        )
    with pytest.raises(
        MissingError,
        match="of a data set that is not given; name its folder: --dataset DIR",
    ):
        load_inputs(DECODE, data_workload(inputs={"A_log": tensor("x", "A_log")}))


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
    assert (
        str(e.value)
        == f"{tmp_path / 'x'}: tensor 'c' must rise from 0 to total_seq_len=10, it {what}"
    )


def test_a_twin_whose_lengths_are_not_its_axes_never_reaches_a_kernel():
    axes = {"total_seq_len": 10, "num_seqs": 2, "len_cu_seqlens": 3}
    w = Workload("0", axes, seq_lens=(3, 9))
    message = "^workload 0: cu_seqlens must rise from 0 to total_seq_len=10, it goes from 0 to 12$"
    with pytest.raises(MissingError, match=message):
        load_inputs(PREFILL, w)


def test_a_header_is_read_without_the_tensors(written):
    tensors, metadata = blob_header(blobs(written[0])[-1])
    assert tensors["cu_seqlens"][0] == "I64" and metadata["gdn_twin"].endswith(
        f" version {synthetic.VERSION}"
    )


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
