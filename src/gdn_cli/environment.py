"""Where a number comes from: GPU, driver, clocks, versions, threads. Read in the worker, kept with every record."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import __version__, paths

_PACKAGES = {"torch": "torch", "triton": "triton", "flashinfer-bench": "flashinfer_bench", "apache-tvm-ffi": "tvm_ffi"}
_PEERS = {"flashinfer-python": "flashinfer", "fla-core": "fla"}


def versions() -> dict[str, str]:
    """Versions by package metadata: flashinfer-bench's own __version__ is 0.0.0.dev0 in its release."""
    from importlib import metadata

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
    """The GPU in use: what does not change while it runs."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
    }
    return found | _nvml(
        lambda nvml, handle: {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "max_sm_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        }
    )


def clocks() -> dict[str, Any]:
    """The clocks at this moment: read right behind a measurement, since an idle GPU slows down at once."""
    return _nvml(
        lambda nvml, handle: {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        }
    )


def _nvml(read: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any]:
    """What `read` gets from NVML for the GPU in use; {} where a container hides NVML, rather than a guess."""
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return read(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}"))
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        return {}


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> dict[str, Any]:
    """The git commit of this checkout, and whether anything in it differs from it; {} for an installed wheel.

    Where sources travelled without their .git (a cluster, a container), `GDN_COMMIT` says it.
    """
    import subprocess

    if given := os.environ.get("GDN_COMMIT"):
        return {"commit": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    if not paths.IN_CHECKOUT:
        return {}

    def git(*args: str) -> str | None:
        try:
            command = ["git", "-C", str(paths.ALGOS_DIR.parent), *args]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    return {"commit": head, "dirty": bool(git("status", "--porcelain"))} if head else {}
