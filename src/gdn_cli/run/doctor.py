"""What is installed here: each finding says what it is for and, if something is
missing, the command that fixes it.

State `ok`; `missing`: some commands cannot run here; `bad`: something is installed but broken.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from .. import paths
from ..errors import GdnError
from ..machine import inventory
from ..machine.inventory import HERE, Machine
from ..schema.output import Finding
from ..worker import profilers


def examine(machine: Machine = HERE) -> list[Finding]:
    """All findings, in the order in which a new user needs them."""
    return [
        *installed(machine),
        _writable("records", paths.runs_dir),
        _writable("builds", paths.builds_dir),
        _writable("Triton's cache", _triton_cache),
    ]


def installed(machine: Machine = HERE) -> list[Finding]:
    """Those that need none of gdn's own files: a container has no algos and no configs."""
    return [
        _python(),
        *(_package(machine, *p) for p in _PACKAGES),
        _component(
            "C++ compiler",
            machine.cxx(),
            "C++ and CUDA algos",
            "apt-get install g++, or set CXX",
        ),
        _gpu(machine),
        _component(
            "nvcc",
            str(machine.cuda_home() or ""),
            "CUDA algos, pack --prove",
            inventory.GET_NVCC,
        ),
        *(_profiler(machine, name) for name in profilers.TOOLS),
    ]


_FOR_CPU = {
    "Python",
    "torch",
    "flashinfer-bench",
    "ninja",
    "C++ compiler",
    "records",
    "builds",
}
_FOR_GPU = {"GPU", "nvcc", "triton"}


def summary(findings: list[Finding]) -> str:
    """What can be done here, in one line."""
    missing = [str(f["what"]) for f in findings if f["state"] != "ok"]
    if cpu := [name for name in missing if name in _FOR_CPU]:
        return f"not ready: {', '.join(cpu)}"
    if gpu := [name for name in missing if name in _FOR_GPU]:
        return f"ready for algos on the CPU; a GPU's need {', '.join(gpu)}"
    return "ready for algos on the CPU and GPU"


def finding(
    state: str, name: str, detail: str, purpose: str, mend: str | None = None
) -> Finding:
    return {"state": state, "what": name, "found": detail, "for": purpose, "mend": mend}


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return finding("ok", "Python", version, "all")


# distribution, import name, what it is for, what pip installs if that differs
_PACKAGES = [
    ("torch", "torch", "run, bench"),
    ("triton", "triton", "Triton algos"),
    ("flashinfer-bench", "flashinfer_bench", "run, bench, pack --prove"),
    ("ninja", "ninja", "C++ and CUDA algos"),
    ("cuda-bench", "cuda.bench", "tier nvbench", "'cuda-bench[cu13]'"),
    ("matplotlib", "matplotlib", "gdn report"),
    ("kernels", "kernels", "pack --for hub --prove"),
    ("modal", "modal", "a B200 at Modal"),
]


def _component(
    name: str, detail: str | None, purpose: str, mend: str, absent: str = "none"
) -> Finding:
    """A finding for something that is here, or is missing and can be installed."""
    if detail:
        return finding("ok", name, detail, purpose)
    return finding("missing", name, absent, purpose, mend)


def _package(
    machine: Machine, name: str, module: str, purpose: str, wheel: str | None = None
) -> Finding:
    version = None
    if machine.has_package(module):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "version unknown"
    mend = f"pip install {wheel or name}"
    return _component(name, version, purpose, mend, "not installed")


def _gpu(machine: Machine) -> Finding:
    gpus = machine.gpus()
    names = [f"{gpu.name} (sm_{gpu.capability.replace('.', '')})" for gpu in gpus]
    text = f"{', '.join(names)}, driver {gpus[0].driver}" if gpus else None
    return _component("GPU", text, "CUDA algos, GPU times", inventory.MODAL)


def _profiler(machine: Machine, name: str) -> Finding:
    try:
        profilers.module(name).find(machine)
    except GdnError as e:
        return finding("missing", f"--tool {name}", e.message, "profile", e.hint)
    return finding("ok", f"--tool {name}", "here", "profile")


def _writable(name: str, place: Callable[[], Path]) -> Finding:
    """Really write a file there: that shows permissions, full disks and read-only mounts."""
    use = "run, bench"
    folder = None
    try:
        folder = paths.make(place())
        with tempfile.TemporaryFile(dir=folder):
            return finding("ok", name, str(folder), use)
    except GdnError as e:
        return finding("bad", name, e.message, use, e.hint)
    except OSError as e:
        mend = "chmod it, or set GDN_HOME elsewhere"
        return finding("bad", name, f"{folder}: {e.strerror}", use, mend)


def _triton_cache() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or paths.home() / ".triton")
