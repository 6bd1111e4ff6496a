"""Who may import whom, held by reading the sources. Imports inside functions count too."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import helpers
import pytest

import gdn_cli

SRC = Path(gdn_cli.__file__).parent.parent
PACKAGE = SRC / "gdn_cli"

# A room is a folder, or a file that lies loose. It imports from its own layer and from
# those below.
LAYERS = {
    "command": "cli report remote tune profile run",
    "wall": "worker",  # may import torch at the top of a file
    # shared by all
    "bottom": "records machine catalog schema"
    " errors paths units text streams files parsing bounded source_hash",
}
LAYER = {room: name for name, rooms in LAYERS.items() for room in rooms.split()}
HEIGHT = {name: height for height, name in enumerate(reversed(LAYERS))}
OLD_NAMES = "serving"  # of what is in the package gdn now, for one release

# What the command may import of worker/.
DOOR = {"request", "messages", "exit_reasons", "serve", "trace_set_writer", "profilers"}
# Inside worker/, from the top to the bottom; what is not listed is its door.
INSIDE = ["judge", "executor", "profilers", "timing"]

# package -> the only room that may import it
ONLY_IN = {
    "typer": "cli",
    "rich": "report",
    "matplotlib": "report",
    "modal": "remote",
    "submitit": "remote",
}
# what costs a second or more to import: only behind the wall at the top of a file
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
    "submitit",
}


@functools.cache
def modules() -> dict[Path, str]:
    """Every source file -> its room. Not the package's own __init__ and __main__, which
    only show the way in.
    """
    rooms = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__", OLD_NAMES):
            rooms[path] = room
    return rooms


@functools.cache
def imports(path: Path) -> list[tuple[ast.stmt, str]]:
    """(statement, the absolute name that it imports) for all imports of a file."""
    package = path.relative_to(SRC).parts[:-1] if SRC in path.parents else ()
    result = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            result += [(node, ".".join([*base, alias.name])) for alias in node.names]
    return result


@functools.cache
def arrows() -> list[tuple[str, str, str]]:
    """(room, the other room that it imports from, where) of every import between rooms."""
    result = []
    for path, room in modules().items():
        for node, full in imports(path):
            parts = full.split(".")
            if parts[0] != "gdn_cli" or len(parts) == 1:
                continue
            if parts[1] not in (room, "__version__"):
                where = f"{path.relative_to(PACKAGE)}:{node.lineno} imports {full}"
                result.append((room, parts[1], where))
    return result


def without_cycles(edges: set[tuple[str, str]]) -> set[str]:
    """The nodes that lie on no cycle and lead to none."""
    left = {node for edge in edges for node in edge}
    free = set()
    while True:
        leaves = {a for a in left if not any(b in left for x, b in edges if x == a)}
        if not leaves:
            return free
        free |= leaves
        left -= leaves


def test_every_room_has_its_layer():
    says = "LAYERS in this file must name every room, once"
    assert set(modules().values()) == set(LAYER), says


def test_no_import_points_up():
    up = [
        where
        for room, other, where in arrows()
        if HEIGHT[LAYER[other]] > HEIGHT[LAYER[room]]
    ]
    assert up == []


def test_no_cycle_between_rooms():
    free = without_cycles({(room, other) for room, other, _ in arrows()})
    assert [where for room, other, where in arrows() if not {room, other} & free] == []


def test_the_command_comes_in_through_the_door():
    wrong = []
    for _, _, where in arrows():
        file, _, full = where.partition(" imports ")
        parts = full.split(".")
        inside = file.startswith("worker/")
        if parts[1] == "worker" and not inside and not DOOR & set(parts[2:3]):
            wrong.append(where)
    assert wrong == []


def test_behind_the_wall_imports_point_down():
    place = {name: i for i, name in enumerate(INSIDE)}
    up = []
    for path, room in modules().items():
        parts = path.relative_to(PACKAGE).parts
        if room != "worker" or parts[1] not in place:
            continue
        for node, full in imports(path):
            other = full.split(".")[2:3]
            if (
                full.startswith("gdn_cli.worker.")
                and place.get(*other, 99) < place[parts[1]]
            ):
                up.append(f"{path.relative_to(PACKAGE)}:{node.lineno} imports {full}")
    assert up == []


def test_the_command_does_not_use_the_library():
    users = [
        path.relative_to(PACKAGE)
        for path in modules()
        for _, full in imports(path)
        if full.split(".")[0] == "gdn"
    ]
    assert users == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_lives_in_one_room(package):
    users = {
        room
        for path, room in modules().items()
        for _, full in imports(path)
        if full.split(".")[0] == package
    }
    assert users == {ONLY_IN[package]}


def test_only_behind_the_wall_torch_is_imported_at_the_top():
    heavy = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} imports {full}"
        for path, room in modules().items()
        if LAYER[room] != "wall"
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
        used = {full.split(".")[0] for _, full in imports(path)}
        foreign = used & {"gdn", "gdn_cli", "flashinfer_bench", *ONLY_IN}
        assert not foreign, f"{path} imports {foreign}"
