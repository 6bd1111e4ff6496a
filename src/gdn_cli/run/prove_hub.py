"""Proof that a folder for the Hugging Face Hub is right: `kernels` reads it, a variant is built and
accepted, and what `kernels` loads of it gives the op's results on a few workloads.

The variant is built and looked at by worker/hub.py in a process of its own. The results are judged
like those of any algo: here of one in Python that calls kernels.get_local_kernel.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ..catalog import workloads
from ..catalog.formats import Solution
from ..catalog.hub import Kernel
from ..catalog.pack import definition
from ..catalog.registry import Registry
from ..machine import inventory
from ..machine.inventory import HERE, Machine
from ..parsing import read_text
from .jobs import Job, environ_of, execute
from .prove import Step, ran, step

# what a kernel of the Hub may import, beside Python's own modules
_ALLOWED = {"torch", "tvm_ffi", *sys.stdlib_module_names}
_WORKLOADS = 3
_CALLS_IT = """from pathlib import Path

from kernels import get_local_kernel

kernel = get_local_kernel(Path({folder!r}), backend={backend!r})


def run({inputs}, {outputs}):
    kernel.{function}({inputs}, out=({outputs},))
"""
GET_KERNELS = "pip install " + (
    "-e '.[hub]'" if inventory.paths.IN_CHECKOUT else "'gdn[hub]'"
)


def prove(
    folder: Path,
    kernels: Sequence[Kernel],
    registry: Registry,
    timeout_s: float,
    machine: Machine = HERE,
) -> Iterator[Step]:
    """Yield each step as it ends, as prove.prove does; stops at the first failure."""
    imported = _imports(folder)
    yield imported
    if imported["state"] == "failed":
        return
    if not machine.has_package("kernels"):
        yield step(
            "build", "skipped", f"package kernels is not installed: {GET_KERNELS}"
        )
        return
    for backend in dict.fromkeys(kernel.backend for kernel in kernels):
        missing = None if machine.cxx() else "no C++ compiler here"
        if backend == "cuda" and machine.cuda_home() is None:
            missing = f"no nvcc here: {inventory.GET_NVCC}"
        if missing:
            yield step(f"{backend}: build", "skipped", missing)
            continue
        of_backend = [kernel for kernel in kernels if kernel.backend == backend]
        with tempfile.TemporaryDirectory(prefix="gdn-prove-") as place:
            for result in _variant(folder, backend, place, timeout_s, machine):
                yield result
                if result["state"] == "failed":
                    return
            for kernel in of_backend if result["state"] == "ok" else ():
                yield from _run(kernel, Path(place), registry, timeout_s, machine)


def _variant(
    folder: Path, backend: str, place: str, timeout_s: float, machine: Machine
) -> Iterator[Step]:
    """The steps of worker/hub.py, in an empty folder."""
    env = environ_of(backend, machine=machine) | {"HF_HUB_OFFLINE": "1"}
    module = [sys.executable, "-m", "gdn_cli.worker.hub"]
    command = [*module, str(folder.resolve()), backend, place]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=env,
            cwd=place,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        why = f"not built after {timeout_s:g} s; --timeout gives it more"
        yield step(f"{backend}: build", "failed", why)
        return
    for line in process.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            yield {**result, "step": f"{backend}: {result['step']}"}
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        why = lines[-1] if lines else f"exit code {process.returncode}"
        yield step(f"{backend}: build", "failed", why)


def _run(
    kernel: Kernel, place: Path, registry: Registry, timeout_s: float, machine: Machine
) -> Iterator[Step]:
    """The smallest workloads, by what `kernels` loads."""
    op = kernel.op
    source = _CALLS_IT.format(
        folder=str(place),
        backend=kernel.backend,
        inputs=", ".join(op.inputs),
        outputs=", ".join(op.outputs),
        function=kernel.function,
    )
    solution: Solution = {
        **kernel.solution,
        "sources": [{"path": "main.py", "content": source}],
    }
    solution["spec"] = {
        "language": "python",
        "target_hardware": [kernel.backend],
        "entry_point": "main.py::run",
        "destination_passing_style": True,
    }
    algo = msgspec.structs.replace(kernel.algo, language="python", specific=False)
    by_size = sorted(workloads.embedded(op), key=lambda w: sum(w.axes.values()))
    small = by_size[:_WORKLOADS]
    env = {"HF_HUB_OFFLINE": "1", "FIB_CACHE_PATH": f"{place}/fib", "GDN_ALGOS": ""}
    job = Job.of(
        "check",
        op,
        definition(op, registry),
        kernel.backend,
        small,
        [(algo, solution)],
        timeout_s=timeout_s,
        env=env,
        machine=machine,
    )
    outcome = execute(job)
    for record, workload in zip(outcome.records, small, strict=False):
        yield ran(outcome, record, op, workload, kernel.backend)
    if len(outcome.records) < len(small):
        yield ran(outcome, None, op, small[len(outcome.records)], kernel.backend)


def _imports(folder: Path) -> Step:
    """The rules for a kernel's Python: its own files by relative imports, and nothing but torch."""
    for path in sorted((folder / "tvm-ffi-ext").rglob("*.py")):
        for node in ast.walk(ast.parse(read_text(path))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                if name.partition(".")[0] not in _ALLOWED:
                    return step("imports", "failed", f"{path.name} imports {name}")
    return step(
        "imports", "ok", "torch, tvm_ffi, and its own files by relative imports"
    )
