"""Tool `sass`: registers, spills, opcodes and the machine code of an algo's kernels.
Needs no GPU.

CUDA C++ is compiled by flashinfer-bench's own builder, as for a run, with -lineinfo
added, which adds the line table and does not change the instructions. Triton's kernels
are compiled by Triton for the workload's launches (triton_cross_compile.py). cuobjdump
extracts the cubins, nvdisasm prints them, with source lines; both come with the CUDA
toolkit, with Triton, and as wheels from PyPI.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct

from ... import files, paths
from ...errors import GdnError, MissingError, UsageError
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
    symbols,
    tools,
)
from .disassembly import Attributes, Instruction

_REFUSED = read_toml(Path(__file__).with_suffix(".toml"))
_DEFAULT = "sm_90a"
GET_TOOLS = "install the CUDA toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
# bytes of each CTA's shared memory that the driver uses
_RESERVED = 1024


def parse_arch(text: str) -> str:
    """ "sm_90a" from "sm_90a", "90a" or "9.0a"; a UsageError if it is not the name of a
    GPU architecture.
    """
    major, minor, suffix = _split(text)
    return f"sm_{major}{minor}{suffix}"


def _split(arch: str) -> tuple[int, int, str]:
    """ "sm_100a" -> (10, 0, "a")."""
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)([af]?)", arch.strip().lower())
    if not match:
        raise UsageError(
            f"'{arch}' is not a GPU architecture",
            hint="write it as sm_90a, 90a or 9.0a",
        )
    return int(match[1]), int(match[2]), match[3]


def find(machine: Machine = HERE) -> None:
    """MissingError if cuobjdump or nvdisasm is not installed."""
    for name in ("cuobjdump", "nvdisasm"):
        if not tools.versions(name, machine):
            raise MissingError(f"no {name} here", hint=GET_TOOLS)


# --- before


def runs(ask: Ask, folder: Path) -> list[Run]:
    """One run for each architecture."""
    language, machine = ask.language, ask.machine
    if refused := _REFUSED.get(language):
        raise UsageError(refused["why"], hint=refused["hint"])
    if language == "cuda" and machine.cuda_home() is None:
        raise MissingError("no nvcc here", hint=inventory.GET_NVCC)
    if language == "triton" and not machine.has_package("triton"):
        raise MissingError("package triton missing", hint="pip install triton")
    archs = [parse_arch(arch) for arch in ask.archs]
    targets = []
    for arch in dict.fromkeys(archs or [here(language, ask.specific, machine)]):
        env = environment(arch, language, machine)
        targets.append(Run(arch, env=env, params={"arch": arch, "folder": str(folder)}))
    return targets


def here(language: str, specific: bool, machine: Machine = HERE) -> str:
    """The compile target of a run on this machine: the GPU's plain capability, as the
    builder uses it, or with the 'a' (executor/build.py), which Triton adds itself.
    """
    gpus = machine.gpus()
    if not gpus:
        return _DEFAULT
    capability = gpus[0].capability
    if specific and language == "cuda":
        capability = inventory.specific(capability) or capability
    return parse_arch(capability)


def environment(arch: str, language: str, machine: Machine = HERE) -> dict[str, str]:
    """The worker's environment: the builder compiles for this architecture, with a line
    table, into a separate cache.
    """
    if language == "triton":
        # nothing is compiled if it is set
        return {"TRITON_INTERPRET": "0"}
    major, minor, suffix = _split(arch)
    flags = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -lineinfo".strip()
    home = machine.cuda_home() or Path()
    version = tools.output(home / "bin" / "nvcc", "--version")
    # the builder's cache key knows neither the architecture nor the compiler nor its flags
    key = repr([version, flags, os.environ.get("NVCC_PREPEND_FLAGS")])
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return {
        inventory.ARCHITECTURES: f"{major}.{minor}{suffix}",
        "NVCC_APPEND_FLAGS": flags,
        "FIB_CACHE_PATH": str(paths.builds_dir() / f"sass-{arch}-{digest}"),
    }


# --- in the worker


class Answer(Struct):
    """The answer of `inside`: `binary`, the library that the builder made, or Triton's
    cubins in the profile's folder, each with its kernel's bytes of dynamic shared memory.
    """

    binary: str | None = None
    cubins: dict[str, int] = {}
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
    kernels, notes = compiled(target.subject.call, major * 10 + minor)
    sizes = ", ".join(f"{name}={size}" for name, size in target.workload.axes.items())
    notes.append(
        f"compiled as a call with {sizes} launches it: other sizes may compile to other code"
    )
    cubins = {}
    for i, kernel in enumerate(kernels):
        number = f"-{i}" if i else ""
        cubin = f"{kernel.metadata.name}{number}.{arch}.cubin"
        files.write(Path(folder, cubin), kernel.asm["cubin"])
        cubins[cubin] = kernel.metadata.shared
    return Answer(cubins=cubins, notes=notes)


# --- after the run


def read(ask: Ask, folder: Path, replies: list[Reply]) -> Reading:
    """Each kernel for each architecture: its facts and its opcodes; and nvdisasm's
    listing of each cubin as a file.
    """
    findings: dict[str, Found] = {}
    notes: list[str] = []
    cubins: list[str] = []
    for reply in replies:
        arch, answer = reply.run.name, reply.answered(Answer)
        notes += answer.notes
        compiled = answer.cubins
        if answer.binary:
            compiled = dict.fromkeys(_extracted(Path(answer.binary), arch, folder), 0)
            usual = arch.rstrip("af")
            if usual != arch and not ask.specific:
                notes.append(f"{arch}: a run there is compiled for {usual}")
        for name, dynamic in compiled.items():
            cubin = Cubin.read(folder / name)
            files.write((folder / name).with_suffix(".sass"), cubin.text)
            cubins.append(name)
            notes.append(
                f"{cubin.arch}: ptxas {cubin.ptxas or 'unknown'}, nvdisasm {cubin.nvdisasm}"
            )
            for symbol in cubin.kernels:
                kernel = _unique(f"{symbols.own(symbol)} ({cubin.arch})", findings)
                findings[kernel] = cubin.findings(kernel, symbol, dynamic)
    if not findings:
        raise GdnError(
            "the compiled code has no kernel", hint="does the entry point launch one?"
        )
    listings = [Path(name).with_suffix(".sass").name for name in cubins]
    return Reading(
        tuple(findings.values()), tuple(dict.fromkeys(notes)), (*listings, *cubins)
    )


def _unique(name: str, taken: dict[str, Found]) -> str:
    """The name with a number if it is taken: a kernel may be compiled for two sets of
    constants.
    """
    unique, number = name, 2
    while unique in taken:
        unique = f"{name} {number}"
        number += 1
    return unique


def _extracted(binary: Path, arch: str, folder: Path) -> list[str]:
    """The names of a library's cubins, moved into `folder`."""
    for _, tool in tools.versions("cuobjdump"):
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            if tools.output(tool, "-xelf", "all", binary, cwd=empty) is None:
                continue
            names = []
            for path in sorted(Path(empty).iterdir()):
                path.replace(folder / path.name)
                names.append(path.name)
        if names:
            return names
    raise GdnError(
        f"cuobjdump finds no GPU code for {arch} in the builder's output",
        hint=GET_TOOLS,
    )


@dataclass(frozen=True)
class Cubin:
    """A cubin as text, printed by the newest nvdisasm and cuobjdump that can read it."""

    text: str
    nvdisasm: str
    elf: str
    usage: dict[str, dict[str, int]]

    @classmethod
    def read(cls, path: Path) -> Cubin:
        text, version = printed("nvdisasm", path, "-c", "-gi")
        elf, _ = printed("cuobjdump", path, "-elf")
        usage, _ = printed("cuobjdump", path, "-res-usage")
        return cls(text, version, elf, disassembly.resources(usage))

    @property
    def arch(self) -> str:
        target = re.search(r"^\s*\.target\s+(sm_\w+)", self.text, flags=re.M)
        return target[1] if target else ""

    @property
    def ptxas(self) -> str | None:
        return disassembly.assembler(self.elf)

    @cached_property
    def kernels(self) -> dict[str, list[Instruction]]:
        return disassembly.kernels(self.text)

    @cached_property
    def attributes(self) -> dict[str, Attributes]:
        return disassembly.attributes(self.elf)

    def findings(self, name: str, symbol: str, dynamic: int) -> Found:
        """The facts of a kernel. `dynamic`: its dynamic shared memory; 0 for CUDA C++,
        where only a launch has it.
        """
        code, usage = self.kernels[symbol], self.usage[symbol]
        attributes = self.attributes.get(symbol, Attributes())
        reserved = _RESERVED if disassembly.reserves_shared(self.elf) else 0
        shared = max(0, usage["SHARED"] - reserved) + dynamic
        constants = [n for key, n in usage.items() if key.startswith("CONSTANT")]
        figures = (
            facts.fact("sass.registers", usage["REG"]),
            facts.fact("sass.shared", shared),
            facts.fact("sass.threads", attributes.threads),
            facts.fact("sass_instructions", len(code)),
            spills(code, attributes, self.ptxas),
            facts.fact("stack", usage["STACK"]),
            facts.fact("constants", sum(constants)),
        )
        table = facts.table("opcodes", disassembly.mix(code))
        return Found(name, figures, tuple(table))


def printed(
    tool: str, cubin: Path, *options: str, machine: Machine = HERE
) -> tuple[str, str]:
    """The output of the newest tool of this name that can read the cubin, and its version."""
    versions = tools.versions(tool, machine)
    for version, path in versions:
        if text := tools.output(path, *options, cubin):
            return text, ".".join(map(str, version))
    newest = ".".join(map(str, versions[0][0])) if versions else "none"
    raise GdnError(
        f"no {tool} here reads {cubin.name}: the newest is {newest}",
        hint=f"pip install -U nvidia-cuda-{tool}",
    )


# the oldest ptxas known to mark spills
_MARKS_SPILLS = (12, 8)


def spills(code: list[Instruction], attributes: Attributes, ptxas: str | None) -> Fact:
    """Bytes per thread stored for want of registers; None if an old ptxas did not mark
    its spills.
    """
    version = tuple(map(int, (ptxas or "0").split(".")[:2]))
    stores, loads = disassembly.spilled(code, attributes.spills)
    local = any(i.name == "STL" for i in code)
    if local and not attributes.spills and version < _MARKS_SPILLS:
        note = "local memory is used, for spills or for arrays: this ptxas does not say"
        return facts.fact("sass.spills", None, note)
    note = f"stored per thread; {loads} B loaded again" if stores or loads else ""
    return facts.fact("sass.spills", stores, note)
