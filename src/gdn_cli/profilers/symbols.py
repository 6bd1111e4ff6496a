"""What stands at an address: a function's name, its library, its source line, its instruction; and readable names.

ELF files and /proc/PID/maps are read here and names are demangled by the C++ runtime, so that no binutils are needed;
addr2line and objdump, where they are, add lines and instructions.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

# --- names --------------------------------------------------------------------------------------------------------


@cache
def demangle(name: str) -> str:
    """A C++ name as its source has it, by the C++ runtime's own __cxa_demangle; as it is where that cannot."""
    if not name.startswith("_Z"):
        return name
    try:
        abi, c = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
    except OSError:
        return name
    abi.__cxa_demangle.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    text = abi.__cxa_demangle(name.encode(), None, None, ctypes.byref(ctypes.c_int()))
    if not text:
        return name
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        c.free(text)


def short(name: str) -> str:
    """A function's name without return type, parameters and unnamed namespaces; of any other text, the text."""
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", demangle(name))
    plain = re.sub(r" \[clone [^]]*\]|\.(constprop|isra|part|cold)\.?\d*", "", plain)
    depth, begin = 0, 0
    for i, c in enumerate(plain):
        if c in "<{[":
            depth += 1
        elif c in ">}]":
            depth -= 1
        elif depth:
            continue
        elif c == " ":
            begin = i + 1
        elif c == "(" and i > begin and not plain[:i].endswith("operator"):
            return plain[begin:i]
    return plain


def own(name: str) -> str:
    """A function's own name, as `short`, without namespaces either; template arguments stay."""
    plain, depth, begin = short(name), 0, 0
    for i, c in enumerate(plain):
        depth += (c == "<") - (c == ">")
        if depth == 0 and plain[i : i + 2] == "::":
            begin = i + 2
    return plain[begin:]


# --- addresses ----------------------------------------------------------------------------------------------------


class Mapping(NamedTuple):
    """An executable part of a process's memory: from `start` up to `end`, from `offset` in the file on."""

    start: int
    end: int
    offset: int
    path: str


def mappings(text: str) -> list[Mapping]:
    """The executable ones of /proc/PID/maps, by address."""
    found = []
    for line in text.splitlines():
        span, mode, offset, _, _, *path = line.split(maxsplit=5)
        if "x" in mode:
            start, end = (int(x, 16) for x in span.split("-"))
            found.append(Mapping(start, end, int(offset, 16), path[0] if path else ""))
    return sorted(found)


class Symbol(NamedTuple):
    start: int
    end: int
    name: str


class Elf:
    """The functions of a 64-bit ELF file. Addresses are the file's own, as nm, objdump and addr2line have them."""

    def __init__(self, path: str) -> None:
        """Raises OSError or ValueError for anything that is no such file."""
        self.path = path
        with open(path, "rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        with data:
            if data[:6] != b"\x7fELF\x02\x01":
                raise ValueError(f"{path}: not a 64-bit little-endian ELF file")
            self._read(data)
        self._starts = [s.start for s in self._symbols]

    def _read(self, data: mmap.mmap) -> None:
        try:
            phoff, shoff, _, _, phsize, phnum, shsize, shnum, shnames = struct.unpack_from("<QQIHHHHHH", data, 32)
            headers = [struct.unpack_from("<II4Q", data, phoff + i * phsize) for i in range(phnum)]
            self._loads = [(offset, size, vaddr) for kind, _, offset, vaddr, _, size in headers if kind == 1]
            sections = [struct.unpack_from("<IIQQQQII", data, shoff + i * shsize) for i in range(shnum)]
            names = sections[shnames][4] if shnum else 0
            self.has_lines = any(_text(data, names + s[0]) == ".debug_line" for s in sections)
            # all functions where the file was not stripped, else the exported ones
            tables = sorted((s for s in sections if s[1] in (2, 11)), key=lambda s: s[1])
            self._symbols: list[Symbol] = []
            for _, _, _, _, offset, size, link, _ in tables[:1]:
                strings, rows = sections[link][4], struct.iter_unpack("<IBBHQQ", data[offset : offset + size])
                functions = [r for r in rows if r[1] & 15 in (2, 10) and r[3]]
                functions.sort(key=lambda r: (r[4], r[5]))
                self._symbols = [Symbol(at, at + n, _text(data, strings + name)) for name, _, _, _, at, n in functions]
        except (struct.error, IndexError, OverflowError):
            raise ValueError(f"{self.path}: broken ELF file") from None

    def address(self, offset: int) -> int | None:
        """Where a byte of the file is in memory, as the file counts."""
        return next((offset - at + vaddr for at, size, vaddr in self._loads if at <= offset < at + size), None)

    def symbol(self, address: int) -> Symbol | None:
        """The function that an address is in."""
        i = bisect_right(self._starts, address) - 1
        if i < 0:
            return None
        found = self._symbols[i]
        if found.end > found.start:
            return found if address < found.end else None
        after = self._starts[i + 1] if i + 1 < len(self._starts) else address + 1
        return found._replace(end=after)  # written in assembler, without a size: up to the next one


def _text(data: mmap.mmap, at: int) -> str:
    return data[at : data.find(b"\0", at)].decode(errors="replace")


@cache
def elf(path: str) -> Elf | None:
    """A file's functions, None where it has none that can be read (deleted, made in memory, another format)."""
    try:
        return Elf(path)
    except (OSError, ValueError):
        return None


class Place(NamedTuple):
    """Where an address of a process lies. Unknown parts are None."""

    library: str  # the file's path, "" for memory without a file
    address: int | None  # in the file
    symbol: Symbol | None


def place(pc: int, maps: list[Mapping]) -> Place:
    """Where a process's program counter stood."""
    i = bisect_right(maps, (pc, float("inf"))) - 1
    if i < 0 or pc >= maps[i].end:
        return Place("", None, None)
    part = maps[i]
    file = elf(part.path) if part.path.startswith("/") else None
    address = file.address(pc - part.start + part.offset) if file else None
    return Place(part.path, address, file.symbol(address) if file and address is not None else None)


# --- lines and instructions ---------------------------------------------------------------------------------------

Frame = tuple[str, str, int]  # function, file, line


def lines(path: str, addresses: Iterable[int]) -> dict[int, list[Frame]]:
    """The source lines of a file's addresses, an inlined function's before its caller's. Empty without addr2line, or
    where the file was built without -g."""
    tool, file = shutil.which("addr2line"), elf(path)
    addresses = list(addresses)
    if not (tool and file and file.has_lines and addresses):
        return {}
    done = _run([tool, "-a", "-i", "-f", "-C", "-e", path], "\n".join(map(hex, addresses)))
    found: dict[int, list[Frame]] = {}
    function = at = None
    for line in done.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", line):
            at, function = int(line, 16), None
        elif function is None:
            function = line
        else:
            if m := re.match(r"(.+):(\d+)(?: \(.*)?$", line):
                found.setdefault(at, []).append((function, m[1], int(m[2])))
            function = None
    return found


_LARGE = 64 * 2**20  # bytes of a library that objdump would read for too long


def instructions(path: str, symbol: Symbol) -> dict[int, str]:
    """A function's instructions by address; empty without objdump."""
    tool = shutil.which("objdump")
    if not tool or not Path(path).is_file() or Path(path).stat().st_size > _LARGE:
        return {}
    span = [f"--start-address={symbol.start:#x}", f"--stop-address={symbol.end:#x}"]
    text = _run([tool, "-d", "-C", "--no-show-raw-insn", *span, path])
    found = re.findall(r"^\s*([0-9a-f]+):\t(.+?)\s*$", text, re.M)
    return {int(at, 16): re.sub(r"\s+", " ", what) for at, what in found}


def _run(command: list[str], stdin: str = "") -> str:
    """A tool's output, nothing where it fails: what it would have added is left out then."""
    try:
        return subprocess.run(command, input=stdin, capture_output=True, text=True, errors="replace", timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
