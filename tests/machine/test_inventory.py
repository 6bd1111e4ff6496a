"""gdn_cli.machine.inventory: which GPUs a CUDA process would see, and in which order."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gdn_cli.machine import inventory

MIG = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"


class NVMLError(Exception):
    pass


class Nvml:
    """pynvml over a list of {name, uuid, capability, cores, mhz}; a handle is one of these."""

    NVMLError, NVML_CLOCK_SM = NVMLError, 1

    def __init__(self, *devices: dict, slices: dict[str, dict] | None = None):
        self.devices, self.slices = devices, slices or {}
        self.open = self.inits = 0

    def nvmlInit(self):
        self.open += 1
        self.inits += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, i):
        return self.devices[i]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        try:
            return self.slices[uuid]
        except KeyError:
            raise NVMLError("Not Found") from None

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, mine):
        return self.devices[mine["of"]]

    def nvmlDeviceGetIndex(self, handle):
        return self.devices.index(handle)

    def nvmlDeviceGetName(self, handle):
        return handle["name"]

    def nvmlDeviceGetUUID(self, handle):
        return handle["uuid"]

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return handle["capability"]

    def nvmlDeviceGetNumGpuCores(self, handle):
        if handle["cores"] is None:
            raise NVMLError("Function Not Found")
        return handle["cores"]

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        assert clock == self.NVML_CLOCK_SM
        return handle["mhz"]


def device(
    uuid: str,
    name: str = "NVIDIA H200",
    capability=(9, 0),
    cores: int | None = 16896,
    mhz: int = 1980,
):
    return {
        "name": name,
        "uuid": uuid,
        "capability": capability,
        "cores": cores,
        "mhz": mhz,
    }


ALIKE = [device("GPU-aa00"), device("GPU-ab11"), device("GPU-cc22")]
SMALL = device("GPU-small", "GT 1030", (6, 1), 384, 1900)


@pytest.fixture
def nvml(monkeypatch):
    """nvml(*devices): that pynvml instead of the one installed, and no setting of the shell's."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def install(*devices, **more):
        inventory._gpus.cache_clear()
        fake = Nvml(*devices, **more)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    yield install
    inventory._gpus.cache_clear()


def seen() -> list[int]:
    return [g.index for g in inventory.gpus()]


def test_all_gpus_with_their_known_facts(nvml):
    fake = nvml(*ALIKE[:1], SMALL)
    assert inventory.gpus() == (
        inventory.Gpu("NVIDIA H200", "9.0", "580.1", "GPU-aa00", 0),
        inventory.Gpu("GT 1030", "6.1", "580.1", "GPU-small", 1),
    )
    assert fake.open == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", []),
        (" ", []),
        ("-1", []),
        ("all", []),
        ("NoDevFiles", []),
        ("0", [0]),
        ("1,0", [1, 0]),
        (" 2 , 1", [2, 1]),
        ("0,2,-1,1", [0, 2]),  # the programming guide's own example
        ("0,3,1", [0]),
        ("5", []),
        ("1,,2", [1]),
        ("+2", [2]),
        ("1gpu2,2ampere", [1, 2]),  # torch's own example
        ("1,1", []),
        ("GPU-cc22,GPU-aa00", [2, 0]),
        ("GPU-c,GPU-ab", [2, 1]),
        ("GPU-a", []),  # two begin so
        ("GPU-c,GPU-zz,GPU-ab", [2]),
        ("GPU-c,1", [2]),
        ("0,GPU-c", [0]),
        ("GPU-cc,GPU-c", []),
    ],
)
def test_visible_devices(value, expected, nvml, monkeypatch):
    nvml(*ALIKE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert seen() == expected


def test_an_empty_entry_is_not_the_beginning_of_a_uuid(nvml, monkeypatch):
    nvml(*ALIKE[:1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,")
    assert seen() == [0]


@pytest.mark.parametrize("value", ["", "-1"])
def test_no_need_to_ask_nvml(value, nvml, monkeypatch):
    fake = nvml(*ALIKE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert (inventory.gpus(), fake.inits) == ((), 0)


def test_a_changed_setting_is_seen(nvml, monkeypatch):
    nvml(*ALIKE)
    assert seen() == [0, 1, 2]
    for value, expected in (("2", [2]), ("", []), ("1,2", [1, 2]), ("2", [2])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert seen() == expected


def test_nvml_is_asked_once(nvml):
    fake = nvml(*ALIKE)
    assert inventory.gpus() == inventory.gpus()
    assert fake.inits == 1


def test_the_fastest_first_unless_by_bus(nvml, monkeypatch):
    nvml(SMALL, *ALIKE[:2])
    assert seen() == [1, 2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert seen() == [1, 0]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert seen() == [0, 2]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert seen() == [1, 0]


def test_cores_count_times_their_clock(nvml):
    slow, quick = (
        device("GPU-1", "A", cores=1000, mhz=1000),
        device("GPU-2", "B", cores=600, mhz=2000),
    )
    nvml(slow, quick)
    assert seen() == [1, 0]


def test_one_model_keeps_its_order(nvml):
    """Boards of one model may differ in their clocks, and CUDA does not reorder these."""
    nvml(device("GPU-1", mhz=1900), device("GPU-2", mhz=1980))
    assert seen() == [0, 1]


def test_an_old_driver_does_not_tell_the_cores(nvml):
    nvml({**SMALL, "cores": None}, *ALIKE[:1])
    assert seen() == [0, 1]


def test_a_slice_of_a_gpu(nvml, monkeypatch):
    nvml(*ALIKE, slices={MIG: {"name": "NVIDIA H200 MIG 1g.18gb", "of": 1}})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{MIG},MIG-other")
    assert inventory.gpus() == (
        inventory.Gpu("NVIDIA H200 MIG 1g.18gb", "9.0", "580.1", MIG, 1),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"MIG-other,{MIG}")
    assert inventory.gpus() == ()


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount"])
def test_no_driver(nvml, broken):
    def fail():
        raise NVMLError("Driver Not Loaded")

    setattr(nvml(*ALIKE), broken, fail)
    assert inventory.gpus() == ()


def test_no_pynvml(nvml, monkeypatch):
    nvml()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert inventory.gpus() == ()


def test_place_asks_for_the_capability_of_the_first_visible(nvml, monkeypatch):
    nvml(*ALIKE[:1], SMALL)
    algo = SimpleNamespace(
        modes=("cuda",), capability="9.0", language="python", packages={}
    )
    machine = inventory.Machine(has_package=lambda module: True)
    assert machine.place(algo).mode == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert machine.place(algo).reason == "needs compute capability 9.0, here is 6.1"
