"""What this machine has, without importing torch: GPUs and packages; whether an algo can
run on it; and the environment in which kernels are built.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields

from .. import paths
from ..catalog.registry import Algo, numbers
from ..errors import MissingError, UsageError
from .toolchain import ARCHITECTURES, cuda_home, cxx, tools_path
from .toolchain import environment as environment  # for who imports them from here
from .toolchain import specific as specific


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str  # "9.0"
    driver: str
    uuid: str = ""  # NVML's: "GPU-8932f937-...", or "MIG-..." of a slice of one
    index: int = 0  # nvidia-smi's; for a slice, its GPU's

    def to_json(self) -> dict[str, Any]:
        """The GPU's fields in a record."""
        return {"index": self.index, "uuid": self.uuid, "name": self.name}

    def fits(self, algo: Algo) -> bool:
        """Whether the GPU has the compute capability that the algo needs."""
        lowest = algo.capability
        return not lowest or numbers(self.capability) >= numbers(lowest)


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that a CUDA process started here would see, in its order; empty if the
    driver or NVML is missing.

    `CUDA_VISIBLE_DEVICES` is read as CUDA reads it (CUDA programming guide,
    "Environment Variables"): unset means all; otherwise the indices or beginnings of
    UUIDs in it, up to the first that does not name a GPU, and none at all if one is
    named twice. A process sees only one MIG slice, the first; slices unknown to NVML
    are left out. NVML counts by PCI bus. CUDA does so only under
    CUDA_DEVICE_ORDER=PCI_BUS_ID, and by default puts the fastest first by an
    undocumented rule, approximated here by cores times clock; GPUs of one model keep
    their order under both.
    """
    return _gpus(
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
    )


@lru_cache
def _gpus(wanted: str | None, by_bus: bool) -> tuple[Gpu, ...]:
    """`wanted` is the value of CUDA_VISIBLE_DEVICES and part of the cache key, because
    a process may change it.
    """
    if wanted is not None and wanted.strip() in ("", "-1"):
        return ()
    try:
        with _nvml() as nvml:
            if wanted is not None and wanted.startswith("MIG-"):
                return _slice(nvml, wanted.split(",")[0])
            devices = [
                _gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(i), i)
                for i in range(nvml.nvmlDeviceGetCount())
            ]
            if not by_bus and len({g.name for g in devices}) > 1:
                devices = _fastest_first(nvml, devices)
            return tuple(devices if wanted is None else _visible(devices, wanted))
    # no library, no driver, no permission: all of them mean that there is no GPU to use
    except Exception:
        return ()


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any, index: int) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    driver, uuid = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlDeviceGetUUID(handle)
    return Gpu(nvml.nvmlDeviceGetName(handle), f"{major}.{minor}", driver, uuid, index)


def _fastest_first(nvml: Any, devices: list[Gpu]) -> list[Gpu]:
    def speed(gpu: Gpu) -> int:
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        clock = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
        return nvml.nvmlDeviceGetNumGpuCores(handle) * clock

    try:
        return sorted(devices, key=speed, reverse=True)  # stable, in reverse too
    except nvml.NVMLError:  # the driver does not say: fall back to the bus order
        return devices


def _slice(nvml: Any, uuid: str) -> tuple[Gpu, ...]:
    """A MIG slice: its own name and UUID, and the capability and the index of its GPU."""
    mine = nvml.nvmlDeviceGetHandleByUUID(uuid)
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mine)
    gpu = _gpu(nvml, whole, nvml.nvmlDeviceGetIndex(whole))
    return (replace(gpu, name=nvml.nvmlDeviceGetName(mine), uuid=uuid),)


def _visible(devices: list[Gpu], wanted: str) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES=`wanted` leaves of `devices`.

    Where the guide is silent this does what torch.cuda._parse_visible_devices does: the
    first entry says whether all are UUIDs or indices, an index is the number that the
    entry begins with ("1st" is 1), and a repeated GPU means none.
    """
    by_uuid, chosen = wanted.startswith("GPU-"), []
    for entry in wanted.split(","):
        if by_uuid:
            beginning = entry.startswith("GPU-")
            matches = [g for g in devices if beginning and g.uuid.startswith(entry)]
        else:
            digits = re.match(r"\s*\+?(\d+)", entry)
            matches = devices[int(digits[1]) :][:1] if digits else []
        if len(matches) != 1:  # no such GPU, or several with this beginning
            break
        chosen += matches
    return chosen if len(set(chosen)) == len(chosen) else []


def near(gpu: Gpu) -> frozenset[int]:
    """The CPUs on the GPU's side of the host, from NVML; empty if it does not say."""
    try:
        with _nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            words = nvml.nvmlDeviceGetCpuAffinity(handle, _WORDS)
    # not supported, not permitted, no NVML: treat all CPUs as equally near
    except Exception:
        return frozenset()
    return frozenset(
        64 * i + bit
        for i, word in enumerate(words)
        for bit in range(64)
        if word >> bit & 1
    )


_WORDS = 64  # of 64 CPUs each


def has_package(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# --- can it run here?


COMPILED = "compiled"  # a mode in which nothing runs


@dataclass(frozen=True)
class Place:
    """Where an algo runs here (`mode`: cuda, cpu, interpreter or emulator; or COMPILED),
    or why it cannot and how to fix that.
    """

    mode: str | None
    reason: str | None = None
    hint: str | None = None


GET_NVCC = "install the CUDA toolkit, or pip install " + (
    "-e '.[cuda]'" if paths.IN_CHECKOUT else "'gdn[cuda]'"
)
NO_GPU = "no GPU here"
EMULATE = "`gdn run --emulate` runs it on the CPU"
GET_GPU = "`gdn list` says how to get one"
MODAL = "`gdn modal run` rents a B200, which needs a Modal account and costs money"


def placed(
    algo: Algo,
    device: str,
    missing: Callable[[Algo, str], Place | None],
    gpus: bool = False,
) -> Place:
    """Choose where to run: a GPU if there is one, else the CPU, else Triton's interpreter.

    `missing(algo, mode)` says what is missing on the machine in question.
    """
    wanted = {
        "auto": ("cuda", "cpu", "interpreter"),
        "cuda": ("cuda",),
        "cpu": ("cpu", "interpreter"),
    }[device]
    modes = [mode for mode in wanted if mode in algo.modes]
    if not modes:
        option = "--gpus" if gpus else f"--device {device}"
        hint = f"it runs on {', '.join(algo.modes)}: drop {option}"
        return Place(None, f"does not run on {device}", hint)
    problem = Place(None)
    for mode in modes:
        lack = missing(algo, mode)
        if lack is None:
            return Place(mode)
        problem = lack
    return problem


# What the worker itself needs: import name -> what pip installs.
_WORKER = {"torch": "torch", "flashinfer_bench": "flashinfer-bench"}


@dataclass(frozen=True)
class Machine:
    """What a command knows about its machine: created once and passed down.

    Each property is looked up on first use. Tests pass a machine with other properties.
    """

    gpus: Callable[[], tuple[Gpu, ...]] = gpus
    near: Callable[[Gpu], frozenset[int]] = near
    has_package: Callable[[str], bool] = has_package
    cuda_home: Callable[[], Path | None] = cuda_home
    cxx: Callable[[], str | None] = cxx

    def chosen(self, text: str) -> tuple[Gpu, ...]:
        """The GPUs that `--gpus` names: `all`, or numbers and beginnings of UUIDs,
        separated by commas.

        Numbers count the visible GPUs from 0 in CUDA's order, like torch: GPUs that
        CUDA_VISIBLE_DEVICES leaves out do not count. UsageError if an entry names no
        GPU or one twice, MissingError if there is no GPU at all.
        """
        option = f"--gpus {text or repr('')}"
        visible = self.gpus()
        if not visible:
            raise MissingError(f"{option}: no GPU here", hint=GET_GPU)
        if text.strip() == "all":
            return visible
        picked: list[Gpu] = []
        for entry in map(str.strip, text.split(",")):
            if entry.isdecimal():
                matches = list(visible[int(entry) :][:1])
            else:
                matches = [
                    gpu for gpu in visible if entry and gpu.uuid.startswith(entry)
                ]
            if len(matches) != 1:
                number = "several GPUs" if matches else "no GPU"
                known = (f"{i} ({gpu.uuid})" for i, gpu in enumerate(visible))
                hint = f"visible here: {', '.join(known)}"
                raise UsageError(f"{option}: '{entry}' names {number}", hint=hint)
            if matches[0] in picked:
                raise UsageError(f"{option} names a GPU twice", hint="name each once")
            picked += matches
        return tuple(picked)

    def place(
        self, algo: Algo, device: str = "auto", among: Sequence[Gpu] = ()
    ) -> Place:
        """Where the algo runs here. `among` are the GPUs to choose from, one of which
        must fit; () means the one that a CUDA process uses by default.
        """
        return placed(algo, device, partial(self._missing, among=among), bool(among))

    def without_gpu(self, algo: Algo) -> Place:
        """What can be done with an algo for which there is no GPU: compile CUDA C++.
        What ships with gdn is known to compile.
        """
        if algo.language != "cuda":
            return Place(None, NO_GPU, GET_GPU)
        ships = algo.folder and algo.folder.is_relative_to(paths.ALGOS_DIR)
        if ships or self._missing(algo, COMPILED, ()):
            return Place(None, NO_GPU, EMULATE)
        return Place(COMPILED)

    def emulates(self, algo: Algo, device: str = "auto") -> Place:
        """Where `--emulate` runs the algo: CUDA C++ as C++ on the CPU."""
        if algo.language != "cuda":
            reason = f"--emulate is for CUDA, {algo.name} is {algo.language}"
            return Place(None, reason, "drop --emulate")
        as_cpp = replace_fields(algo, language="cpp")
        return self._missing(as_cpp, "emulator", ()) or Place("emulator")

    def _missing(self, algo: Algo, mode: str, among: Sequence[Gpu]) -> Place | None:
        if mode == "cuda":
            able = among or self.gpus()[:1]
            if not able:
                return Place(None, NO_GPU, GET_GPU)
            if not any(gpu.fits(algo) for gpu in able):
                have = ", ".join(dict.fromkeys(gpu.capability for gpu in able))
                reason = f"needs compute capability {algo.capability}, here is {have}"
                return Place(None, reason, GET_GPU)
        triton = {"triton": "triton"} if algo.language == "triton" else {}
        for module, wheel in (_WORKER | triton | algo.packages).items():
            if not self.has_package(module):
                return Place(None, f"package {wheel} missing", f"pip install {wheel}")
        if algo.language == "cuda" and self.cuda_home() is None:
            return Place(None, "no nvcc here", GET_NVCC)
        if algo.language == "cpp" and self.cxx() is None:
            hint = "install g++ or clang++, or set CXX"
            return Place(None, "no C++ compiler here", hint)
        return None


HERE = Machine()  # the default, if none is passed


# --- the environment of builders


def with_builders(
    env: Mapping[str, str],
    mode: str,
    gpu: Gpu | None = None,
    machine: Machine = HERE,
) -> dict[str, str]:
    """An environment in which flashinfer-bench's builders work. `gpu` is the only
    visible GPU; None: CUDA's choice.
    """
    env = dict(env)
    env["PATH"] = tools_path(env.get("PATH", ""))
    home = machine.cuda_home()
    if home:
        env["CUDA_HOME"] = str(home)
    # flashinfer-bench's cache key has neither the GPU nor the Python that a build was
    # made for, nor the list of architectures
    target = "cpu"
    gpus: tuple[Gpu, ...] = ()
    if mode == "cuda":
        gpus = (gpu,) if gpu else machine.gpus()
    if gpus:
        target = gpus[0].capability
        # the one that is locked, whatever CUDA's order is
        if gpu or len(gpus) > 1:
            env["CUDA_VISIBLE_DEVICES"] = gpus[0].uuid
    architectures = env.get(ARCHITECTURES)
    if architectures:
        target += f"-for-{re.sub(r'[^0-9A-Za-z.+]+', '_', architectures)}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    env.setdefault("FIB_CACHE_PATH", str(paths.builds_dir() / f"{python}-{target}"))
    # otherwise in the temporary folder
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(paths.builds_dir() / "inductor"))
    return env
