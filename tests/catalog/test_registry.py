"""Algos and ops as files say they are: names, ladders, broken files, the user's own
folders. No torch in here.
"""

from __future__ import annotations

import os

import pytest

from gdn_cli import paths
from gdn_cli.catalog import registry, scaffold
from gdn_cli.catalog.registry import Algo, Registry
from gdn_cli.errors import UsageError
from gdn_cli.report.book import ladder

OPS = registry.load().ops


def algo(full_name: str, after: str | None = None) -> Algo:
    op, name = full_name.split("/")
    return Algo(
        op=op, name=name, summary="", language="python", entry_point="main.py::run", destination_passing=True,
        modes=("cpu",), after=after,
    )  # fmt: skip


def known(*full_names: str, broken=()) -> Registry:
    return Registry(OPS, tuple(algo(n) for n in full_names), tuple(broken))


# --- names


@pytest.mark.parametrize(
    ("name", "op", "found"),
    [
        ("both", None, "gdn_decode/both"),  # decode first
        ("both", "gdn_prefill", "gdn_prefill/both"),
        ("gdn_prefill/both", None, "gdn_prefill/both"),
        ("gdn_prefill/both", "gdn_prefill", "gdn_prefill/both"),
        ("only", None, "gdn_prefill/only"),  # the only op that has it
        ("attention_fwd/all", None, "attention_fwd/all"),
    ],
)
def test_a_name_is_found(name, op, found):
    names = "gdn_decode/both gdn_prefill/both gdn_prefill/only gdn_decode/all"
    r = known(*names.split(), "attention_fwd/all")
    assert r.find(name, op).full_name == found


@pytest.mark.parametrize(
    ("name", "op", "says"),
    [
        (
            "two",
            None,
            "several ops have 'two': gdn_prefill/two, attention_fwd/two; add",
        ),
        ("cuda-v9", None, "algo 'cuda-v9'; did you mean cuda-v4 or cuda-v1?"),
        ("cuda-v1", "gdn_prefill", "algo of gdn_prefill 'cuda-v1'; there are: two"),
        ("gdn_prefill/cuda-v1", None, "algo of gdn_prefill 'cuda-v1'; there are: two"),
        (
            "gdn_decode/cuda-v1",
            "gdn_prefill",
            "is not an algo of gdn_prefill; drop --op",
        ),
        ("gdn_decod/cuda-v1", None, "op 'gdn_decod'; did you mean gdn_decode"),
        ("xyzzy", "gdn_decode", "'xyzzy'; there are: cuda-v1, cuda-v4"),
        ("", None, "unknown algo ''; there are: "),
    ],
)
def test_a_name_is_not_found(name, op, says):
    names = "gdn_decode/cuda-v1 gdn_decode/cuda-v4 gdn_prefill/two attention_fwd/two"
    with pytest.raises(UsageError) as e:
        known(*names.split()).find(name, op)
    assert says in str(e.value) and e.value.code == 2


def test_an_unknown_op_names_the_nearest():
    with pytest.raises(
        UsageError, match="unknown op 'gdn_prefil'; did you mean gdn_prefill"
    ):
        registry.load().op("gdn_prefil")


# --- the ladder


@pytest.mark.parametrize(
    ("rungs", "order"),
    [
        ({"b": None, "a": None, "pt-z": None}, ["a", "b", "pt-z"]),
        ({"a": "b", "b": "c", "c": None}, ["c", "b", "a"]),
        # no ladder's come last
        (
            {"v1": "pt-r", "v2": "v1", "fi": None, "pt-r": None},
            ["pt-r", "v1", "v2", "fi"],
        ),
        # two rungs on one: each with its own
        ({"z": None, "y2": "z", "y10": "z", "x": "y2"}, ["z", "y10", "y2", "x"]),
        # the rung below was deleted: its successor stays
        ({"a": "not-here", "b": "a"}, ["a", "b"]),
        ({"a": "a"}, ["a"]),
        # a cycle loses none and does not hang
        ({"a": "b", "b": "a", "d": None}, ["b", "a", "d"]),
    ],
)
def test_ladder_order(rungs, order):
    algos = [algo(f"gdn_decode/{name}", after) for name, after in rungs.items()]
    assert [a.name for a in registry._ladder(algos, "")] == order


def test_the_reference_is_the_lowest_rung():
    rungs = {"fi": None, "a": None, "b": "a", "pt": None}
    algos = [algo(f"gdn_decode/{name}", after) for name, after in rungs.items()]
    assert [a.name for a in registry._ladder(algos, "pt")] == ["pt", "a", "b", "fi"]


def test_the_shipped_ladders_have_no_missing_rung():
    r = registry.load()
    for op in r.ops:
        names = [a.name for a in r.algos_of(op)]
        assert names[0] == r.ops[op].reference
        for a in r.algos_of(op):
            assert a.after is None or names.index(a.after) < names.index(a.name), (
                a.full_name
            )


def test_each_shipped_algo_is_a_rung_or_says_that_it_is_a_peer():
    r = registry.load()
    for op in r.ops:
        known = ladder(r, op)
        rungs = {r.ops[op].reference, *known.after}
        assert rungs | known.peers == set(known.order) and not rungs & known.peers, op


def test_only_what_is_declared_is_a_peer(tmp_path, write_algo):
    """Neither an algo without `after`, nor one after an algo that is not there; and a
    copy of a peer is none, while the peer stays one.
    """
    for name, keys in {
        "alone": {},
        "lost": {"after": "gone"},
        "theirs": {"peer": True},
    }.items():
        write_algo(tmp_path, name, "def run(): ...", **keys)
    known = registry.load(str(tmp_path))
    scaffold.new(known, "copy", known.find("fi-baseline"), tmp_path)
    found = ladder(registry.load(str(tmp_path)), "gdn_decode")
    assert (
        found.peers == {"fi-baseline", "fla-upstream", "theirs"}
        and found.after["copy"] == "fi-baseline"
    )
    assert set(found.order[-3:]) == found.peers and found.order[0] == "pt-reference"


# --- what ships


def test_every_shipped_algo_and_config_loads():
    r = registry.load()
    assert r.broken == ()
    folders = {
        f"{p.parent.parent.name}/{p.parent.name}"
        for p in paths.ALGOS_DIR.glob("*/*/algo.toml")
    }
    assert {a.full_name for a in r.algos} == folders and len(folders) >= 14
    assert len(r.ops) == 18 and list(r.ops)[0] == "gdn_decode"
    for op in r.ops.values():
        assert r.reference(op).language == "python" and "cpu" in r.reference(op).modes
        assert op.baseline is None or r.find(op.baseline, op.name)
    for a in r.algos:
        assert a.provenance["source"], a.full_name
        assert a.provenance["license"] == "Apache-2.0", a.full_name
        assert a.entry_point.endswith("::run") and "\n" not in a.summary, a.full_name
        assert not {"cpu", "interpreter"} <= set(a.modes), a.full_name


def test_the_definitions_are_the_contests():
    decode, prefill = OPS["gdn_decode"], OPS["gdn_prefill"]
    assert decode.definition == "gdn_decode_qk4_v8_d128_k_last"
    names = "q k v state A_log a dt_bias b".split()
    assert list(decode.inputs) == [*names, "scale"]
    assert list(prefill.inputs) == [*names, "cu_seqlens", "scale"]
    assert list(decode.outputs) == ["output", "new_state"]
    assert decode.shape(decode.inputs["state"], {"batch_size": 3}) == (3, 8, 128, 128)
    assert decode.shape(decode.inputs["scale"], {"batch_size": 3}) == ()
    axes = {"total_seq_len": 7, "num_seqs": 2, "len_cu_seqlens": 3}
    assert prefill.shape(prefill.outputs["output"], axes) == (7, 8, 128)
    assert prefill.shape(prefill.inputs["cu_seqlens"], axes) == (3,)


# --- broken algo.toml

# name of the folder -> (arguments of write_algo, a part of the error)
BROKEN = {
    "no-key": (dict(drop=("summary",)), "missing required field `summary`"),
    "unknown-device": (dict(devices=["cpu", "tpu"]), "'tpu' - at `$.devices[1]`"),
    "unknown-key": (dict(sumary="typo"), "unknown field `sumary`"),
    "no-entry-file": (
        dict(entry_point="gone.py::run"),
        "$.entry_point: expected a file",
    ),
    "Upper": ({}, "folder name 'Upper': expected lower case letters"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_algo_toml_names_file_and_key(name, tmp_path, write_algo):
    keys, says = BROKEN[name]
    folder = write_algo(tmp_path, name, "def run(): ...", **keys)
    r = registry.load(str(tmp_path))
    (broken,) = r.broken
    assert (broken.op, broken.name) == ("gdn_decode", name)
    text = str(broken.error)
    assert broken.error.code == 2 and text.startswith(str(folder)) and says in text
    # the rest stands
    assert r.find("pt-reference").folder == paths.ALGOS_DIR / "gdn_decode/pt-reference"
    with pytest.raises(UsageError) as e:
        r.find(name)
    assert e.value is broken.error


def test_broken_algos_do_not_take_the_list_down(tmp_path, write_algo, gdn):
    write_algo(tmp_path, "whole", "def run(): ...")
    for name, (keys, _) in BROKEN.items():
        write_algo(tmp_path, name, "def run(): ...", **keys)
    done = gdn("list", "--json", "--algos", tmp_path)
    assert done.code == 0 and done.err == ""
    assert {a["algo"] for a in done.json["algos"]} >= {"whole", "pt-reference"}
    assert {b["algo"] for b in done.json["broken"]} == set(BROKEN)
    shown = gdn("list", env={"GDN_ALGOS": str(tmp_path)})
    text = " ".join(shown.out.split())
    assert shown.code == 0 and "whole" in text and "pt-reference" in text
    for name, (_, says) in BROKEN.items():
        assert f"broken gdn_decode/{name}:" in text
        assert says in text


# --- the user's own folders


def test_the_users_folder_stands_in_for_ours(tmp_path, write_algo):
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_algo(mine, "cpp-v1", "#", summary="mine")
    write_algo(other, "cpp-v1", "#", summary="other")
    write_algo(other, "extra", "#", summary="other")
    r = registry.load(os.pathsep.join((str(mine), str(other))))
    assert r.find("cpp-v1").summary == "mine" and r.find("extra").summary == "other"
    assert [a.full_name for a in r.algos].count("gdn_decode/cpp-v1") == 1
    assert registry.load().find("cpp-v1").language == "cpp"


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(
        UsageError,
        match=f"no such algos folder: {tmp_path}/none; it holds <op>/<algo>/algo.toml",
    ):
        registry.load(str(tmp_path / "none"))
