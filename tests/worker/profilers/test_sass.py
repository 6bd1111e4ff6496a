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
import pytest

from gdn_cli.catalog import pack, registry, workloads
from gdn_cli.errors import FAILED, MISSING, USAGE, GdnError, MissingError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.machine.inventory import HERE, Gpu, Machine
from gdn_cli.run import jobs
from gdn_cli.worker.judge import check
from gdn_cli.worker.profilers import Ask, Reply, Run, disassembly, sass, symbols, tools
from gdn_cli.worker.profilers.disassembly import Attributes, Instruction, Kernel
from gdn_cli.worker.request import Profiling

# rows.cu, and what CUDA 13's tools print of it for sm_90a
DATA = helpers.TESTS / "data" / "sass"
LISTING, ELF, USAGE_TEXT = (
    (DATA / f"rows.{kind}.txt").read_text() for kind in ("nvdisasm", "elf", "usage")
)
SOURCE = (DATA / "rows.cu").read_text()
ROWS, CROWDED = disassembly.kernels(LISTING)


def instructions(*texts: str) -> list[Instruction]:
    return [Instruction(16 * i, text) for i, text in enumerate(texts)]


# --- what nvdisasm and cuobjdump print


def test_a_listing_has_each_kernel_without_what_fills_it_up():
    assert [(symbols.own(k.symbol), len(k.instructions)) for k in (ROWS, CROWDED)] == [
        # the function that it calls comes after it, and is counted
        ("rows<__nv_bfloat16, 3>", 41),
        ("crowded", 163),
    ]
    assert ROWS.instructions[0].text == "LDC R1, c[0x0][0x28]"
    assert (ROWS.instructions[-1].offset, ROWS.instructions[-1].name) == (0x280, "RET")
    assert [i.offset for i in CROWDED.instructions] == list(range(0, 163 * 16, 16))
    assert (ROWS.labels[".L_x_1"], ROWS.labels[".L_x_0"]) == (0x110, 0x1C0)


def places(text, sources=()):
    """Offset -> (instruction, file, line) of the kernel `rows`."""
    (kernel,) = (k for k in disassembly.kernels(text) if k.symbol == ROWS.symbol)
    return {
        i.offset: (i.text, *disassembly.place(i, sources)) for i in kernel.instructions
    }


def test_an_instruction_has_the_source_line_of_the_algo_or_else_the_innermost():
    ours = places(LISTING, ["rows.cu"])
    load = "LDG.E.64.CONSTANT R2, desc[UR6][R2.64]"
    assert ours[0x150] == (load, "rows.cu", 5)  # __ldg, in load(), in rows()
    assert ours[0x190] == ("FFMA R7, R3, 3, R2", "rows.cu", 16)
    assert ours[0x1A0][2] == 16  # said once for both
    assert ours[0x270][2] == 7  # of the function behind the kernel
    anyones = places(LISTING)
    assert anyones[0x150] == (load, "/cuda/include/sm_32_intrinsics.hpp", 137)


def test_code_without_source_lines_is_not_given_another_s():
    text = LISTING.replace('//## File "/builds/rows/rows.cu", line 7', "")
    at = places(text, ["rows.cu"])
    assert (at[0x250][2], *at[0x260][1:]) == (21, None, None)


@pytest.mark.parametrize(
    "file, source",
    [
        ("/cache/x/kernel.cu", "kernel.cu"),
        ("kernel.cu", "kernel.cu"),
        ("/cache/x/gates/kernel.cu", "gates/kernel.cu"),
        ("/cache/x/my-kernel.cu", None),
        ("/usr/include/kernel.h", None),
    ],
)
def test_a_path_of_the_line_table_names_a_source(file, source):
    assert disassembly.source_of(file, ["kernel.cu", "gates/kernel.cu"]) == source


def test_resources_and_attributes():
    usage = disassembly.resources(USAGE_TEXT)
    figures = {
        symbols.own(s): (u["REG"], u["STACK"], u["SHARED"], u["CONSTANT[0]"])
        for s, u in usage.items()
    }
    assert figures == {
        "rows<__nv_bfloat16, 3>": (16, 0, 128 + 1024, 548),
        "crowded": (32, 64, 0, 544),
    }
    found = disassembly.attributes(ELF)
    assert (found[ROWS.symbol].max_threads, found[CROWDED.symbol].max_threads) == (
        128,
        1024,
    )
    assert found[ROWS.symbol].threads is None
    assert (
        disassembly.attributes(ELF.replace("EIATTR_MAX_THREADS", "EIATTR_REQNTID"))[
            ROWS.symbol
        ].threads
        == 128
    )
    assert (disassembly.architecture(ELF), disassembly.assembler(ELF)) == (
        "sm_90a",
        "13.0.88",
    )
    assert disassembly.reserves_shared(ELF)


def test_the_header_of_an_older_cubin():
    old = "64bit elf: type=2, abi=7, sm=90a, toolkit=128, flags = 0x5a0d5a"
    assert (disassembly.architecture(old), disassembly.assembler(old)) == (
        "sm_90a",
        "12.8",
    )
    assert not disassembly.reserves_shared(old)


def test_spills_are_what_ptxas_counts():
    marks = disassembly.attributes(ELF)
    # nvcc -Xptxas -v on rows.cu: "64 bytes stack frame, 56 bytes spill stores, 72 bytes
    # spill loads"
    assert disassembly.spilled(CROWDED.instructions, marks[CROWDED.symbol].spills) == (
        56,
        72,
    )
    assert disassembly.spilled(ROWS.instructions, marks[ROWS.symbol].spills) == (0, 0)


def test_a_local_array_is_not_a_spill_and_an_old_ptxas_does_not_say():
    array = Kernel("k", tuple(instructions("STL.128 [R1], R4", "LDL R3, [R2]")), {})
    assert sass._spills(array, Attributes(), "13.0.88").value == 0
    assert sass._spills(array, Attributes(), "12.4").value is None
    assert sass._spills(array, Attributes(spills=frozenset({0})), "12.4").value == 16
    assert (
        sass._spills(
            Kernel("k", tuple(instructions("EXIT")), {}), Attributes(), "12.4"
        ).value
        == 0
    )


# --- instructions


def test_the_mix_of_a_kernel():
    rows = {
        kind: (count, which)
        for kind, count, _, which in disassembly.mix(ROWS.instructions)
    }
    assert rows == {
        "integer": (13, "LEA 3, IMAD 2, ISETP 2, LOP3 2, VIADD 2, IADD3 1, 1 more"),
        "moves and other": (9, "IMAD 3, S2R 2, CS2R 1, MOV 1, S2UR 1, UMOV 1"),
        "branches": (5, "BRA 2, CALL 1, EXIT 1, RET 1"),
        "constant loads": (5, "ULDC 3, LDC 2"),
        "FP32 math": (3, "FFMA 2, FADD 1"),
        "memory loads": (2, "LDG 1, LDS 1"),
        "memory stores": (2, "STG 1, STS 1"),
        "barriers and fences": (1, "BAR 1"),
        "conversions": (1, "F2FP 1"),
    }
    shares = [share for _, _, share, _ in disassembly.mix(ROWS.instructions)]
    assert sum(shares) == pytest.approx(100) and shares[0] == pytest.approx(
        100 * 13 / 41
    )


@pytest.mark.parametrize(
    "text, kind",
    [
        ("@!P0 FADD.FTZ R1, R2, R3", "FP32 math"),
        ("FFMA2 R4, R4.F32x2.HI_LO, R2.F32x2.HI_LO, R6.F32x2.HI_LO", "FP32 math"),
        ("HFMA2.MMA R5, -RZ, RZ, 0, 0", "moves and other"),  # a constant
        # no tensor core, for all its name
        ("HFMA2.MMA R5, R4, R3, R5", "FP16 and bf16 math"),
        ("HFMA2.BF16_V2 R5, R4, R3, -RZ", "FP16 and bf16 math"),
        ("IMAD.MOV.U32 R3, RZ, RZ, 0x0", "moves and other"),
        ("IMAD.WIDE.U32 R2, R13, 0x2, R2", "integer"),
        ("UIADD3 UR4, UR4, 0x1, URZ", "integer"),
        ("MUFU.EX2 R2, R2", "special functions"),
        ("SHFL.BFLY PT, R7, R26, 0x10, 0x1f", "shuffles and votes"),
        ("I2FP.F32.S32 R2, R0", "conversions"),
        ("ULDC.64 UR4, c[0x0][0x208]", "constant loads"),
        ("LDCU.128 UR8, c[0x0][0x390]", "constant loads"),
        ("LDSM.16.M88.4 R4, [R2]", "memory loads"),
        ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5", "atomics"),
        ("LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64]", disassembly.ASYNC),
        ("UTMALDG.2D [UR8], [UR4], desc[UR6]", disassembly.ASYNC),
        ("UBLKCP.S.G [UR4], [UR6], UR8", disassembly.ASYNC),
        ("HMMA.16816.F32.BF16 R4, R8, R10, R4", disassembly.TENSOR),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", disassembly.TENSOR),
        (
            "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], !UPT",
            disassembly.TENSOR,
        ),
        ("LDTM.x32 R4, tmem[UR4]", disassembly.TENSOR),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", "barriers and fences"),
        ("WARPSYNC.ALL", "barriers and fences"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "barriers and fences"),
        ("@P0 EXIT", "branches"),
        ("SOMETHING.NEW R1", "moves and other"),
    ],
)
def test_the_kind_of_an_instruction(text, kind):
    assert disassembly.kind(Instruction(0, text)) == kind


def test_widths_by_memory():
    code = instructions(
        "LDG.E.NA.128 R4, desc[UR4][R4.64]", "LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64]", "LDG.E.U16.CONSTANT R1, [R2]",
        "LDG.E R1, [R2]", "@P0 LDG.E.128 R4, [R2]", "STS.64 [R2], R4", "LDSM.16.M88.4 R4, [R2]", "LDS.U8 R1, [R2]",
        "LDC.64 R2, c[0x0][0x210]", "FADD R1, R2, R3",
    )  # fmt: skip
    assert [(where, name, bits, count) for where, name, bits, count, _ in disassembly.widths(code)] == [
        ("global", "LDG", 256, 1), ("global", "LDG", 128, 2), ("global", "LDG", 32, 1), ("global", "LDG", 16, 1),
        ("shared", "LDS", 8, 1), ("shared", "STS", 64, 1), ("shared", "LDSM", 128, 1),
    ]  # fmt: skip
    notes = {bits: note for _, _, bits, _, note in disassembly.widths(code)}
    assert (notes[128], notes[16]) == (
        "16 bytes a lane: full width",
        "2 bytes a lane: an eighth or less of the width",
    )


def test_loops_are_backward_branches():
    assert disassembly.loops(ROWS) == [(0x110, 0x1B0, 11, 1)]
    assert disassembly.loops(CROWDED) == []


@pytest.mark.parametrize(
    "symbol, name",
    [
        (
            "_ZN41_GLOBAL__N__77b14536_9_kernel_cu_b147438113gdn_decode_v4EPK13__nv_bfloat16S2_Pf",
            "gdn_decode_v4",
        ),
        ("_ZN2ns4rowsIfLi4EEEvPKT_PS1_i", "rows<float, 4>"),
        ("gdn_decode_kernel", "gdn_decode_kernel"),
    ],
)
def test_a_kernel_s_short_name(symbol, name):
    assert symbols.own(symbol) == name


def test_a_listing_that_people_read():
    spills = disassembly.attributes(ELF)[CROWDED.symbol].spills
    text = disassembly.annotated(ROWS, {"rows.cu": SOURCE}, ["rows, by hand"])
    assert text.startswith("// rows, by hand\n")
    assert (
        ".L_x_1:\n/*0110*/      IADD3 R3, P0, R11, R4, RZ\n" in text
        and "    // sm_32_intrinsics.hpp:137 <- rows.cu:5 <- rows.cu:15    __device__ float4 load(const float4* p) { return __ldg(p); }\n/*0150*/      LDG.E.64.CONSTANT R2, desc[UR6][R2.64]\n"
        in text
    )
    assert "\nrescue(" not in text and "\nrescue:\n" in text
    assert "    // spill" not in text
    marked = disassembly.annotated(CROWDED, {}, [], spills)
    assert (
        "/*0230*/      STL [R1], R2    // spill\n" in marked
        and marked.count("// spill") == 26
    )


# --- occupancy, names, refusals


@pytest.mark.parametrize(
    "arch, registers, threads, shared, limit",
    [
        # cuda-v4; Nsight Compute on an H200 says 100 %, too
        ("sm_90a", 32, 256, 0, (100, "warps")),
        ("sm_90a", 60, 32, 8, (50, "blocks")),  # fla-recurrent; 50 % there
        # handed out as 104: 4 warps in a partition, not 5
        ("sm_100a", 97, 32, 0, (25, "registers")),
        # two CTAs of four warps
        ("sm_90", 32, 128, 100 * 1024, (12.5, "shared memory")),
        # 48 warps: one CTA of 32
        ("sm_86", 32, 1024, 0, (pytest.approx(200 / 3), "warps")),
        ("sm_70", 32, 256, 0, None),  # its limits are not known here
    ],
)
def test_theoretical_occupancy(arch, registers, threads, shared, limit):
    assert sass.occupancy(arch, registers, threads, shared) == limit


@pytest.mark.parametrize("text", ["sm_90a", "90a", "9.0a", "SM_90A", "sm90a", " 9.0a "])
def test_an_architecture_by_any_of_its_names(text):
    assert sass.parse_arch(text) == "sm_90a"


def test_architectures_of_three_digits():
    assert [sass.parse_arch(text) for text in ("10.0a", "100a", "sm_120", "10.3f")] == [
        "sm_100a", "sm_100a", "sm_120", "sm_103f",
    ]  # fmt: skip


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


def test_algos_that_no_builder_compiles_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--tool ncu"):
        sass.runs(ask("python"), tmp_path)
    with pytest.raises(UsageError, match="--tool cpu"):
        sass.runs(ask("cpp"), tmp_path)


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


def test_without_an_architecture_it_is_this_gpu_s_or_hoppers(tmp_path):
    machine = Machine(gpus=lambda: (), has_package=lambda name: True)
    assert [
        run.name for run in sass.runs(ask("triton", machine=machine), tmp_path)
    ] == ["sm_90a"]
    machine = Machine(
        gpus=lambda: (Gpu("a card", "10.0", "580"),), has_package=lambda name: True
    )
    assert [
        run.name for run in sass.runs(ask("triton", machine=machine), tmp_path)
    ] == ["sm_100"]
    assert [
        run.name
        for run in sass.runs(ask("triton", "90a", "sm_90a", machine=machine), tmp_path)
    ] == ["sm_90a"]


def tool(path: Path, version: str, prints: str | None) -> Path:
    """A tool that says its version, and prints something or fails."""
    does = f"echo '{prints}'" if prints else "exit 1"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "release, V{version}" && exit 0\n{does}\n'
    )
    path.chmod(0o755)
    return path


def test_the_newest_tool_that_can_read_a_cubin_is_taken(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "nvidia" / "cu13" / "bin").mkdir(parents=True)
    old = tool(tmp_path / "bin" / "nvdisasm", "12.8.55", "code")
    new = tool(tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm", "13.10.1", None)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(tools.sys, "path", [str(tmp_path)])
    machine = Machine(cuda_home=lambda: None)
    monkeypatch.setattr(tools, "LOCAL", tmp_path / "local")
    monkeypatch.setattr(tools, "triton_bin", lambda: None)
    assert tools.versions("nvdisasm", machine) == [
        ((13, 10, 1), new.resolve()),
        ((12, 8, 55), old.resolve()),
    ]
    assert sass._Code._read("nvdisasm", tmp_path / "x.cubin", machine=machine) == (
        "code\n",
        "12.8.55",
    )
    tool(old, "12.8.55", None)
    with pytest.raises(
        GdnError,
        match="no nvdisasm here reads x.cubin: the newest is 13.10.1; pip install -U",
    ):
        sass._Code._read("nvdisasm", tmp_path / "x.cubin", machine=machine)


@pytest.mark.parametrize(
    "reply, code, line",
    [
        ({"status": "refused", "reason": "nvcc fatal   : Unsupported gpu architecture 'compute_130a'"}, USAGE,
         "nvcc does not know sm_90a: Unsupported gpu architecture 'compute_130a'; another --arch, or a newer CUDA "
         "toolkit"),
        ({"status": "refused", "reason": "no GPU; ncu", "code": MISSING, "tail": ("said",)}, MISSING,
         "sm_90a: no GPU; ncu"),
        ({"status": "crashed", "reason": "crashed with SIGABRT", "tail": ("a", "LLVM ERROR: no such target")}, FAILED,
         "sm_90a: crashed with SIGABRT: LLVM ERROR: no such target"),
        ({"status": "refused", "reason": "kernel.cu(3): error: expected a ;\nkernel.cu(9): error"}, FAILED,
         "sm_90a: kernel.cu(3): error: expected a ;"),
    ],
)  # fmt: skip
def test_a_run_that_failed_is_one_line(tmp_path, reply, code, line):
    with pytest.raises(GdnError) as caught:
        sass.read(
            ask("cuda"),
            tmp_path,
            [Reply(Run("sm_90a", params={"arch": "sm_90a"}), **reply)],
        )
    assert (str(caught.value), caught.value.code) == (line, code)


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
    algo = known.find(name)
    op = known.ops[algo.op]
    definition, solution = pack.definition(op, known), pack.pack(algo, op)
    asked = Ask(solution, archs=archs)
    replies = []
    for run in sass.runs(asked, folder):
        profile = Profiling("sass", run.params)
        workload = workloads.twin(op, {"batch_size": 1})
        job = jobs.Job.of(
            "profile",
            op,
            definition,
            "cpu",
            [workload],
            [(algo, solution)],
            profile=profile,
            wrap=run.wrap,
            env=run.env,
        )
        outcome = jobs.execute(job)
        record = next(iter(outcome.records), None)
        fate = record if record and not record.passed else outcome
        answer = record.answer if record else None
        replies.append(
            Reply(
                run,
                fate.status.value,
                fate.reason,
                answer,
                tuple(outcome.tail),
                fate.code,
            )
        )
    return sass.read(asked, folder, replies)


def table(found, key: str) -> list[tuple]:
    return list(next(t.rows for t in found.tables if t.key == key))


@pytest.fixture(scope="module")
def v4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4")
    return profiled(registry.load(), "cuda-v4", folder, "sm_90a", "sm_100a"), folder


@needs_tools
@needs_nvcc
@pytest.mark.slow
def test_cuda_cpp_is_what_its_source_says(v4):
    reading, folder = v4
    assert [found.name for found in reading.found] == [
        "gdn_decode_v4 (sm_90a)",
        "gdn_decode_v4 (sm_100a)",
    ]
    assert reading.files == (
        "gdn_decode_v4.sm_90a.sass", "gdn_decode_v4.sm_100a.sass", "kernel.sm_90a.cubin", "kernel.sm_100a.cubin",
    )  # fmt: skip
    for found in reading.found:
        assert found.value("registers") <= 32  # 8 CTAs of 256 threads
        assert (found.value("threads"), found.value("occupancy_max")) == (256, 100)
        assert (found.value("shared"), found.value("spills"), found.value("stack")) == (
            0,
            0,
            0,
        )
        mix = {kind: which for kind, _, _, which in table(found, "mix")}
        assert "SHFL 15" in mix["shuffles and votes"]  # three sums, five steps each
        assert disassembly.TENSOR not in mix and "barriers and fences" not in mix
        widths = Counter({row[1:3]: row[3] for row in table(found, "widths")})
        # the state; k and q
        assert (widths["LDG", 128], widths["STG", 128], widths["LDG", 64]) == (1, 1, 2)
        assert not any(row[0] == "shared" for row in table(found, "widths"))
    for arch in ("sm_90a", "sm_100a"):
        text = (folder / f"gdn_decode_v4.{arch}.sass").read_text()
        assert text.startswith(
            f"// gdn_decode_v4 ({arch})\n// 32 registers, 0 B of shared memory, no spills"
        )
        line = text.splitlines()[
            next(i for i, x in enumerate(text.splitlines()) if "STG.E.128" in x) - 1
        ]
        assert re.fullmatch(
            r"    // kernel\.cu:\d+    reinterpret_cast<float4\*>\(new_state\)\[at\] = s;",
            line,
        )


@needs_tools
@needs_nvcc
def test_line_information_changes_no_instruction_and_spills_are_ptxas_own(tmp_path):
    nvcc = inventory.cuda_home() / "bin" / "nvcc"
    (tmp_path / "rows.cu").write_text(SOURCE)
    code = {}
    for name, flags in (("plain", ["-Xptxas", "-v"]), ("lines", ["-lineinfo"])):
        cubin = tmp_path / f"{name}.cubin"
        done = subprocess.run(
            [nvcc, "-std=c++17", "-O2", "-arch=sm_90a", "-cubin", "-o", cubin, *flags, tmp_path / "rows.cu"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        code[name] = sass._Code(cubin, "sm_90a")
        said = done.stderr if name == "plain" else said  # noqa: F821

    def texts(code):
        return [
            (i.offset, re.sub(r"`\(\$?_\S*\)", "", i.text))
            for k in disassembly.kernels(code.text)
            for i in k.instructions
        ]

    assert texts(code["plain"]) == texts(code["lines"])
    frames = {
        name: [i.frames for k in disassembly.kernels(c.text) for i in k.instructions]
        for name, c in code.items()
    }
    assert not any(frames["plain"]) and all(frames["lines"])
    for kernel in disassembly.kernels(code["plain"].text):
        counts = disassembly.spilled(
            kernel.instructions, code["plain"].attributes[kernel.symbol].spills
        )
        assert f"{counts[0]} bytes spill stores, {counts[1]} bytes spill loads" in said
    assert any(int(stores) for stores in re.findall(r"(\d+) bytes spill stores", said))
    rows = next(
        k
        for k in disassembly.kernels(code["lines"].text)
        if "rows" in symbols.own(k.symbol)
    )
    found = sass._found("rows", rows, code["lines"], None, {})
    # ptxas's "128 bytes smem": the driver's KiB is not the kernel's
    assert found.value("shared") == 128
    assert [row[0] for row in table(found, "loops")] == ["rows.cu:14"]


@needs_tools
@needs_triton
@pytest.mark.slow
def test_triton_compiles_without_a_gpu(tmp_path):
    reading = profiled(registry.load(), "fla-recurrent", tmp_path, "sm_90a", "sm_100a")
    assert [found.name for found in reading.found] == [
        "gdn_decode_kernel (sm_90a)",
        "gdn_decode_kernel (sm_100a)",
    ]
    for found in reading.found:
        assert (found.value("threads"), found.value("spills")) == (32, 0)  # num_warps=1
        widths = Counter({row[1:3]: row[3] for row in table(found, "widths")})
        # BV=4 rows of 128 floats over 32 lanes
        assert (widths["LDG", 128], widths["STG", 128]) == (4, 4)
        assert disassembly.TENSOR not in {row[0] for row in table(found, "mix")}
    text = (tmp_path / "gdn_decode_kernel.sm_100a.sass").read_text()
    assert "CTAs of 32 threads" in text.splitlines()[1]
    assert re.search(r"// kernel\.py:\d+    b_s = tl\.load\(state \+ o_s\)", text)
    assert (
        "compiled as a call with batch_size=1 launches it: other sizes may compile to other code"
        in reading.notes
    )
    assert set(reading.files) == {
        f"gdn_decode_kernel.{arch}.{kind}"
        for arch in ("sm_90a", "sm_100a")
        for kind in ("sass", "cubin")
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
    write_algo(
        tmp_path,
        "launches",
        {"main.py": LAUNCHES},
        language="triton",
        destination_passing=True,
        devices=["cuda"],
    )
    write_algo(
        tmp_path,
        "asks",
        {"main.py": ASKS_FIRST},
        language="triton",
        destination_passing=True,
        devices=["cuda"],
    )
    known = registry.load(str(tmp_path))
    reading = profiled(known, "launches", tmp_path, "sm_90a")
    assert [(f.name, f.value("threads")) for f in reading.found] == [
        ("tuned (sm_90a)", 128), ("copy (sm_90a)", 32), ("copy-2 (sm_90a)", 32),
    ]  # fmt: skip
    assert any(
        note.startswith("autotuned: the first of 2 configs, N: 128, num_warps: 4")
        for note in reading.notes
    )
    assert any(
        note.startswith("compiled up to where the algo's host code fails")
        for note in reading.notes
    )
    with pytest.raises(
        GdnError, match="fails without a GPU before it launches a kernel.*--tool ncu"
    ) as caught:
        profiled(known, "asks", tmp_path, "sm_90a")
    assert caught.value.code == MISSING


@needs_nvcc
def test_a_separate_cuda_build_for_each_architecture_and_flags(tmp_path, monkeypatch):
    def environments(flags: str) -> list[dict[str, str]]:
        monkeypatch.setenv("NVCC_APPEND_FLAGS", flags)
        return [run.env for run in sass.runs(ask("cuda", "sm_90a", "100a"), tmp_path)]

    hopper, blackwell = environments("--use_fast_math")
    assert (hopper["TVM_FFI_CUDA_ARCH_LIST"], blackwell["TVM_FFI_CUDA_ARCH_LIST"]) == (
        "9.0a",
        "10.0a",
    )
    # a run would be compiled with the user's, too
    assert hopper["NVCC_APPEND_FLAGS"] == "--use_fast_math -lineinfo"
    plain = environments("")
    assert plain[0]["NVCC_APPEND_FLAGS"] == "-lineinfo"
    assert len({env["FIB_CACHE_PATH"] for env in (hopper, blackwell, *plain)}) == 4


@needs_nvcc
def test_an_architecture_that_the_compiler_does_not_know(tmp_path):
    with pytest.raises(
        UsageError, match="the ptxas of nvcc does not know sm_990; it knows sm_.*sm_90a"
    ):
        sass.runs(ask("cuda", "99.0"), tmp_path)


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
    reading = profiled(registry.load(), "fla-recurrent", tmp_path)
    (offline,) = (
        code_of(tmp_path / name) for name in reading.files if name.endswith(".cubin")
    )
    assert offline in there


def code_of(cubin: Path) -> list[str]:
    (kernel,) = disassembly.kernels(sass._Code(cubin, "").text)
    return [i.text for i in kernel.instructions]
