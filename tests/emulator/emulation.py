"""CUDA sources made ready for a CPU: what the emulator needs of them, and a library of them."""

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
import torch

from gdn_cli import paths
from gdn_cli.machine import inventory

HERE = paths.PACKAGE / "emulator"
CACHE = helpers.TESTS.parent / ".pytest_cache" / "emulated"
CUDA = helpers.OURS / "_cuda"


def without_ptx(source: str) -> str:
    """access.cuh or gates.cuh with plain C++ for its few lines of PTX: loads, stores, exp2."""
    head = "template <int BYTES, int HOW> void "
    load = head + "load(uint32_t* w, const void* p) { std::memcpy(w, p, BYTES); }\n"
    store = head + "store(void* p, const uint32_t* w) { std::memcpy(p, w, BYTES); }\n"
    source, n = re.subn(
        r"#define GDN_LOAD.*?#undef GDN_LOAD\n", load, source, flags=re.S
    )
    source, m = re.subn(
        r"#define GDN_STORE.*?#undef GDN_STORE\n", store, source, flags=re.S
    )
    source, k = re.subn(r'asm\("ex2\.approx.*?;\n', "y = exp2f(x);\n", source)
    assert (n, m, k) in {(1, 1, 0), (0, 0, 1)}, "it has other PTX than this knows"
    assert "asm" not in source
    return source


def library(
    folder: Path,
    driver: str,
    kernel: Path,
    *,
    cuts=(),
    races: bool = False,
    flags: tuple[str, ...] = (),
) -> ctypes.CDLL:
    """A library of `driver`, which includes `kernel`; both may include _cuda's
    access.cuh and gates.cuh. The driver's macro CUT gets each of the `cuts`. `flags` are
    the compiler's: with many cuts and short runs -O0 is sooner done.
    """
    driver = driver.replace("@CUTS@", "\n  ".join(f"CUT{cut}" for cut in cuts))
    for file in ("access.cuh", "gates.cuh"):
        (folder / file).write_text(
            without_ptx(next(CUDA.glob(f"*/{file}")).read_text())
        )
    shutil.copy(kernel, folder)
    (folder / "driver.cpp").write_text(driver)
    return compiled(folder, *flags, races=races)


# what tokens are of: bfloat16, float16
TOKENS = CUDA / "prefill" / "token.h"
TOKENS_F16 = next(helpers.OURS.glob("*/cuda-chunk-packed-f16/token.h"))


def compiled(folder: Path, *flags: str, races: bool = False) -> ctypes.CDLL:
    """The library of `driver.cpp` in a folder. It is cached by its sources: the
    folder's files, those of emulator/, the compiler and its flags. With `races` it
    looks for them: see `races_in`.
    """
    if inventory.cxx() is None:
        pytest.skip("no C++ compiler here")
    if not (folder / "token.h").exists():
        shutil.copy(TOKENS, folder)
    command = [
        inventory.cxx(),
        "-std=c++17",
        "-O1",
        "-w",
        "-fPIC",
        "-I",
        str(HERE),
        "-I",
        ".",
        *flags,
    ]
    steps = [[*command, "-shared", "driver.cpp"]]
    # two steps, since the detector is not to look at itself; without -fsanitize its
    # library is not linked
    if races:
        steps = [
            [
                *command,
                "-g",
                "-fsanitize=thread",
                "-DEMULATED_RACES",
                "-c",
                "driver.cpp",
            ],
            [
                *command,
                "-DEMULATED_RACES",
                "-shared",
                "{own}/driver.o",
                str(HERE / "races.cpp"),
                "-ldl",
            ],
        ]
    version = subprocess.run(
        [inventory.cxx(), "--version"], capture_output=True, text=True
    ).stdout
    made_from = hashlib.sha256(repr((version, steps)).encode())
    for file in sorted([*folder.iterdir(), *HERE.iterdir()]):
        made_from.update(file.name.encode() + b"\0" + file.read_bytes())
    library = CACHE / f"{made_from.hexdigest()[:24]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as own:
            for step in steps:
                made = f"{own}/driver.o" if "-c" in step else f"{own}/driver.so"
                subprocess.run(
                    [*(part.format(own=own) for part in step), "-o", made],
                    cwd=folder,
                    check=True,
                )
            os.replace(f"{own}/driver.so", library)
    return ctypes.CDLL(str(library))


C_TYPES = {
    "void": ctypes.c_void_p,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
}


class Struct(ctypes.Structure):
    """A tensor is its address."""

    def __init__(self, **fields) -> None:
        for name, x in fields.items():
            fields[name] = x.data_ptr() if isinstance(x, torch.Tensor) else x
        super().__init__(**fields)


def structure(source: str, name: str) -> type[Struct]:
    """A struct of a driver: lines of `type name, *pointer, array[5];`."""
    fields = []
    body = re.search(rf"struct {name} {{(.*?)}};", source, re.S)[1]
    for kind, names in re.findall(r"^ +(\w+) ([^;]+);", body, re.M):
        for field in re.split(r",\s*", names):
            array = re.fullmatch(r"(\w+)\[(\d+)\]", field)
            if array:
                fields.append((array[1], C_TYPES[kind] * int(array[2])))
            else:
                fields.append((field.lstrip("*"), C_TYPES[kind]))
    return type(name, (Struct,), {"_fields_": fields})


def addresses(*tensors: torch.Tensor) -> ctypes.Array:
    """What C takes as `void** t`."""
    return (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))


def races_in(library: ctypes.CDLL, folder: Path) -> set[tuple[str, str]]:
    """The pairs of source lines, the earlier access first, that raced in shared memory
    since the last call. The sources are in `folder`. Raises AssertionError if no two
    threads used the same word.
    """
    pairs, checked = (ctypes.c_uint64 * 2 * 256)(), ctypes.c_long()
    n = min(library.races(pairs, len(pairs), ctypes.byref(checked)), len(pairs))
    assert checked.value > 0, "no two threads have used the same word"
    codes = [hex(code) for pair in pairs[:n] for code in pair]
    if not codes:
        return set()
    command = ["addr2line", "-s", "-e", library._name, *codes]
    lines = []
    for place in subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines():
        name, number = place.split(" ")[0].split(":")
        file = next(where / name for where in (folder, HERE) if (where / name).exists())
        lines.append(
            file.read_text(encoding="utf-8").splitlines()[int(number) - 1].strip()
        )
    return set(zip(lines[::2], lines[1::2], strict=True))
