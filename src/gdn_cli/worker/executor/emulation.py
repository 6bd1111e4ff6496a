"""A CUDA solution as one in C++, which runs on a CPU: `gdn run --emulate`.

The files of gdn_cli/emulator stand in for CUDA's headers, and for those of _cuda/ptx. C++
has no words for a launch, for shared memory and for PTX: here they become calls of
emulator/emulated.h. No line changes its number.
"""

from __future__ import annotations

import os
import re

from ... import paths
from ...catalog.formats import Solution

_FOLDER = paths.PACKAGE / "emulator"


def _nested(opening: str, closing: str) -> str:
    """The pattern of brackets and what is in them."""
    pattern = ""
    for _ in range(5):
        inner = f"[^{opening}{closing}]" + (pattern and f"|{pattern}")
        pattern = rf"\{opening}(?:{inner})*\{closing}"
    return pattern


_ROUND, _ANGLES = _nested("(", ")"), _nested("<", ">")
_TEXT = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_TEXT}|//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAUNCH = re.compile(rf"((?:[\w:]|{_ANGLES})+)\s*<<<(.*?)>>>\s*({_ROUND})", re.DOTALL)
_SHARED = re.compile(r"([^;{}\n]*)\b__shared__\b([^;]*)(?=;)")
_ALIGNED = re.compile(rf"\b(?:alignas|__align__)\s*{_ROUND}|\b(?:static|extern)\b")
_DECLARED = re.compile(rf"((?:[\w:*]|\s|{_ANGLES})*\s)(\w+\s*(?:[\[,].*)?)", re.DOTALL)
_ASM = re.compile(rf"\b(?:asm|__asm__)\b\s*(?:(?:__)?volatile(?:__)?)?\s*({_ROUND})")
_TEMPLATE = re.compile(rf"\(((?:{_TEXT}|[^\":])*)")
_OPERAND = re.compile(rf"({_TEXT})\s*({_ROUND})")
_MEMORY = re.compile(r"(?:\bstd::)?\b(mem(?:cpy|move|set))(?=\s*\()")
_EXPORT = re.compile(r"\bTVM_FFI_DLL_EXPORT_TYPED_FUNC(?=\s*\()")


def for_cpu(solution: Solution) -> Solution:
    """The solution in C++, with the emulator's own files."""
    own = {path.name: path.read_text() for path in sorted(_FOLDER.iterdir())}
    texts = dict(own)
    for source in solution["sources"]:
        path, text = source["path"], source["content"]
        if path not in own or not _is_ours(path, text):
            texts[_named(path)] = rewritten(text)
    file, _, symbol = solution["spec"]["entry_point"].partition("::")
    spec = solution["spec"] | {
        "language": "cpp",
        "entry_point": f"{_named(file)}::{symbol}",
    }
    sources = [{"path": path, "content": text} for path, text in texts.items()]
    return solution | {"spec": spec, "sources": sources}  # type: ignore[return-value]


def compiler() -> dict[str, str]:
    """The environment of its build."""
    return {"CXX": "sh cxx.sh", "EMULATED_CXX": os.environ.get("CXX") or "c++"}


def explained(errors: str) -> str:
    """A C++ compiler's errors, with what the emulator lacks named as such."""
    errors = re.sub(
        r"error: [^\n]*?[‘'](__\w+)[’'][^\n]*",
        r"error: the emulator does not know '\1'",
        errors,
    )
    return re.sub(
        r"error: (\S+): No such file or directory",
        r"error: the emulator has no \1",
        errors,
    )


def _named(path: str) -> str:
    """As a file that a C++ compiler takes."""
    return f"{path}.cpp" if path.endswith(".cu") else path


def _is_ours(path: str, text: str) -> bool:
    """Whether a file is the one of _cuda that the emulator's stands in for."""
    ours = paths.ALGOS_DIR.glob(f"_cuda/*/{path}")
    return any(file.read_text() == text for file in ours)


def rewritten(text: str) -> str:
    """A CUDA source as C++ that includes emulated.h."""
    text = _COMMENT.sub(_without_comment, text)
    for pattern, new in ((_SHARED, _shared), (_ASM, _asm), (_LAUNCH, _launch)):
        text = pattern.sub(new, text)
    text = _MEMORY.sub(r"emulated::\1", text)
    return _EXPORT.sub("EMULATED_EXPORT", text)


def _without_comment(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith('"') else " " + _lines(match[0])


def _lines(text: str) -> str:
    """The ends of its lines, those of a macro too."""
    return "".join(re.findall(r"\\?\n", text))


def _on_one_line(text: str) -> str:
    return re.sub(r"\\?\n", " ", text)


def _launch(match: re.Match[str]) -> str:
    """kernel<<<grid, block>>>(x) -> emulated::launched([&] { kernel(x); }, grid, block)"""
    kernel, config, given = match.groups()
    called = f"{kernel}{_lines(config)}{given}"
    return f"emulated::launched([&] {{ {called}; }}, {_on_one_line(config)})"


def _shared(match: re.Match[str]) -> str:
    """__shared__ float a[8], b; -> float (&a)[8] = emulated::shared([] {}), (&b) = ..."""
    before, after = (_ALIGNED.sub("", part) for part in match.groups())
    declared = _DECLARED.fullmatch(after)
    if not declared:
        return match[0]
    kind, rest = declared.groups()
    names = []
    for variable in re.split(r",(?![^\[]*\])", rest):
        name, bracket, sizes = variable.strip().partition("[")
        if "extern" in match[1]:
            sizes = sizes.partition("]")[2]
            base = f"reinterpret_cast<{kind}(*){sizes}>(emulated::me->cta->base)"
            names.append(f"(*const {name}){sizes} = {base}")
        else:
            names.append(f"(&{name}){bracket}{sizes} = emulated::shared([] {{}})")
    return before + kind + ", ".join(names)


def _asm(match: re.Match[str]) -> str:
    """asm("..." : "=f"(y) : "f"(x)) -> emulated::Ptx(..., "...").operand("=f", (y))..."""
    template = _TEMPLATE.match(match[1])
    assert template
    operands = _OPERAND.findall(match[1], template.end())
    calls = [f".operand({how}, {value})" for how, value in operands]
    text = template[1].strip(") \n\\")
    new = f"emulated::Ptx(__FILE__, __LINE__, {text})"
    return _on_one_line(new + "".join(calls)) + f"{_lines(match[0])}.run()"
