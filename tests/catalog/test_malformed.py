"""Files that a person writes or hands to gdn, each wrong in one place: one line with
the file. msgspec's own rules are not tested here.
"""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest

from gdn_cli import paths
from gdn_cli.catalog import ops, pack, presets, registry
from gdn_cli.catalog.trace_set import from_folder
from gdn_cli.errors import GdnError
from gdn_cli.remote import settings

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]
ALGO = """
summary = "s"
language = "python"
entry_point = "main.py::run"
destination_passing = false
devices = ["cpu"]
[provenance]
source = "a test"
[tune]
file = "tuned.py"
size = ["batch_size"]
[tune.constants]
rows = [1, 2]
"""
PRESET = """
[p]
summary = "s"
[p.settings]
seconds = 1
[p.workloads]
gdn_prefill = [{ seq_lens = "4x16" }]
"""
OP = (paths.CONFIGS_DIR / "gdn_decode.toml").read_text()
MODAL = (paths.CONFIGS_DIR / "modal.toml").read_text()
SOLUTION = json.dumps(pack.pack(REGISTRY.find("pt-reference"), DECODE))
INPUTS = {"scale": {"type": "scalar", "value": 0.5}}
WORKLOAD = {"uuid": "u", "axes": {"batch_size": 2}, "inputs": INPUTS}
ROW = json.dumps({"definition": DECODE.definition, "workload": WORKLOAD})
DEFINITION = json.dumps(pack.definition(DECODE, REGISTRY))
HUGE = "9" * 5000
DEEP = "[" * 300 + "]" * 300


def algo(folder: Path, text: str) -> None:
    path = folder / "gdn_decode" / "mine" / "algo.toml"
    path.parent.mkdir(parents=True)
    (path.parent / "main.py").write_text("def run(): ...")
    path.write_text(text)
    registry.read_algo(path, "gdn_decode")


def op(folder: Path, text: str) -> None:
    (folder / "op.toml").write_text(text)
    ops.read_op(folder / "op.toml")


def preset(folder: Path, text: str) -> None:
    (folder / "presets.toml").write_text(text)
    presets.load_preset("p")


def modal(folder: Path, text: str) -> None:
    (folder / "modal.toml").write_text(text)
    settings.load()


def solution(folder: Path, text: str) -> None:
    (folder / "solution.json").write_text(text)
    pack.read_solution(folder / "solution.json", REGISTRY)


def row(folder: Path, row: str, definition: str = DEFINITION) -> None:
    for name in ("definitions", "workloads"):
        (folder / name).mkdir()
    (folder / "definitions" / f"{DECODE.definition}.json").write_text(definition)
    (folder / "workloads" / "w.jsonl").write_text(row)
    from_folder(DECODE, folder)


def definition(folder: Path, definition: str) -> None:
    row(folder, ROW, definition)


# a reader, the part of its good text to replace, the replacement, a part of the message
CASES = [
    (algo, '"s"', "3", "$.summary"),
    (algo, '"s"', '"s"\nsumary = 1', "unknown field `sumary`"),
    (algo, '"s"', '"s"\nsummary = "t"', "not valid TOML"),
    (algo, '"s"', f'"s"\nx = {HUGE}', "Exceeds the limit"),
    (algo, '"s"', f'"s"\nx = {DEEP}', "nested more than 100 deep"),
    (algo, '"s"', '"s"\n"a\\u001bb" = 1', "\\x1bb"),
    (algo, '"s"', f'"s"\n{"a" * 2000} = 1', "unknown field"),
    (algo, "run", "run\\n", "`$.entry_point`"),
    (algo, "main.py", "../main.py", "`$.entry_point`"),
    (algo, "main.py", "gone.py", "$.entry_point: expected a file of this folder"),
    (algo, '["cpu"]', '["cpu"]\nsetup = "a.cu::f"', "`$.setup`"),
    (algo, "tuned.py", "main.py", "$.tune.file: expected a file of its own"),
    (algo, "rows =", '"ro ws" =', "`$.tune.constants`"),
    (algo, "size =", 'where = "row"\nsize =', "where: expected a condition on the"),
    (op, "head_size = 128", 'head_size = "x"', "axes.head_size: expected a number"),
    (op, 'linear_in = ["v"', 'linear_in = ["w"', "linear_in: expected names of q, k"),
    (op, '"float32"', '"float33"', "dtype: expected names of float64"),
    (op, "new_state = 1e-5", "", "outputs: expected names of output"),
    (op, "new_state = 1e-5", "x = 1e-5\nnew_state = 1", "tolerance: expected names of"),
    (op, '["num_v_heads"]', '["heads"]', "A_log.shape: expected names of batch_size"),
    (op, '{ new_state = "state"', '{ new_state = "w"', "in_place.new_state: expected"),
    (preset, "seconds = 1", "trials = 1", "[p.settings]: seconds: expected either"),
    (modal, "idle = 2", "idle = -2", "$.limits.idle"),
    (solution, SOLUTION, "null", "Expected `object`"),
    (solution, SOLUTION, DEEP, "nested more than 100 deep"),
    (solution, '"author": "gdn"', f'"author": {HUGE}', "Integer value out of range"),
    (solution, '"name": "gdn', '"name": "\\u001bgdn', "$.name: expected printable"),
    (row, '"u"', '"a/b"', "$.workload.uuid"),
    (row, "0.5", "NaN", "not valid JSON: JSON is malformed"),
    (row, '"batch_size": 2', '"n": 2', "axes n=2; those of gdn_decode are batch_size"),
    (definition, '"value": 4', '"value": -4', "$.axes"),
]  # fmt: skip
GOOD = {
    algo: ALGO,
    op: OP,
    preset: PRESET,
    modal: MODAL,
    solution: SOLUTION,
    row: ROW,
    definition: DEFINITION,
}
BRACES = ["{", "}", "{nope}", "{}", "{0}", "{batch_size.real}", "{batch_size:9999}"]
CASES += [
    (op, '"B={batch_size}"', f"'{label}'", "label: expected names of batch_size")
    for label in BRACES
]


@pytest.mark.parametrize(("reader", "old", "new", "says"), CASES)
def test_mistakes_are_named_in_one_line(reader, old, new, says, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CONFIGS_DIR", tmp_path)
    assert old in GOOD[reader]
    with pytest.raises(GdnError) as e:
        reader(tmp_path, GOOD[reader].replace(old, new, 1))
    text = str(e.value)
    assert text.startswith(str(tmp_path)) and says in text
    assert text.isprintable() and len(text) < 700 and e.value.code in (2, 3)


@pytest.mark.parametrize("reader", GOOD)
def test_right_files_are_read(reader, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CONFIGS_DIR", tmp_path)
    reader(tmp_path, GOOD[reader])
