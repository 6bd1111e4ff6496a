"""Parses the output of nvdisasm and cuobjdump: kernels, instructions, resources.

The text is from `nvdisasm -c -gi`, `cuobjdump -res-usage` and `cuobjdump -elf`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple


class Instruction(NamedTuple):
    """`offset`: bytes from the kernel's start; `op`: the opcode with its modifiers,
    such as "LDG.E.128".
    """

    offset: int
    op: str

    @property
    def name(self) -> str:
        """The opcode alone: "LDG"."""
        return self.op.split(".")[0]


# an offset, a predicate, an opcode
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@\S+\s+)?([^\s;]+)", flags=re.M
)


def kernels(text: str) -> dict[str, list[Instruction]]:
    """kernel's symbol -> its code and that of the functions that it calls, which follow
    it in its section, from the output of `nvdisasm -c`. Device functions with their own
    section (only in relocatable code) are left out.
    """
    codes = {}
    for part in re.split(r"^\s*\.section\s+", text, flags=re.M)[1:]:
        name = part.split(",", 1)[0].strip().strip('"')
        if name.startswith(".text.") and "STO_CUDA_ENTRY" in part:
            codes[name.removeprefix(".text.")] = _code(part)
    return codes


def _code(part: str) -> list[Instruction]:
    """The instructions of a section without its padding, a branch to itself and NOPs."""
    code = [Instruction(int(at, 16), op) for at, op in _INSTRUCTION.findall(part)]
    while code and code[-1].name == "NOP":
        code.pop()
    if code and code[-1].name == "BRA":
        code.pop()
    return code


def mix(code: Sequence[Instruction]) -> list[tuple[str, int, float]]:
    """(opcode with its modifiers, how many, share in %), the most frequent first. The
    modifiers have the width of a load or store: "LDG.E.128".
    """
    counts = Counter(instruction.op for instruction in code)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(op, count, 100 * count / len(code)) for op, count in ranked]


def spilled(code: Iterable[Instruction], spills: frozenset[int]) -> tuple[int, int]:
    """Bytes per thread that the code stores to spill registers, and loads to refill
    them: each counted once, however often a loop runs it. ptxas -v calls them "spill
    stores" and "spill loads".
    """
    sizes = Counter[str]()
    for i in code:
        if i.offset in spills:
            width = re.search(r"\.(64|128)\b", i.op)
            sizes[i.name] += int(width[1]) // 8 if width else 4
    return sizes["STL"], sizes["LDL"]


# --- resources


def resources(text: str) -> dict[str, dict[str, int]]:
    """kernel's symbol -> {"REG": 32, "STACK": 0, "SHARED": 1152, "CONSTANT[0]": 616,
    ...} from `cuobjdump -res-usage`.

    In bytes, except REG. SHARED is static, and from sm_90 on includes the driver's own
    KiB if there is any at all.
    """
    usage = {}
    for symbol, line in re.findall(r"^\s*Function (\S+):\s*\n\s*(.*)$", text, re.M):
        values = re.findall(r"(\w+(?:\[\d+\])?):(\d+)", line)
        usage[symbol] = {key: int(value) for key, value in values}
    return usage


class Attributes(NamedTuple):
    """A kernel's attributes in a cubin."""

    # the most threads of a CTA, by __launch_bounds__ or Triton's num_warps
    threads: int | None = None
    # offsets of the instructions that spill or refill a register
    spills: frozenset[int] = frozenset()


def attributes(text: str) -> dict[str, Attributes]:
    """kernel's symbol -> attributes, from the .nv.info sections in the output of
    `cuobjdump -elf`.
    """
    by_symbol = {}
    for symbol, part in re.findall(
        r"^\.nv\.info\.(\S+)\s*\n(.*?)(?=^\.|\Z)", text, flags=re.M | re.S
    ):
        offsets = re.findall(r"SpillRefill\s*:\s*Offset\s*:\s*(0x[0-9a-f]+)", part)
        by_symbol[symbol] = Attributes(
            _cta(part, "REQNTID") or _cta(part, "MAX_THREADS"),
            frozenset(int(offset, 16) for offset in offsets),
        )
    return by_symbol


def _cta(part: str, attribute: str) -> int | None:
    """The product of an attribute's three sizes."""
    sizes = r"Value:\s*(0x[0-9a-f]+)\s+(0x[0-9a-f]+)\s+(0x[0-9a-f]+)\s"
    match = re.search(rf"EIATTR_{attribute}\s+Format:\s*\w+\s+{sizes}", part)
    return prod(int(size, 16) for size in match.groups()) if match else None


def reserves_shared(text: str) -> bool:
    """Whether SHARED includes the driver's own KiB, by the sections in the output of
    `cuobjdump -elf`.
    """
    return re.search(r"^\.nv\.shared\.reserved", text, flags=re.M) is not None


def assembler(text: str) -> str | None:
    """The version of the ptxas that made the cubin, from the output of `cuobjdump
    -elf`: "13.0.88", or before 13.0 only the toolkit's, "12.8".
    """
    if version := re.search(r"Tool Version:.*\bV(\d+\.\d+\.\d+)", text):
        return version[1]
    toolkit = re.search(r"\btoolkit=(\d+?)\.?(\d)\b", text)
    return f"{toolkit[1]}.{toolkit[2]}" if toolkit else None
