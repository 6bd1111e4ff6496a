"""Source lines for what ncu samples in CUDA C++: flashinfer-bench's builder compiles it without a line table.

So the tool sass's build, which is compiled and never run, lends its own: the same sources through the same builder,
with -lineinfo on top. A kernel gets the lines only where its machine code is that build's, one instruction for one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .. import machine
from ..errors import GdnError
from . import Ask, Reply, Run, disassembly, sass
from .ncu_report import Line, Listing

NAME = "lines"


def runs(ask: Ask, folder: Path) -> list[Run]:
    """The run that compiles; none where there is nothing to gain, or no nvcc or disassembler here."""
    if ask.solution["spec"]["language"] != "cuda" or machine.cuda_home() is None or not machine.gpus():
        return []
    try:
        sass.find()
    except GdnError:
        return []
    arch = sass.here("cuda", ask.specific)
    params = {"arch": arch, "folder": str(folder)}
    return [Run(NAME, env=sass.environment(arch, "cuda"), params={NAME: params})]


def inside(target: Any, params: dict[str, Any]) -> dict[str, Any]:
    return sass.inside(target, params[NAME])


def lines(ask: Ask, folder: Path, reply: Reply | None, listings: list[Listing]) -> dict[int, Line]:
    """Address -> line, of the listings whose code is the build's; {} where nothing was compiled or read."""
    binary = reply.answer.get("binary") if reply else None
    if not binary:
        return {}
    sources = {source["path"]: source["content"] for source in ask.solution["sources"]}
    try:
        kernels = sass.code(Path(binary), reply.run.params[NAME]["arch"], folder)
    except GdnError:
        return {}
    found: dict[int, Line] = {}
    for listing in listings:
        ran = [(i.offset, _plain(i.text)) for i in listing.instructions]
        for kernel in kernels:
            if ran[: len(kernel.instructions)] == [(i.offset, _plain(i.text)) for i in kernel.instructions]:
                places = [disassembly.place(i, sources) for i in kernel.instructions]
                found |= _lines(listing, places, sources)
                break
    return found


def _lines(listing: Listing, places: list[disassembly.Place], sources: dict[str, str]) -> dict[int, Line]:
    found = {}
    for instruction, place in zip(listing.instructions, places, strict=False):
        if place.file in sources and place.line:
            text = sources[place.file].splitlines()[place.line - 1 : place.line]
            found[instruction.address] = Line(place.file, place.line, " ".join("".join(text).split()))
    return found


def _plain(text: str) -> str:
    """An instruction as both tools print it: one writes a branch's target as an address, the other as a label, and
    only one has the hints for the register cache."""
    text = re.sub(r"\s+", " ", text.rstrip(" ;")).replace(".reuse", "")
    jumps = re.match(r"(@!?U?P\w+ )?(BRA|BSSY|CALL|JMP|WARPSYNC)", text)
    return re.sub(r"`\(.*\)|0x[0-9a-f]+", "", text).strip() if jumps else text
