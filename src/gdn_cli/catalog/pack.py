"""Algo -> flashinfer-bench Solution -> solution.json, and back. Imports neither torch
nor flashinfer-bench.

A solution is one flat folder of sources. Files that flashinfer-bench would silently
drop (subfolders, other suffixes) or fail on later (empty files, absolute imports of a
sibling) are refused here, by name.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..errors import UsageError, one_line
from ..parsing import decode, read_json, read_text, wrong
from . import file_kinds
from .file_kinds import SUFFIXES
from .formats import Definition, Solution, Tensor
from .ops import Op, TensorSpec
from .registry import Algo, Registry, is_source

# files of the folder that are not packed
STAY_BEHIND = ("algo.toml", "README.md", "tuning.json")
AUTHOR = "gdn"


def pack(
    algo: Algo, op: Op, *, name: str | None = None, author: str = AUTHOR
) -> Solution:
    """The algo as a flashinfer-bench Solution with every field of its spec set.

    Solution names must be unique in a data set, and short algo names are not
    (`fi-baseline` is in two ops): hence `<op>-<algo>`.
    """
    if algo.solution is not None:
        return algo.solution
    solution = {
        "name": name or f"{op.name}-{algo.name}",
        "definition": op.definition,
        "author": author,
        "spec": {
            "language": algo.language,
            "target_hardware": [
                "cuda" if mode == "cuda" else "cpu"
                for mode in algo.modes
                if mode != "interpreter"
            ],
            "entry_point": algo.entry_point,
            "dependencies": list(algo.packages.values()),
            "destination_passing_style": algo.destination_passing,
            "binding": "tvm-ffi" if algo.language in ("cpp", "cuda") else None,
        },
        "sources": [
            {"path": path.name, "content": _content(path)} for path in sources(algo)
        ],
        "description": algo.summary,
    }
    _check(solution, f"{op.name}/{algo.name}")
    return solution


def sources(algo: Algo) -> list[Path]:
    """The files to pack, from the algo's folder and those it shares; a UsageError names
    the first that cannot be packed.
    """
    files = []
    for path in sorted(algo.folder.iterdir()):
        if (
            path.name in STAY_BEHIND
            or path.name == "__pycache__"
            or path.name.startswith(".")
        ):
            continue
        if path.is_dir():
            raise UsageError(
                f"{path}: flashinfer-bench drops subfolders",
                hint="move its files next to algo.toml, or out of the algo",
            )
        if path.suffix not in SUFFIXES:
            raise UsageError(
                f"{path}: flashinfer-bench drops files with the suffix '{path.suffix}'",
                hint=(
                    f"rename it to one of {', '.join(SUFFIXES)}, or move it out of the algo's"
                    " folder"
                ),
            )
        if not is_source(path, algo.folder):
            raise UsageError(
                f"{path}: not a plain file of the algo's own folder",
                hint="links must stay inside the folder: copy the file",
            )
        files.append(path)
    files = sorted([*files, *algo.shares], key=lambda path: path.name)
    modules = {path.stem for path in files if path.suffix == ".py"}
    for path in files:
        if path.suffix == ".py":
            _refuse_absolute_siblings(path, modules)
    return files


def _content(path: Path) -> str:
    text = read_text(path)
    if not text.strip():
        raise UsageError(
            f"{path}: flashinfer-bench refuses empty files",
            hint="delete it, or give it a comment",
        )
    return text


def _refuse_absolute_siblings(path: Path, siblings: set[str]) -> None:
    try:
        tree = ast.parse(_content(path), filename=str(path))
    except SyntaxError as e:
        raise UsageError(f"{path}:{e.lineno}: not valid Python: {e.msg}") from None
    # a zero byte; brackets or sums beyond the parser's depth
    except (ValueError, RecursionError, MemoryError) as e:
        raise UsageError(f"{path}: not valid Python: {one_line(e)}") from None
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            if (module := name.split(".")[0]) in siblings:
                raise UsageError(
                    f"{path}:{node.lineno}: absolute import of the sibling '{module}'",
                    hint=(
                        f"a solution is imported as a package: write `from .{module} import ...`"
                    ),
                )


def definition(op: Op, registry: Registry) -> Definition:
    """The op as a FlashInfer-Trace Definition; its reference is the source of the op's
    reference algo.
    """
    algo = registry.reference(op)
    axes = {
        name: {"type": "var"} if value is None else {"type": "const", "value": value}
        for name, value in op.axes.items()
    }

    def tensors(specs: dict[str, TensorSpec]) -> dict[str, Tensor]:
        return {
            name: {"shape": list(s.shape) if s.shape else None, "dtype": s.dtype}
            for name, s in specs.items()
        }

    return {
        "name": op.definition,
        "description": op.summary,
        "op_type": op.op_type,
        "tags": list(op.tags),
        "axes": axes,
        "constraints": list(op.constraints),
        "inputs": tensors(op.inputs),
        "outputs": tensors(op.outputs),
        "reference": next(
            _content(p)
            for p in sources(algo)
            if p.name == algo.entry_point.split("::")[0]
        ),
    }


def source_hash(solution: Solution) -> str:
    """12 hex digits over all that decides the build: language, entry point, calling
    style, binding and every source.
    """
    spec = solution["spec"]
    parts = [
        spec["language"],
        spec["entry_point"],
        str(spec["destination_passing_style"]),
        str(spec.get("binding")),
    ]
    parts += [text for s in solution["sources"] for text in (s["path"], s["content"])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


# --- reading a packed file, which may be written by anyone


def read_solution(path: Path, registry: Registry) -> Algo:
    """Read a packed solution.json as an algo. Nothing is written; a UsageError says
    what is wrong with the file.
    """
    if (found := file_kinds.kind(path)) and found[0] != "a packed solution":
        raise UsageError(
            f"{path}: a packed solution was expected, and this is {found[0]}",
            hint=found[1],
        )
    solution = decode(read_json(path), Solution, path)
    _check(solution, path)
    name, spec, entry_point = (
        solution["name"],
        solution["spec"],
        solution["spec"]["entry_point"],
    )
    if not (op := registry.ops.of_definition(solution["definition"])):
        wanted = f"definition '{solution['definition']}' is not one of gdn's ops"
        raise UsageError(
            f"{path}: {wanted}",
            hint=f"gdn knows {', '.join(o.definition for o in registry.ops.values())}",
        )
    spec.setdefault("destination_passing_style", True)  # flashinfer-bench's default
    return Algo(
        op=op.name,
        name=name,
        summary=solution.get("description") or f"packed by {solution['author']}",
        language=spec["language"],
        entry_point=entry_point,
        destination_passing=spec["destination_passing_style"],
        modes=_modes(spec["language"], spec["target_hardware"]),
        solution=solution,
    )


def _check(solution: Solution, where: object) -> None:
    """UsageError for what no packed file may hold: `pack` writes nothing that `run` refuses."""
    files = [source["path"] for source in solution["sources"]]
    for key in ("name", "author"):
        if not solution[key].isprintable() or len(solution[key]) > 200:
            raise wrong(
                where, [key], "printable text of at most 200 characters", solution[key]
            )
    if len(set(files)) < len(files):
        raise wrong(where, ["sources"], "files of different names", files)
    entry_point = solution["spec"]["entry_point"]
    if entry_point.count("::") != 1 or entry_point.split("::")[0] not in files:
        raise wrong(
            where,
            ["spec", "entry_point"],
            "'<one of the sources>::<symbol>'",
            entry_point,
        )
    for file in files:
        parts = PurePosixPath(file).parts + PureWindowsPath(file).parts
        if not file.isprintable() or not PurePosixPath(file).name or len(file) > 200:
            raise UsageError(f"{where}: source {file!r:.60} is not a valid file name")
        if (
            ".." in parts
            or PurePosixPath(file).is_absolute()
            or PureWindowsPath(file).anchor
        ):
            out = f"source '{file}' would be written outside its folder; refused"
            raise UsageError(f"{where}: {out}")


def _modes(language: str, hardware: list[str]) -> tuple[str, ...]:
    """Where a packed file may run. Hardware names are free text ('cuda', 'NVIDIA_B200',
    'cpu'); languages are not.
    """
    if language == "cpp" or (
        language == "python" and "cpu" in hardware and len(hardware) == 1
    ):
        return ("cpu",)
    if language == "python" and "cpu" in hardware:
        return ("cuda", "cpu")
    return ("cuda", "interpreter") if language == "triton" else ("cuda",)
