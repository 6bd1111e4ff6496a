"""Who may import whom: three layers of folders, held by reading the sources. Imports
inside functions count as well.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import helpers
import pytest

import gdn_cli

PACKAGE = Path(gdn_cli.__file__).parent

# A room is a folder, or a file that lies loose. It imports from its own layer and from those below.
LAYERS = {
    "top": "cli report remote tune profile run",  # the command
    # may import torch at the top of a file
    "middle": "worker runner operators serving profilers timing",
    # shared by all
    "bottom": (
        "records machine catalog schema errors paths units text streams files parsing bounded"
    ),
}
LAYER = {room: name for name, rooms in LAYERS.items() for room in rooms.split()}
HEIGHT = {name: height for height, name in enumerate(reversed(LAYERS))}

# package -> the only room that may import it
ONLY_IN = {"typer": "cli", "rich": "report", "matplotlib": "report", "modal": "remote"}
# what costs a second or more to import: only at the top of files of the middle layer
HEAVY = {
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "matplotlib",
    "flashinfer_bench",
    "flashinfer",
    "fla",
    "modal",
}


@functools.cache
def modules() -> dict[Path, str]:
    """Every source file -> its room. Not the package's own __init__ and __main__, which
    only show the way in.
    """
    found = {
        path: path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    return {
        path: room
        for path, room in found.items()
        if room not in ("__init__", "__main__")
    }


@functools.cache
def imports(path: Path) -> list[tuple[ast.stmt, str]]:
    """(statement, the absolute name that it imports) for all imports of a file."""
    package = (
        ("gdn_cli", *path.relative_to(PACKAGE).parts[:-1])
        if PACKAGE in path.parents
        else ()
    )
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            found += [(node, ".".join([*base, alias.name])) for alias in node.names]
    return found


@functools.cache
def arrows() -> list[tuple[str, str, str]]:
    """(room, the other room that it imports from, where) of every import between rooms."""
    found = []
    for path, room in modules().items():
        for node, full in imports(path):
            parts = full.split(".")
            if (
                parts[0] == "gdn_cli"
                and len(parts) > 1
                and parts[1] not in (room, "__version__")
            ):
                found.append(
                    (
                        room,
                        parts[1],
                        f"{path.relative_to(PACKAGE)}:{node.lineno} imports {full}",
                    )
                )
    return found


def test_every_room_has_its_layer():
    assert set(modules().values()) == set(LAYER), (
        "LAYERS in this file must name every room, once"
    )


def test_no_import_points_up():
    assert [
        where
        for room, other, where in arrows()
        if HEIGHT[LAYER[other]] > HEIGHT[LAYER[room]]
    ] == []


def test_no_cycle_between_rooms():
    below = {room: {other for a, other, _ in arrows() if a == room} for room in LAYER}
    while free := [room for room, others in below.items() if not others & set(below)]:
        for room in free:
            del below[room]
    assert [
        where for room, other, where in arrows() if room in below and other in below
    ] == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_lives_in_one_room(package):
    users = {
        room
        for path, room in modules().items()
        for _, full in imports(path)
        if full.split(".")[0] == package
    }
    assert users == {ONLY_IN[package]}


def test_only_the_middle_layer_imports_torch_at_its_top():
    heavy = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} imports {full}"
        for path, room in modules().items()
        if LAYER[room] != "middle"
        for node, full in imports(path)
        if full.split(".")[0] in HEAVY and node.col_offset == 0
    ]
    assert heavy == []


def test_algos_stand_alone():
    """An algo is packed and sent away: gdn is not there when it runs, and neither are
    typer, rich and modal.
    """
    sources = sorted(helpers.OURS.glob("*/*/*.py"))
    assert len(sources) >= 8
    for path in sources:
        foreign = {full.split(".")[0] for _, full in imports(path)} & {
            "gdn_cli",
            "flashinfer_bench",
            *ONLY_IN,
        }
        assert not foreign, f"{path} imports {foreign}"
