"""Tool `sass`: registers, spills, instruction mix and the annotated machine code of an
algo's kernels. Needs no GPU.

CUDA C++ is compiled by flashinfer-bench's own builder, as for a run, with -lineinfo
added, which adds the line table and does not change the instructions. Triton's kernels
are compiled by Triton for the workload's launches (triton_cross_compile.py). cuobjdump
extracts the cubins, nvdisasm prints them; both come with the CUDA toolkit, with Triton,
and as wheels from PyPI.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ... import files, paths
from ...errors import FAILED, GdnError, MissingError, UsageError
from ...machine import inventory
from ...machine.inventory import HERE, Machine
from ...parsing import read_toml
from . import (
    Ask,
    Fact,
    Found,
    Reading,
    Reply,
    Run,
    disassembly,
    facts,
    kept,
    symbols,
    tools,
)
from .disassembly import Attributes, Kernel

_DATA = read_toml(Path(__file__).with_suffix(".toml"))
_DEFAULT = "sm_90a"
GET_TOOLS = "install the CUDA toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
_RESERVED = 1024  # bytes of each CTA's shared memory that the driver uses


def parse_arch(text: str) -> str:
    """ "sm_90a" from "sm_90a", "90a" or "9.0a"; a UsageError if it is not the name of a
    GPU architecture.
    """
    found = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)([af]?)", text.strip().lower())
    if not found:
        raise UsageError(
            f"'{text}' is not a GPU architecture",
            hint="write it as sm_90a, 90a or 9.0a",
        )
    major, minor, suffix = found.groups()
    return f"sm_{major}{minor}{suffix}"


def _split(arch: str) -> tuple[int, int, str]:
    """ "sm_100a" -> (10, 0, "a")."""
    found = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    return int(found[1]), int(found[2]), found[3]


def find(machine: Machine = HERE) -> None:
    """MissingError if cuobjdump or nvdisasm is not installed."""
    for name in ("cuobjdump", "nvdisasm"):
        if not tools.versions(name, machine):
            raise MissingError(f"no {name} here", hint=GET_TOOLS)


# --- before


def runs(ask: Ask, folder: Path) -> list[Run]:
    """One run for each architecture."""
    language = ask.language
    if refused := _DATA["refused"].get(language):
        raise UsageError(refused["why"], hint=refused["hint"])
    if language == "cuda" and ask.machine.cuda_home() is None:
        raise MissingError("no nvcc here", hint=inventory.GET_NVCC)
    if language == "triton" and not ask.machine.has_package("triton"):
        raise MissingError("package triton missing", hint="pip install triton")
    archs = list(dict.fromkeys(parse_arch(arch) for arch in ask.archs)) or [
        here(language, ask.specific, ask.machine)
    ]
    for arch in archs:
        _known(arch, language, ask.machine)
    return [
        Run(
            arch,
            env=environment(arch, language, ask.machine),
            params={"arch": arch, "folder": str(folder)},
        )
        for arch in archs
    ]


def here(language: str, specific: bool, machine: Machine = HERE) -> str:
    """The compile target of a run on this machine: the GPU's plain capability, as the
    builder uses it, or with the 'a' (executor/build.py), which Triton adds itself.
    """
    gpus = machine.gpus()
    if not gpus:
        return _DEFAULT
    own = (
        inventory.specific(gpus[0].capability)
        if specific and language == "cuda"
        else None
    )
    return parse_arch(own or gpus[0].capability)


def _known(arch: str, language: str, machine: Machine) -> None:
    """A UsageError if the ptxas to be called says that it does not know the architecture."""
    compilers, whose = [machine.cuda_home() / "bin" / "ptxas"], "the ptxas of nvcc"
    if language == "triton":
        compilers, whose = (
            sorted((tools.triton_bin() or Path("/nowhere")).glob("ptxas*")),
            "Triton's ptxas",
        )
    helps = "".join(tools.output(compiler, "--help") or "" for compiler in compilers)
    known = set(re.findall(r"'(sm_\d+[af]?)'", helps))
    if known and arch not in known:
        names = sorted(known, key=lambda name: (_split(name)[:2], name))
        raise UsageError(
            f"{whose} does not know {arch}", hint=f"it knows {', '.join(names)}"
        )


def environment(arch: str, language: str, machine: Machine = HERE) -> dict[str, str]:
    """The worker's environment: the builder compiles for this architecture, with a line
    table, into a separate cache.
    """
    if language == "triton":
        return {"TRITON_INTERPRET": "0"}  # nothing is compiled if it is set
    major, minor, suffix = _split(arch)
    flags = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -lineinfo".strip()
    # the builder's cache key knows neither the architecture nor the compiler nor its flags
    made_by = [
        tools.output(machine.cuda_home() / "bin" / "nvcc", "--version"),
        flags,
        os.environ.get("NVCC_PREPEND_FLAGS"),
    ]
    digest = hashlib.sha256(repr(made_by).encode()).hexdigest()[:8]
    return {
        inventory.ARCHITECTURES: f"{major}.{minor}{suffix}",
        "NVCC_APPEND_FLAGS": flags,
        "FIB_CACHE_PATH": str(paths.builds_dir() / f"sass-{arch}-{digest}"),
    }


# --- in the worker


class Compiled(Struct):
    """A kernel compiled by Triton: the cubin's name in the profile's folder, bytes of
    dynamic shared memory.
    """

    cubin: str
    shared: int


class Answer(Struct):
    """The answer of `inside`: `binary`, the library that the builder made, or Triton's kernels."""

    binary: str | None = None
    kernels: list[Compiled] | None = None
    notes: list[str] = []


def inside(target: Any, arch: str, folder: str) -> Answer:
    """Compile."""
    if target.solution["spec"]["language"] == "cuda":
        binary = target.kernel.runnable.metadata.misc.get("binary")
        if binary is None:
            raise UsageError(
                "its binding is not tvm-ffi: sass reads only that builder's output",
                hint="--tool ncu",
            )
        return Answer(str(binary))
    from .triton_cross_compile import compiled

    major, minor, _ = _split(arch)
    kernels, notes = compiled(target.subject.call, major * 10 + minor, Path(folder))
    sizes = ", ".join(f"{name}={size}" for name, size in target.workload.axes.items())
    first = f"compiled as a call with {sizes} launches it: other sizes may compile to other code"
    return Answer(kernels=kernels, notes=[first, *notes])


# --- after the run


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """Each kernel for each architecture: its facts, its tables, and its code as a file."""
    sources = ask.sources
    found: list[Found] = []
    notes: list[str] = []
    listings: list[str] = []
    cubins: list[str] = []
    for reply in replies:
        arch, answer = reply.run.params["arch"], reply.said(Answer)
        for cubin, shared in _cubins(reply, answer, folder):
            code = _Code(cubin, arch)
            for kernel in disassembly.kernels(code.text):
                short = symbols.own(kernel.symbol)
                name = _free(short, f" ({code.arch})", [f.name for f in found])
                file = _free(_slug(short), f".{code.arch}.sass", listings)
                figures = _found(name, kernel, code, shared, sources)
                spills = code.attributes.get(kernel.symbol, Attributes()).spills
                listing = disassembly.annotated(
                    kernel, sources, _header(figures, code), spills
                )
                files.write(folder / file, listing)
                found.append(figures)
                listings.append(file)
            cubins.append(cubin.name)
            notes.append(
                f"{code.arch}: ptxas {code.ptxas or 'unknown'}, nvdisasm {code.nvdisasm}"
            )
            if code.arch != arch:
                notes.append(f"asked for {arch}: Triton compiles for {code.arch}")
        notes += answer.notes
        if answer.binary and arch.endswith(("a", "f")):
            plain = arch.rstrip("af")
            usual = (
                f"compiled for {plain}, as the builder does unless {inventory.ARCHITECTURES}"
                " is set"
            )
            notes.append(
                f"{arch}: gdn's runs there are compiled for it (algo.toml: specific); a judge's"
                f" are {usual}"
                if ask.specific
                else f"{arch}: a run there is {usual}"
            )
    if not found:
        raise GdnError(
            "the compiled code has no kernel", hint="does the entry point launch one?"
        )
    return Reading(
        tuple(found), tuple(dict.fromkeys(notes)), kept(folder, *listings, *cubins)
    )


def _cubins(
    reply: Reply, answer: Answer, folder: Path
) -> list[tuple[Path, int | None]]:
    """The cubins of a reply, in `folder`, each with its dynamic shared memory (None:
    known only at a launch).
    """
    arch = reply.run.params["arch"]
    if answer.binary:
        return [(path, None) for path in _extracted(Path(answer.binary), arch, folder)]
    if answer.kernels is not None:
        return [(folder / kernel.cubin, kernel.shared) for kernel in answer.kernels]
    reason = reply.reason or f"the process ended as '{reply.status}'"
    if unknown := re.search(r"Unsupported gpu architecture '\w+'", reason):
        raise UsageError(
            f"nvcc does not know {arch}: {unknown[0]}",
            hint="another --arch, or a newer CUDA toolkit",
        )
    first = next(line.strip() for line in reason.splitlines() if line.strip())
    last = f": {reply.tail[-1][:200]}" if reply.tail and reply.code is None else ""
    raise GdnError(f"{arch}: {first}{last}", code=reply.code or FAILED)


def _extracted(binary: Path, arch: str, folder: Path) -> list[Path]:
    """The cubins in a library, moved into `folder` with the architecture in their names."""
    for _, tool in tools.versions("cuobjdump"):
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            if tools.output(tool, "-xelf", "all", binary, cwd=empty) is None:
                continue
            found = []
            for path in sorted(Path(empty).iterdir()):
                name = _free(
                    path.name.split(".")[0],
                    f".{arch}.cubin",
                    [path.name for path in found],
                )
                found.append(path.replace(folder / name))
            if found:
                return found
    raise GdnError(
        f"cuobjdump finds no GPU code for {arch} in the builder's output",
        hint=GET_TOOLS,
    )


def code(binary: Path, arch: str, folder: Path) -> list[Kernel]:
    """The kernels in a library that the builder made, with the lines that they come
    from. Raises GdnError.
    """
    with tempfile.TemporaryDirectory(dir=folder) as here:
        cubins = _extracted(binary, arch, Path(here))
        return [
            kernel
            for cubin in cubins
            for kernel in disassembly.kernels(_Code(cubin, arch).text)
        ]


class _Code:
    """A cubin as text: printed by the newest nvdisasm and cuobjdump that can read it."""

    def __init__(self, cubin: Path, arch: str) -> None:
        self.text, self.nvdisasm = self._read("nvdisasm", cubin, "-c", "-gi")
        elf, _ = self._read("cuobjdump", cubin, "-elf")
        usage, _ = self._read("cuobjdump", cubin, "-res-usage")
        self.usage, self.attributes = (
            disassembly.resources(usage),
            disassembly.attributes(elf),
        )
        self.reserved = _RESERVED if disassembly.reserves_shared(elf) else 0
        self.ptxas, self.arch = (
            disassembly.assembler(elf),
            disassembly.architecture(elf) or arch,
        )

    @staticmethod
    def _read(
        name: str, cubin: Path, *options: str, machine: Machine = HERE
    ) -> tuple[str, str]:
        versions = tools.versions(name, machine)
        for version, tool in versions:
            if text := tools.output(tool, *options, cubin):
                return text, ".".join(map(str, version))
        newest = ".".join(map(str, versions[0][0])) if versions else "none"
        raise GdnError(
            f"no {name} here reads {cubin.name}: the newest is {newest}",
            hint=f"pip install -U nvidia-cuda-{name}",
        )


def _found(
    name: str,
    kernel: Kernel,
    code: _Code,
    dynamic: int | None,
    sources: Mapping[str, str],
) -> Found:
    usage, attributes = (
        code.usage[kernel.symbol],
        code.attributes.get(kernel.symbol, Attributes()),
    )
    shared = _shared(kernel, max(0, usage["SHARED"] - code.reserved), dynamic)
    constants = sum(size for key, size in usage.items() if key.startswith("CONSTANT"))
    made = [facts.fact("sass.registers", usage["REG"]), shared]
    if threads := attributes.threads or attributes.max_threads:
        note = "" if attributes.threads else "its launch bound: a launch may have fewer"
        made.append(facts.fact("sass.threads", threads, note))
        if shared.value is not None and (
            limit := occupancy(code.arch, usage["REG"], threads, shared.value)
        ):
            made += [
                facts.fact("sass.occupancy_max", limit[0]),
                facts.fact("occupancy_limit", limit[1]),
            ]
    made += [
        facts.fact("sass_instructions", len(kernel.instructions)),
        _spills(kernel, attributes, code.ptxas),
        facts.fact("stack", usage["STACK"]),
        facts.fact("constants", constants),
    ]
    tables = (
        *facts.table("mix", disassembly.mix(kernel.instructions)),
        *facts.table("widths", disassembly.widths(kernel.instructions)),
        *facts.table("loops", _loops(kernel, sources)),
    )
    return Found(name, tuple(made), tables)


def _shared(kernel: Kernel, static: int, dynamic: int | None) -> Fact:
    """Bytes of shared memory per CTA; None if it is known only at a launch."""
    if dynamic is None and static:
        return facts.fact("sass.shared", static, "static; a launch may add to it")
    if dynamic is None and any(i.name in _SHARED for i in kernel.instructions):
        return facts.fact("sass.shared", None, "dynamic: known only at a launch")
    value = static + (dynamic or 0)
    return facts.fact("sass.shared", value, "without the driver's KiB" if value else "")


def _spills(kernel: Kernel, attributes: Attributes, ptxas: str | None) -> Fact:
    """Bytes per thread stored for want of registers; None if an old ptxas did not mark
    its spills.
    """
    stores, loads = disassembly.spilled(kernel.instructions, attributes.spills)
    marks = ptxas is not None and tuple(map(int, ptxas.split(".")[:2])) >= _MARKS_SPILLS
    if (
        not marks
        and not attributes.spills
        and any(i.name == "STL" for i in kernel.instructions)
    ):
        note = "local memory is used, for spills or for arrays: this ptxas does not say"
        return facts.fact("sass.spills", None, note)
    return facts.fact(
        "sass.spills",
        stores,
        f"stored per thread; {loads} B loaded again" if stores or loads else "",
    )


_MARKS_SPILLS = (12, 8)  # the oldest ptxas known to mark them
_SHARED = (
    "LDS",
    "STS",
    "LDSM",
    "STSM",
    "ATOMS",
    "LDGSTS",
    "UBLKCP",
    "UTMALDG",
    "UTMASTG",
)


def _loops(
    kernel: Kernel, sources: Mapping[str, str]
) -> Iterator[tuple[str, str, int, int]]:
    places = {i.offset: disassembly.place(i, sources) for i in kernel.instructions}
    for loop in disassembly.loops(kernel):
        at = places[loop.last]
        where = f"{at.file.rsplit('/', 1)[-1]}:{at.line}" if at.file else ""
        yield (
            where,
            f"{loop.first:04x}-{loop.last:04x}",
            loop.instructions,
            loop.accesses,
        )


def _header(found: Found, code: _Code) -> list[str]:
    """The first lines of a listing."""
    shared = found.value("shared")
    spills = found.value("spills")
    figures = [
        f"{found.value('registers')} registers",
        "dynamic shared memory" if shared is None else f"{shared} B of shared memory",
        (
            "spills unknown"
            if spills is None
            else f"{spills} B of spills"
            if spills
            else "no spills"
        ),
        f"{found.value('stack')} B of stack frame",
        f"{found.value('sass_instructions')} instructions",
    ]
    if threads := next((fact for fact in found.facts if fact.key == "threads"), None):
        figures.append(
            f"CTAs of {'at most ' if threads.note else ''}{threads.value} threads"
        )
    return [
        found.name,
        ", ".join(figures),
        f"ptxas {code.ptxas or 'unknown'}, nvdisasm {code.nvdisasm}",
        (
            "/*offset in bytes*/ instruction, under the source line that it comes from (innermost"
            " inlined function first)"
        ),
    ]


# in each of an SM's four partitions, allocated to warps in units of 256
_REGISTERS = 16384


def occupancy(
    arch: str, registers: int, threads: int, shared: int
) -> tuple[float, str] | None:
    """The share of an SM's warps (%) that fit on it at once, and what limits them; None
    for an unknown architecture.

    registers per thread, threads per CTA, and shared memory per CTA in bytes, without
    the KiB that the driver adds.
    """
    major, minor, _ = _split(arch)
    if (limits := _DATA["limits"].get(f"{major}.{minor}")) is None:
        return None
    most_warps, most_ctas, kib = limits
    warps = -(-threads // 32)
    per_warp = max(256, -(-registers * 32 // 256) * 256)
    per_cta = -(-(shared + _RESERVED) // 128) * 128
    ctas = {
        "warps": most_warps // warps,
        "blocks": most_ctas,
        "registers": 4 * (_REGISTERS // per_warp) // warps,
        "shared memory": kib * 1024 // per_cta,
    }
    by = min(ctas, key=ctas.__getitem__)
    return 100 * ctas[by] * warps / most_warps, by


def _free(name: str, suffix: str, taken: Collection[str]) -> str:
    """The name with its suffix, and a number if it is taken: a kernel may be compiled
    for two sets of constants.
    """
    names = (
        f"{name}{suffix}",
        *(f"{name}-{n}{suffix}" for n in range(2, len(taken) + 2)),
    )
    return next(name for name in names if name not in taken)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:80]
