"""The environment of a measurement: GPU, driver, clocks, versions, threads. Read in the
worker, kept with every record.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

from .. import __version__, paths, units
from ..schema.record_types import Environment, GpuState, Timing
from . import host_load, inventory

_PACKAGES = (
    "torch",
    "triton",
    "flashinfer-bench",
    "apache-tvm-ffi",
    "flashinfer-python",
    "fla-core",
    "flash-qla",
)


def versions() -> dict[str, str]:
    """Versions by package metadata: the release of flashinfer-bench has __version__ 0.0.0.dev0."""
    from importlib import metadata

    releases = {"gdn": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            releases[name] = metadata.version(name)
    return releases


def allocation() -> str | None:
    """The job of SLURM, and its node, that this process is in: "12_1 on n2"."""
    job = os.environ.get("SLURM_JOB_ID")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    node = os.environ.get("SLURMD_NODENAME")
    return f"{job} on {node}" if job and node else job


def describe(mode: str) -> Environment:
    """The environment of a worker that runs in `mode`. Imports torch."""
    import torch

    environment = Environment(
        versions=versions() | {"torch": str(torch.__version__)}, cpus=os.cpu_count()
    )
    if mode == "cuda":
        _describe_gpu(environment)
        environment.cuda = torch.version.cuda
        # otherwise built for this GPU, see `specific`
        environment.architectures = os.environ.get(inventory.ARCHITECTURES)
    else:
        environment.cpu, environment.threads = cpu_name(), torch.get_num_threads()
    # for a GPU too: the host launches what runs there
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
        environment.cpus, environment.affinity = len(cpus), ranges(cpus)
    return environment


def _describe_gpu(environment: Environment) -> None:
    """The GPU in use: properties that do not change while it runs."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    environment.gpu = properties.name
    environment.capability = f"{properties.major}.{properties.minor}"
    environment.sms = properties.multi_processor_count
    environment.l2_bytes = properties.L2_cache_size
    gpu = _matching_gpu(str(properties.uuid), inventory.gpus())
    if gpu:
        environment.gpu_index, environment.gpu_uuid = gpu.index, gpu.uuid
    # a container may hide it: leave it out rather than guess
    with contextlib.suppress(Exception):
        nvml, handle = _opened()
        environment.driver = nvml.nvmlSystemGetDriverVersion()
        environment.max_sm_clock_mhz = nvml.nvmlDeviceGetMaxClockInfo(
            handle, nvml.NVML_CLOCK_SM
        )


def _matching_gpu(uuid: str, visible: Sequence[inventory.Gpu]) -> inventory.Gpu | None:
    """The GPU with this UUID as torch gives it (without GPU- or MIG-), otherwise the
    only GPU if there is just one.
    """
    for gpu in visible:
        if gpu.uuid.endswith(uuid):
            return gpu
    return visible[0] if len(visible) == 1 else None


# By NVML's bit (nvml.h, nvmlClocksEventReason*): the name in a record, and what slowed the
# GPU. Not included: an idle GPU, and clocks set by a user, which is done on purpose for
# steady measurements.
_SLOWED = {
    0x04: ("sw_power_cap", "its power cap"),
    0x20: ("sw_thermal", "its temperature"),
    0x40: ("hw_thermal", "its temperature"),
    0x80: ("hw_power_brake", "the power brake of its server"),
    0x08: ("hw_slowdown", "its protection against heat and overload"),
    0x10: ("sync_boost", "the others of its sync boost group"),
}


def gpu_state(brief: bool = False, own: int = 1) -> GpuState:
    """The state of the GPU in use, as far as NVML gives it here; empty if NVML is hidden.

    `own` is the number of gdn's own processes on the GPU, which do not count as others.
    `brief`, between batches: only the values that may change during a measurement, the
    SM clock and the reasons for reducing it.
    """
    nvml, handle = _opened()
    readings: dict[str, Callable[[], Any]] = {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "throttle": lambda: _throttle(nvml, handle),
    }
    if not brief:
        readings |= {
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(
                handle, nvml.NVML_CLOCK_MEM
            ),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "other_processes": lambda: _others(
                nvml.nvmlDeviceGetComputeRunningProcesses(handle), own
            ),
        }
    state = GpuState()
    for name, read in readings.items():
        # not supported by this GPU, this driver or this container
        with contextlib.suppress(Exception):
            setattr(state, name, read())
    return state


def _throttle(nvml: Any, handle: Any) -> list[str]:
    # the name that drivers before 535 have, too
    bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return [name for bit, (name, _) in sorted(_SLOWED.items()) if bits & bit]


def _others(processes: list[Any], own: int) -> int:
    """How many processes other than ours are on the GPU. Ours are listed too once torch
    has opened it.

    Counted, not compared by pid: in a container NVML gives the host's pids, and some
    drivers give a thread's.
    """
    return max(0, len({p.pid for p in processes}) - own)


# --- doubts about a number

_HOT_C = 85  # an H100 SXM is rated for 87 at most, and slows down at 89 (nvidia-smi -q)
_MOVED = 0.03  # of the highest SM clock
_SPREAD = 0.10  # half the interquartile range, as a share of the median: Timing.spread
# a smaller interquartile range is the clock's resolution (CUPTI ticks every 32 ns)
_TICKS_US = 0.2


def doubts(
    before: GpuState,
    during: list[GpuState],
    after: GpuState,
    timing: Timing,
    target: float,
) -> list[str]:
    """Reasons not to trust a number, each with what to do about it; [] if all is well.

    before, during, after  gpu_state()'s readings: before, between and right after the samples
    target                 the plan's: half the width of the median's 95 % interval, as
      a share of the median
    """
    return [
        *_shared([before, *during, after]),
        *_slowed([*during, after]),
        *_moved(during),
        # a cause says more than its effect
        *(host_load.doubts(timing) or _noisy(timing, target)),
    ]


def _shared(states: list[GpuState]) -> list[str]:
    count = max(state.other_processes or 0 for state in states)
    if count == 0:
        return []
    others = units.count(count, "other process", "other processes")
    advice = "measure again when the GPU is free"
    return [f"{others} used the GPU while this was measured: {advice}"]


def _slowed(states: list[GpuState]) -> list[str]:
    """Why the clocks were reduced, and heat. Ignores the state before: reasons of an
    idle GPU need not hold under load.
    """
    reasons = {reason for state in states for reason in state.throttle or ()}
    # NVML also sets the less specific hw_slowdown with these
    if reasons & {"hw_thermal", "hw_power_brake"}:
        reasons.discard("hw_slowdown")
    advice = "let it rest, or compare within this run only"
    texts = [
        f"the GPU was slowed by {cause} while this was measured: {advice}"
        for name, cause in _SLOWED.values()
        if name in reasons
    ]
    hottest = max((state.temperature_c or 0 for state in states), default=0)
    if hottest >= _HOT_C:
        texts.append(f"the GPU was at {hottest} °C while this was measured: {advice}")
    return list(dict.fromkeys(texts))


def _moved(during: list[GpuState]) -> list[str]:
    clocks = [state.sm_mhz for state in during if state.sm_mhz is not None]
    # the first reading may still be at the idle clock
    if len(clocks) > 1 and clocks[0] < clocks[1]:
        clocks = clocks[1:]
    low, high = min(clocks, default=0), max(clocks, default=0)
    if high - low <= _MOVED * high:
        return []
    advice = "lock it (nvidia-smi --lock-gpu-clocks), or compare within this run only"
    return [
        f"the SM clock moved between {low} and {high} MHz while this was measured: {advice}"
    ]


def _noisy(timing: Timing, target: float) -> list[str]:
    texts = []
    low, high = timing.ci_low_us, timing.ci_high_us
    if low is not None and high is not None and timing.stopped == "time":
        interval = (high - low) / 2 / timing.median_us
        if interval > target:
            texts.append(
                f"the median is known to ±{_percent(interval)} only, not to the target of"
                f" {_percent(target)}: give it more time (--seconds)"
            )
    if timing.spread > _SPREAD and timing.high_us - timing.low_us > _TICKS_US:
        texts.append(
            f"the middle half of the samples spreads over ±{_percent(timing.spread)} of the"
            " median: end other programs on this machine and measure again"
        )
    return texts


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + " %"


@lru_cache
def _opened() -> tuple[Any, Any]:
    """(pynvml, handle of the GPU in use), open for the rest of the process: nvmlInit
    takes milliseconds. (None, None) if it cannot be opened: every reading then fails.
    """
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(0).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # no library, no driver, no permission, no GPU that torch can use
        return None, None


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in Linux's format for lists of CPUs: {0, 1, 2, 3, 8} -> "0-3,8"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class Commit(TypedDict, total=False):
    commit: str
    dirty: bool  # the files differ from it


def commit() -> Commit:
    """The git commit of this checkout; {} for an installed wheel.

    Where sources were copied without their .git (a cluster, a container), `GDN_COMMIT` gives it.
    """
    import subprocess

    if given := os.environ.get("GDN_COMMIT"):
        dirty = given.endswith("-dirty")
        return Commit(commit=given.removesuffix("-dirty"), dirty=dirty)
    if not paths.IN_CHECKOUT:
        return {}

    def git(*args: str) -> str | None:
        try:
            command = ["git", "-C", str(paths.ALGOS_DIR.parent), *args]
            result = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return {}
    return Commit(commit=head, dirty=bool(git("status", "--porcelain")))
