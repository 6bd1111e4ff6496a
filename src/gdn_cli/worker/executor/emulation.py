"""A CUDA solution as one in C++, which runs on a CPU: `gdn run --emulate`.

The files of gdn_cli/emulator stand in for CUDA's headers, and for those of _cuda/ptx. C++
has no words for a launch, for shared memory and for PTX: here they become calls of
emulator/emulated.h. No line changes its number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ... import paths
from ...catalog.formats import Solution

_FOLDER = paths.PACKAGE / "emulator"
_UNSEEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL
)
_PAIRS = dict(zip(")>]", "(<[", strict=True))
_LAUNCH = re.compile(r"<<<(.*?)>>>\s*(?=\()", re.DOTALL)
_SHARED = re.compile(r"(?<=[;{}\n])([^;{}\n]*)\b__shared__\b([^;]*)(?=;)")
_ALIGNED = re.compile(r"\b(?:alignas|__align__)\s*\([^()]*\)|\b(?:static|extern)\b")
_DECLARED = re.compile(r"(.*?)\b(\w+)\s*((?:\[.*\])?)\s*", re.DOTALL)
_ASM = re.compile(r"\b(?:asm|__asm__)\b(?:\s+(?:volatile|__volatile__))?\s*(?=\()")
_OPERAND = re.compile(r'\s*("[^"]*")\s*(\(.*\))\s*', re.DOTALL)
_EXPORT = re.compile(r"\bTVM_FFI_DLL_EXPORT_TYPED_FUNC(?=\s*\()")

Edit = tuple[int, int, str]


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
        r"error: [^\n]*[‘'](__\w+)[’'][^\n]*",
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
    text = _edited(text, _shared)
    text = _edited(text, _asm)
    text = _edited(text, _launches)
    return _EXPORT.sub("EMULATED_EXPORT", text)


def _edited(text: str, edits: object) -> str:
    code = _UNSEEN.sub(_blank, text)
    for begin, end, new in sorted(edits(text, code), reverse=True):  # type: ignore[operator]
        text = text[:begin] + new + text[end:]
    return text


def _blank(match: re.Match[str]) -> str:
    """A comment or a text as blanks, between its quotes."""
    inner = re.sub(r"[^\n]", " ", match[0])
    return f'"{inner[1:-1]}"' if match[0].startswith('"') else inner


def _launches(text: str, code: str) -> Iterator[Edit]:
    """kernel<<<grid, block>>>(x) -> emulated::launched([&] { kernel(x); }, grid, block)"""
    for match in _LAUNCH.finditer(code):
        begin = _begin(code, match.start())
        end = _end(code, match.end())
        config = text[match.start(1) : match.end(1)]
        called = text[begin : match.start()] + "\n" * match[0].count("\n")
        called += text[match.end() : end]
        config = config.replace("\n", " ")
        yield begin, end, f"emulated::launched([&] {{ {called}; }}, {config})"


def _begin(code: str, end: int) -> int:
    """Where the name that ends here begins, with its template's arguments."""
    at = len(code[:end].rstrip())
    while at and (code[at - 1].isalnum() or code[at - 1] in "_:)>]"):
        at -= 1
        if opening := _PAIRS.get(code[at]):
            depth = 1
            while depth:
                at -= 1
                depth += (code[at] in _PAIRS) - (code[at] in _PAIRS.values())
            assert code[at] == opening
    return at


def _end(code: str, begin: int) -> int:
    """Behind the parenthesis that closes the one here."""
    depth = 0
    for at in range(begin, len(code)):
        depth += (code[at] == "(") - (code[at] == ")")
        if depth == 0:
            return at + 1
    return len(code)


def _split(code: str, separator: str) -> list[tuple[int, int]]:
    """The parts between separators outside of brackets."""
    depth = angles = 0
    cuts = [-1]
    for i, letter in enumerate(code):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            angles += (letter == "<") - (letter == ">")
            if angles == 0 and letter == separator:
                cuts.append(i)
    ends = [*cuts[1:], len(code)]
    return [(begin + 1, end) for begin, end in zip(cuts, ends, strict=True)]


def _shared(text: str, code: str) -> Iterator[Edit]:
    """__shared__ float a[8], b; -> float (&a)[8] = emulated::shared([] {}), (&b) = ..."""
    for match in _SHARED.finditer(code):
        before, after = _ALIGNED.sub("", match[1]), _ALIGNED.sub("", match[2])
        declared = [_DECLARED.fullmatch(after[i:j]) for i, j in _split(after, ",")]
        if not all(declared):
            continue
        kind = declared[0][1]  # type: ignore[index]
        names = []
        for each in declared:
            _, name, sizes = each.groups()  # type: ignore[union-attr]
            if re.search(r"\bextern\b", match[1]):
                sizes = sizes[sizes.find("]") + 1 :]
                here = "emulated::me->cta->base"
                cast = f"reinterpret_cast<{kind} (*){sizes}>({here})"
                names.append(f"(*const {name}){sizes} = {cast}")
            else:
                names.append(f"(&{name}){sizes} = emulated::shared([] {{}})")
        yield match.start(), match.end(), before + kind + ", ".join(names)


def _asm(text: str, code: str) -> Iterator[Edit]:
    """asm("..." : "=f"(y) : "f"(x)) -> emulated::Ptx(..., "...").operand("=f", (y))..."""
    for match in _ASM.finditer(code):
        end = _end(code, match.end())
        inner = text[match.end() + 1 : end - 1].replace("\\\n", "  ")
        unseen = code[match.end() + 1 : end - 1].replace("\\\n", "  ")
        template, *sections = _split(unseen, ":")
        new = f"emulated::Ptx(__FILE__, __LINE__, {inner[slice(*template)].strip()})"
        for begin, stop in sections[:2]:
            for i, j in _split(unseen[begin:stop], ","):
                part = inner[begin + i : begin + j]
                if operand := _OPERAND.fullmatch(part):
                    new += f".operand({operand[1]}, {operand[2]})"
                elif part.strip():  # a macro
                    break
        lines = "".join(re.findall(r"\\?\n", text[match.start() : end]))
        yield match.start(), end, new.replace("\n", " ") + lines + ".run()"
