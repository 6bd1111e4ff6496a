"""Workloads: the built-in ones, the user's selection, and valid data set folders. No
torch in here.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter

import pytest

from gdn_cli import paths
from gdn_cli.catalog import ops, pack, presets, registry, trace_set
from gdn_cli.catalog.trace_set import from_folder
from gdn_cli.catalog.workloads import Workload, embedded, select
from gdn_cli.errors import MissingError, UsageError

REGISTRY = registry.load()
OPS = REGISTRY.ops
DECODE, PREFILL, ATTENTION = OPS["gdn_decode"], OPS["gdn_prefill"], OPS["attention_fwd"]


def axes_of(workloads) -> list[dict]:
    return [w.axes for w in workloads]


# --- embedded


def test_decode_workloads_are_the_contests():
    ws = embedded(DECODE)
    assert [w.index for w in ws] == list(range(54))
    counts = {1: 10, 4: 8, 8: 7, 16: 7, 32: 7, 48: 7, 64: 8}
    assert Counter(w.axes["batch_size"] for w in ws) == counts
    assert ws[0].uuid == "901e5104-dccb-4c3f-ae13-ef4d31a4d456"
    assert ws[20].uuid.startswith("25d1f606") and ws[20].axes == {"batch_size": 8}


def test_prefill_workloads_are_the_contests():
    ws = embedded(PREFILL)
    assert [w.index for w in ws] == list(range(100))
    assert sum(w.axes["total_seq_len"] for w in ws) == 183_065
    assert sum(w.axes["num_seqs"] for w in ws) == 797
    assert len({(w.axes["total_seq_len"], w.axes["num_seqs"]) for w in ws}) == 77
    assert all(w.axes["len_cu_seqlens"] == w.axes["num_seqs"] + 1 for w in ws)
    assert ws[90].uuid == "07aa7922-1848-48a9-830a-54216b5553b3"
    assert ws[90].axes == {"total_seq_len": 5709, "num_seqs": 2, "len_cu_seqlens": 3}


def test_every_workload_has_the_ops_axes_and_its_own_uuid():
    every = [(op, w) for op in OPS.values() for w in embedded(op)]
    assert len(every) == 54 + 100 + 2 * 6 + 10 + 9 + 2 * (8 + 9 + 8 + 8 + 9 + 13)
    assert len({str(uuid.UUID(w.uuid)) for _, w in every}) == len(every)
    for op, w in every:
        assert set(w.axes) == set(op.var_axes)
        assert w.origin == "twin" and w.inputs is None


def test_attention_twins_have_lasting_uuids():
    ws = embedded(ATTENTION)
    assert axes_of(ws) == [
        {"batch_size": 1, "seq_len": s} for s in (128, 256, 512, 1024, 2048, 4096)
    ]
    # results are filed under these: a change here orphans every record there is
    assert ws[2].uuid == "588b0601-e2b5-55a7-abb7-9b29c2d66d82"
    for op, chosen, id_ in (
        (DECODE, "batch_size=5", "0c8f11b8-7711-55ae-ad5c-0865fd44fe11"),
        (PREFILL, "seq_lens=1024+7168", "e8e3337a-fd21-5784-b834-8c66ee91fc04"),
    ):
        assert [w.uuid for w in select(op, [], chosen=[chosen])] == [id_]


# --- selecting


@pytest.mark.parametrize(
    ("op", "chosen", "indices"),
    [
        (DECODE, ["12"], [12]),
        (DECODE, ["0-3"], [0, 1, 2, 3]),
        # a union, in the order of the data set
        (DECODE, ["7", "3", "5-6", "3"], [3, 5, 6, 7]),
        (DECODE, ["3, 7"], [3, 7]),
        (PREFILL, ["64", "33", "1"], [1, 33, 64]),
        (DECODE, ["901e"], [0]),
        (DECODE, ["901E5104-DCCB"], [0]),
        (DECODE, ["5716"], [7]),  # digits, but no index: a prefix
        (DECODE, ["26f760ab-c286-41bf-8c37-3bc5df4c98fc"], [14]),
        (DECODE, ["batch_size=64"], list(range(46, 54))),
        (DECODE, ["batch_size=4", "0"], [0, *range(10, 18)]),
        (PREFILL, ["num_seqs=57"], [18]),
        (PREFILL, ["total_seq_len=8192,num_seqs=34"], [4, 5]),
        (PREFILL, ["total_seq_len=6"], [0]),
        (PREFILL, ["len_cu_seqlens=58"], [18]),
        (PREFILL, ["seq_lens=6"], [0]),  # one sequence: the axes say it all
        (ATTENTION, ["seq_len=1024"], [3]),
    ],
)
def test_choosing(op, chosen, indices):
    ws = embedded(op)
    assert select(op, ws, chosen=chosen) == [ws[i] for i in indices]


def test_digits_are_read_as_an_index_first():
    ws = [Workload("1234-a", {"batch_size": 1}, 0)]
    ws += [Workload(f"u{i}", {"batch_size": 1}, i) for i in range(1, 2000)]
    assert select(DECODE, ws, chosen=["1234"]) == [ws[1234]]
    assert select(DECODE, ws[:9], chosen=["1234"]) == [ws[0]]


@pytest.mark.parametrize(
    ("op", "chosen", "sizes", "seq_lens"),
    [
        (DECODE, "batch_size=5", (5,), None),
        (ATTENTION, "seq_len=300", (1, 300), None),
        (ATTENTION, "seq_len=512,batch_size=4", (4, 512), None),
        (DECODE, "B=5", (5,), None),  # as tables have it
        (DECODE, " B = 5 ", (5,), None),
        (ATTENTION, "B=4 S=512", (4, 512), None),
        (PREFILL, "T=70,num_seqs=9", (70, 9, 10), None),
        (PREFILL, "total_seq_len=70,len_cu_seqlens=3", (70, 2, 3), None),
        (PREFILL, "seq_lens=2x3+64", (70, 3, 4), (3, 3, 64)),
        (PREFILL, "seq_lens=77777", (77777, 1, 2), None),
    ],
)
def test_axes_that_no_workload_has_give_a_twin(op, chosen, sizes, seq_lens):
    (w,) = select(op, embedded(op), chosen=[chosen])
    assert list(w.axes.items()) == list(zip(op.var_axes, sizes, strict=True))
    assert (w.seq_lens, w.index, w.origin) == (seq_lens, None, "twin")
    assert select(op, [], chosen=[chosen]) == [w]  # the same one whatever it is beside
    assert w.uuid not in {e.uuid for e in embedded(op)}


def test_every_size_can_be_chosen_by_the_label_that_tables_give_it():
    for op in registry.load().ops.values():
        for w in embedded(op)[:3]:
            label, _ = ops.label_of(op, w.axes)
            found = select(op, embedded(op), chosen=[label])
            labels = {ops.label_of(op, f.axes)[0] for f in found}
            assert w in found and labels == {label}, op.name


def test_twins_come_after_the_data_set_and_once():
    ws = embedded(DECODE)
    chosen = ["batch_size=5", "0", "batch_size=5", "batch_size=2"]
    picked = select(DECODE, ws, chosen=chosen)
    assert [w.axes["batch_size"] for w in picked] == [1, 5, 2] and picked[0] == ws[0]


def test_other_lengths_of_the_same_axes_are_another_twin():
    even, uneven, drawn = (
        select(PREFILL, [], chosen=[c])[0]
        for c in ("seq_lens=2x50", "seq_lens=1+99", "total_seq_len=100,num_seqs=2")
    )
    assert even.axes == uneven.axes == drawn.axes
    assert len({even.uuid, uneven.uuid, drawn.uuid}) == 3


@pytest.mark.parametrize(
    ("op", "chosen", "says"),
    [
        (DECODE, "54", "no workload '54' of gdn_decode: its 54 workloads have indices"),
        (DECODE, "50-54", "indices 0-53"),
        (DECODE, "901", "a uuid prefix of at least 4 hex digits"),
        (DECODE, "batchsize=4", "'batchsize'; did you mean batch_size?"),
        (DECODE, "head_size=64", "is always 128; choose by batch_size"),
        (DECODE, "B=0", "axis batch_size='0'; expected a positive whole number"),
        (DECODE, "seq_lens=4", "unknown axis of gdn_decode 'seq_lens'"),
        (PREFILL, "T=3,N=4", "num_seqs=4 sequences do not fit total_seq_len=3"),
        (PREFILL, "T=9,N=4,len_cu_seqlens=9", "len_cu_seqlens == num_seqs + 1"),
        (PREFILL, "seq_lens=4x0", "seq_lens='4x0'; expected lengths such as"),
        (PREFILL, "seq_lens=4x2,num_seqs=4", "seq_lens allows no other axes"),
        (ATTENTION, "batch_size=2", "; add seq_len for a twin"),
    ],
)
def test_invalid_selections_are_refused(op, chosen, says):
    with pytest.raises(UsageError) as e:
        select(op, embedded(op), chosen=[chosen])
    assert says in str(e.value) and "\n" not in str(e.value) and e.value.code == 2


def test_an_ambiguous_prefix_names_the_candidates():
    ids = ["abcd0000-aa", "abcd1000-aa", "abcd2000-aa", "abce"]
    ws = [Workload(id_, {"batch_size": 1}, i) for i, id_ in enumerate(ids)]
    with pytest.raises(UsageError, match="fits 3 workloads of gdn_decode: abcd0000-aa"):
        select(DECODE, ws, chosen=["abcd"])
    assert select(DECODE, ws, chosen=["abce"]) == [ws[3]]


def test_nothing_to_take():
    with pytest.raises(
        UsageError, match="no workloads of its own; name axes: --workload batch_size="
    ):
        select(DECODE, [])


# --- presets


def test_the_presets_that_ship():
    assert presets.names() == ["quick", "contest", "sweep", "peers"]
    quick, contest, sweep, peers = map(presets.load_preset, presets.names())
    assert quick.settings_for("gdn_decode") == {"seconds": 0.3}
    for name, numbers in (("gdn_decode", (10, 50, 3)), ("gdn_prefill", (1, 5, 3))):
        counts = dict(zip(("warmup", "iterations", "trials"), numbers, strict=True))
        assert contest.settings_for(name) == counts

    def chosen(op, preset):
        return select(op, embedded(op), preset=preset)

    for op in OPS.values():
        assert chosen(op, contest) == embedded(op)
    # the first of each size
    assert [w.index for w in chosen(DECODE, quick)] == [0, 18, 46]
    assert [w.index for w in chosen(PREFILL, quick)] == [22, 40, 87]
    assert [w.index for w in chosen(ATTENTION, quick)] == [2]
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 128, 256]
    assert [w.axes["batch_size"] for w in chosen(DECODE, sweep)] == sizes
    lens = [(64,), (512,), (2048,), (8192,), (32768,)]
    lens += [(2048,) * 4, (1024,) * 8, (256,) * 32, (64,) * 64, (1024, 7168)]
    picked = chosen(PREFILL, sweep)
    assert [w.seq_lens or (w.axes["total_seq_len"],) for w in picked] == lens
    assert len(chosen(DECODE, peers)) == 27 and len(chosen(PREFILL, peers)) == 17


def test_named_workloads_win_over_the_presets():
    ws = embedded(DECODE)
    assert select(DECODE, ws, chosen=["3"], preset=presets.load_preset("quick")) == [
        ws[3]
    ]
    assert select(DECODE, ws, preset=presets.load_preset("quick"), first=2) == [
        ws[0],
        ws[18],
    ]


def test_a_preset_takes_the_data_sets_own_workload():
    own = [Workload("mine", {"batch_size": 2}, 0, "dataset", {})]
    picked = select(DECODE, own, preset=presets.load_preset("sweep"))
    assert picked[1] is own[0] and {w.origin for w in picked if w is not own[0]} == {
        "twin"
    }


GOOD = (
    '[p]\nsummary = "s"\n[p.settings]\nseconds = 1\n[p.workloads]\ngdn_decode = [{ batch_size = 2'
    " }]\n"
)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('summary = "s"', "", "[p]: Object missing required field `summary`"),
        ("seconds = 1", "", "[p.settings]: seconds: expected either"),
        ("seconds = 1", "warmup = 1\ntrials = 3", "seconds: expected either"),
        ("= 1", "= 1\n[p.settings.gdn_decode]\nwarmup = 1.5", "settings.gdn_decode]"),
        ("batch_size = 2", "batch = 2", "gdn_decode[0]: unknown axis of gdn_decode"),
        ("gdn_decode =", "gdn_decod =", "no workloads for gdn_decode, it has gdn_deco"),
    ],
)
def test_a_broken_preset_names_file_and_key(tmp_path, monkeypatch, old, new, says):
    monkeypatch.setattr(paths, "CONFIGS_DIR", tmp_path)
    file = tmp_path / "presets.toml"
    file.write_text(GOOD)
    workloads = select(DECODE, embedded(DECODE), preset=presets.load_preset("p"))
    assert axes_of(workloads) == [{"batch_size": 2}]
    assert old in GOOD
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError) as e:
        select(DECODE, embedded(DECODE), preset=presets.load_preset("p"))
    assert str(file) in str(e.value) and says in str(e.value) and e.value.code == 2


# --- a data set folder


def definition_of(op) -> dict:
    return json.loads(json.dumps(pack.definition(op, REGISTRY)))


def row(op, name="w0", axes=None, inputs=None, **more) -> dict:
    axes = axes or {a: 2 for a in op.var_axes}
    workload = {"uuid": name, "axes": axes, "inputs": {} if inputs is None else inputs}
    return {"definition": op.definition, "workload": workload, **more}


def write_folder(root, op, rows, definition=None, file=None):
    d = root / "definitions" / op.op_type
    d.mkdir(parents=True, exist_ok=True)
    text = json.dumps(definition or definition_of(op))
    (d / f"{op.definition}.json").write_text(text)
    w = root / "workloads" / op.op_type
    w.mkdir(parents=True, exist_ok=True)
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    (w / (file or f"{op.definition}.jsonl")).write_text("\n".join(lines) + "\n")
    return root


def test_a_folders_workloads_come_in_its_order(tmp_path):
    inputs = {
        "q": {"type": "random"},
        "k": {"type": "safetensors", "path": "blob/x.safetensors", "tensor_key": "k"},
        "scale": {"type": "scalar", "value": 0.25},
    }
    rows = [
        row(DECODE, "b", {"batch_size": 3}, inputs),
        "",
        row(DECODE, "a", {"batch_size": 1, "head_size": 128}),
    ]
    write_folder(tmp_path, DECODE, rows)
    write_folder(tmp_path, PREFILL, [row(PREFILL, "c")])
    ws = from_folder(DECODE, tmp_path)
    assert ws == [
        Workload("b", {"batch_size": 3}, 0, "dataset", inputs),
        Workload("a", {"batch_size": 1}, 1, "dataset", {}),
    ]
    assert select(DECODE, ws, chosen=["1"]) == [ws[1]]
    assert [w.uuid for w in from_folder(PREFILL, tmp_path)] == ["c"]


def test_rows_are_found_anywhere_below_workloads(tmp_path):
    write_folder(
        tmp_path, PREFILL, [row(DECODE, "x"), row(PREFILL, "y")], file="deep.jsonl"
    )
    write_folder(tmp_path, DECODE, ["not json, and not ours"], file="other.jsonl")
    (tmp_path / "definitions" / "gdn" / "broken.json").write_text("{")
    assert [w.uuid for w in from_folder(DECODE, tmp_path)] == ["x"]


def test_fixed_axes_may_have_other_names(tmp_path):
    text = json.dumps(definition_of(DECODE)).replace("head_size", "d")
    write_folder(tmp_path, DECODE, [row(DECODE)], json.loads(text))
    assert len(from_folder(DECODE, tmp_path)) == 1


def changed(**changes) -> dict:
    d = definition_of(DECODE)
    for place, value in changes.items():
        kind, _, name = place.partition("__")
        if value is None:
            del d[kind][name]
        else:
            d[kind][name] = d[kind].get(name, {}) | value
    return d


def test_folders_that_are_not_there_or_empty(tmp_path):
    def says(root) -> str:
        with pytest.raises(MissingError) as e:
            from_folder(DECODE, root)
        assert e.value.code == 3 and "\n" not in str(e.value)
        return str(e.value)

    nowhere = tmp_path / "nowhere"
    assert "it has no definitions/ and no workloads/; name" in says(nowhere)
    assert not nowhere.exists()  # flashinfer-bench would have made it
    (tmp_path / "definitions").mkdir()
    assert "it has no workloads/" in says(tmp_path)
    (tmp_path / "workloads").mkdir()
    absent = f"has no definition {DECODE.definition} (gdn_decode); it has"
    assert f"{absent} none" in says(tmp_path)
    write_folder(tmp_path, PREFILL, [row(PREFILL)])
    assert f"{absent} {PREFILL.definition}" in says(tmp_path)
    write_folder(tmp_path, DECODE, [])
    absent = f"has no workloads of {DECODE.definition}; it has"
    assert f"{absent} {PREFILL.definition}" in says(tmp_path)


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        (
            changed(inputs__state={"dtype": "bfloat16"}),
            "state is bfloat16 [batch_size, 8",
        ),
        (
            changed(axes__head_size={"value": 64}),
            "q is bfloat16 [batch_size, 1, 4, 64]",
        ),
        (
            changed(inputs__scale={"shape": ["seq_len"]}),
            "scale is float32 [1]; that of",
        ),
        (
            changed(inputs__b=None),
            "it has q, k, v, state, A_log, a, dt_bias, scale; gdn",
        ),
        (changed(axes__head_size=None), "q is bfloat16 [batch_size, 1, 4, head_size]"),
    ],
)
def test_a_definition_that_is_not_ours(tmp_path, definition, says):
    write_folder(tmp_path, DECODE, [row(DECODE)], definition)
    with pytest.raises(MissingError) as e:
        from_folder(DECODE, tmp_path)
    assert f"{DECODE.definition}.json: " in str(e.value) and says in str(e.value)
    assert e.value.code == 3


FILE = {"type": "safetensors", "path": "p", "tensor_key": "q"}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"definition": ', "jsonl:2: not valid JSON: Input data was truncated"),
        ("[1, 2]", "jsonl:2: Expected `object`"),
        *[
            (row(DECODE, name=name), "$.workload.uuid")
            for name in ("", "a/b", "..\\x", "a\0b", "a\n", " ", "x" * 201)
        ],
        (row(DECODE, inputs={"q": FILE | {"path": "a\0b"}}), "$.workload.inputs"),
        (row(DECODE, inputs={"q": FILE | {"path": "../x"}}), "'../x' leads out of the"),
        (row(DECODE, inputs={"q": {"type": "file"}}), "$.workload.inputs"),
        (
            row(DECODE, axes={"batch": 2}),
            "axes batch=2; those of gdn_decode are batch_",
        ),
        (
            row(DECODE, axes={"batch_size": 2, "head_size": 64}),
            "jsonl:2: axes batch_size=2, head_size=64; those of",
        ),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, line, says):
    write_folder(tmp_path, DECODE, [row(DECODE, "fine"), line])
    with pytest.raises(MissingError) as e:
        from_folder(DECODE, tmp_path)
    assert says in str(e.value) and e.value.code == 3 and "\n" not in str(e.value)
    assert f"{DECODE.definition}.jsonl:2: " in str(e.value)


def test_many_workloads_cost_no_more_looks_at_folders_than_few(tmp_path, monkeypatch):
    """100,000 workloads of 8 files each took 45 s: each name was followed link by link,
    from the root.
    """
    resolve, looks = os.path.realpath, []

    def counted(*args, **how):
        looks.append(args)
        return resolve(*args, **how)

    monkeypatch.setattr(os.path, "realpath", counted)
    counts = []
    for n in (3, 300):
        rows = []
        for i in range(n):
            inputs = {k: FILE | {"path": f"blob/{i}-{k}"} for k in DECODE.inputs}
            rows.append(row(DECODE, f"w{i}", inputs=inputs))
        write_folder(tmp_path, DECODE, rows)
        looks.clear()
        assert len(from_folder(DECODE, tmp_path)) == n
        counts.append(len(looks))
    assert counts[0] == counts[1] <= 3


def test_rows_and_definitions_that_git_lfs_still_holds(tmp_path):
    write_folder(tmp_path, DECODE, LFS.split("\n"))
    with pytest.raises(
        MissingError, match="jsonl: a git-LFS pointer, .*run `git lfs pull`"
    ):
        from_folder(DECODE, tmp_path)
    (tmp_path / "definitions" / "gdn" / f"{DECODE.definition}.json").write_text(LFS)
    with pytest.raises(MissingError, match="json: a git-LFS pointer"):
        from_folder(DECODE, tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_tensors_are_read_from_plain_files(make, tmp_path):
    make(tmp_path / "x")
    with pytest.raises(MissingError, match="here: path 'x' is not a plain file"):
        trace_set.blob(tmp_path, "x", "here")
