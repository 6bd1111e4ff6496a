"""`gdn profile --tool sass`: machine code that is read right, and compiled by the road
that runs take. Needs no GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import helpers
import oracle
import profiles
import pytest
import screens
from worker.profilers import targets

from gdn_cli.catalog import registry
from gdn_cli.errors import FAILED, MISSING, GdnError, MissingError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.machine.inventory import HERE, Gpu, Machine
from gdn_cli.profile import session
from gdn_cli.worker.judge import check
from gdn_cli.worker.profilers import (
    Ask,
    Reading,
    Reply,
    Run,
    disassembly,
    sass,
    symbols,
    tools,
)
from gdn_cli.worker.profilers.disassembly import Attributes, Instruction

# rows.cu, and what CUDA 13's tools print of it for sm_90a
DATA = helpers.TESTS / "data" / "sass"
LISTING, ELF, USAGE_TEXT = (
    (DATA / f"rows.{kind}.txt").read_text() for kind in ("nvdisasm", "elf", "usage")
)
# the kernels `rows` and `crowded`
ROWS, CROWDED = disassembly.kernels(LISTING)


# --- what nvdisasm and cuobjdump print


def test_the_facts_of_kernels():
    cubin = sass.Cubin(LISTING, "13.0", ELF, disassembly.resources(USAGE_TEXT))
    found = [cubin.findings(symbols.own(name), name, 0) for name in (ROWS, CROWDED)]
    screens.check("sass-facts", profiles.told(Reading(tuple(found))))
    exact = ELF.replace("EIATTR_MAX_THREADS", "EIATTR_REQNTID")
    assert disassembly.attributes(exact) == disassembly.attributes(ELF)
    assert (cubin.arch, cubin.ptxas) == ("sm_90a", "13.0.88")
    assert disassembly.assembler("64bit elf: type=2, sm=90a, toolkit=128") == "12.8"


@pytest.mark.parametrize(
    "marked, ptxas, value",
    [((), "13.0.88", 0), ((), "12.4", None), ((0,), "12.4", 16)],
)
def test_a_local_array_is_not_a_spill_and_an_old_ptxas_does_not_say(
    marked, ptxas, value
):
    array = [Instruction(0, "STL.128"), Instruction(16, "LDL")]
    attributes = Attributes(spills=frozenset(marked))
    assert sass.spills(array, attributes, ptxas).value == value


# --- names, refusals


@pytest.mark.parametrize(
    "text, arch",
    [
        *((text, "sm_90a") for text in ("sm_90a", "90a", "SM_90A", "sm90a", " 9.0a ")),
        ("10.0a", "sm_100a"),
        ("100a", "sm_100a"),
        ("sm_120", "sm_120"),
        ("10.3f", "sm_103f"),
    ],
)
def test_an_architecture_by_any_of_its_names(text, arch):
    assert sass.parse_arch(text) == arch


@pytest.mark.parametrize(
    "text", ["", "h100", "sm_9", "9", "compute_90a", "sm_90b", "9.0.1", "sm_1000a"]
)
def test_invalid_architectures_are_refused(text):
    with pytest.raises(UsageError, match="sm_90a, 90a or 9.0a"):
        sass.parse_arch(text)


def ask(language: str, *archs: str, machine: Machine = HERE) -> Ask:
    return Ask(
        {"spec": {"language": language}, "sources": []}, archs=archs, machine=machine
    )


@pytest.mark.parametrize(
    "language, hint", [("python", "--tool ncu"), ("cpp", "--tool cpu")]
)
def test_algos_that_no_builder_compiles_are_refused(tmp_path, language, hint):
    with pytest.raises(UsageError, match=hint):
        sass.runs(ask(language), tmp_path)


def test_missing_parts_are_named(tmp_path, monkeypatch):
    found = {"nvdisasm": [], "cuobjdump": [((13, 0, 1), Path("x"))]}
    monkeypatch.setattr(tools, "versions", lambda name, machine: found[name])
    with pytest.raises(MissingError, match="no nvdisasm here; .*nvidia-cuda-nvdisasm"):
        sass.find()
    machine = Machine(cuda_home=lambda: None, has_package=lambda name: False)
    with pytest.raises(MissingError, match="no nvcc here"):
        sass.runs(ask("cuda", machine=machine), tmp_path)
    with pytest.raises(MissingError, match="pip install triton"):
        sass.runs(ask("triton", machine=machine), tmp_path)


GPUS = (Gpu("a card", "10.0", "580"),)


@pytest.mark.parametrize(
    "gpus, archs, name",
    [((), (), "sm_90a"), (GPUS, (), "sm_100"), (GPUS, ("90a", "sm_90a"), "sm_90a")],
)
def test_without_an_architecture_it_is_this_gpu_s_or_hoppers(
    tmp_path, gpus, archs, name
):
    machine = Machine(gpus=lambda: gpus, has_package=lambda name: True)
    (run,) = sass.runs(ask("triton", *archs, machine=machine), tmp_path)
    assert run.name == name


def tool(path: Path, version: str, prints: str | None) -> Path:
    """A tool that says its version, and prints something or fails."""
    does = f"echo '{prints}'" if prints else "exit 1"
    says = f'[ "$1" = --version ] && echo "release, V{version}" && exit 0'
    return targets.script(path, f"#!/bin/sh\n{says}\n{does}\n")


def test_the_newest_tool_that_can_read_a_cubin_is_taken(tmp_path, monkeypatch):
    old = tool(tmp_path / "bin" / "nvdisasm", "12.8.55", "code")
    new = tool(tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm", "13.10.1", None)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(tools.sys, "path", [str(tmp_path)])
    machine = Machine(cuda_home=lambda: None)
    monkeypatch.setattr(tools, "LOCAL", tmp_path / "local")
    assert tools.versions("nvdisasm", machine) == [
        ((13, 10, 1), new.resolve()),
        ((12, 8, 55), old.resolve()),
    ]
    cubin = tmp_path / "x.cubin"
    printed = sass.printed("nvdisasm", cubin, machine=machine)
    assert printed == ("code\n", "12.8.55")
    tool(old, "12.8.55", None)
    with pytest.raises(GdnError, match="reads x.cubin: the newest is 13.10.1"):
        sass.printed("nvdisasm", cubin, machine=machine)


@pytest.mark.parametrize(
    "reply, code, line",
    [
        ({"reason": "no GPU; ncu", "code": MISSING, "tail": ("said",)}, MISSING, "no GPU; ncu"),
        ({"reason": "crashed", "tail": ("a", "LLVM ERROR: why")}, FAILED, "crashed (LLVM ERROR: why)"),
        ({"reason": "k.cu(3): error\nk.cu(9): error"}, FAILED, "k.cu(3): error"),
    ],
)  # fmt: skip
def test_a_run_that_failed_is_one_line(tmp_path, reply, code, line):
    failed = Reply(Run("sm_90a"), "refused", **reply)
    with pytest.raises(GdnError) as caught:
        sass.read(ask("cuda"), tmp_path, [failed])
    assert (
        str(caught.value) == f"the algo's process under the profiler (sm_90a): {line}"
    )
    assert caught.value.code == code


# --- compiled, through the worker

needs_tools = pytest.mark.skipif(
    not (tools.versions("cuobjdump") and tools.versions("nvdisasm")),
    reason="no cuobjdump or nvdisasm here",
)
needs_nvcc = pytest.mark.skipif(inventory.cuda_home() is None, reason="no nvcc here")
needs_triton = pytest.mark.skipif(
    not inventory.has_package("triton"), reason="no triton here"
)


def profiled(known: registry.Registry, name: str, folder: Path, *archs: str):
    """The facts of an algo at batch_size 1, through a worker for each architecture, as
    in `gdn profile`.
    """
    chosen = "gdn_decode", "sass", "batch_size=1", None
    _, (subject,) = session.subjects(known, [name], *chosen)
    settings = session.Settings("sass", folder, archs=archs)
    profile = session.run(subject, settings, lambda *_: None, print)
    return profile.reading, Path(profile.folder)


def opcodes(found) -> Counter:
    (table,) = found.tables
    return Counter({row[0]: row[1] for row in table.rows})


@needs_tools
@needs_nvcc
@pytest.mark.slow
def test_cuda_cpp_is_what_its_source_says(tmp_path):
    archs = "sm_90a", "sm_100a"
    reading, folder = profiled(registry.load(), "cuda-v4", tmp_path, *archs)
    names = [f"gdn_decode_v4 ({arch})" for arch in archs]
    assert [found.name for found in reading.found] == names
    assert reading.files == (
        *(f"kernel.{arch}.sass" for arch in archs),
        *(f"kernel.{arch}.cubin" for arch in archs),
    )
    for found in reading.found:
        # 8 CTAs of 256 threads
        assert found.value("registers") <= 32 and found.value("threads") == 256
        sizes = [found.value(key) for key in ("shared", "spills", "stack")]
        assert sizes == [0, 0, 0]
        counts = opcodes(found)
        # three sums, five steps each
        assert sum(n for op, n in counts.items() if op.startswith("SHFL")) == 15
        # the state; k and q
        loads = [
            n for op, n in counts.items() if op.startswith("LDG.E") and "128" in op
        ]
        assert sum(loads) == 1
        assert not any(op.startswith(("HMMA", "HGMMA", "BAR")) for op in counts)
    for arch in archs:
        text = (folder / f"kernel.{arch}.sass").read_text()
        (line,) = re.findall(r'kernel.cu", line (\d+)\n.*STG.E.128', text)
        source = (helpers.OURS / "gdn_decode" / "cuda-v4" / "kernel.cu").read_text()
        assert "new_state)[at] = s;" in source.splitlines()[int(line) - 1]


@needs_tools
@needs_nvcc
@pytest.mark.slow
def test_line_information_changes_no_instruction_and_spills_are_ptxas_own(tmp_path):
    cubin = tmp_path / "rows.cubin"
    nvcc = inventory.cuda_home() / "bin" / "nvcc"
    command = [nvcc, "-std=c++17", "-O2", "-arch=sm_90a", "-cubin", "-o", cubin]

    def compiled(*flags: str) -> tuple[sass.Cubin, str]:
        line = [*command, *flags, DATA / "rows.cu"]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        return sass.Cubin.read(cubin), done.stderr

    (plain, printed), (lines, _) = compiled("-Xptxas", "-v"), compiled("-lineinfo")
    assert plain.kernels == lines.kernels
    assert "//## File" in lines.text and "//## File" not in plain.text
    for symbol, code in plain.kernels.items():
        spills = plain.attributes[symbol].spills
        stores, loads = disassembly.spilled(code, spills)
        assert f"{stores} bytes spill stores, {loads} bytes spill loads" in printed
    assert re.search(r"[1-9]\d* bytes spill stores", printed)
    # ptxas's "128 bytes smem": the driver's KiB is not the kernel's
    rows = next(symbol for symbol in lines.kernels if "rows" in symbol)
    assert lines.findings("rows", rows, 0).value("shared") == 128


@needs_tools
@needs_triton
@pytest.mark.slow
def test_triton_compiles_without_a_gpu(tmp_path):
    archs = "sm_90a", "sm_100a"
    reading, folder = profiled(registry.load(), "fla-recurrent", tmp_path, *archs)
    names = [f"gdn_decode_kernel ({arch})" for arch in archs]
    assert [found.name for found in reading.found] == names
    for found in reading.found:
        # num_warps=1
        assert (found.value("threads"), found.value("spills")) == (32, 0)
        # BV=4 rows of 128 floats over 32 lanes
        counts = opcodes(found)
        assert (counts["LDG.E.128"], counts["STG.E.128"]) == (4, 4)
    text = (folder / "gdn_decode_kernel.sm_100a.sass").read_text()
    assert re.search(r'//## File ".*kernel.py", line \d+', text)
    assert "batch_size=1 launches it" in "".join(reading.notes)
    kinds = "sass", "cubin"
    assert set(reading.files) == {
        f"gdn_decode_kernel.{arch}.{kind}" for arch in archs for kind in kinds
    }


LAUNCHES = """
import torch, triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({"N": 128}, num_warps=4), triton.Config({"N": 64}, num_warps=2)], key=["n"])
@triton.jit
def tuned(x, y, n, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def copy(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at))

def run(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    tuned[lambda meta: (triton.cdiv(128, meta["N"]),)](state, new_state, 128)
    for n in (32, 32, 64):
        copy[(1,)](state, new_state, N=n, num_warps=1)
    torch.cuda.synchronize()
"""
ASKS_FIRST = (
    "import torch\n\ndef run(*args):\n    torch.cuda.get_device_properties(0)\n"
)


@needs_tools
@needs_triton
@pytest.mark.slow
def test_launches_are_compiled_once_each_and_the_first_config_is_taken(
    tmp_path, write_algo
):
    more = {"language": "triton", "destination_passing": True, "devices": ["cuda"]}
    write_algo(tmp_path, "launches", {"main.py": LAUNCHES}, **more)
    write_algo(tmp_path, "asks", {"main.py": ASKS_FIRST}, **more)
    known = registry.load(str(tmp_path))
    reading, _ = profiled(known, "launches", tmp_path, "sm_90a")
    assert [(f.name, f.value("threads")) for f in reading.found] == [
        ("tuned (sm_90a)", 128),
        ("copy (sm_90a)", 32),
        ("copy (sm_90a) 2", 32),
    ]
    notes = "\n".join(reading.notes)
    assert "autotuned: the first of 2 configs, N: 128, num_warps: 4" in notes
    assert "compiled up to where the algo's host code fails" in notes
    with pytest.raises(GdnError, match="before it launches a kernel") as caught:
        profiled(known, "asks", tmp_path, "sm_90a")
    assert caught.value.code == MISSING


@needs_nvcc
def test_a_separate_cuda_build_for_each_architecture_and_flags(tmp_path, monkeypatch):
    builds = []
    # a run would be compiled with the user's, too
    for flags in ("--use_fast_math -lineinfo", "-lineinfo"):
        monkeypatch.setenv("NVCC_APPEND_FLAGS", flags.removesuffix("-lineinfo"))
        envs = [run.env for run in sass.runs(ask("cuda", "sm_90a", "100a"), tmp_path)]
        archs = [env["TVM_FFI_CUDA_ARCH_LIST"] for env in envs]
        assert archs == ["9.0a", "10.0a"]
        assert {" ".join(env["NVCC_APPEND_FLAGS"].split()) for env in envs} == {flags}
        builds += [env["FIB_CACHE_PATH"] for env in envs]
    assert len(set(builds)) == 4


@pytest.mark.gpu
@needs_tools
@needs_triton
def test_triton_offline_is_triton_on_the_gpu(tmp_path):
    """The CPU's tensors specialise a kernel as the GPU's do: the same instructions."""
    op, kernel = helpers.built("fla-recurrent", "cuda")
    inputs = [
        x.cuda() if hasattr(x, "cuda") else x
        for x in oracle.inputs(op.name, batch_size=1)
    ]
    kernel(inputs, check.allocate(op, {"batch_size": 1}, "cuda"))
    there = []  # other tests may have compiled it for other sizes in this process
    for cache in kernel.module.gdn_decode_kernel.device_caches.values():
        for i, compiled in enumerate(cache[0].values()):
            (tmp_path / f"{i}.cubin").write_bytes(compiled.asm["cubin"])
            there.append(code_of(tmp_path / f"{i}.cubin"))
    reading, folder = profiled(registry.load(), "fla-recurrent", tmp_path)
    (offline,) = (
        code_of(folder / name) for name in reading.files if name.endswith(".cubin")
    )
    assert offline in there


def code_of(cubin: Path) -> list[str]:
    """The instructions with their offsets and operands."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/.*", sass.Cubin.read(cubin).text)
