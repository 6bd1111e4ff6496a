"""gdn_cli.machine.environment: readings of the GPU, and the doubts that follow from them."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import building
import pytest

from gdn_cli.machine import environment
from gdn_cli.schema.record_types import GpuState

# --- readings


class NVMLError(Exception):
    pass


class Nvml:
    """pynvml for one GPU. `bits`: its clock event reasons, `pids`: the processes with a
    context on it.
    """

    NVMLError, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = NVMLError, 1, 2, 0

    def __init__(self, bits: int = 0, pids: tuple[int, ...] = (42,)):
        self.bits, self.pids, self.opened = bits, pids, 0

    def nvmlInit(self):
        self.opened += 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-8932f937-d72c"
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle, clock):
        assert handle == "handle"
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 41

    def nvmlDeviceGetPowerUsage(self, handle):
        return 123456  # milliwatts

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.bits

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.pids]


@pytest.fixture
def nvml(monkeypatch):
    """nvml(**settings): that pynvml, and a torch that sees its GPU."""
    import torch

    def install(**settings):
        environment._opened.cache_clear()
        fake = Nvml(**settings)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        properties = SimpleNamespace(uuid="8932f937-d72c")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
        return fake

    yield install
    environment._opened.cache_clear()


STATE = {
    "sm_mhz": 1980,
    "memory_mhz": 3201,
    "temperature_c": 41,
    "power_w": 123.456,
    "throttle": [],
    "other_processes": 0,
}


def test_a_reading(nvml):
    fake = nvml()
    assert environment.gpu_state() == GpuState(**STATE)
    assert environment.gpu_state(brief=True) == GpuState(sm_mhz=1980, throttle=[])
    assert fake.opened == 1


# the bits of nvml.h, NVML_CLOCKS_EVENT_REASON_*
@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (1, []),  # GPU_IDLE
        (2, []),  # APPLICATIONS_CLOCKS_SETTING
        (4, ["sw_power_cap"]),
        (8, ["hw_slowdown"]),
        (16, ["sync_boost"]),
        (32, ["sw_thermal"]),
        (64, ["hw_thermal"]),
        (128, ["hw_power_brake"]),
        (256, []),  # DISPLAY_CLOCK_SETTING
        (4 | 32 | 1, ["sw_power_cap", "sw_thermal"]),
    ],
)
def test_throttle_reasons(bits, reasons, nvml):
    nvml(bits=bits)
    assert environment.gpu_state().throttle == reasons


def test_the_bits_are_pynvml_s():
    pynvml = pytest.importorskip("pynvml")
    names = {
        "sw_power_cap": "SwPowerCap",
        "hw_slowdown": "HwSlowdown",
        "sync_boost": "SyncBoost",
        "sw_thermal": "SwThermalSlowdown",
        "hw_thermal": "HwThermalSlowdown",
        "hw_power_brake": "HwPowerBrakeSlowdown",
    }
    theirs = {
        getattr(pynvml, f"nvmlClocksThrottleReason{theirs}"): ours
        for ours, theirs in names.items()
    }
    assert theirs == {bit: name for bit, (name, _) in environment._SLOWED.items()}
    # and the functions that are called are there
    assert {name for name in vars(Nvml) if name.startswith("nvml")} <= set(dir(pynvml))


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        ((), 0),
        ((os.getpid(),), 0),
        ((1234567,), 0),  # in a container: the host's number of this process
        ((os.getpid(), 7), 1),
        ((7, 7, 8, 9), 2),  # one process may be listed twice
    ],
)
def test_other_processes(pids, others, nvml):
    nvml(pids=pids)
    assert environment.gpu_state().other_processes == others


def fails(*args):
    raise NVMLError("Not Supported")


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        ("nvmlDeviceGetClockInfo", {"sm_mhz", "memory_mhz"}),
        ("nvmlDeviceGetTemperature", {"temperature_c"}),
        ("nvmlDeviceGetPowerUsage", {"power_w"}),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", {"throttle"}),
        ("nvmlDeviceGetComputeRunningProcesses", {"other_processes"}),
    ],
)
def test_values_that_nvml_cannot_read_are_left_out(function, keys, nvml):
    setattr(nvml(), function, fails)
    assert environment.gpu_state() == GpuState(
        **{k: v for k, v in STATE.items() if k not in keys}
    )


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_hidden_nvml(function, nvml):
    setattr(nvml(), function, fails)
    assert environment.gpu_state() == GpuState()


def test_no_gpu_in_torch(nvml, monkeypatch):
    import torch

    nvml()
    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    assert environment.gpu_state() == GpuState()


def test_the_cpu(monkeypatch):
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {8, 0, 2, 1, 3}, raising=False
    )
    found = environment.describe("cpu")
    assert (found.cpus, found.affinity) == (5, "0-3,8")
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    found = environment.describe("cpu")
    assert found.cpus == os.cpu_count() and found.affinity is None


def test_compile_time_requests(monkeypatch):
    monkeypatch.setattr(environment, "_describe_gpu", lambda found: None)
    monkeypatch.delenv("TVM_FFI_CUDA_ARCH_LIST", raising=False)
    assert environment.describe("cuda").architectures is None
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "8.0 9.0a")
    assert environment.describe("cuda").architectures == "8.0 9.0a"
    assert environment.describe("cpu").architectures is None


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([1, 0], "0-1"),
        ([0, 2, 4], "0,2,4"),
        ({9, 10, 11, 3, 63, 64}, "3,9-11,63-64"),
    ],
)
def test_ranges(numbers, text):
    assert environment.ranges(numbers) == text


# --- doubts

FINE = {
    "low_us": 99.0,
    "high_us": 101.0,
    "ci_low_us": 99.5,
    "ci_high_us": 100.5,
    "stopped": "target",
}


def doubts(before=None, during=None, after=None, target=0.01, **timing) -> list[str]:
    before, *during, after = (
        GpuState(**STATE | (d or {})) for d in (before, *(during or [{}, {}]), after)
    )
    us = timing.pop("median_us", 100.0)
    return environment.doubts(
        before, during, after, building.timing(us, **FINE | timing), target
    )


def test_silent_when_all_is_well():
    assert doubts() == []
    unknown, fine = GpuState(), building.timing(100.0, **FINE)
    assert environment.doubts(unknown, [], unknown, fine, 0.01) == []
    assert environment.doubts(unknown, [unknown, unknown], unknown, fine, 0.01) == []
    idle = GpuState(sm_mhz=345, temperature_c=30, throttle=[])
    assert environment.doubts(idle, [GpuState(**STATE)], idle, fine, 0.01) == []


def slowed(*causes: str) -> list[str]:
    advice = "let it rest, or compare within this run only"
    return [
        f"the GPU was slowed by {cause} while this was measured: {advice}"
        for cause in causes
    ]


HEAT, BRAKE = "its temperature", "the power brake of its server"


@pytest.mark.parametrize(
    ("reasons", "causes"),
    [
        (["sw_power_cap"], ["its power cap"]),
        (["hw_slowdown"], ["its protection against heat and overload"]),
        (["sync_boost"], ["the others of its sync boost group"]),
        (["hw_slowdown", "hw_thermal"], [HEAT]),
        (["hw_slowdown", "hw_power_brake"], [BRAKE]),
        (["hw_slowdown", "hw_thermal", "sw_thermal"], [HEAT]),
    ],
)
def test_throttled(reasons, causes):
    assert doubts(during=[{}, {"throttle": reasons}, {}]) == slowed(*causes)
    assert doubts(after={"throttle": reasons}) == slowed(*causes)
    assert doubts(before={"throttle": reasons}) == []


def moved(low: int, high: int) -> list[str]:
    return [
        f"the SM clock moved between {low} and {high} MHz while this was measured: "
        "lock it (nvidia-smi --lock-gpu-clocks), or compare within this run only"
    ]


@pytest.mark.parametrize(
    ("clocks", "said"),
    [
        ([2000, 1940, 2000], []),  # 3 % exactly
        ([2000, 1939, 2000], moved(1939, 2000)),
        ([2000, 1500], moved(1500, 2000)),
        ([345, 1980, 1980], []),  # still rising from idle
        ([345, 1980], []),
        ([345, 1500, 1980], moved(1500, 1980)),
        ([345], []),
    ],
)
def test_clocks(clocks, said):
    assert doubts(during=[{"sm_mhz": mhz} for mhz in clocks]) == said


def test_clocks_before_and_after_are_the_idle_gpu_s():
    assert doubts(before={"sm_mhz": 345}, after={"sm_mhz": 345}) == []


def test_hot():
    (said,) = doubts(during=[{"temperature_c": 85}, {"temperature_c": 88}])
    assert said.startswith("the GPU was at 88 °C while this was measured: ")
    assert doubts(during=[{"temperature_c": 84}], after={"temperature_c": 84}) == []
    assert len(doubts(after={"temperature_c": 85})) == 1


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_shared(when):
    busy = {"other_processes": 2}
    (said,) = doubts(**{when: [busy] if when == "during" else busy})
    assert said.startswith("2 other processes used the GPU while this was measured: ")


def known(interval: str, target: str) -> list[str]:
    return [
        f"the median is known to ±{interval} % only, not to the target of {target} %: give it"
        " more time (--seconds)"
    ]


def test_an_interval_wider_than_the_target():
    wide = {"ci_low_us": 98.0, "ci_high_us": 102.5}  # half of 4.5 in 100
    assert doubts(stopped="time", **wide) == known("2.25", "1")
    assert doubts(stopped="time", **wide, target=0.005) == known("2.25", "0.5")
    assert doubts(stopped="time", **wide, target=0.03) == []
    assert doubts(stopped="count", **wide) == []  # asked for exactly so
    assert doubts(stopped="time") == []  # narrow at the last moment
    assert doubts(stopped="time", ci_low_us=None, ci_high_us=None) == []
    assert doubts(stopped="time", ci_low_us=80.0, ci_high_us=120.0) == known("20", "1")


def test_spread():
    said = (
        "the middle half of the samples spreads over ±{} % of the median: "
        + "end other programs on this machine and measure again"
    )
    assert doubts(low_us=90.0, high_us=110.0) == []  # 10 % exactly
    assert doubts(low_us=98.0, high_us=123.0) == [said.format("12.5")]
    # an empty launch: a few ticks of the clock
    assert doubts(median_us=0.58, low_us=0.51, high_us=0.67) == []
    assert doubts(median_us=0.0, low_us=0.0, high_us=1.0, spread=0.0) == []
