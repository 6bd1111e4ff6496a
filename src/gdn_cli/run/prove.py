"""Proof that a packed file is complete: loaded, matched and built by flashinfer-bench
in a clean process and an empty directory, with an empty build cache; CUDA compiled for
each of ARCHITECTURES; then run if there is a device.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..catalog import workloads
from ..catalog.formats import Solution
from ..catalog.ops import Op
from ..catalog.pack import definition, read_solution
from ..catalog.registry import Registry
from ..errors import one_line
from ..machine import inventory
from ..machine.inventory import HERE, Machine
from ..schema.record_types import Record, Status
from .jobs import Job, Outcome, execute

Step = dict[str, str]  # step, state and detail
ARCHITECTURES = ("9.0a", "10.0a")  # H100 and H200; B200
_ALWAYS_THERE = {"torch", "triton", "numpy"}


def prove(
    file: Path,
    packages: dict[str, str],
    registry: Registry,
    timeout_s: float,
    machine: Machine = HERE,
) -> Iterator[Step]:
    """Yield each step as it ends: {"step", "state": ok | skipped | failed, "detail"}.
    Stops at the first failure.

    `packages` maps import names to pip's names, as algo.toml declares them; a file by
    others has none.
    """
    algo = read_solution(file, registry)
    op = registry.ops[algo.op]
    solution = algo.solution
    assert solution is not None
    yield step(
        "read",
        "ok",
        f"{len(solution['sources'])} sources, {file.stat().st_size} bytes of JSON",
    )
    imported = _imports(solution, packages)
    yield imported
    if imported["state"] == "failed":
        return
    place = machine.place(algo)

    for module, wheel in packages.items():
        if not machine.has_package(module):
            why = f"package {wheel} is not installed: pip install {wheel}"
            yield step("build", "skipped", why)
            return

    if algo.language == "cpp" and not machine.cxx():
        yield step("build", "skipped", "no C++ compiler here")
        return
    if algo.language == "cuda" and machine.cuda_home() is None:
        yield step("build", "skipped", f"no nvcc here: {inventory.GET_NVCC}")
        return

    def job(
        mode: str, work: tuple[workloads.Workload, ...], env: dict[str, str]
    ) -> Job:
        return Job.of(
            "prove",
            op,
            definition(op, registry),
            mode,
            work,
            [(algo, solution)],
            timeout_s=timeout_s,
            env=env,
            machine=machine,
        )

    with tempfile.TemporaryDirectory(prefix="gdn-prove-") as cache:
        env = {"FIB_CACHE_PATH": f"{cache}/built", "GDN_ALGOS": ""}
        mode, for_all = place.mode or "cpu", env
        if algo.language == "cuda":
            mode = "cpu"
            for_all = {
                **env,
                "FIB_CACHE_PATH": f"{cache}/archs",
                inventory.ARCHITECTURES: " ".join(ARCHITECTURES),
            }
        outcome = execute(job(mode, (), for_all))
        if outcome.status is not Status.DONE:
            yield step("build", "failed", outcome.reason or outcome.status)
            return
        targets = f" for {', '.join(ARCHITECTURES)}" if for_all is not env else ""
        detail = f"by flashinfer-bench{targets}, in {outcome.build_s:.1f} s"
        yield step("build", "ok", detail)
        assert outcome.proof is not None
        yield {"step": "signature", **outcome.proof}
        if outcome.proof["state"] == "failed":
            return
        if place.mode is None:
            yield step("run", "skipped", f"{place.reason}; {place.hint}")
            return
        small = min(workloads.embedded(op), key=lambda w: sum(w.axes.values()))
        outcome = execute(job(place.mode, (small,), env))
        record = outcome.records[0] if outcome.status is Status.DONE else None
        yield ran(outcome, record, op, small, place.mode)


def step(name: str, state: str, detail: str) -> Step:
    """One step, as it is shown."""
    return {"step": name, "state": state, "detail": detail}


def _imports(solution: Solution, packages: dict[str, str]) -> Step:
    """Top-level modules that the sources import, compared with the packages that the
    solution declares.
    """
    declared = {
        name.lower().replace("-", "_")
        for name in solution["spec"].get("dependencies") or []
    }
    declared |= set(packages) | _ALWAYS_THERE | set(sys.stdlib_module_names)
    imported: set[str] = set()

    for source in solution["sources"]:
        if not source["path"].endswith(".py"):
            continue
        try:
            tree = ast.parse(source["content"])
        # the others: a zero byte; brackets or sums beyond the parser's depth
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            why = f"{source['path']}: not valid Python: {one_line(e)}"
            return step("imports", "failed", why)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add((node.module or "").split(".")[0])

    if undeclared := sorted(imported - declared):
        why = "imported, but not in [packages] of algo.toml: a judge may not have it"
        return step("imports", "failed", f"{', '.join(undeclared)}: {why}")
    outside = sorted(imported - set(sys.stdlib_module_names))
    needs = f"needs {', '.join(outside)}" if outside else "needs no package"
    return step("imports", "ok", needs)


def ran(
    outcome: Outcome,
    record: Record | None,
    op: Op,
    workload: workloads.Workload,
    mode: str,
) -> Step:
    """The step of a workload's run; without a record, of one that did not come so far."""
    label = f"{op.label.format(**workload.axes)} on {mode}"
    if record is None:
        return step("run", "failed", f"{label}: {outcome.reason or outcome.status}")
    if not record.passed:
        return step("run", "failed", f"{label}: {record.reason}")
    assert record.check is not None
    by_output = record.check.errors.items()
    errors = ", ".join(f"{name} {error:.1e}" for name, error in by_output)
    return step("run", "ok", f"{label}: right, relative error {errors}")
