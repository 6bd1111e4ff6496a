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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from .. import files
from ..catalog.formats import Definition, Solution
from ..catalog.ops import Op
from ..catalog.workloads import Workload, embedded
from ..errors import GdnError, MissingError, UsageError
from ..parsing import Json, json_of, read_text
from .judge import synthetic
from .judge.dataset import blob_header

MARKER = "gdn-data.json"


def build(
    root: Path,
    ops: Sequence[Op],
    workloads_by_op: Mapping[str, Sequence[Workload]],  # by op.name; twins
    solutions: Sequence[Solution],
    definitions: Sequence[Definition],
    # blobs; what is being written
    progress: Callable[[int, int, str], None] = lambda count, total, what: None,
) -> dict[str, int]:
    """Write the folder, or complete it: a complete blob is kept. One workload in memory at a time.

    Returns counts. Refuses a folder that holds anything else, such as the contest's own
    data set: twins have its uuids.
    """
    by_name = {definition["name"]: definition for definition in definitions}
    blobs = [
        (op, w, root / blob(op, w)) for op in ops for w in workloads_by_op[op.name]
    ]
    for _, workload, _ in blobs:
        if workload.origin != "twin":
            raise UsageError(
                f"workload {workload.uuid} is from a data set; only twins are written",
                hint="leave --dataset out",
            )
    _claim(root)
    counts = {"written": 0, "kept": 0, "bytes": 0, "solutions": 0}
    for i, (op, workload, path) in enumerate(blobs):
        label = op.label.format(**workload.axes)
        progress(i, len(blobs), f"{op.name} {label}")
        if complete(workload, path):
            counts["kept"] += 1
        else:
            counts["written"] += 1
            counts["bytes"] += write_blob(op, workload, path, root)
    packed = {}
    for op in ops:
        place = f"{op.op_type}/{op.definition}"
        _write(root, f"definitions/{place}.json", _pretty(by_name[op.definition]))
        # rows last: a row never names a blob that is not there
        rows = f"workloads/{place}.jsonl"
        _write(root, rows, _rows(op, workloads_by_op[op.name], root / rows))
    for solution in solutions:
        definition = by_name[solution["definition"]]
        place = f"{solution['author']}/{definition['op_type']}/{definition['name']}"
        packed[f"solutions/{place}/{solution['name']}.json"] = _pretty(solution)
    for file, text in packed.items():
        _write(root, file, text)
    progress(len(blobs), len(blobs), "done")
    return counts | {"solutions": len(packed)}


def complete(workload: Workload, path: Path) -> bool:
    """Whether a workload's blob is there, as this version of the twins has it."""
    try:
        return blob_header(path)[1] == _metadata(workload)
    except GdnError:
        return False


def _write(root: Path, path: str, text: str) -> None:
    # files outside the folder would not be read back
    files.write(root / path, text, within=root, hint=None)


def blob(op: Op, workload: Workload) -> str:
    """The path of a workload's tensors relative to the root, as in its row."""
    return f"blob/workloads/{op.op_type}/{op.definition}/{workload.uuid}.safetensors"


def _rows(op: Op, workloads: Sequence[Workload], path: Path) -> str:
    """The rows of these workloads and those already in the folder, in the contest's order."""
    lines = read_text(path, MissingError).splitlines() if path.exists() else []
    rows = {json_of(line, path)["workload"]["uuid"]: line for line in lines}
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
    return {
        "definition": op.definition,
        "workload": {"uuid": workload.uuid, "axes": workload.axes, "inputs": inputs},
        "solution": None,
        "evaluation": None,
    }


def _metadata(workload: Workload) -> dict[str, str]:
    # one key: safetensors writes several in any order, and the same twin should give the same file
    return {"gdn_twin": f"{workload.uuid} version {synthetic.VERSION}"}


def write_blob(op: Op, workload: Workload, path: Path, root: Path) -> int:
    """Write a workload's tensors; returns the number of bytes."""
    inputs = synthetic.inputs(op, workload).items()
    tensors = {name: x for name, x in inputs if isinstance(x, torch.Tensor)}
    with files.beside(path, within=root, hint=None) as temporary:
        try:
            safetensors.torch.save_file(tensors, temporary, _metadata(workload))
        except safetensors.SafetensorError as e:
            raise MissingError(f"cannot write {path}: {e}") from None
        return temporary.stat().st_size


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _claim(root: Path) -> None:
    if root.is_file():
        raise UsageError(f"{root} is a file", hint="name a new or empty folder")
    if root.is_dir() and not (root / MARKER).is_file() and any(root.iterdir()):
        raise UsageError(
            f"{root} is not empty, and `gdn data build` did not write it",
            hint="name a new or empty folder; nothing was changed",
        )
    note = "twins: uuids and axes of the contest where it has the op, tensors drawn from the uuids"
    made_by = {"made_by": "gdn data build", "note": note}
    _write(root, MARKER, _pretty(made_by | {"twin_version": synthetic.VERSION}))
