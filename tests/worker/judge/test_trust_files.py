"""Files that somebody else wrote: nothing of them is carried away, run or followed that
lies outside their folder, and none of them is more than one clear line.
"""

from __future__ import annotations

import json
import os
import stat

import helpers
import pytest
import torch
from safetensors.torch import save_file

from gdn_cli import parsing, paths
from gdn_cli.catalog import pack, registry, trace_set
from gdn_cli.catalog.workloads import Workload
from gdn_cli.errors import MissingError, UsageError
from gdn_cli.records import store
from gdn_cli.worker.judge import dataset

OPS = registry.load().ops
DECODE = OPS["gdn_decode"]
RUN = "def run(*x):\n    return x\n"


def broken(folder) -> dict[str, str]:
    return {b.name: str(b.error) for b in registry.load(str(folder)).broken}


# --- an algo's files


@pytest.fixture
def secret(tmp_path):
    """A file next to the folder of algos."""
    file = tmp_path / "secret.py"
    file.write_text("# what is nobody's business\n")
    return file


@pytest.fixture
def algos(tmp_path):
    """A folder with one algo that is right."""
    helpers.write_algo(
        tmp_path / "algos", "good", {"main.py": RUN, "half.py": "# half\n"}
    )
    return tmp_path / "algos"


@pytest.mark.parametrize(
    "way", ["absolute", "three parts", "up", "link", "linked folder"]
)
def test_shares_stay_in_the_folder_of_algos(way, algos, secret):
    (algos / "gdn_decode" / "good" / "link.py").symlink_to(secret)
    (algos / "gdn_decode" / "away").symlink_to(secret.parent)
    name = {
        "absolute": str(secret),
        "three parts": "/etc/passwd",
        "up": "../algos/secret.py",
        "link": "gdn_decode/good/link.py",
        "linked folder": "gdn_decode/away/secret.py",
    }[way]
    helpers.write_algo(algos, "thief", RUN, shares=[name])
    assert "$.shares: expected files of other algos" in broken(algos)["thief"]


@pytest.mark.parametrize("file", ["main.py", "more.py", "tuned.py"])
def test_a_source_that_is_a_link_out_of_its_folder_is_refused(file, algos, secret):
    tune = '[tune]\nfile = "tuned.py"\nsize = ["batch_size"]\nconstants = { rows = [1, 2] }'
    folder = helpers.write_algo(
        algos, "thief", {"other.py": "# x\n"} if file == "main.py" else RUN, extra=tune
    )
    (folder / file).symlink_to(secret)
    known = registry.load(str(algos))
    if file == "more.py":  # no key of algo.toml names it: it is seen when it is packed
        with pytest.raises(UsageError, match="more.py: not a plain file of"):
            pack.pack(known.find("thief"), DECODE)
    else:
        key = {"main.py": "entry_point", "tuned.py": "tune.file"}[file]
        assert f"$.{key}: expected a file of" in broken(algos)["thief"]
    assert "nobody" not in json.dumps(pack.pack(known.find("good"), DECODE))


def test_links_inside_the_folder_are_as_good_as_files(algos):
    folder = helpers.write_algo(
        algos, "linked", {"real.py": RUN}, entry_point="real.py::run"
    )
    (folder / "main.py").symlink_to("real.py")
    (algos / "gdn_decode" / "alias").symlink_to("linked")  # and a whole algo may be one
    known = registry.load(str(algos))
    for name in ("linked", "alias"):
        sources = pack.pack(known.find(name), DECODE)["sources"]
        assert {s["path"] for s in sources} == {"main.py", "real.py"}
        assert {s["content"] for s in sources} == {RUN}


def test_a_pipe_among_the_sources_does_not_block(algos):
    os.mkfifo(helpers.write_algo(algos, "piped", RUN) / "more.py")
    toml = helpers.write_algo(algos, "piped-toml", RUN) / "algo.toml"
    toml.unlink()
    os.mkfifo(toml)
    known = registry.load(str(algos))
    assert broken(algos) == {"piped-toml": f"{toml}: not a plain file"}
    with pytest.raises(UsageError, match="more.py: not a plain file"):
        pack.pack(known.find("piped"), DECODE)


_BRACKETS = "x = " + "[" * 5000 + "]" * 5000
BAD_TOML = {
    "deep": _BRACKETS,
    "less deep": "x = " + "[" * 150 + "]" * 150,
    "dotted": ".".join("a" * 2000) + " = 1",
    "long": "x = " + "9" * 10_000,
    "long hex": "x = 0x" + "f" * 10_000,
    "65 bits": f"x = {2**65}",
    "long where a list belongs": 'shares = 0x' + "f" * 10_000,
    "a long name": f'entry_point = "{"a" * 5000}.py::run"',
    "zero byte": "summary = '\0'",
    "nothing": "",
    "binary": "\x7fELF\x02\x01",
}  # fmt: skip


def test_an_algo_toml_of_any_kind_breaks_itself_only(algos, gdn):
    for i, text in enumerate(BAD_TOML.values()):
        (helpers.write_algo(algos, f"bad-{i}", RUN) / "algo.toml").write_text(text)
    (helpers.write_algo(algos, "a-folder", RUN) / "algo.toml").unlink()
    (algos / "gdn_decode" / "a-folder" / "algo.toml").mkdir()
    says = broken(algos)
    assert set(says) == {"a-folder", *(f"bad-{i}" for i in range(len(BAD_TOML)))}
    for name, text in says.items():
        assert text.startswith(f"{algos}/gdn_decode/{name}/algo.toml: ")
        assert "\n" not in text and len(text) < 6000
    whole = {a.name for a in registry.load(str(algos)).algos}
    assert {"good", "pt-reference", "cuda-v5"} <= whole
    done = gdn("run", "--algos", algos, "--algo", "bad-0", "-w", "0")
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert "nested more than 100 deep" in done.err


# --- JSON

DEEP = "[" * 5000 + "]" * 5000
TOO_DEEP = "tables are nested more than 100 deep"
TOO_LONG = "it has a number that does not fit in 64 bits"
BAD_JSON = {
    "deep": (DEEP, TOO_DEEP),
    "deep below a name": ('{"a":' * 5000 + "1" + "}" * 5000, TOO_DEEP),
    "less deep": ("[" * 101 + "]" * 101, TOO_DEEP),
    "long": ("9" * 10_000, "Integer value out of range"),
    "long below a name": ('{"a": [1, -' + "9" * 400 + "]}", TOO_LONG),
    "endless": ('{"a": 1e99999}', "Number out of range - at `$[...]`"),
    "half a character": ('{"a": "\\ud800"}', "Input data was truncated"),
    "nothing": ("", "Input data was truncated"),
}


@pytest.mark.parametrize("what", BAD_JSON)
def test_invalid_json_is_one_clear_line(what, tmp_path):
    text, says = BAD_JSON[what]
    file = tmp_path / "x.json"
    file.write_text(text)
    for kind in (UsageError, MissingError):
        with pytest.raises(kind) as e:
            parsing.read_json(file, kind)
        assert str(e.value) == f"{file}: not valid JSON: {says}"


@pytest.mark.parametrize("text", [DEEP, "\0"])
@pytest.mark.parametrize(
    ("args", "code"),
    [
        ("report x.json", 2),
        ("run x.json -w 0", 2),
        ("compare x.json pt-reference", 2),
        ("profile x.json", 2),
        ("modal bench --resume x.json", 2),
        ("run --algo pt-reference --dataset data -w 0", 3),
    ],
)
@pytest.mark.sampled(7)
def test_every_command_that_reads_json_says_so_in_one_line(
    args, code, text, tmp_path, gdn
):
    (tmp_path / "x.json").write_text(text)
    for name in ("definitions", "workloads"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / "definitions" / f"{DECODE.definition}.json").write_text(text)
    home = {"GDN_HOME": str(tmp_path / "home")}
    done = gdn(*args.split(), cwd=tmp_path, env=home)
    assert (done.code, done.out) == (code, "") and "Traceback" not in done.err
    assert "not valid JSON: " in done.err and len(done.err.splitlines()[0]) < 500


# --- a data set's paths


def fetched(root, path):
    inputs = {"A_log": tensor(path)}
    row = Workload("0", {"batch_size": 1}, 0, "dataset", inputs)
    return dataset.load_inputs(DECODE, row, "cpu", root)


def tensor(path) -> dict:
    return {"type": "safetensors", "path": str(path), "tensor_key": "A_log"}


@pytest.mark.parametrize(
    "path", ["../x", "{tmp}/x", "blob/../../x", "link", "away/x", "{root}/inside"]
)
def test_a_data_set_s_paths_stay_inside_it(path, tmp_path):
    root = tmp_path / "data"
    (root / "blob").mkdir(parents=True)
    save_file({"A_log": torch.zeros(8)}, tmp_path / "x")
    save_file({"A_log": torch.zeros(8)}, root / "inside")
    (root / "link").symlink_to("../x")
    (root / "away").symlink_to(tmp_path)
    (root / "good").symlink_to("inside")
    assert torch.equal(fetched(root, "good")[4], torch.zeros(8))
    path = path.format(tmp=tmp_path, root=root)
    says = "input A_log: path '.*leads out of the data set"
    with pytest.raises(MissingError, match=says):
        fetched(root, path)
    for name in ("definitions", "workloads"):
        (root / name).mkdir()
    definition = json.dumps(pack.definition(DECODE, registry.load()))
    (root / "definitions" / f"{DECODE.definition}.json").write_text(definition)
    row = {"uuid": "u", "axes": {"batch_size": 1}, "inputs": {"A_log": tensor(path)}}
    line = json.dumps({"definition": DECODE.definition, "workload": row})
    (root / "workloads" / "x.jsonl").write_text(f"{line}\n")
    with pytest.raises(MissingError, match=f"x.jsonl:1: {says}"):
        trace_set.from_folder(DECODE, root)


def test_the_cache_of_hugging_face_keeps_its_files_beside_the_snapshot(tmp_path):
    home = tmp_path / "datasets--x--y"
    root = home / "snapshots" / "123abc"
    root.mkdir(parents=True)
    (home / "blobs").mkdir()
    save_file({"A_log": torch.ones(8)}, home / "blobs" / "hash")
    (root / "x").symlink_to("../../blobs/hash")
    assert torch.equal(fetched(root, "x")[4], torch.ones(8))


def test_tensors_come_from_plain_files(tmp_path):
    os.mkfifo(tmp_path / "x")
    with pytest.raises(MissingError, match="path 'x' is not a plain file"):
        fetched(tmp_path, "x")


# --- gdn's own folders


def rights(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_gdns_own_folders_are_private_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "new" / "home"))
    store.open_document("run", {}, None)
    for folder in (tmp_path / "new", tmp_path / "new" / "home", paths.runs_dir()):
        assert rights(folder) == 0o700
    (tmp_path / "old").mkdir()
    (tmp_path / "old").chmod(0o755)
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "old"))
    store.open_document("run", {}, None)
    # theirs stays as they made it
    assert rights(tmp_path / "old") == 0o755 and rights(paths.runs_dir()) == 0o700


@pytest.fixture
def below_tmp(tmp_path, monkeypatch):
    """GDN_HOME with white space, and a temporary folder that all may write to: where
    builds then go.
    """
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "with space"))
    return shared / f"gdn-builds-{os.getuid()}"


def test_builds_below_the_temporary_folder_are_made_for_this_user_alone(below_tmp):
    assert paths.builds_dir() == below_tmp and rights(below_tmp) == 0o700
    assert paths.planted(below_tmp / "py311-cpu") is None


@pytest.mark.parametrize("plant", ["open", "readable", "link", "file", "somebody's"])
def test_builds_that_another_user_may_have_planted_are_refused(
    plant, below_tmp, tmp_path
):
    if plant == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        below_tmp.symlink_to(tmp_path / "elsewhere")
    elif plant == "file":
        below_tmp.write_text("")
    else:
        below_tmp.mkdir(mode=0o700)
        below_tmp.chmod({"open": 0o777, "readable": 0o755}.get(plant, 0o700))
    if plant == "somebody's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(below_tmp, 1234, 1234)
    with pytest.raises(MissingError) as e:
        paths.builds_dir()
    assert str(below_tmp) in str(e.value) and "GDN_HOME" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_build_cache_below_a_folder_of_all_users_is_looked_at(tmp_path):
    shared = tmp_path / "shared"
    mine, builds = shared / "mine", shared / "mine" / "builds"
    builds.mkdir(parents=True)
    shared.chmod(0o1777)
    for folder in (mine, builds):
        folder.chmod(0o755)
    assert paths.planted(builds) is paths.planted(shared / "not-there" / "x") is None
    mine.chmod(0o777)
    assert paths.planted(builds) == f"others may write to {mine}"
    mine.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(mine, 1234, 1234)
        assert paths.planted(builds) == f"{mine} belongs to another user"
