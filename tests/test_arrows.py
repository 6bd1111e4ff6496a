"""Who may import whom: DESIGN.md's arrows, held by reading the sources. Imports inside functions count as well."""

from __future__ import annotations

import ast
from pathlib import Path

import helpers
import pytest

import gdn_cli

PACKAGE = Path(gdn_cli.__file__).parent

# From top to bottom: a module imports only from lower lines, and from nothing beside it on its own line.
# A folder (commands, report, timing) is one name here; inside it modules may import each other.
LAYERS = """
    commands
    remote
    profiling  tuning
    running
    prove  doctor  scaffold  tracefolder  report  loading
    below  campaign  comparison
    history  score  bottleneck  differences  choosing
    records
    jobs
    worker
    tasks
    probes  profilers
    check
    isolation
    environment
    timing
    dataset  build  signature  contract
    twins  tuned
    pack
    traceset  lanes  journal  cached  request
    machine  workloads
    presets
    registry
    profile_types
    files  parsing  paths
    messages  paired  fates
    record_types
    statuses
    errors  dtypes  locks  units  expression  seqlens  bounded  redaction  keeper
    text
"""
RANK = {name: rank for rank, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}

# package -> the only modules that may import it
ONLY_IN = {"typer": {"commands"}, "rich": {"report"}, "matplotlib": {"report"}, "modal": {"remote"}}
# what costs a second or more to import; whatever lists, finds or prints must not need it, not even at the top of a file
HEAVY = {"torch", "triton", "numpy", "matplotlib", "flashinfer_bench", "flashinfer", "fla", "flash_qla", "modal"}
MAY_BE_HEAVY = {
    "check", "timing", "dataset", "build", "twins", "tracefolder", "dtypes", "tasks", "probes", "profilers", "loading",
    "contract", "isolation",
}  # fmt: skip


def modules() -> dict[Path, str]:
    """Every source file of the package, and the name that it has in LAYERS."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name not in ("__init__", "__main__"):
            found[path] = name
    return found


def imports(path: Path) -> list[tuple[ast.stmt, str]]:
    """(statement, what it imports as an absolute name) of a file, wherever in it."""
    package = ("gdn_cli", *path.relative_to(PACKAGE).parts[:-1]) if PACKAGE in path.parents else ()
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            # `from .. import report` imports a module, `from ..report import show` a name of one
            found += [(node, ".".join([*base, alias.name])) for alias in node.names]
    return found


def own(name: str) -> str | None:
    """`gdn_cli.timing.floor.bytes_moved` -> `timing`; None for other packages, and for `gdn_cli.__version__`."""
    parts = name.split(".")
    return parts[1] if parts[0] == "gdn_cli" and len(parts) > 1 and parts[1] != "__version__" else None


def test_every_module_has_its_layer():
    assert set(modules().values()) == set(RANK), "LAYERS in this file must name every module, once"


@pytest.mark.parametrize("name", sorted(RANK, key=RANK.get))
def test_imports_point_downward(name):
    upward = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} imports {target}"
        for path, module in modules().items()
        if module == name
        for node, full in imports(path)
        if (target := own(full)) and target != name and RANK[target] <= RANK[name]
    ]
    assert upward == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_lives_in_one_place(package):
    users = {module for path, module in modules().items() for _, full in imports(path) if full.split(".")[0] == package}
    assert users <= ONLY_IN[package]
    assert users, f"nothing imports {package}: does this test still look in the right place?"


def test_only_what_runs_kernels_imports_torch_at_its_top():
    heavy = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} imports {full}"
        for path, module in modules().items()
        if module not in MAY_BE_HEAVY
        for node, full in imports(path)
        if full.split(".")[0] in HEAVY and node.col_offset == 0
    ]
    assert heavy == []


def test_algos_stand_alone():
    """An algo is packed and sent away: gdn is not there when it runs, and neither are typer, rich and modal."""
    sources = sorted(helpers.OURS.glob("*/*/*.py"))
    assert len(sources) >= 8
    for path in sources:
        foreign = {full.split(".")[0] for _, full in imports(path)} & {"gdn_cli", "flashinfer_bench", *ONLY_IN}
        assert not foreign, f"{path} imports {foreign}"
