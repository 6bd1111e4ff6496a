"""Readable names of C++ functions and kernels, demangled by the C++ runtime, so that no
binutils are needed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import cache


@cache
def demangle(name: str) -> str:
    """A C++ name as in its source, by the C++ runtime's own __cxa_demangle; unchanged
    if that fails.
    """
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
    """A function's name without return type, parameters and unnamed namespaces; any
    other text is returned unchanged.
    """
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", demangle(name))
    plain = re.sub(r" \[clone [^]]*\]|\.(constprop|isra|part|cold)\.?\d*", "", plain)
    begin = 0
    for i, c in _outside_brackets(plain):
        if c == " ":
            begin = i + 1
        elif c == "(" and i > begin and not plain[:i].endswith("operator"):
            return plain[begin:i]
    return plain


def own(name: str) -> str:
    """A function's own name: like `short`, also without namespaces; template arguments stay."""
    plain = short(name)
    begin = 0
    for i, _ in _outside_brackets(plain):
        if plain.startswith("::", i):
            begin = i + 2
    return plain[begin:]


def _outside_brackets(text: str) -> Iterator[tuple[int, str]]:
    """The characters, with their positions, that are not inside brackets of templates
    or lambdas.
    """
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "<{[") - (c in ">}]")
        if not depth and c not in ">}]":
            yield i, c


def bare(name: str) -> str:
    """Like `own`, without template arguments: a kernel's name in tables."""
    return own(name).partition("<")[0] or name
