"""The kernels' sources: the place of shared device code, and their ladders."""

import re
from pathlib import Path

import helpers
import pytest

SOURCES = [
    path
    for path in sorted(helpers.OURS.rglob("*"))
    if path.suffix in (".cu", ".cuh", ".h", ".cpp", ".py", ".md")
]


def test_device_code_of_several_algos_lies_in_cuda():
    """Only tables that `gdn tune` generates are shared from an algo's own folder, next
    to its algo.toml.
    """
    algos = helpers.REGISTRY.algos
    generated = {algo.folder / algo.tune.file for algo in algos if algo.tune}
    for algo in algos:
        for path in set(algo.shares) - generated:
            shared = path.parent.parent == helpers.OURS / "_cuda"
            assert shared or path.suffix == ".py", algo.full_name


def test_names_are_those_of_one_file():
    """A packed solution is one folder: no two headers of _cuda may have one name."""
    names = [path.name for path in (helpers.OURS / "_cuda").glob("*/*")]
    assert len(names) == len(set(names))


def test_editors_find_every_header():
    """`make compile_commands.json`: each of our includes is in a folder of the command,
    or next to the file.
    """
    script = helpers.OURS / "_cuda" / "compile_commands.py"
    done = helpers.python(str(script))
    assert done.code == 0, done.err
    commands = {Path(command["file"]): command["arguments"] for command in done.json}
    assert {
        path for path in SOURCES if path.suffix in (".cu", ".cuh", ".cpp", ".h")
    } == set(commands)
    for path, arguments in commands.items():
        folders = [path.parent, *(Path(a[2:]) for a in arguments if a.startswith("-I"))]
        for name in re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8")):
            assert any((folder / name).is_file() for folder in folders), (
                f"{path}: {name}"
            )


LADDERS = sorted(helpers.OURS.glob("*/README.md"))
# work tile, chunk, configuration, TMA
OLD = re.compile(r"\b(walk\w*|items?|pieces?|cuts?|copy engine)\b")


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda path: path.parent.name)
def test_a_ladder_is_a_log_of_what_exists(ladder):
    """It uses the field's words and existing algos, files and pages; it ends with the
    present state and a link.
    """
    text = ladder.read_text(encoding="utf-8")
    assert OLD.findall(re.sub(r"`[^`]+`", "", text)) == []
    assert "docs/kernels/" in text.partition("\n## Present state\n")[2]
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ladder.parent / link).exists(), link
    algos = {algo.name for algo in helpers.REGISTRY.algos}
    families = r"`((?:pt|cpp|cuda|triton|fla|fi|flashqla|flashcore|sdpa)-[\w-]+)`"
    # -old: what a change was compared with
    named = {name.removesuffix("-old") for name in re.findall(families, text)}
    assert named <= algos
    files = {path.name for path in helpers.OURS.rglob("*")}
    assert set(re.findall(r"`(?:[\w/]+/)?(\w+\.(?:cuh?|h|cpp))`", text)) <= files


@pytest.mark.records
@pytest.mark.parametrize("ladder", LADDERS, ids=lambda path: path.parent.name)
def test_a_ladder_names_records_that_there_are(ladder):
    """But for those that it calls old, which only the history has."""
    text = " ".join(ladder.read_text(encoding="utf-8").split())
    records = re.findall(r"(?<!old record )`([\w/-]+\.jsonl?)`", text)
    names = {Path(name).name for name in records} - {"tuning.json"}
    there = {path.name for path in (helpers.TESTS.parent / "results").rglob("*.json*")}
    assert names
    assert names <= there
