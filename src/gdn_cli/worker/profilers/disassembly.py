"""Parses the output of nvdisasm and cuobjdump: kernels, instructions with their source
lines, resources.

The text is from `nvdisasm -c -gi` (its JSON has no source lines), `cuobjdump
-res-usage` and `cuobjdump -elf`. The kinds of opcodes are in opcodes.toml.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...parsing import read_toml
from . import source_line, symbols


@dataclass(frozen=True)
class Instruction:
    """One instruction. `offset`: bytes from the kernel's start; `text`: as printed,
    with its predicate, without ';'.

    `frames` are the (file, line) pairs that it comes from, the innermost inlined
    function first; empty if the compiler gave none.
    """

    offset: int
    text: str
    frames: tuple[tuple[str, int], ...] = ()

    @property
    def op(self) -> str:
        """The opcode with its modifiers: "LDG.E.128"."""
        words = self.text.split()
        return words[1] if words[0].startswith("@") and len(words) > 1 else words[0]

    @property
    def name(self) -> str:
        """The opcode alone: "LDG"."""
        return self.op.split(".")[0]

    @property
    def target(self) -> str | None:
        """The label that a branch goes to."""
        found = re.search(r"`\((\.L[^)]*)\)", self.text)
        return found[1] if found and self.name == "BRA" else None


@dataclass(frozen=True)
class Kernel:
    """A kernel's code, and that of the functions that it calls, which follow it in its section.

    The padding of the section, a branch to itself followed by NOPs, is left out.
    """

    symbol: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]  # label -> offset


class Place(NamedTuple):
    """Where an instruction comes from. `file` and `line` are None if not known."""

    file: str | None
    line: int | None


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;?\s*$")
_FRAME = re.compile(r'^\s*//## File "([^"]*)", line (\d+)( inlined at )?')
_LABEL = re.compile(r"^(\.L\w+|\$?[\w$.]+):\s*$")


def kernels(text: str) -> list[Kernel]:
    """The kernels in the output of `nvdisasm -c -gi`, in its order. Device functions
    with their own section (only in relocatable code) are left out.
    """
    found = []
    for part in re.split(r"^\s*\.section\s+", text, flags=re.M)[1:]:
        name = part.split(",", 1)[0].strip().strip('"')
        if name.startswith(".text.") and "STO_CUDA_ENTRY" in part:
            found.append(_kernel(name.removeprefix(".text."), part))
    return found


def _kernel(symbol: str, part: str) -> Kernel:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    frames: list[tuple[str, int]] = []
    whole = True  # an instruction's frames end with the one that is not inlined
    for line in part.splitlines():
        if found := _FRAME.match(line):
            frames = [] if whole else frames
            frames.append((found[1], int(found[2])))
            whole = not found[3]
        elif found := _INSTRUCTION.match(line):
            offset = int(found[1], 16)
            labels |= dict.fromkeys(waiting, offset)
            waiting.clear()
            # line 0: unknown
            instructions.append(
                Instruction(offset, found[2], tuple(f for f in frames if f[1]))
            )
        elif found := _LABEL.match(line):
            waiting.append(found[1])
            # a function, possibly of a library: the line before it is not its own
            if not found[1].startswith(".L"):
                frames, whole = [], True
    return Kernel(symbol, tuple(_without_padding(instructions, labels)), labels)


def _without_padding(
    instructions: list[Instruction], labels: Mapping[str, int]
) -> list[Instruction]:
    end = len(instructions)
    while end and instructions[end - 1].name == "NOP":
        end -= 1
    last = instructions[end - 1] if end else None
    if last and last.target and labels.get(last.target) == last.offset:
        end -= 1
    return instructions[:end]


def place(instruction: Instruction, sources: Iterable[str] = ()) -> Place:
    """The innermost line that is in one of `sources` (paths as in a solution), named by
    that path; if there is none, the innermost of all, by the file's own name.
    """
    own = (
        Place(source, line)
        for file, line in instruction.frames
        if (source := source_of(file, sources))
    )
    return next(own, Place(*(instruction.frames or [(None, None)])[0]))


def source_of(file: str, sources: Iterable[str]) -> str | None:
    """Which of the sources a path of the line table is: the builder wrote them into its
    own folder.
    """
    found = [
        source for source in sources if file == source or file.endswith(f"/{source}")
    ]
    return max(found, key=len, default=None)


# --- resources


def resources(text: str) -> dict[str, dict[str, int]]:
    """kernel's symbol -> {"REG": 32, "STACK": 0, "SHARED": 1152, "CONSTANT[0]": 616,
    ...} from `cuobjdump -res-usage`.

    In bytes, except REG. SHARED is static, and from sm_90 on includes the driver's own
    KiB if there is any at all.
    """
    usage = {}
    for symbol, values in re.findall(
        r"^\s*Function (\S+):\s*\n\s*(.*)$", text, flags=re.M
    ):
        usage[symbol] = {
            key: int(value)
            for key, value in re.findall(r"(\w+(?:\[\d+\])?):(\d+)", values)
        }
    return usage


@dataclass(frozen=True)
class Attributes:
    """A kernel's attributes in a cubin."""

    max_threads: int | None = None  # __launch_bounds__: the most threads of a CTA
    threads: int | None = None  # the exact number of threads of a CTA
    # offsets of the instructions that spill or refill a register
    spills: frozenset[int] = frozenset()


def attributes(text: str) -> dict[str, Attributes]:
    """kernel's symbol -> attributes, from the .nv.info sections in the output of
    `cuobjdump -elf`.
    """
    found = {}
    for part in re.split(r"^(?=\.nv\.info\.)", text, flags=re.M)[1:]:
        symbol = part.split("\n", 1)[0].strip().removeprefix(".nv.info.")
        # up to the next section
        part = re.split(r"^\.", part[1:], maxsplit=1, flags=re.M)[0]
        spills = (
            int(at, 16)
            for at in re.findall(r"SpillRefill\s*:\s*Offset\s*:\s*(0x[0-9a-f]+)", part)
        )
        found[symbol] = Attributes(
            _cta(part, "MAX_THREADS"), _cta(part, "REQNTID"), frozenset(spills)
        )
    return found


def _cta(part: str, attribute: str) -> int | None:
    """The product of an attribute's three sizes."""
    found = re.search(
        rf"EIATTR_{attribute}\s+Format:\s*\w+\s+Value:\s*((?:0x[0-9a-f]+\s+){{3}})",
        part,
    )
    if not found:
        return None
    x, y, z = (int(size, 16) for size in found[1].split())
    return x * y * z


def reserves_shared(text: str) -> bool:
    """Whether SHARED includes the driver's own KiB, by the sections in the output of
    `cuobjdump -elf`.
    """
    return re.search(r"^\.nv\.shared\.reserved", text, flags=re.M) is not None


def assembler(text: str) -> str | None:
    """The version of the ptxas that made the cubin, from the output of `cuobjdump
    -elf`: "13.0.88", or before 13.0 only the toolkit's, "12.8".
    """
    if found := re.search(r"Tool Version:.*\bV(\d+\.\d+\.\d+)", text):
        return found[1]
    found = re.search(r"\btoolkit=(\d+?)\.?(\d)\b", text)
    return f"{found[1]}.{found[2]}" if found else None


def architecture(text: str) -> str | None:
    """ "sm_90a", from the output of `cuobjdump -elf`."""
    found = re.search(r"\bELF:.*\bsm=(\d+[af]?)\b", text, flags=re.I)
    return f"sm_{found[1]}" if found else None


# --- kinds of instructions

LOADS, STORES, ASYNC, TENSOR = (
    "memory loads",
    "memory stores",
    "asynchronous copies (TMA, cp.async)",
    "tensor cores",
)
OTHER = "moves and other"

_OPCODES = read_toml(Path(__file__).with_name("opcodes.toml"))
_KIND = {name: kind for kind, names in _OPCODES["kinds"].items() for name in names}


def kind(instruction: Instruction) -> str:
    """The kind of work that it does; `OTHER` for moves and unknown opcodes."""
    name, text = instruction.name, instruction.text
    if instruction.op.startswith("IMAD.MOV") or re.search(
        r"\bHFMA2(\.\w+)* \w+, -?RZ, -?RZ, ", text
    ):
        return OTHER  # a move into a register, on whichever pipe is free
    return _KIND.get(name) or (
        _KIND.get(name[1:], OTHER) if name.startswith("U") else OTHER
    )


def mix(instructions: Iterable[Instruction]) -> list[tuple[str, int, float, str]]:
    """(kind, how many, share in %, the opcodes in it with their numbers), the most
    frequent kind first.
    """
    kinds: dict[str, Counter[str]] = {}
    for instruction in instructions:
        kinds.setdefault(kind(instruction), Counter())[instruction.name] += 1
    total = sum(names.total() for names in kinds.values())
    rows = []
    for what, names in sorted(
        kinds.items(), key=lambda item: (-item[1].total(), item[0])
    ):
        ranked = sorted(names.items(), key=lambda item: (-item[1], item[0]))
        which = ", ".join(f"{name} {count}" for name, count in ranked[:6])
        more = f", {len(ranked) - 6} more" if len(ranked) > 6 else ""
        rows.append((what, names.total(), 100 * names.total() / total, which + more))
    return rows


_SPACES = _OPCODES["spaces"]  # the memory that a load or store with a width accesses


def bits(instruction: Instruction) -> int:
    """How many bits a load or store moves for one thread."""
    modifiers = instruction.op.split(".")[1:]
    # 8x8 matrices of 16-bit values: 32 bits a thread each
    if instruction.name in ("LDSM", "STSM"):
        return 32 * next((int(m) for m in modifiers if m in ("2", "4")), 1)
    if any(m in ("U8", "S8", "8") for m in modifiers):
        return 8
    if any(m in ("U16", "S16", "16") for m in modifiers):
        return 16
    return next((int(m) for m in modifiers if m in ("64", "128", "256")), 32)


_WIDTH_NOTES = {
    256: "two full 16-byte accesses in one",
    128: "full width",
    64: "half width",
    32: "a quarter of the width",
}


def widths(instructions: Iterable[Instruction]) -> list[tuple[str, str, int, int, str]]:
    """(memory, opcode, bits per thread, how many, note), the memories in `_SPACES`'
    order, the widest first.
    """
    counts = Counter(
        (_SPACES[i.name], i.name, bits(i)) for i in instructions if i.name in _SPACES
    )
    order = {name: at for at, name in enumerate(_SPACES)}
    rows = []
    for (where, name, width), count in sorted(
        counts.items(), key=lambda item: (order[item[0][1]], -item[0][2])
    ):
        size = f"{width // 8} byte{'s' if width > 8 else ''} a lane"
        note = _WIDTH_NOTES.get(width, "an eighth or less of the width")
        rows.append((where, name, width, count, f"{size}: {note}"))
    return rows


class Loop(NamedTuple):
    """A backward branch and its target: offsets of the first and of the last instruction."""

    first: int
    last: int
    instructions: int
    accesses: int  # loads and stores, except loads of constants


def loops(kernel: Kernel) -> list[Loop]:
    """The kernel's loops in the order of their first instructions; several branches to
    one target are one loop.
    """
    ends: dict[int, int] = {}
    for i in kernel.instructions:
        start = kernel.labels.get(i.target) if i.target else None
        if start is not None and start < i.offset:
            ends[start] = max(i.offset, ends.get(start, 0))
    found = []
    for first, last in sorted(ends.items()):
        body = [i for i in kernel.instructions if first <= i.offset <= last]
        found.append(
            Loop(
                first,
                last,
                len(body),
                sum(kind(i) in (LOADS, STORES, ASYNC) for i in body),
            )
        )
    return found


def spilled(
    instructions: Iterable[Instruction], spills: frozenset[int]
) -> tuple[int, int]:
    """Bytes per thread that the code stores to spill registers, and loads to refill
    them: each counted once, however often a loop runs it. ptxas -v calls them "spill
    stores" and "spill loads".
    """
    there = [i for i in instructions if i.offset in spills]
    return tuple(
        sum(bits(i) // 8 for i in there if i.name == name) for name in ("STL", "LDL")
    )  # type: ignore


# --- names and listings


def annotated(
    kernel: Kernel,
    sources: Mapping[str, str],
    header: Iterable[str],
    spills: frozenset[int] = frozenset(),
) -> str:
    """The kernel's code after `header`, each run of instructions under the source line
    that it comes from.

    `sources`: path -> text. A line is named by its whole chain, innermost first:
    `kernel.cu:51 <- kernel.cu:75`. `spills`: offsets of the instructions that are
    marked as spills.
    """
    names = {offset: name for name, offset in kernel.labels.items()}
    out = [f"// {line}".rstrip() for line in header]
    above: tuple[tuple[str, int], ...] | None = None
    for i in kernel.instructions:
        if i.offset in names and i.offset:
            label = names[i.offset]
            out.append(
                f"{label}:"
                if label.startswith(".L")
                else f"\n{symbols.own(label.rsplit('$', 1)[-1])}:"
            )
        if i.frames != above:
            above, at = i.frames, place(i, sources)
            chain = [
                f"{source_of(file, sources) or file.rsplit('/', 1)[-1]}:{line}"
                for file, line in i.frames
            ]
            text = source_line(sources, at.file or "", at.line or 0)
            out += [
                "",
                f"    // {' <- '.join(chain) or 'no source line'}    {text}".rstrip(),
            ]
        predicated = i.text if i.text.startswith("@") else f"     {i.text}"
        out.append(
            f"/*{i.offset:04x}*/ {predicated}{'    // spill' if i.offset in spills else ''}"
        )
    return "\n".join(out) + "\n"
