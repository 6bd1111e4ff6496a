"""Source lines for ncu's samples in CUDA C++, which flashinfer-bench's builder compiles
without a line table.

They come from the build of the tool sass, which is compiled and never run: the same
sources and the same builder, with -lineinfo added. A kernel gets the lines only if its
machine code is identical to that build's.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ...errors import GdnError
from . import Ask, Reply, Run, disassembly, sass, source_line
from .ncu_reader import Launch, Line

NAME = "lines"


def runs(ask: Ask, folder: Path) -> list[Run]:
    """The run that compiles; none if it would not help, or without nvcc or a disassembler here."""
    machine = ask.machine
    if ask.language != "cuda" or machine.cuda_home() is None or not machine.gpus():
        return []
    try:
        sass.find(machine)
    except GdnError:
        return []
    arch = sass.here("cuda", ask.specific, machine)
    return [
        Run(
            NAME,
            env=sass.environment(arch, "cuda", machine),
            params={"arch": arch, "folder": str(folder)},
        )
    ]


def lent(
    ask: Ask, folder: Path, reply: Reply | None, launches: list[Launch]
) -> list[Launch]:
    """The launches, with lines if their code is the build's; unchanged if nothing was
    compiled or read.
    """
    binary = reply and reply.said(sass.Answer).binary
    if not binary:
        return launches
    try:
        kernels = sass.code(Path(binary), reply.run.params["arch"], folder)
    except GdnError:
        return launches
    return [_with_lines(launch, kernels, ask.sources) for launch in launches]


def _with_lines(
    launch: Launch, kernels: list[disassembly.Kernel], sources: dict[str, str]
) -> Launch:
    ran = [(i.offset, _plain(i.text)) for i in launch.code]
    for kernel in kernels:
        built = kernel.instructions
        if ran and ran[: len(built)] == [(i.offset, _plain(i.text)) for i in built]:
            lines = [_line(disassembly.place(i, sources), sources) for i in built]
            code = [
                replace(i, line=line)
                for i, line in zip(launch.code, lines, strict=False)
            ]
            return replace(launch, code=(*code, *launch.code[len(built) :]))
    return launch


def _line(place: disassembly.Place, sources: dict[str, str]) -> Line | None:
    if place.file not in sources or not place.line:
        return None
    return Line(place.file, place.line, source_line(sources, place.file, place.line))


def _plain(text: str) -> str:
    """An instruction in a common form: one tool prints a branch's target as an address,
    the other as a label, and only one prints the hints for the register cache.
    """
    text = re.sub(r"\s+", " ", text.rstrip(" ;")).replace(".reuse", "")
    jumps = re.match(r"(@!?U?P\w+ )?(BRA|BSSY|CALL|JMP|WARPSYNC)", text)
    return re.sub(r"`\(.*\)|0x[0-9a-f]+", "", text).strip() if jumps else text
