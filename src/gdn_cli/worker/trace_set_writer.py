"""Write a FlashInfer-Trace folder: definitions, workloads, their tensors and our solutions.

`flashinfer-bench run --local DIR` accepts it, and `load_inputs` reads back exactly the twins' bits:

    definitions/<op_type>/<definition>.json
    workloads/<op_type>/<definition>.jsonl
    blob/workloads/<op_type>/<definition>/<uuid>.safetensors
    solutions/<author>/<op_type>/<definition>/<name>.json
    gdn-data.json                                   marks the folder as ours
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch

from .. import files
from ..catalog.formats import Definition, Solution
from ..catalog.ops import ITEMSIZE, Op
from ..catalog.workloads import Workload, embedded
from ..errors import GdnError, MissingError, UsageError
from ..parsing import Json, json_of, read_json, read_text
from .judge import synthetic
from .judge.dataset import DTYPE_CODES, blob_header

MARKER = "gdn-data.json"
# bytes that must stay free in addition to the tensors: rows, headers, directories
_HEADROOM = 16 << 20


def build(
    root: Path,
    ops: Sequence[Op],
    workloads_by_op: Mapping[str, Sequence[Workload]],  # by op.name; twins
    solutions: Sequence[Solution],
    definitions: Sequence[Definition],
    # blobs; what is being written
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, int]:
    """Write the folder, or complete it: a complete blob is kept. One workload in memory at a time.

    Returns counts. Refuses a folder that holds anything else, such as the contest's own
    data set: twins have its uuids.
    """
    by_name = {definition["name"]: definition for definition in definitions}
    packed: dict[Path, Solution] = {}
    for solution in solutions:
        name = solution["definition"]
        folder = (
            root / "solutions" / solution["author"] / by_name[name]["op_type"] / name
        )
        packed[folder / f"{solution['name']}.json"] = solution
    tasks = [
        _Task(op, w, root / blob(op, w)) for op in ops for w in workloads_by_op[op.name]
    ]
    for task in tasks:
        if task.workload.origin != "twin":
            raise UsageError(
                f"workload {task.workload.uuid} is from a data set; only twins are written",
                hint="leave --dataset out",
            )
    with _writing(root):
        _claim(root)
        _refuse_same_names(root, packed)
        waiting = [task for task in tasks if not task.complete]
        _refuse_small_disk(root, sum(task.size for task in waiting))
        written = 0
        for done, task in enumerate(tasks):
            label = task.op.label.format(**task.workload.axes)
            progress(done, len(tasks), f"{task.op.name} {label}")
            if task in waiting:
                written += write_blob(task.op, task.workload, task.path, root)
        for op in ops:
            path = root / "definitions" / op.op_type / f"{op.definition}.json"
            _write(path, _pretty(by_name[op.definition]), root)
            # rows last: a row never names a blob that is not there
            path = root / "workloads" / op.op_type / f"{op.definition}.jsonl"
            _write(path, _rows(op, workloads_by_op[op.name], path), root)
        for path, solution in packed.items():
            _write(path, _pretty(solution), root)
        progress(len(tasks), len(tasks), "done")
    return {
        "written": len(waiting),
        "kept": len(tasks) - len(waiting),
        "bytes": written,
        "solutions": len(packed),
    }


class _Task(NamedTuple):
    """The tensors of a workload, to be written to a path."""

    op: Op
    workload: Workload
    path: Path

    @property
    def size(self) -> int:
        """In bytes."""
        total = 0
        for spec in self.op.inputs.values():
            count = math.prod(self.op.shape(spec, self.workload.axes))
            total += count * ITEMSIZE[spec.dtype]
        return total

    @property
    def complete(self) -> bool:
        """Whether the blob exists, with the right tensors and this version of the twins."""
        try:
            tensors, metadata = blob_header(self.path)
        except GdnError:
            return False
        specs = {
            name: (DTYPE_CODES[spec.dtype], self.op.shape(spec, self.workload.axes))
            for name, spec in self.op.inputs.items()
            if spec.shape is not None
        }
        return tensors == specs and metadata == _metadata(self.workload)


def _write(path: Path, text: str, root: Path) -> None:
    # files outside the folder would not be read back
    files.write(path, text, within=root, hint=None)


def blob(op: Op, workload: Workload) -> str:
    """The path of a workload's tensors relative to the root, as in its row."""
    return f"blob/workloads/{op.op_type}/{op.definition}/{workload.uuid}.safetensors"


def _rows(op: Op, workloads: Sequence[Workload], path: Path) -> str:
    """The rows of these workloads and those already in the folder, in the contest's order."""
    lines = read_text(path, MissingError).splitlines() if path.exists() else []
    rows = {}
    try:
        for line in filter(str.strip, lines):
            rows[json_of(line, path, MissingError)["workload"]["uuid"]] = line
    except (KeyError, TypeError):
        raise MissingError(
            f"{path}: a line of it is not a workload",
            hint="delete it: it is written again",
        ) from None
    rows |= {w.uuid: json.dumps(row(op, w)) for w in workloads}
    place = {w.uuid: i for i, w in enumerate(embedded(op))}
    ordered = sorted(rows, key=lambda uuid: place.get(uuid, len(place)))
    return "".join(rows[uuid] + "\n" for uuid in ordered)


def row(op: Op, workload: Workload) -> Json:
    inputs: dict[str, dict] = {}
    for name, spec in op.inputs.items():
        if spec.shape is None:
            value = synthetic.draw(op, workload, name)
            inputs[name] = {"type": "scalar", "value": value}
        else:
            file = {"path": blob(op, workload), "tensor_key": name}
            inputs[name] = {"type": "safetensors"} | file
    row = {"uuid": workload.uuid, "axes": workload.axes, "inputs": inputs}
    none = {"solution": None, "evaluation": None}
    return {"definition": op.definition, "workload": row} | none


def _metadata(workload: Workload) -> dict[str, str]:
    # one key: safetensors writes several in any order, and the same twin should give the same file
    return {"gdn_twin": f"{workload.uuid} version {synthetic.VERSION}"}


def write_blob(op: Op, workload: Workload, path: Path, root: Path) -> int:
    inputs = synthetic.inputs(op, workload).items()
    tensors = {name: x for name, x in inputs if isinstance(x, torch.Tensor)}
    with files.beside(path, within=root, hint=None) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata=_metadata(workload))
        return temporary.stat().st_size


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        where = e.filename or root
        raise MissingError(f"cannot write {where}: {e.strerror or e}") from None
    except safetensors.SafetensorError as e:
        raise MissingError(
            f"cannot write the tensors under {root}: {e}", hint="is the disk full?"
        ) from None


# --- refusals, before anything is written


def _claim(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file", hint="name a new or empty folder")
    if root.is_dir() and not (root / MARKER).is_file() and any(root.iterdir()):
        raise UsageError(
            f"{root} is not empty, and `gdn data build` did not write it",
            hint="name a new or empty folder; nothing was changed",
        )
    note = "twins: uuids and axes of the contest where it has the op, tensors drawn from the uuids"
    made = {"made_by": "gdn data build", "note": note}
    text = _pretty(made | {"twin_version": synthetic.VERSION})
    files.write(root / MARKER, text, hint=None)


def _refuse_small_disk(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed + _HEADROOM:
        raise MissingError(
            f"{root}: the tensors need {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
            hint="free some, or write fewer workloads (-n, --workload)",
        )


def _refuse_same_names(root: Path, packed: Mapping[Path, Solution]) -> None:
    """A name that occurs twice in the folder makes it unreadable for flashinfer-bench."""
    names = [solution["name"] for solution in packed.values()]
    for path in (root / "solutions").rglob("*.json"):
        if path in packed:
            continue
        with suppress(MissingError, AttributeError):
            name = read_json(path, MissingError).get("name")
            if name in names:
                raise UsageError(
                    f"{path}: has a solution called '{name}' already",
                    hint="delete it, or pack under another name",
                )
