"""Files that a person writes or hands to gdn, each wrong in one place: one line with
the file, the path and no more.
"""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest

from gdn_cli import parsing, paths
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
PRESET = (
    '[p]\nsummary = "s"\n[p.settings]\nseconds = 1\n[p.workloads]\ngdn_decode = [{ batch_size = 2'
    " }]\n"
)
OP = (paths.CONFIGS_DIR / "gdn_decode.toml").read_text()
MODAL = (paths.CONFIGS_DIR / "modal.toml").read_text()
SOLUTION = json.dumps(pack.pack(REGISTRY.find("pt-reference"), DECODE))
INPUTS = {"scale": {"type": "scalar", "value": 0.5}}
WORKLOAD = {"uuid": "u", "axes": {"batch_size": 2}, "inputs": INPUTS}
ROW = json.dumps({"definition": DECODE.definition, "workload": WORKLOAD})
DEFINITION = json.dumps(pack.definition(DECODE, REGISTRY))
HUGE = "9" * 5000
DEEP = "[" * 300 + "]" * 300


def read_algo(folder: Path, text: str) -> None:
    path = folder / "gdn_decode" / "mine" / "algo.toml"
    path.parent.mkdir(parents=True)
    (path.parent / "main.py").write_text("def run(): ...")
    path.write_text(text)
    registry.read_algo(path, "gdn_decode")


def read_op(folder: Path, text: str) -> None:
    (folder / "op.toml").write_text(text)
    ops.read_op(folder / "op.toml")


def read_preset(folder: Path, text: str) -> None:
    (folder / "presets.toml").write_text(text)
    presets.load_preset("p")


def read_modal(folder: Path, text: str) -> None:
    (folder / "modal.toml").write_text(text)
    settings.load()


def read_solution(folder: Path, text: str) -> None:
    (folder / "solution.json").write_text(text)
    pack.read_solution(folder / "solution.json", REGISTRY)


def read_folder(folder: Path, row: str = ROW, definition: str = DEFINITION) -> None:
    for name in ("definitions", "workloads"):
        (folder / name).mkdir()
    (folder / "definitions" / f"{DECODE.definition}.json").write_text(definition)
    (folder / "workloads" / "w.jsonl").write_text(row)
    from_folder(DECODE, folder)


def read_definition(folder: Path, definition: str) -> None:
    read_folder(folder, ROW, definition)


# reader, a good text, the part to replace, its replacement, the file, the place in the
# message
CASES = [
    (read_algo, ALGO, '"s"', "3", "algo.toml", "$.summary: expected text, got 3"),
    (read_algo, ALGO, '"s"', '" "', "algo.toml", "$.summary: expected text, got ' '"),
    (
        read_algo,
        ALGO,
        '"s"',
        "2020-01-01",
        "algo.toml",
        "$.summary: expected text, got datetime.date",
    ),
    (
        read_algo,
        ALGO,
        '"s"',
        '"s"\nsumary = 1',
        "algo.toml",
        "$.sumary: unknown key; did you mean summary",
    ),
    (read_algo, ALGO, '"s"', '"s"\nsummary = "t"', "algo.toml", "not valid TOML"),
    (
        read_algo,
        ALGO,
        '"s"',
        f'"s"\nx = {HUGE}',
        "algo.toml",
        "a number that does not fit in 64 bits",
    ),
    (
        read_algo,
        ALGO,
        '"s"',
        f'"s"\nx = {DEEP}',
        "algo.toml",
        "nested more than 100 deep",
    ),
    (
        read_algo,
        ALGO,
        '"s"',
        '"s"\n"a\\u001bb" = 1',
        "algo.toml",
        '$["a\\u001bb"]: unknown key',
    ),
    (
        read_algo,
        ALGO,
        "run",
        "run\\n",
        "algo.toml",
        "$.entry_point: expected 'file::symbol'",
    ),
    (
        read_algo,
        ALGO,
        "false",
        "0",
        "algo.toml",
        "$.destination_passing: expected true or false, got 0",
    ),
    (
        read_algo,
        ALGO,
        '["cpu"]',
        '{ cpu = "x" }',
        "algo.toml",
        "$.devices: expected a list of cuda, cpu",
    ),
    (
        read_algo,
        ALGO,
        '["cpu"]',
        '["cpu", 3]',
        "algo.toml",
        "$.devices: expected a list of cuda, cpu",
    ),
    (
        read_algo,
        ALGO,
        '"a test"',
        "[1]",
        "algo.toml",
        "$.provenance.source: expected text, got [1]",
    ),
    (
        read_algo,
        ALGO,
        "[1, 2]",
        "[1, -2147483649]",
        "algo.toml",
        "$.tune.constants.rows: expected a list of different",
    ),
    (
        read_algo,
        ALGO,
        "[1, 2]",
        "[]",
        "algo.toml",
        "$.tune.constants.rows: expected a list of different",
    ),
    (
        read_algo,
        ALGO,
        "rows =",
        '"ro ws" =',
        "algo.toml",
        '$.tune.constants["ro ws"]: expected a name',
    ),
    (
        read_algo,
        ALGO,
        "rows =",
        '"a.b" = [1]\nrows = "x"\nz =',
        "algo.toml",
        "$.tune.constants.rows: expected a list",
    ),
    (
        read_algo,
        ALGO,
        "[tune]",
        "[constants]\nrows = 8\n[tune]",
        "algo.toml",
        "$.constants: unknown key",
    ),
    (
        read_op,
        OP,
        "head_size = 128",
        "head_size = -1",
        "op.toml",
        "$.axes.head_size: expected a positive whole number",
    ),
    (
        read_op,
        OP,
        "head_size = 128",
        'head_size = "x"',
        "op.toml",
        "$.axes.head_size: expected a positive whole",
    ),
    (
        read_op,
        OP,
        "new_state = 1e-5",
        "new_state = nan",
        "op.toml",
        "$.tolerance.new_state: expected a positive number",
    ),
    (
        read_op,
        OP,
        "new_state = 1e-5",
        "new_state = -1.0",
        "op.toml",
        "$.tolerance.new_state: expected a positive",
    ),
    (
        read_op,
        OP,
        'linear_in = ["v"',
        'linear_in = ["w"',
        "op.toml",
        "$.linear_in: expected inputs",
    ),
    *[
        (
            read_op,
            OP,
            'label = "B={batch_size}"',
            f"label = '{label}'",
            "op.toml",
            "$.label: expected text; {NAME} may be",
        )
        for label in (
            "{",
            "}",
            "B={nope}",
            "{}",
            "{0}",
            "{batch_size.real}",
            "{batch_size!r}",
            "{batch_size:99999999999}",
        )
    ],
    *[
        (
            read_op,
            OP,
            'definition = "',
            f'definition = "{braces}',
            "op.toml",
            "$.definition: expected text; {NAME} may be",
        )
        for braces in (
            "{",
            "{nope}",
            "{head_size.x}",
            "{head_size[0]}",
            "{batch_size}",
            "{head_size:9999999999}",
        )
    ],
    (
        read_op,
        OP,
        'flops = "',
        'flops = "1/0 * ',
        "op.toml",
        "$.flops: expected a formula of batch_size,",
    ),
    (
        read_op,
        OP,
        "constraints = [",
        'constraints = ["1/0", ',
        "op.toml",
        "$.constraints[0]: expected a condition that has",
    ),
    (
        read_op,
        OP,
        "constraints = [",
        'constraints = ["num_v_heads % (head_size - 128) == 0", ',
        "op.toml",
        "$.constraints[0]: expected a condition that has an answer (it divides by zero)",
    ),
    (
        read_op,
        OP,
        "constraints = [",
        f'constraints = ["{"9" * 400} / batch_size > 1.5", ',
        "op.toml",
        "$.constraints[0]: expected a condition that has an answer (its numbers are too large)",
    ),
    (
        read_preset,
        PRESET,
        "seconds = 1",
        "seconds = nan",
        "presets.toml",
        "$.p.settings.seconds: expected a positive",
    ),
    (
        read_preset,
        PRESET,
        "seconds = 1",
        "seconds = true",
        "presets.toml",
        "$.p.settings.seconds: expected a positive",
    ),
    (
        read_preset,
        PRESET,
        "seconds = 1",
        "warmup = -1",
        "presets.toml",
        "$.p.settings.warmup: expected a whole number",
    ),
    (read_preset, PRESET, "= 2", "= 0", "presets.toml", "$.p.workloads.gdn_decode[0]"),
    (
        read_preset,
        PRESET,
        "{ batch_size = 2 }",
        "{}",
        "presets.toml",
        "$.p.workloads.gdn_decode[0]: expected axes such",
    ),
    (read_preset, "p = 3\n", "", "", "presets.toml", "$.p: expected a table, got 3"),
    (
        read_modal,
        MODAL,
        "idle = 2",
        "idle = -2",
        "modal.toml",
        "$.limits.idle: expected a positive whole number, got -2",
    ),
    (
        read_modal,
        MODAL,
        "cpu = 4 ",
        "cpu = 4.5 ",
        "modal.toml",
        "$.container.cpu: expected a positive whole number",
    ),
    (
        read_modal,
        MODAL,
        'exact = ["H100"]',
        "exact = 3",
        "modal.toml",
        "$.gpus.exact: expected a list, got 3",
    ),
    (
        read_modal,
        MODAL,
        'A10 = ["A10", "A10G"]',
        "A10 = [1]",
        "modal.toml",
        "$.gpus.devices.A10[0]: expected text",
    ),
    (
        read_modal,
        MODAL,
        "[volumes]",
        "[volume]",
        "modal.toml",
        "$.volume: unknown key; did you mean volumes",
    ),
    (
        read_solution,
        SOLUTION,
        SOLUTION,
        "null",
        "solution.json",
        "$: expected a table, got None",
    ),
    (
        read_solution,
        SOLUTION,
        SOLUTION,
        DEEP,
        "solution.json",
        "nested more than 100 deep",
    ),
    (
        read_solution,
        SOLUTION,
        '"author": "gdn"',
        f'"author": {HUGE}',
        "solution.json",
        "does not fit in 64 bits",
    ),
    (
        read_solution,
        SOLUTION,
        '"author": "gdn"',
        '"author": "\\ud800"',
        "solution.json",
        "half a character",
    ),
    (
        read_solution,
        SOLUTION,
        '"name": "gdn',
        '"name": "\\u001bgdn',
        "solution.json",
        "$.name: expected printable text",
    ),
    (
        read_solution,
        SOLUTION,
        '"language": "python"',
        '"language": ["c"]',
        "solution.json",
        "$.spec.language: expected",
    ),
    (
        read_solution,
        SOLUTION,
        '"dependencies": []',
        '"dependencies": [1]',
        "solution.json",
        "$.spec.dependencies[0]: exp",
    ),
    (
        read_folder,
        ROW,
        '"u"',
        "null",
        "w.jsonl:1",
        "$.workload.uuid: expected text without / and control characters, got None",
    ),
    (
        read_folder,
        ROW,
        "0.5",
        "NaN",
        "w.jsonl:1",
        "not valid JSON: it has NaN, which is not a number",
    ),
    (
        read_folder,
        ROW,
        "0.5",
        "1e999",
        "w.jsonl:1",
        "a number that does not fit in 64 bits",
    ),
    (
        read_folder,
        ROW,
        "0.5",
        "true",
        "w.jsonl:1",
        "$.workload.inputs.scale.value: expected a number, got True",
    ),
    (
        read_folder,
        ROW,
        '"scalar"',
        "{}",
        "w.jsonl:1",
        "$.workload.inputs.scale.type: expected 'random' or 'scalar'",
    ),
    (
        read_definition,
        DEFINITION,
        '"axes": {',
        '"axes": null, "a": {',
        ".json",
        "$.axes: expected a table, got None",
    ),
    (
        read_definition,
        DEFINITION,
        '"value": 4',
        '"value": -4',
        ".json",
        "expected a positive whole number, got -4",
    ),
]


@pytest.mark.parametrize(("reader", "good", "old", "new", "file", "says"), CASES)
def test_mistakes_are_named_in_one_line(
    reader, good, old, new, file, says, tmp_path, monkeypatch
):
    monkeypatch.setattr(paths, "CONFIGS_DIR", tmp_path)
    assert old in good
    with pytest.raises(GdnError) as e:
        reader(tmp_path, good.replace(old, new, 1))
    text = str(e.value)
    assert text.startswith(str(tmp_path)) and f"{file}: " in text and says in text
    assert text.isprintable() and len(text) < 700 and e.value.code in (2, 3)


def test_the_schema_of_algo_toml_has_its_keys():
    found = parsing.schema(registry.AlgoFile)["$defs"]["AlgoFile"]
    assert {"summary", "language", "entry_point", "devices", "tune"} <= set(
        found["properties"]
    )
    assert found["additionalProperties"] is False and "provenance" in found["required"]
    assert not {"op", "name", "folder", "solution"} & set(found["properties"])
