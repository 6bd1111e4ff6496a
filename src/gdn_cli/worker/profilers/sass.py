"""Tool `sass`: registers, spills, opcodes and the annotated machine code of an algo's
kernels. Needs no GPU.

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
from collections.abc import Collection
from dataclasses import dataclass
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
    files_in,
    symbols,
    tools,
)
from .disassembly import Attributes, Compiled, Kernel

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
    found = []
    for arch in dict.fromkeys(archs or [here(language, ask.specific, machine)]):
        env = environment(arch, language, machine)
        found.append(Run(arch, env=env, params={"arch": arch, "folder": str(folder)}))
    return found


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
    """Each kernel for each architecture: its facts, its opcodes, and its code as a file."""
    found: dict[str, Found] = {}
    notes: list[str] = []
    listings: list[str] = []
    cubins: list[str] = []
    for reply in replies:
        arch, answer = reply.run.name, reply.partial(Answer)
        for path, shared in _cubins(reply, answer, folder):
            cubin = Cubin.of(path, arch)
            cubins.append(path.name)
            notes.append(
                f"{cubin.arch}: ptxas {cubin.ptxas or 'unknown'}, nvdisasm {cubin.nvdisasm}"
            )
            if cubin.arch != arch:
                notes.append(f"asked for {arch}: Triton compiles for {cubin.arch}")
            for kernel in disassembly.kernels(cubin.text):
                short = symbols.own(kernel.symbol)
                name = _unique(short, f" ({cubin.arch})", found)
                listing = _unique(_slug(short), f".{cubin.arch}.sass", listings)
                header = [name, notes[-1], "/*offset in bytes*/ instruction"]
                spills = cubin.attributes_of(kernel).spills
                text = disassembly.annotated(kernel, ask.sources, header, spills)
                files.write(folder / listing, text)
                found[name] = cubin.found(name, kernel, shared)
                listings.append(listing)
        notes += answer.notes
        if answer.binary and arch.endswith(("a", "f")):
            notes.append(_target_note(arch, ask.specific))
    if not found:
        raise GdnError(
            "the compiled code has no kernel", hint="does the entry point launch one?"
        )
    names = files_in(folder, *listings, *cubins)
    return Reading(tuple(found.values()), tuple(dict.fromkeys(notes)), names)


def _target_note(arch: str, specific: bool) -> str:
    usual = (
        f"compiled for {arch.rstrip('af')}, as the builder does unless"
        f" {inventory.ARCHITECTURES} is set"
    )
    if specific:
        return (
            f"{arch}: gdn's runs there are compiled for it (algo.toml: specific); a judge's are"
            f" {usual}"
        )
    return f"{arch}: a run there is {usual}"


def _cubins(
    reply: Reply, answer: Answer, folder: Path
) -> list[tuple[Path, int | None]]:
    """The cubins of a reply, in `folder`, each with its dynamic shared memory (None:
    known only at a launch).
    """
    arch = reply.run.name
    if answer.binary:
        return [(path, None) for path in _extracted(Path(answer.binary), arch, folder)]
    if answer.kernels is not None:
        return [(folder / kernel.cubin, kernel.shared) for kernel in answer.kernels]
    reason = (reply.reason or f"the process ended as '{reply.status}'").strip()
    if unknown := re.search(r"Unsupported gpu architecture '\w+'", reason):
        raise UsageError(
            f"nvcc does not know {arch}: {unknown[0]}",
            hint="another --arch, or a newer CUDA toolkit",
        )
    last = f": {reply.tail[-1][:200]}" if reply.tail and reply.code is None else ""
    raise GdnError(f"{arch}: {reason.splitlines()[0]}{last}", code=reply.code or FAILED)


def _extracted(binary: Path, arch: str, folder: Path) -> list[Path]:
    """The cubins in a library, moved into `folder` with the architecture in their names."""
    for _, tool in tools.versions("cuobjdump"):
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            if tools.output(tool, "-xelf", "all", binary, cwd=empty) is None:
                continue
            names: list[str] = []
            for path in sorted(Path(empty).iterdir()):
                names.append(_unique(path.name.split(".")[0], f".{arch}.cubin", names))
                path.replace(folder / names[-1])
        if names:
            return [folder / name for name in names]
    raise GdnError(
        f"cuobjdump finds no GPU code for {arch} in the builder's output",
        hint=GET_TOOLS,
    )


@dataclass(frozen=True)
class Cubin:
    """A cubin as text, printed by the newest nvdisasm and cuobjdump that can read it."""

    text: str
    nvdisasm: str
    ptxas: str | None
    arch: str
    usage: dict[str, dict[str, int]]
    attributes: dict[str, Attributes]
    # bytes of the driver's in the usage of shared memory
    reserved: int

    @classmethod
    def of(cls, path: Path, arch: str) -> Cubin:
        text, nvdisasm = printed("nvdisasm", path, "-c", "-gi")
        elf, _ = printed("cuobjdump", path, "-elf")
        usage, _ = printed("cuobjdump", path, "-res-usage")
        return cls(
            text,
            nvdisasm,
            disassembly.assembler(elf),
            disassembly.architecture(elf) or arch,
            disassembly.resources(usage),
            disassembly.attributes(elf),
            _RESERVED if disassembly.reserves_shared(elf) else 0,
        )

    def attributes_of(self, kernel: Kernel) -> Attributes:
        return self.attributes.get(kernel.symbol, Attributes())

    def found(self, name: str, kernel: Kernel, dynamic: int | None) -> Found:
        """The facts of a kernel. `dynamic`: its dynamic shared memory, if that is known."""
        usage, attributes = self.usage[kernel.symbol], self.attributes_of(kernel)
        static = max(0, usage["SHARED"] - self.reserved)
        constants = [n for key, n in usage.items() if key.startswith("CONSTANT")]
        made = [
            facts.fact("sass.registers", usage["REG"]),
            shared_memory(kernel, static, dynamic),
        ]
        if threads := attributes.threads or attributes.max_threads:
            note = "its launch bound: a launch may have fewer"
            if attributes.threads:
                note = ""
            made.append(facts.fact("sass.threads", threads, note))
        made += [
            facts.fact("sass_instructions", len(kernel.instructions)),
            spills(kernel, attributes, self.ptxas),
            facts.fact("stack", usage["STACK"]),
            facts.fact("constants", sum(constants)),
        ]
        table = facts.table("opcodes", disassembly.mix(kernel.instructions))
        return Found(name, tuple(made), tuple(table))


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


_SHARED = re.compile(r"LDSM?|STSM?|ATOMS|LDGSTS|UBLKCP|UTMALDG|UTMASTG")


def shared_memory(kernel: Kernel, static: int, dynamic: int | None) -> Fact:
    """Bytes of shared memory per CTA; None if it is known only at a launch."""
    if dynamic is None and static:
        return facts.fact("sass.shared", static, "static; a launch may add to it")
    if dynamic is None and any(_SHARED.fullmatch(i.name) for i in kernel.instructions):
        return facts.fact("sass.shared", None, "dynamic: known only at a launch")
    size = static + (dynamic or 0)
    return facts.fact("sass.shared", size, "without the driver's KiB" if size else "")


# the oldest ptxas known to mark spills
_MARKS_SPILLS = (12, 8)


def spills(kernel: Kernel, attributes: Attributes, ptxas: str | None) -> Fact:
    """Bytes per thread stored for want of registers; None if an old ptxas did not mark
    its spills.
    """
    version = tuple(map(int, (ptxas or "0").split(".")[:2]))
    stores, loads = disassembly.spilled(kernel.instructions, attributes.spills)
    local = any(i.name == "STL" for i in kernel.instructions)
    if local and not attributes.spills and version < _MARKS_SPILLS:
        note = "local memory is used, for spills or for arrays: this ptxas does not say"
        return facts.fact("sass.spills", None, note)
    note = f"stored per thread; {loads} B loaded again" if stores or loads else ""
    return facts.fact("sass.spills", stores, note)


def _unique(name: str, suffix: str, taken: Collection[str]) -> str:
    """The name with its suffix, and a number if it is taken: a kernel may be compiled
    for two sets of constants.
    """
    number = 2
    unique = name + suffix
    while unique in taken:
        unique = f"{name}-{number}{suffix}"
        number += 1
    return unique


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:80]
