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
from ...catalog.formats import Input
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


# name -> dtype code, shape
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def load_inputs(
    op: Op, workload: Workload, device: str = "cpu", root: Path | None = None
) -> list[Any]:
    """The call's inputs in the definition's order: tensors on `device`, scalars as Python numbers.

    root is the FlashInfer-Trace folder, needed for origin "dataset". Inputs that its
    row calls random, or leaves out (`drawn`), come from the twin: blindly drawn ones
    would make an invalid call, or one that overflows.
    """
    blobs: dict[Path, Tensors] = {}  # headers; several inputs share a file
    names = drawn(op, workload)
    # 65536 tokens of 16/32 heads take seconds, most in numpy
    with ThreadPoolExecutor(len(names) or 1) as pool:
        twins = [*pool.map(lambda name: synthetic.draw(op, workload, name), names)]
    values: dict[str, torch.Tensor | float] = dict(zip(names, twins, strict=True))
    given = workload.inputs or {}
    for name in op.inputs:
        if name not in values:
            values[name] = _given(op, workload, name, given[name], root, blobs)
    if "cu_seqlens" in values:
        total = workload.axes["total_seq_len"]
        if wrong := seqlens.fault(values["cu_seqlens"], total):
            place = f"workload {workload.uuid}: cu_seqlens"
            if "cu_seqlens" not in names:
                spec = given["cu_seqlens"]
                file = Path(root or "") / spec["path"]
                place = f"{file}: tensor '{spec['tensor_key']}'"
            raise MissingError(f"{place} {wrong}")
    return [_placed(values[name], device) for name in op.inputs]


_LINE = 64  # bytes in a cache line; torch's own tensors start at one


def _placed(value: torch.Tensor | float, device: str) -> torch.Tensor | float:
    """The value on a device. A tensor is moved to the start of a cache line, as a
    caller's is: numpy's memory starts 16, 32 or 48 bytes after one, different in each
    process. A state placed like that raised cpp-v1's time from 15 us to 20.
    """
    if not isinstance(value, torch.Tensor):
        return value
    value = value.to(device)
    return value.clone() if value.data_ptr() % _LINE else value


def drawn(op: Op, workload: Workload) -> list[str]:
    """Names of the inputs that are drawn from the uuid instead of read from a file or a row."""
    if workload.origin == "twin":
        return list(op.inputs)
    given = workload.inputs or {}
    return [
        name
        for name in op.inputs
        if name not in given or given[name]["type"] == "random"
    ]


def _given(
    op: Op,
    workload: Workload,
    name: str,
    spec: Input,
    root: Path | None,
    blobs: dict[Path, Tensors],
) -> torch.Tensor | float:
    """An input of a row: a scalar, or a tensor of a file."""
    want = op.inputs[name]
    if spec["type"] == "scalar":
        if want.shape is None:
            return spec["value"]
        raise MissingError(
            f"workload {workload.uuid}: input {name} is a scalar, {op.definition} has a tensor"
            " there"
        )
    if root is None:
        raise MissingError(
            f"workload {workload.uuid}: input {name} is in {spec['path']}, of a data set that is"
            " not given",
            hint="name its folder: --dataset DIR, or FIB_DATASET_PATH",
        )
    path = blob(Path(root), spec["path"], f"workload {workload.uuid}: input {name}")
    if path not in blobs:
        blobs[path] = blob_header(path)[0]
    key = spec["tensor_key"]
    tensors = blobs[path]
    if key not in tensors:
        names = ", ".join(tensors) or "none"
        raise MissingError(
            f"{path}: no tensor '{key}' for input {name}; it has {names}"
        )
    if want.shape is None:
        raise MissingError(
            f"{path}: tensor '{key}' for input {name}, which is a scalar in {op.definition}"
        )
    dtype, shape = tensors[key]
    due = op.shape(want, workload.axes)
    if shape != due:
        axes = ", ".join(f"{axis}={size}" for axis, size in workload.axes.items())
        raise MissingError(
            f"{path}: tensor '{key}' has shape {list(shape)}, {op.definition} at {axes} has"
            f" {list(due)}"
        )
    code = DTYPE_CODES[want.dtype]
    if dtype != code:
        raise MissingError(
            f"{path}: tensor '{key}' is {dtype}, {op.definition} has {code}"
        )
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.get_tensor(key)
    except (OSError, safetensors.SafetensorError) as e:
        raise MissingError(f"{path}: {e}") from None


def blob_header(path: Path) -> tuple[Tensors, dict[str, str]]:
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
            tensors: Tensors = {}
            for name in file.keys():  # noqa: SIM118  not a dict
                piece = file.get_slice(name)
                tensors[name] = piece.get_dtype(), tuple(piece.get_shape())
            return tensors, file.metadata() or {}
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
