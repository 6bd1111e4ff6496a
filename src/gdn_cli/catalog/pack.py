"""Algo -> flashinfer-bench Solution -> solution.json, and back. Imports neither torch
nor flashinfer-bench.

A solution is one flat folder of sources. Files that flashinfer-bench would silently
drop (subfolders, other suffixes) or fail on later (empty files) are refused here, by name.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath

from .. import source_hash as hashing
from ..errors import UsageError
from ..parsing import decode, read_json, read_text, wrong
from .formats import Axis, Definition, Solution, Tensor
from .ops import Op, TensorSpec
from .registry import Algo, Mode, Registry, is_source

SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".cxx", ".cc", ".c", ".h", ".hpp")
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
    hardware: list[str] = [mode for mode in algo.modes if mode != "interpreter"]
    files = sources(algo)
    solution: Solution = {
        "name": name or f"{op.name}-{algo.name}",
        "definition": op.definition,
        "author": author,
        "spec": {
            "language": algo.language,
            "target_hardware": hardware,
            "entry_point": algo.entry_point,
            "dependencies": list(algo.packages.values()),
            "destination_passing_style": algo.destination_passing,
            "binding": "tvm-ffi" if algo.language in ("cpp", "cuda") else None,
        },
        "sources": [{"path": path.name, "content": _content(path)} for path in files],
        "description": algo.summary,
    }
    _check(solution, f"{op.name}/{algo.name}")
    return solution


def sources(algo: Algo) -> list[Path]:
    """The files to pack, from the algo's folder and those it shares; a UsageError names
    the first that cannot be packed.
    """
    files = []
    folder = algo.own_folder
    for path in sorted(folder.iterdir()):
        if path.name in (*STAY_BEHIND, "__pycache__") or path.name.startswith("."):
            continue
        if path.is_dir() or path.suffix not in SUFFIXES:
            raise UsageError(
                f"{path}: flashinfer-bench drops subfolders, and files that end in none"
                f" of {', '.join(SUFFIXES)}",
                hint="move it out of the algo's folder",
            )
        if not is_source(path, folder):
            raise UsageError(
                f"{path}: not a plain file of the algo's own folder",
                hint="links must stay inside the folder: copy the file",
            )
        files.append(path)
    return sorted([*files, *algo.shares], key=lambda path: path.name)


def _content(path: Path) -> str:
    text = read_text(path)
    if not text.strip():
        raise UsageError(
            f"{path}: flashinfer-bench refuses empty files",
            hint="delete it, or give it a comment",
        )
    return text


def definition(op: Op, registry: Registry) -> Definition:
    """The op as a FlashInfer-Trace Definition; its reference is the source of the op's
    reference algo.
    """
    algo = registry.reference(op)
    main = algo.entry_point.split("::")[0]
    texts = {path.name: _content(path) for path in sources(algo)}
    axes: dict[str, Axis] = {}
    for axis, size in op.axes.items():
        axes[axis] = {"type": "const", "value": size} if size else {"type": "var"}

    def tensors(specs: dict[str, TensorSpec]) -> dict[str, Tensor]:
        table: dict[str, Tensor] = {}
        for name, spec in specs.items():
            shape = list(spec.shape) if spec.shape else None
            table[name] = {"shape": shape, "dtype": spec.dtype}
        return table

    return {
        "name": op.definition,
        "description": op.summary,
        "op_type": op.op_type,
        "tags": list(op.tags),
        "axes": axes,
        "constraints": list(op.constraints),
        "inputs": tensors(op.inputs),
        "outputs": tensors(op.outputs),
        "reference": texts[main],
    }


def source_hash(solution: Solution) -> str:
    """12 hex digits over all that decides the build: language, entry point, calling
    style, binding and every source.
    """
    spec = solution["spec"]
    return hashing.source_hash(
        spec["language"],
        spec["entry_point"],
        spec["destination_passing_style"],
        spec.get("binding"),
        [(source["path"], source["content"]) for source in solution["sources"]],
    )


# --- reading a packed file, which may be written by anyone


def read_solution(path: Path, registry: Registry) -> Algo:
    """Read a packed solution.json as an algo. Nothing is written; a UsageError says
    what is wrong with the file.
    """
    kind = partial(UsageError, hint="`gdn pack` writes a packed solution")
    solution = decode(read_json(path), Solution, path, kind)
    _check(solution, path)
    spec = solution["spec"]
    op = registry.ops.of_definition(solution["definition"])
    if not op:
        raise UsageError(
            f"{path}: definition '{solution['definition']}' is not one of gdn's ops"
        )
    spec.setdefault("destination_passing_style", True)  # flashinfer-bench's default
    return Algo(
        op=op.name,
        name=solution["name"],
        summary=solution.get("description") or f"packed by {solution['author']}",
        language=spec["language"],
        entry_point=spec["entry_point"],
        destination_passing=spec["destination_passing_style"],
        modes=_modes(spec["language"], spec["target_hardware"]),
        solution=solution,
    )


def _check(solution: Solution, where: object) -> None:
    """UsageError for what no packed file may hold: `pack` writes nothing that `run` refuses."""
    files = [source["path"] for source in solution["sources"]]
    for key, text in (("name", solution["name"]), ("author", solution["author"])):
        if not text.isprintable() or len(text) > 200:
            expected = "printable text of at most 200 characters"
            raise wrong(where, [key], expected, text)
    if len(set(files)) < len(files):
        raise wrong(where, ["sources"], "files of different names", files)
    entry_point = solution["spec"]["entry_point"]
    if entry_point.count("::") != 1 or entry_point.split("::")[0] not in files:
        expected = "'<one of the sources>::<symbol>'"
        raise wrong(where, ["spec", "entry_point"], expected, entry_point)
    for file in files:
        posix, windows = PurePosixPath(file), PureWindowsPath(file)
        if not file.isprintable() or not posix.name or len(file) > 200:
            raise UsageError(f"{where}: source {file!r:.60} is not a valid file name")
        leads_up = ".." in posix.parts + windows.parts
        if leads_up or posix.is_absolute() or windows.anchor:
            raise UsageError(
                f"{where}: source '{file}' would be written outside its folder; refused"
            )


def _modes(language: str, hardware: list[str]) -> tuple[Mode, ...]:
    """Where a packed file may run. Hardware names are free text ('cuda', 'NVIDIA_B200',
    'cpu'); languages are not.
    """
    if language == "cpp":
        return ("cpu",)
    if language == "python" and "cpu" in hardware:
        return ("cpu",) if len(hardware) == 1 else ("cuda", "cpu")
    return ("cuda", "interpreter") if language == "triton" else ("cuda",)
