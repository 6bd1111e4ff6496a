"""What sanitizers and the emulator write down, as a line each; and `--sanitize`."""

import building
import helpers
import pytest

from gdn_cli.machine import inventory, sanitizers
from gdn_cli.schema.record_types import Status
from gdn_cli.worker.judge import faults

HERE = "/builds/tvm_ffi/tvm_ffi_mine_abcdef"
RACE = f"""==================
WARNING: ThreadSanitizer: data race (pid=30081)
  Read of size 4 at 0x55a3961690ac by thread T2:
    #0 std::vector<int>::operator[] /usr/include/c++/12/bits/stl_vector.h:1046 (t+0x126c)
    #1 work() {HERE}/kernel.cpp:4 (t+0x126c)
    #2 <null> <null> (libstdc++.so.6+0xd44a2)

  Previous write of size 4 at 0x55a3961690ac by thread T1:
    #0 work() {HERE}/kernel.cpp:7 (t+0x1284)

  Thread T2 (tid=30087, running) created by main thread at:
    #0 run {HERE}/kernel.cpp:9 (t+0x12de)

SUMMARY: ThreadSanitizer: data race {HERE}/kernel.cpp:4 in work()
==================
"""
ELSEWHERE = RACE.replace(HERE, "/usr/src/torch")
OVERFLOW = f"""=================================================================
==30122==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602000000060 at pc 0x55 bp 0x7f
READ of size 4 at 0x602000000060 thread T0
    #0 0x55e7fe57b43f in run {HERE}/kernel.cpp:9
    #1 0x7f6bec045249 in __libc_start_call_main ../sysdeps/nptl/libc_start_call_main.h:58

0x602000000060 is located 0 bytes to the right of 16-byte region
allocated by thread T0 here:
    #0 0x55e7fe57b3c6 in run {HERE}/kernel.cpp:8
"""
SIGNAL = f"""AddressSanitizer:DEADLYSIGNAL
=================================================================
==30134==ERROR: AddressSanitizer: SEGV on unknown address 0x000000000000 (pc 0x56 T0)
==30134==The signal is caused by a WRITE memory access.
    #0 0x564282b62494 in run {HERE}/kernel.cpp:10
"""
AT = f"{HERE}/kernel.cpp"
RACED = f"data race: read of size 4, {AT}:4 and previous write of size 4, {AT}:7"
EMULATED = (
    "race: threads {} and 35 write and read shared byte {}, /a/k.cu:3 and /a/k.cu:4"
)


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        ({}, []),
        ({"faults.7": RACE + ELSEWHERE + RACE}, [RACED]),
        ({"faults.8": OVERFLOW}, [f"heap-buffer-overflow: read of size 4, {AT}:9"]),
        ({"faults.9": SIGNAL}, [f"SEGV: {AT}:10"]),
        (
            {"faults.emulated": f"{EMULATED.format(3, '0x4')}\n{EMULATED.format(5, '0x8')}\n"},
            [EMULATED.format(3, "0x4")],
        ),
        (
            {"faults.emulated": "".join(f"race: x, /a/k.cu:{i}\n" for i in range(5))},
            [*(f"race: x, /a/k.cu:{i}" for i in range(3)), "and 2 more"],
        ),
    ],
)  # fmt: skip
def test_a_line_for_each_fault_in_the_algos_own_files(
    files, lines, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert faults.collect() == lines
    assert faults.collect() == []


def test_a_record_with_a_fault_is_wrong():
    right = building.record("a", status="passed", reason=None)
    crashed = building.record("a", status="crashed", reason="SIGSEGV")
    assert faults.with_faults(right, []).passed
    told = faults.with_faults(right, ["race: x"])
    assert (told.status, told.reason) == (Status.WRONG, "race: x")
    told = faults.with_faults(crashed, ["race: x"])
    assert (told.status, told.reason) == (Status.CRASHED, "SIGSEGV\nrace: x")


KERNEL = (
    helpers.TESTS.parent / "examples/algos/gdn_decode/my-decode/kernel.cpp"
).read_text()
# two threads, which share one q and one k
RACY = KERNEL.replace("    float q_[D], k_[D];\n", "")
RACY = RACY.replace("#include <cstring>", "#include <cstring>\n#include <thread>")
RACY = RACY.replace(
    "  for (int64_t i = 0; i < B * HV; ++i) {",
    "  static float q_[D], k_[D];\n"
    "  const auto some = [&](int64_t from, int64_t to) {\n"
    "  for (int64_t i = from; i < to; ++i) {",
)
RACY = RACY.replace(
    "    }\n  }\n}\n",
    "    }\n  }\n  };\n  std::thread other(some, 0, B * HV / 2);\n"
    "  some(B * HV / 2, B * HV);\n  other.join();\n}\n",
)


@pytest.mark.slow
def test_a_race_of_threads_is_found(tmp_path, gdn):
    if inventory.cxx() is None:
        pytest.skip("no C++ compiler here")
    how = dict(language="cpp", entry_point="kernel.cpp::run", destination_passing=True)
    folder = helpers.write_algo(tmp_path, "racy", {"kernel.cpp": RACY}, **how)
    args = "run", "racy", "--algos", tmp_path, "-w", "0", "--json"
    done = gdn(*args, "--sanitize", "thread")
    if "has no libtsan.so" in done.out:
        pytest.skip("no ThreadSanitizer here")
    (record,) = done.json["records"]
    assert (done.code, record["status"]) == (1, "wrong")
    line = next(i for i, x in enumerate(RACY.splitlines(), 1) if "q_[c] =" in x)
    places = f"{folder}/kernel.cpp:{line}", f"{folder}/kernel.cpp:{line + 1}"
    _, *found = record["reason"].splitlines()
    races = [x for x in found if x.startswith("data race: write of size 4, ")]
    assert races and all(any(place in x for place in places) for x in races)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("cpp-v1 --sanitize memory", "unknown sanitizer 'memory'"),
        ("cuda-v1 --sanitize thread", "--sanitize is for C++, cuda-v1 is cuda"),
        ("cpp-v1 --sanitize thread --official", "--official and --sanitize exclude"),
        ("cuda-v1 --emulate --sandbox", "--emulate and --sandbox exclude each other"),
    ],
)
def test_wrong_usage(args, says, gdn):
    done = gdn("run", *args.split())
    assert done.code == 2 and says in " ".join(done.err.split())


def test_a_compiler_without_the_library_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "echo")
    with pytest.raises(Exception, match="echo has no libasan.so"):
        sanitizers.environment("address", None)
