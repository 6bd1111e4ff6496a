"""Reads the workloads of a FlashInfer-Trace folder, such as the contest's. Imports
neither torch nor numpy.

Tensors are read later, by worker/dataset.py; worker/trace_set_writer.py writes such folders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from ..errors import MissingError
from ..parsing import Json, Positive, Text, decode, json_of, read_text
from ..units import listed
from .formats import Calls
from .ops import Op
from .workloads import Workload, embedded, in_words

_LFS_POINTER = "version https://git-lfs"


_FILE = Meta(pattern=r"^(?=\s*\S)[^\x00]+$")
_UUID = Meta(pattern=r"^(?=\s*\S)[^\x00-\x1f\x7f/\\]{1,200}(?!\n)$")


class Random(Struct, frozen=True, tag_field="type", tag="random"):
    """An input that is drawn."""


class Scalar(Struct, frozen=True, tag_field="type", tag="scalar"):
    value: int | float


class Safetensors(Struct, frozen=True, tag_field="type", tag="safetensors"):
    path: Annotated[str, _FILE]
    tensor_key: Text


class Row(Struct, frozen=True):
    """A workload."""

    uuid: Annotated[str, _UUID]
    axes: dict[str, Positive]
    inputs: dict[str, Random | Scalar | Safetensors]


class Line(Struct, frozen=True):
    """A line of workloads/**/*.jsonl."""

    workload: Row


def known(op: Op, root: Path | None) -> list[Workload]:
    """The workloads to choose from: those of a folder if one is given, else the embedded twins."""
    return embedded(op) if root is None else from_folder(op, root)


def from_folder(op: Op, root: Path) -> list[Workload]:
    """The op's workloads in a FlashInfer-Trace folder, in its order. Tensors are read later.

    Files are definitions/**/NAME.json and workloads/**/*.jsonl. The definition's
    inputs and outputs must match the op's. Any error is one MissingError line.
    """
    folders = ("definitions", "workloads")
    absent = [name for name in folders if not os.path.isdir(root / name)]
    if absent:
        raise MissingError(
            f"{root} is not a FlashInfer-Trace data set: it has no {'/ and no '.join(absent)}/",
            hint="name the folder that holds both, or write one with `gdn data build DIR`",
        )
    path, definition = _find_definition(op, root)
    _same_definition(op, path, definition)
    workloads: list[Workload] = []
    others: set[str] = set()
    within = _Within(root)
    for file in sorted((root / "workloads").rglob("*.jsonl")):
        for number, line in enumerate(_read(file).split("\n"), 1):
            # lines of other definitions need not be valid; a folder of all of
            # FlashInfer has thousands
            if file.stem != op.definition and f'"{op.definition}"' not in line:
                others.add(file.stem)
                continue
            if not line.strip():
                continue
            where = f"{file}:{number}"
            if workload := _row(op, where, line, len(workloads), within):
                workloads.append(workload)
    if not workloads:
        raise MissingError(
            f"{root / 'workloads'} has no workloads of {op.definition}",
            hint=f"it has {listed(sorted(others), most=10) or 'none'}",
        )
    return workloads


def _read(path: Path) -> str:
    text = read_text(path, MissingError)
    if text.startswith(_LFS_POINTER):
        raise lfs_error(path)
    return text


def blob(root: Path, name: str, where: str) -> Path:
    """The file of tensors that a workload names: inside the data set's root, links
    followed. Otherwise a MissingError that begins with `where` the file is named.
    """
    _Within(root).check(name, where)
    path = root / name
    if os.path.exists(path) and not os.path.isfile(path):
        raise MissingError(f"{where}: path '{name}' is not a plain file")
    return path


class _Within:
    """Whether files that a data set names are in it, links followed. A folder is looked at once,
    however many workloads name its files."""

    def __init__(self, root: Path) -> None:
        self.root = os.fspath(root)
        self.real = cache(os.path.realpath)
        home = self.real(self.root)
        self.homes = [home + os.sep]
        snapshots = os.path.dirname(home)
        # in Hugging Face's cache the files of a snapshot are links into blobs/
        if os.path.basename(snapshots) == "snapshots":
            blobs = os.path.join(os.path.dirname(snapshots), "blobs")
            self.homes.append(blobs + os.sep)
        self.known: set[str] = set()

    def check(self, name: str, where: str) -> None:
        """Raises a MissingError that begins with `where` the file is named."""
        if name in self.known:
            return
        if os.path.isabs(name) or ".." in name.split("/"):
            raise MissingError(
                f"{where}: path '{name}' leads out of the data set",
                hint="paths start at its root",
            )
        folder, file = os.path.split(os.path.join(self.root, name))
        path = os.path.join(self.real(folder), file)
        if os.path.islink(path):
            path = os.path.realpath(path)
        if not path.startswith(tuple(self.homes)):
            raise MissingError(
                f"{where}: path '{name}' is a link that leads out of the data set",
                hint="copy the file",
            )
        self.known.add(name)


def lfs_error(path: Path) -> MissingError:
    return MissingError(
        f"{path}: a git-LFS pointer, the data itself was not downloaded",
        hint="run `git lfs pull` in the data set's folder",
    )


def _json(where: object, text: str) -> Json:
    return decode(json_of(text, where, MissingError), Json, where, MissingError)


def definition(op: Op, root: Path) -> Json:
    """A folder's own definition of the op."""
    return _find_definition(op, root)[1]


def _find_definition(op: Op, root: Path) -> tuple[Path, Json]:
    folder = root / "definitions"
    files = {path.stem: path for path in folder.rglob("*.json")}
    path = files.get(op.definition)
    if path is None:
        raise MissingError(
            f"{folder} has no definition {op.definition} ({op.name})",
            hint=f"it has {listed(sorted(files), most=10) or 'none'}",
        )
    return path, _json(path, _read(path))


def _same_definition(op: Op, path: Path, definition: Json) -> None:
    """Check for the same inputs and outputs, in order. Fixed axes are compared by
    value: their names do not matter.
    """
    hint = "the folder is made for another version of the definition"
    failed = partial(MissingError, hint=hint)
    calls = decode(definition, Calls, path, failed)
    axes = {name: axis.get("value") for name, axis in calls["axes"].items()}
    pairs = (calls["inputs"], op.inputs), (calls["outputs"], op.outputs)
    for tensors, specs in pairs:
        # gdn's ops have no optional inputs: those of a definition are left out
        names = [n for n, x in tensors.items() if n in specs or not x.get("optional")]
        if names != list(specs):
            raise failed(
                f"{path}: it has {', '.join(names)}; {op.name} has {', '.join(specs)}"
            )
        for name, spec in specs.items():
            actual = _words(tensors[name]["shape"], tensors[name]["dtype"], axes)
            expected = _words(spec.shape, spec.dtype, op.axes)
            if actual != expected:
                raise failed(
                    f"{path}: {name} is {actual}; that of {op.name} is {expected}"
                )


def _words(
    shape: Sequence[str] | None, dtype: str, axes: Mapping[str, int | None]
) -> str:
    """A tensor in words: "float32 [batch_size, 128]"."""
    if shape is None:
        return f"{dtype} scalar"
    return f"{dtype} [{', '.join(str(axes.get(axis) or axis) for axis in shape)}]"


def _row(op: Op, where: str, line: str, index: int, within: _Within) -> Workload | None:
    """One line of a JSONL file; None for another definition's."""
    table = _json(where, line)
    if table.get("definition") != op.definition:
        return None
    row = decode(table, Line, where, MissingError).workload
    # flashinfer-bench ignores fixed axes in a row; a fixed axis of another value is another op
    fixed = {name: size for name, size in row.axes.items() if name in op.fixed}
    variable = set(row.axes) - set(fixed)
    if variable != set(op.var_axes) or not fixed.items() <= op.fixed.items():
        raise MissingError(
            f"{where}: axes {in_words(row.axes) or 'none'}; those of {op.name} are"
            f" {', '.join(op.var_axes)}"
        )
    for name, spec in row.inputs.items():
        if isinstance(spec, Safetensors):
            within.check(spec.path, f"{where}: input {name}")
    return Workload(
        row.uuid,
        {axis: row.axes[axis] for axis in op.var_axes},
        index=index,
        origin="dataset",
        inputs=table["workload"]["inputs"],
    )
