"""Workload -> tensors: drawn for a twin; read from a data set and checked against the
definition otherwise.

Anything wrong with a file is one MissingError line that names it, raised before any
tensor reaches a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import safetensors
from torch import Tensor

from ... import errors
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
) -> list:
    """The call's inputs in the definition's order: tensors on `device`, scalars as Python numbers.

    root is the FlashInfer-Trace folder, needed for origin "dataset". Inputs that its
    row calls random, or leaves out (`drawn`), come from the twin: blindly drawn ones
    would make an invalid call, or one that overflows.
    """
    names = drawn(op, workload)
    # 65536 tokens of 16/32 heads take seconds, most in numpy
    with ThreadPoolExecutor(len(names) or 1) as pool:
        twins = [*pool.map(lambda name: synthetic.draw(op, workload, name), names)]
    values: dict[str, Tensor | float] = dict(zip(names, twins, strict=True))
    given = workload.inputs or {}
    for name in op.inputs:
        if name not in values:
            values[name] = _given(op, workload, name, given[name], root)
    if "cu_seqlens" in values:
        total = workload.axes["total_seq_len"]
        if wrong := seqlens.fault(values["cu_seqlens"], total):
            raise MissingError(f"workload {workload.uuid}: cu_seqlens {wrong}")
    return [_placed(values[name], device) for name in op.inputs]


_LINE = 64  # bytes in a cache line; torch's own tensors start at one


def _placed(value: Tensor | float, device: str) -> Tensor | float:
    """The value on a device. A tensor is moved to the start of a cache line, as a
    caller's is: numpy's memory starts 16, 32 or 48 bytes after one, different in each
    process. A state placed like that raised cpp-v1's time from 15 us to 20.
    """
    if not isinstance(value, Tensor):
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
    op: Op, workload: Workload, name: str, spec: Input, root: Path | None
) -> Tensor | float:
    """An input of a row: a scalar, or a tensor of a file."""
    want = op.inputs[name]
    where = f"workload {workload.uuid}: input {name}"
    if (spec["type"] == "scalar") != (want.shape is None):
        kind = "a scalar" if want.shape is None else "a tensor"
        raise MissingError(f"{where} must be {kind}, as in {op.definition}")
    if spec["type"] == "scalar":
        return spec["value"]
    if root is None:
        raise MissingError(
            f"{where} is in {spec['path']}, of a data set that is not given",
            hint="name its folder: --dataset DIR, or FIB_DATASET_PATH",
        )
    path = blob(root, spec["path"], where)
    tensors, _ = blob_header(path)
    key = spec["tensor_key"]
    due = DTYPE_CODES[want.dtype], op.shape(want, workload.axes)
    if tensors.get(key) != due:
        held = "no tensor" if key not in tensors else "a {} of shape {}"
        axes = ", ".join(f"{axis}={size}" for axis, size in workload.axes.items())
        raise MissingError(
            f"{path}: '{key}' is {held.format(*tensors.get(key, ()))}, {op.definition} at"
            f" {axes} has a {due[0]} of shape {due[1]}"
        )
    with _reading(path), safetensors.safe_open(path, framework="pt") as file:
        return file.get_tensor(key)


def blob_header(path: Path) -> tuple[Tensors, dict[str, str]]:
    """A safetensors file's tensors, name -> (dtype code, shape), and its metadata.
    Reads no tensor.
    """
    with _reading(path):
        with path.open("rb") as opened:
            if opened.read(64).startswith(b"version https://git-lfs"):
                raise lfs_error(path)
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {
                name: (piece.get_dtype(), tuple(piece.get_shape()))
                for name, piece in slices.items()
            }
            return tensors, file.metadata() or {}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say what is wrong with a file of tensors."""
    hint = "the data set is not complete: download it again"
    try:
        yield
    except OSError as e:
        raise MissingError(f"{path}: {e.strerror or e}", hint=hint) from None
    except safetensors.SafetensorError as e:
        reason = f"cut short, or not a safetensors file: {errors.one_line(e)}"
        raise MissingError(f"{path}: {reason}", hint=hint) from None
