"""Workload -> tensors: drawn for a twin; read from a data set and checked against the
definition otherwise.

Anything wrong with a file is one MissingError line that names it, raised before any
tensor reaches a kernel.
"""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors
import torch

from ...catalog import seqlens
from ...catalog.ops import Op
from ...catalog.trace_set import blob, lfs_error
from ...catalog.workloads import Workload
from ...errors import MissingError
from . import synthetic

# safetensors' names of the dtypes that definitions use
DTYPE_CODES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "bool": "BOOL",
}


def load_inputs(
    op: Op, workload: Workload, device: str = "cpu", root: Path | None = None
) -> list[Any]:
    """The call's inputs in the definition's order: tensors on `device`, scalars as Python numbers.

    root is the FlashInfer-Trace folder, needed for origin "dataset". Inputs that its
    row calls random, or leaves out (`drawn`), come from the twin: blindly drawn ones
    would make an invalid call, or one that overflows.
    """
    blobs: dict[Path, dict] = {}  # headers; several inputs share a file
    names, values = drawn(op, workload), []
    # 65536 tokens of 16/32 heads take seconds, most in numpy
    with ThreadPoolExecutor(len(names) or 1) as pool:
        made = dict(
            zip(
                names,
                pool.map(lambda name: synthetic.draw(op, workload, name), names),
                strict=True,
            )
        )
    for name in op.inputs:
        spec = (workload.inputs or {}).get(name)
        if name in made:
            value = made.pop(name)
        elif spec["type"] == "scalar":
            if op.inputs[name].shape is not None:
                there = f"{op.definition} has a tensor there"
                raise MissingError(
                    f"workload {workload.uuid}: input {name} is a scalar, {there}"
                )
            value = spec["value"]
        else:
            value = _read(op, workload, name, spec, root, blobs)
        if name == "cu_seqlens" and (
            wrong := seqlens.fault(value, workload.axes["total_seq_len"])
        ):
            where = f"workload {workload.uuid}: cu_seqlens"
            if name not in drawn(op, workload):
                where = (
                    f"{Path(root or '') / spec['path']}: tensor '{spec['tensor_key']}'"
                )
            raise MissingError(f"{where} {wrong}")
        values.append(
            _placed(value.to(device)) if isinstance(value, torch.Tensor) else value
        )
    return values


_LINE = 64  # bytes in a cache line; torch's own tensors start at one


def _placed(value: torch.Tensor) -> torch.Tensor:
    """The tensor, moved to the start of a cache line as a caller's is. numpy's memory
    starts 16, 32 or 48 bytes after one, different in each process: a state placed like
    that raised cpp-v1's time from 15 us to 20.
    """
    return value.clone() if value.data_ptr() % _LINE else value


def drawn(op: Op, workload: Workload) -> list[str]:
    """Names of the inputs that are drawn from the uuid instead of read from a file or a row."""
    if workload.origin == "twin":
        return list(op.inputs)
    return [
        n
        for n in op.inputs
        if (workload.inputs or {}).get(n, {"type": "random"})["type"] == "random"
    ]


def _read(
    op: Op,
    workload: Workload,
    name: str,
    spec: dict,
    root: Path | None,
    blobs: dict[Path, dict],
) -> torch.Tensor:
    if root is None:
        raise MissingError(
            f"workload {workload.uuid}: input {name} is in {spec['path']}, of a data set that is"
            " not given",
            hint="name its folder: --dataset DIR, or FIB_DATASET_PATH",
        )
    path = blob(Path(root), spec["path"], f"workload {workload.uuid}: input {name}")
    if path not in blobs:
        blobs[path] = blob_header(path)[0]
    key, there = spec["tensor_key"], blobs[path]
    if key not in there:
        raise MissingError(
            f"{path}: no tensor '{key}' for input {name}; it has {', '.join(there) or 'none'}"
        )
    want = op.inputs[name]
    if want.shape is None:
        raise MissingError(
            f"{path}: tensor '{key}' for input {name}, which is a scalar in {op.definition}"
        )
    dtype, shape = there[key]
    if shape != op.shape(want, workload.axes):
        raise MissingError(
            f"{path}: tensor '{key}' has shape {list(shape)}, {op.definition} at "
            f"{', '.join(f'{k}={v}' for k, v in workload.axes.items())} "
            f"has {list(op.shape(want, workload.axes))}"
        )
    if dtype != DTYPE_CODES[want.dtype]:
        raise MissingError(
            f"{path}: tensor '{key}' is {dtype}, {op.definition} has {DTYPE_CODES[want.dtype]}"
        )
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(key)
    except (OSError, safetensors.SafetensorError) as e:
        raise MissingError(f"{path}: {e}") from None
    return tensor


def blob_header(
    path: Path,
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, str]]:
    """A safetensors file's tensors, name -> (dtype code, shape), and its metadata.
    Reads no tensor.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise MissingError(f"{path}: not a plain file")
        with path.open("rb") as file:
            if file.read(64).startswith(b"version https://git-lfs"):
                raise lfs_error(path)
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a dict
            return {
                name: (x.get_dtype(), tuple(x.get_shape()))
                for name, x in slices.items()
            }, file.metadata() or {}
    except FileNotFoundError:
        raise MissingError(
            f"no such file: {path}",
            hint="the data set is not complete: download it again",
        ) from None
    except OSError as e:
        raise MissingError(f"{path}: cannot be read: {e.strerror or e}") from None
    except safetensors.SafetensorError as e:
        why = (str(e).splitlines() or [""])[0]
        raise MissingError(
            f"{path}: cut short, or not a safetensors file: {why}",
            hint="download it again",
        ) from None
