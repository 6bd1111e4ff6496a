"""Ops, presets and engines of one's own, in GDN_HOME/configs."""

from __future__ import annotations

import helpers
import pytest

from gdn_cli import paths
from gdn_cli.catalog import presets, registry
from gdn_cli.errors import UsageError
from gdn_cli.remote import engines

OP = """
definition = "scaled_sum_d{d}"
op_type = "toy"
summary = "y = a + 2 b"
reference = "pt-reference"
label = "N={n}"
linear_in = ["a", "b"]
flips = ["a"]
workloads = [{ n = 4 }, { n = 64 }]
axes = { n = "var", d = 16 }
[inputs]
a = { shape = ["n", "d"], dtype = "float32" }
b = { shape = ["n", "d"], dtype = "float32" }
[outputs]
y = { shape = ["n", "d"], dtype = "float32" }
[tolerance]
y = 1e-5
"""
RUN = "def run(a, b):\n    return a + 2 * b\n"


@pytest.fixture
def configs(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "home"))
    folder = paths.config_dirs()[1]
    assert folder == tmp_path / "home" / "configs"
    folder.mkdir(parents=True)
    (folder / "scaled_sum.toml").write_text(OP)
    return folder


@pytest.fixture
def algos(configs, tmp_path):
    helpers.write_algo(tmp_path, "pt-reference", RUN, op="scaled_sum")
    wrong = RUN.replace("2 *", "3 *")
    helpers.write_algo(tmp_path, "wrong", wrong, op="scaled_sum")
    return tmp_path


@pytest.mark.slow
def test_an_op_of_ones_own_is_listed_run_and_copied(algos, gdn):
    env = {"GDN_HOME": str(algos / "home"), "GDN_ALGOS": str(algos)}
    op = ["--op", "scaled_sum"]
    listed = gdn("list", *op, "--json", env=env).json["algos"]
    assert [a["algo"] for a in listed] == ["pt-reference", "wrong"]
    done = gdn("run", *op, "--json", env=env)
    verdicts = {(r["algo"], r["workload"]["axes"]["n"]) for r in done.json["records"]}
    assert verdicts == {(a, n) for a in ("pt-reference", "wrong") for n in (4, 64)}
    passed = {r["algo"] for r in done.json["records"] if r["status"] == "passed"}
    assert done.code == 1 and passed == {"pt-reference"}
    done = gdn("new", "mine", "--from", "wrong", *op, "--json", env=env)
    assert done.json["folder"] == str(algos / "scaled_sum" / "mine")


def test_its_reference_is_ones_own_too(algos):
    known = registry.load(str(algos))
    reference = known.reference(known.op("scaled_sum"))
    assert reference.folder == algos / "scaled_sum" / "pt-reference"
    decode = known.reference(known.op("gdn_decode"))
    assert decode.own_folder.is_relative_to(paths.ALGOS_DIR)
    with pytest.raises(UsageError, match="unknown algo of scaled_sum 'pt-reference'"):
        registry.load().reference(known.op("scaled_sum"))


def test_an_op_of_gdns_is_not_replaced(configs):
    (configs / "gdn_decode.toml").write_text(OP)
    with pytest.raises(UsageError, match="gdn_decode.toml: gdn has an op gdn_decode"):
        registry.load()


def test_an_op_may_be_like_one_of_gdns(configs):
    text = 'like = "gdn_decode"\ndefinition = "mine"\n[tolerance]\noutput = 1e-9\n'
    (configs / "mine.toml").write_text(text)
    op = registry.load().op("mine")
    assert op.tolerance == {"output": 1e-9, "new_state": 1e-5}


def test_a_preset_of_ones_own_wins_and_may_name_part_of_gdns(configs):
    text = "[mine]\nsummary = 's'\nsettings.seconds = 1\nworkloads.scaled_sum = 'all'\n"
    (configs / "presets.toml").write_text(f"[quick.settings]\nseconds = 0.1\n{text}")
    assert presets.names() == ["quick", "contest", "sweep", "peers", "mine"]
    quick = presets.load_preset("quick")
    assert quick.settings_for(None) == {"seconds": 0.1} and "gdn_mtp" in quick.workloads
    assert presets.load_preset("mine").workloads == {"scaled_sum": "all"}
    (configs / "presets.toml").write_text("[quick]\nsumary = 's'\n")
    with pytest.raises(
        UsageError, match=r"configs/presets.toml: \[quick\]: .*`sumary`"
    ):
        presets.load_preset("quick")


def test_an_engine_of_ones_own(configs):
    text = '[here]\ncommand = ["a"]\ncuda = false\nstart_s = 1\n[slurm]\ntime = 5\n'
    (configs / "engines.toml").write_text(text)
    assert engines.table("here").command == ("a",)
    assert engines.table("slurm").time == 5 and engines.table("slurm").cuda
