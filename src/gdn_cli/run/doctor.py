"""What is installed here: each finding says what it is for and, if something is
missing, the command that fixes it.

State `ok`; `missing`: some commands cannot run here; `bad`: something is installed but broken.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from .. import parsing, paths
from ..catalog import registry, trace_set
from ..errors import GdnError
from ..machine import inventory
from ..machine.inventory import HERE, Machine
from ..worker import profilers

Finding = dict[str, str | None]  # state, what, found, for and mend


def examine(dataset: Path | None = None, machine: Machine = HERE) -> list[Finding]:
    """All findings, in the order in which a new user needs them."""
    return [
        *installed(machine),
        _dataset(dataset),
        _modal_token(),
        _writable("records", paths.runs_dir),
        _writable("builds", paths.builds_dir),
        _writable("Triton's cache", _triton_cache),
        *_algos(),
    ]


def installed(machine: Machine = HERE) -> list[Finding]:
    """Those that need none of gdn's own files: a container has no algos and no configs."""
    return [
        *_python(),
        *(_package(machine, *p) for p in _PACKAGES),
        _there(
            "C++ compiler",
            machine.cxx(),
            "C++ and CUDA algos",
            "apt-get install g++, or set CXX",
        ),
        _gpu(machine),
        _there(
            "nvcc",
            str(machine.cuda_home() or ""),
            "CUDA algos, pack --prove",
            inventory.GET_NVCC,
        ),
        *(_profiler(machine, name) for name in profilers.TOOLS),
    ]


_FOR_CPU = (
    "Python",
    "torch",
    "flashinfer-bench",
    "ninja",
    "C++ compiler",
    "records",
    "builds",
)
_FOR_GPU = ("GPU", "nvcc", "triton")


def summary(findings: list[Finding]) -> str:
    """What can be done here, in one line."""
    missing = {f["what"]: f["found"] for f in findings if f["state"] != "ok"}
    cpu, gpu = (
        [f"{name} ({missing[name]})" for name in names if name in missing]
        for names in (_FOR_CPU, _FOR_GPU)
    )
    if cpu:
        return f"not ready: {', '.join(cpu)}"
    return (
        f"ready for algos on the CPU; a GPU's need {', '.join(gpu)}"
        if gpu
        else "ready for algos on the CPU and GPU"
    )


def finding(
    state: str, what: str, found: str, purpose: str, mend: str | None = None
) -> Finding:
    return {"state": state, "what": what, "found": found, "for": purpose, "mend": mend}


def _python() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 10) <= sys.version_info[:2] <= (3, 13)
    return [
        finding(
            "ok" if fits else "bad",
            "Python",
            version,
            "all",
            None if fits else "use Python 3.10 to 3.13",
        )
    ]


# distribution, import name, what it is for, how to install it
_PACKAGES = [
    ("torch", "torch", "run, bench", "pip install torch"),
    ("triton", "triton", "Triton algos", "pip install triton"),
    (
        "flashinfer-bench",
        "flashinfer_bench",
        "run, bench, pack --prove",
        "pip install flashinfer-bench",
    ),
    ("ninja", "ninja", "C++ and CUDA algos", "pip install ninja"),
    ("flashinfer-python", "flashinfer", "fi-baseline", "pip install flashinfer-python"),
    ("fla-core", "fla", "fla-upstream", "pip install fla-core"),
    ("flash-qla", "flash_qla", "flashqla", "pip install flash-qla"),
    ("cupti-python", "cupti", "fib, of newer versions", "pip install cupti-python"),
    ("cuda-bench", "cuda.bench", "tier nvbench", "pip install 'cuda-bench[cu13]'"),
    ("matplotlib", "matplotlib", "gdn report", "pip install matplotlib"),
    ("modal", "modal", "a B200 at Modal", "pip install modal"),
]


def _there(
    what: str, found: str | None, purpose: str, mend: str, absent: str = "none"
) -> Finding:
    """A finding for something that is here, or is missing and can be installed."""
    return (
        finding("ok", what, found, purpose)
        if found
        else finding("missing", what, absent, purpose, mend)
    )


def _package(
    machine: Machine, name: str, module: str, purpose: str, mend: str
) -> Finding:
    found = None
    if machine.has_package(module):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "version unknown"
    return _there(name, found, purpose, mend, "not installed")


def _gpu(machine: Machine) -> Finding:
    found = machine.gpus()
    names = ", ".join(f"{g.name} (sm_{g.capability.replace('.', '')})" for g in found)
    here = f"{names}, driver {found[0].driver}" if found else None
    return _there("GPU", here, "CUDA algos, GPU times", inventory.MODAL)


def _profiler(machine: Machine, name: str) -> Finding:
    try:
        profilers.module(name).find(machine)
    except GdnError as e:
        return finding("missing", f"--tool {name}", e.message, "profile", e.hint)
    return finding("ok", f"--tool {name}", "here", "profile")


def _dataset(folder: Path | None) -> Finding:
    purpose = "--dataset (the twins need none)"
    if folder is None:
        return finding(
            "missing",
            "dataset",
            "none chosen",
            purpose,
            "set FIB_DATASET_PATH, or `gdn data build DIR`",
        )
    counts, problems = [], []
    for op in registry.load().ops.values():
        try:
            counts.append(f"{len(trace_set.from_folder(op, folder))} {op.name}")
        except GdnError as e:
            problems.append(e)
    if counts:
        return finding("ok", "dataset", f"{', '.join(counts)} workloads", purpose)
    return finding("bad", "dataset", problems[0].message, purpose, problems[0].hint)


def _modal_token() -> Finding:
    found = None
    if os.environ.get("MODAL_TOKEN_ID") and os.environ.get("MODAL_TOKEN_SECRET"):
        found = "in the environment"
    else:
        # whether any profile has one; only Modal can check the token itself
        with contextlib.suppress(GdnError):
            file = Path(
                os.environ.get("MODAL_CONFIG_PATH") or paths.home() / ".modal.toml"
            )
            if any(
                isinstance(of, dict) and "token_id" in of
                for of in parsing.read_toml(file).values()
            ):
                found = "in Modal's config file"
    return _there("Modal token", found, "a B200 at Modal", "modal setup")


def _writable(what: str, place: Callable[[], Path]) -> Finding:
    """Really write a file there: that shows permissions, full disks and read-only mounts."""
    folder = None
    try:
        folder = paths.make(place())
        with tempfile.TemporaryFile(dir=folder):
            return finding("ok", what, str(folder), "run, bench")
    except GdnError as e:
        return finding("bad", what, e.message, "run, bench", e.hint)
    except OSError as e:
        return finding(
            "bad",
            what,
            f"{folder}: {e.strerror}",
            "run, bench",
            "chmod it, or set GDN_HOME elsewhere",
        )


def _triton_cache() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or paths.home() / ".triton")


def _algos() -> list[Finding]:
    try:
        broken = registry.load(os.environ.get("GDN_ALGOS")).broken
    except GdnError as e:
        return [finding("bad", "GDN_ALGOS", e.message, "your own algos", e.hint)]
    return [
        finding(
            "bad", "algo.toml", str(b.error), f"{b.op}/{b.name}", "correct that key"
        )
        for b in broken
    ]
