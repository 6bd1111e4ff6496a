"""Parses the output of nvdisasm and cuobjdump: kernels, instructions with their source
lines, resources.

The text is from `nvdisasm -c -gi` (its JSON has no source lines), `cuobjdump
-res-usage` and `cuobjdump -elf`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from . import source_line, symbols

# (file, line), the innermost inlined function first
Frames = tuple[tuple[str, int], ...]


class Compiled(Struct):
    """A kernel compiled by Triton: the cubin's name in the profile's folder, bytes of
    dynamic shared memory.
    """

    cubin: str
    shared: int


@dataclass(frozen=True)
class Instruction:
    """One instruction. `offset`: bytes from the kernel's start; `text`: as printed,
    with its predicate, without ';'; `frames`: where it comes from, empty if the
    compiler did not say.
    """

    offset: int
    text: str
    frames: Frames = ()

    @property
    def op(self) -> str:
        """The opcode with its modifiers: "LDG.E.128"."""
        words = self.text.split()
        return words[1] if words[0].startswith("@") and len(words) > 1 else words[0]

    @property
    def name(self) -> str:
        """The opcode alone: "LDG"."""
        return self.op.split(".")[0]


@dataclass(frozen=True)
class Kernel:
    """A kernel's code, and that of the functions that it calls, which follow it in its section.

    The padding of the section, a branch to itself followed by NOPs, is left out.
    """

    symbol: str
    instructions: tuple[Instruction, ...]
    # label -> offset
    labels: Mapping[str, int]


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
    # labels of the next instruction
    waiting: list[str] = []
    frames: Frames = ()
    # an instruction's frames end with the one that is not inlined
    ended = True
    for line in part.splitlines():
        if match := _FRAME.match(line):
            frame = match[1], int(match[2])
            frames = (frame,) if ended else (*frames, frame)
            ended = not match[3]
        elif match := _INSTRUCTION.match(line):
            offset = int(match[1], 16)
            labels |= dict.fromkeys(waiting, offset)
            waiting.clear()
            # line 0: unknown
            known = tuple(frame for frame in frames if frame[1])
            instructions.append(Instruction(offset, match[2], known))
        elif match := _LABEL.match(line):
            waiting.append(match[1])
            # a function, possibly of a library: the line before it is not its own
            if not match[1].startswith(".L"):
                frames, ended = (), True
    return Kernel(symbol, tuple(_without_padding(instructions, labels)), labels)


def _without_padding(
    instructions: list[Instruction], labels: Mapping[str, int]
) -> list[Instruction]:
    code = list(instructions)
    while code and code[-1].name == "NOP":
        code.pop()
    if code and code[-1].name == "BRA":
        target = re.search(r"`\((\.L[^)]*)\)", code[-1].text)
        if target and labels.get(target[1]) == code[-1].offset:
            code.pop()
    return code


def place(instruction: Instruction, sources: Iterable[str] = ()) -> tuple[str, int]:
    """The innermost line that is in one of `sources` (paths as in a solution), named by
    that path; else the innermost of all, by the file's own name; ("", 0) if not known.
    """
    for file, line in instruction.frames:
        if source := source_of(file, sources):
            return source, line
    return instruction.frames[0] if instruction.frames else ("", 0)


def source_of(file: str, sources: Iterable[str]) -> str | None:
    """Which of the sources a path of the line table is: the builder wrote them into its
    own folder.
    """
    matches = [s for s in sources if f"/{file}".endswith(f"/{s}")]
    return max(matches, key=len, default=None)


# --- resources


def resources(text: str) -> dict[str, dict[str, int]]:
    """kernel's symbol -> {"REG": 32, "STACK": 0, "SHARED": 1152, "CONSTANT[0]": 616,
    ...} from `cuobjdump -res-usage`.

    In bytes, except REG. SHARED is static, and from sm_90 on includes the driver's own
    KiB if there is any at all.
    """
    usage = {}
    for symbol, line in re.findall(
        r"^\s*Function (\S+):\s*\n\s*(.*)$", text, flags=re.M
    ):
        values = re.findall(r"(\w+(?:\[\d+\])?):(\d+)", line)
        usage[symbol] = {key: int(value) for key, value in values}
    return usage


@dataclass(frozen=True)
class Attributes:
    """A kernel's attributes in a cubin."""

    # __launch_bounds__: the most threads of a CTA
    max_threads: int | None = None
    # the exact number of threads of a CTA
    threads: int | None = None
    # offsets of the instructions that spill or refill a register
    spills: frozenset[int] = frozenset()


def attributes(text: str) -> dict[str, Attributes]:
    """kernel's symbol -> attributes, from the .nv.info sections in the output of
    `cuobjdump -elf`.
    """
    found = {}
    for part in re.split(r"^\.nv\.info\.", text, flags=re.M)[1:]:
        symbol = part.split("\n", 1)[0].strip()
        # up to the next section
        part = re.split(r"^\.", part, maxsplit=1, flags=re.M)[0]
        offsets = re.findall(r"SpillRefill\s*:\s*Offset\s*:\s*(0x[0-9a-f]+)", part)
        spills = frozenset(int(offset, 16) for offset in offsets)
        found[symbol] = Attributes(
            _cta(part, "MAX_THREADS"), _cta(part, "REQNTID"), spills
        )
    return found


def _cta(part: str, attribute: str) -> int | None:
    """The product of an attribute's three sizes."""
    sizes = r"Value:\s*(0x[0-9a-f]+)\s+(0x[0-9a-f]+)\s+(0x[0-9a-f]+)\s"
    match = re.search(rf"EIATTR_{attribute}\s+Format:\s*\w+\s+{sizes}", part)
    if not match:
        return None
    return int(match[1], 16) * int(match[2], 16) * int(match[3], 16)


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


def architecture(text: str) -> str | None:
    """ "sm_90a", from the output of `cuobjdump -elf`."""
    match = re.search(r"\bELF:.*\bsm=(\d+[af]?)\b", text, flags=re.I)
    return f"sm_{match[1]}" if match else None


# --- instructions


def mix(instructions: Iterable[Instruction]) -> list[tuple[str, int, float]]:
    """(opcode with its modifiers, how many, share in %), the most frequent first. The
    modifiers have the width of a load or store: "LDG.E.128".
    """
    counts = Counter(instruction.op for instruction in instructions)
    total = counts.total()
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(op, count, 100 * count / total) for op, count in ranked]


def spilled(
    instructions: Iterable[Instruction], spills: frozenset[int]
) -> tuple[int, int]:
    """Bytes per thread that the code stores to spill registers, and loads to refill
    them: each counted once, however often a loop runs it. ptxas -v calls them "spill
    stores" and "spill loads".
    """
    sizes = Counter[str]()
    for i in instructions:
        if i.offset in spills:
            width = re.search(r"\.(64|128)\b", i.op)
            sizes[i.name] += int(width[1]) // 8 if width else 4
    return sizes["STL"], sizes["LDL"]


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
    labels = {offset: name for name, offset in kernel.labels.items() if offset}
    lines = [f"// {line}".rstrip() for line in header]
    above: Frames | None = None
    for i in kernel.instructions:
        if label := labels.get(i.offset):
            function = symbols.own(label.rsplit("$", 1)[-1])
            lines.append(f"{label}:" if label.startswith(".L") else f"\n{function}:")
        if i.frames != above:
            above = i.frames
            lines += ["", f"    // {_chain(i, sources)}".rstrip()]
        predicated = i.text if i.text.startswith("@") else f"     {i.text}"
        mark = "    // spill" if i.offset in spills else ""
        lines.append(f"/*{i.offset:04x}*/ {predicated}{mark}")
    return "\n".join(lines) + "\n"


def _chain(instruction: Instruction, sources: Mapping[str, str]) -> str:
    """The source lines that an instruction comes from, and the text of the algo's."""
    chain = [
        f"{source_of(file, sources) or file.rsplit('/', 1)[-1]}:{line}"
        for file, line in instruction.frames
    ]
    text = source_line(sources, *place(instruction, sources))
    return f"{' <- '.join(chain) or 'no source line'}    {text}"
