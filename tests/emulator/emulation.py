"""CUDA sources made ready for a CPU: what emulator/ needs of them, and a library of them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import helpers
import pytest

from gdn_cli.machine import inventory

HERE = helpers.TESTS / "emulator"
CACHE = helpers.TESTS.parent / ".pytest_cache" / "emulated"
CUDA = helpers.OURS / "_cuda"


def without_ptx(source: str) -> str:
    """access.cuh or gates.cuh with plain C++ for its few lines of PTX: loads, stores, exp2."""
    head = "template <int BYTES, int HOW> void "
    load = head + "load(uint32_t* w, const void* p) { std::memcpy(w, p, BYTES); }\n"
    store = head + "store(void* p, const uint32_t* w) { std::memcpy(p, w, BYTES); }\n"
    source, n = re.subn(r"#define GDN_LOAD.*?#undef GDN_LOAD\n", load, source, flags=re.S)
    source, m = re.subn(r"#define GDN_STORE.*?#undef GDN_STORE\n", store, source, flags=re.S)
    source, k = re.subn(r'asm\("ex2\.approx.*?;\n', "y = exp2f(x);\n", source)
    assert (n, m, k) in {(1, 1, 0), (0, 0, 1)}, "it has other PTX than this knows"
    assert "asm" not in source
    return source


def library(folder: Path, driver: str, kernel: Path) -> ctypes.CDLL:
    """A library of `driver`, which includes `kernel`; both may include _cuda's access.cuh and gates.cuh."""
    for file in ("access.cuh", "gates.cuh"):
        (folder / file).write_text(without_ptx(next(CUDA.glob(f"*/{file}")).read_text()))
    shutil.copy(kernel, folder)
    (folder / "driver.cpp").write_text(driver)
    return compiled(folder)


def compiled(folder: Path, *flags: str) -> ctypes.CDLL:
    """The library of `driver.cpp` in a folder. It is cached by its sources: the folder's files, those of
    emulator/, the compiler and its flags."""
    if inventory.cxx() is None:
        pytest.skip("no C++ compiler here")
    command = [inventory.cxx(), "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-I", str(HERE), "-I", ".", *flags]
    version = subprocess.run([inventory.cxx(), "--version"], capture_output=True, text=True).stdout
    made_from = hashlib.sha256(repr((version, command)).encode())
    for file in sorted([*folder.iterdir(), *HERE.iterdir()]):
        made_from.update(file.name.encode() + b"\0" + file.read_bytes())
    library = CACHE / f"{made_from.hexdigest()[:24]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as own:
            subprocess.run([*command, "-o", f"{own}/driver.so", "driver.cpp"], cwd=folder, check=True)
            os.replace(f"{own}/driver.so", library)
    return ctypes.CDLL(str(library))
