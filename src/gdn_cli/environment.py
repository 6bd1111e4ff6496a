"""Where a number comes from: GPU, driver, clocks, versions, threads. Read in the worker, kept with every record."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__

_PACKAGES = {"torch": "torch", "triton": "triton", "flashinfer-bench": "flashinfer_bench", "apache-tvm-ffi": "tvm_ffi"}
_PEERS = {"flashinfer-python": "flashinfer", "fla-core": "fla"}


def versions() -> dict[str, str]:
    """Versions by package metadata: flashinfer-bench's own __version__ is 0.0.0.dev0 in its release."""
    found = {"gdn": __version__, "python": platform.python_version()}
    for name in [*_PACKAGES, *_PEERS]:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe(mode: str) -> dict[str, Any]:
    """The environment of a worker that runs in `mode`. Imports torch."""
    import torch

    found: dict[str, Any] = {"versions": versions() | {"torch": torch.__version__}}
    if mode == "cuda":
        found |= gpu()
        found["cuda"] = torch.version.cuda
    else:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        found |= {"cpu": cpu_name(), "cpus": cpus, "threads": torch.get_num_threads()}
    return found


def gpu() -> dict[str, Any]:
    """Name, driver and present clocks of the GPU in use."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
    }
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        found["sm_clock_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        found["memory_clock_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        pynvml.nvmlShutdown()
    except Exception as e:  # a container may hide NVML: the record then says so instead of guessing
        found["clocks_unknown"] = type(e).__name__
    return found


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit(folder: Path) -> dict[str, Any]:
    """The git commit of the sources in `folder`, and whether anything there differs from it; {} outside git."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    return {"commit": head, "dirty": bool(git("status", "--porcelain", "--", "."))} if head else {}
