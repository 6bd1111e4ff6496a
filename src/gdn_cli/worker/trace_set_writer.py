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
from typing import Any

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
    root = Path(root)
    by_name = {d["name"]: d for d in definitions}
    types = {name: d["op_type"] for name, d in by_name.items()}
    places = {
        root
        / "solutions"
        / s["author"]
        / types[s["definition"]]
        / s["definition"]
        / f"{s['name']}.json": s
        for s in solutions
    }
    # files outside the folder would not be read back
    into: dict[str, Any] = {"within": root, "hint": None}
    for op in ops:
        for workload in workloads_by_op[op.name]:
            if workload.origin != "twin":
                raise UsageError(
                    f"workload {workload.uuid} is from a data set; only twins are written",
                    hint="leave --dataset out",
                )
    with _writing(root):
        _claim(root)
        _refuse_same_names(root, places)
        jobs = [
            (op, w, root / blob(op, w)) for op in ops for w in workloads_by_op[op.name]
        ]
        waiting = [not _whole(op, w, path) for op, w, path in jobs]
        sizes = [
            sum(
                math.prod(op.shape(s, w.axes)) * ITEMSIZE[s.dtype]
                for s in op.inputs.values()
            )
            for op, w, _ in jobs
        ]
        _refuse_small_disk(
            root, sum(size for size, wait in zip(sizes, waiting, strict=True) if wait)
        )
        report = {
            "written": 0,
            "kept": waiting.count(False),
            "bytes": 0,
            "solutions": len(places),
        }
        for done, ((op, workload, path), wait) in enumerate(
            zip(jobs, waiting, strict=True)
        ):
            progress(done, len(jobs), f"{op.name} {op.label.format(**workload.axes)}")
            if wait:
                report["written"] += 1
                report["bytes"] += write_blob(op, workload, path, root)
        for op in ops:
            path = root / "definitions" / op.op_type / f"{op.definition}.json"
            files.write(path, _pretty(by_name[op.definition]), **into)
            # rows last: a row never names a blob that is not there
            path = root / "workloads" / op.op_type / f"{op.definition}.jsonl"
            files.write(path, _rows(op, workloads_by_op[op.name], path), **into)
        for path, solution in places.items():
            files.write(path, _pretty(solution), **into)
        progress(len(jobs), len(jobs), "done")
    return report


def blob(op: Op, workload: Workload) -> str:
    """The path of a workload's tensors relative to the root, as in its row."""
    return f"blob/workloads/{op.op_type}/{op.definition}/{workload.uuid}.safetensors"


def _rows(op: Op, workloads: Sequence[Workload], path: Path) -> str:
    """The rows of these workloads and those already in the folder, in the contest's order."""
    lines = read_text(path, MissingError).splitlines() if path.exists() else []
    try:
        rows = {
            json_of(line, path, MissingError)["workload"]["uuid"]: line
            for line in lines
            if line.strip()
        }
    except (KeyError, TypeError):
        raise MissingError(
            f"{path}: a line of it is not a workload",
            hint="delete it: it is written again",
        ) from None
    rows |= {w.uuid: json.dumps(row(op, w)) for w in workloads}
    place = {w.uuid: i for i, w in enumerate(embedded(op))}
    return "".join(
        rows[uuid] + "\n"
        for uuid in sorted(rows, key=lambda uuid: place.get(uuid, len(place)))
    )


def row(op: Op, workload: Workload) -> Json:
    inputs: dict[str, dict] = {}
    for name, spec in op.inputs.items():
        if spec.shape is None:
            inputs[name] = {
                "type": "scalar",
                "value": synthetic.draw(op, workload, name),
            }
        else:
            inputs[name] = {
                "type": "safetensors",
                "path": blob(op, workload),
                "tensor_key": name,
            }
    row = {"uuid": workload.uuid, "axes": workload.axes, "inputs": inputs}
    return {
        "definition": op.definition,
        "workload": row,
        "solution": None,
        "evaluation": None,
    }


def _metadata(workload: Workload) -> dict[str, str]:
    # one key: safetensors writes several in any order, and the same twin should give the same file
    return {"gdn_twin": f"{workload.uuid} version {synthetic.VERSION}"}


def _specs(op: Op, workload: Workload) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name: (DTYPE_CODES[spec.dtype], op.shape(spec, workload.axes))
        for name, spec in op.inputs.items()
        if spec.shape is not None
    }


def _whole(op: Op, workload: Workload, path: Path) -> bool:
    """Whether the blob exists, with the right size, the right tensors, and this version
    of the twins.
    """
    try:
        there, metadata = blob_header(path)
    except GdnError:
        return False
    return there == _specs(op, workload) and metadata == _metadata(workload)


def write_blob(op: Op, workload: Workload, path: Path, root: Path) -> int:
    tensors = {
        n: t
        for n, t in synthetic.inputs(op, workload).items()
        if isinstance(t, torch.Tensor)
    }
    # a fixed name: what a killed run left, gigabytes perhaps, is overwritten by the next
    with files.beside(path, within=root, hint=None, mark="part") as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata=_metadata(workload))
        return temporary.stat().st_size


def _pretty(value: dict) -> str:
    return json.dumps(value, indent=2) + "\n"


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise MissingError(
            f"cannot write {e.filename or root}: {e.strerror or e}"
        ) from None
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
    files.write(
        root / MARKER,
        _pretty(
            {
                "made_by": "gdn data build",
                "note": note,
                "twin_version": synthetic.VERSION,
            }
        ),
        hint=None,
    )


def _refuse_small_disk(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed + _HEADROOM:
        raise MissingError(
            f"{root}: the tensors need {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
            hint="free some, or write fewer workloads (-n, --workload)",
        )


def _refuse_same_names(root: Path, places: Mapping[Path, dict]) -> None:
    """A name that occurs twice in the folder makes it unreadable for flashinfer-bench."""
    names = {s["name"]: path for path, s in places.items()}
    for path in (root / "solutions").rglob("*.json"):
        if path in places:
            continue
        with suppress(MissingError, AttributeError):
            name = read_json(path, MissingError).get("name")
            if name in names:
                raise UsageError(
                    f"{path}: has a solution called '{name}' already",
                    hint="delete it, or pack under another name",
                )
