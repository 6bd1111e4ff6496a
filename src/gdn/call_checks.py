"""Inputs and outputs of an algo's call in torch's terms: schemas, checks, shapes, the docstring."""

from __future__ import annotations

import inspect
import os
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cli.catalog import seqlens
from gdn_cli.catalog.expression import condition
from gdn_cli.catalog.ops import Op, TensorSpec, torch_dtype
from gdn_cli.catalog.registry import Algo

from . import tensor_checks

# bytes: of every address on a GPU; wide loads need it, and Triton compiles for it
ALIGNMENT = 16
# of the docstring of what `load` returns
DOCUMENT = """{op.name} by {algo.name}: {algo.summary}.

{op.summary}.

Inputs:
{inputs}

Returns a tuple of:
{outputs}

The definition has {fixed}.
The algo may take other head counts.
out={out} writes into these tensors instead of new ones, and returns them.
{remarks}
As an operator: torch.ops.{operator}, torch.ops.{operator}_out."""
IN_PLACE = "It updates {} in place, given as {} too; without out= it works on a copy of all of {}."
DEVICES = "Runs on {}; all tensors contiguous and on one device. No backward."


class Contract:
    """An op's inputs and outputs in torch's terms, for the devices of one algo:
    schemas, checks, shapes.
    """

    def __init__(self, op: Op, algo: Algo) -> None:
        self.op, self.algo = op, algo
        self.names, self.outputs = tuple(op.inputs), tuple(op.outputs)
        # as Python writes it: a comma follows a single one
        self.tuple = f"({', '.join(self.outputs)}{',' * (len(self.outputs) == 1)})"
        self.tensors = tuple(
            name for name, spec in op.inputs.items() if spec.shape is not None
        )
        # the input whose device is the call's
        self.first = self.names.index(self.tensors[0])
        self.devices = _devices(algo)
        self.constraints = tuple(_over_axes(op))
        # a library's binding knows what its kernel needs of each address
        self.alignment = 1 if algo.language in ("cpp", "cuda") else ALIGNMENT
        # shapes that passed: checking costs the host more than the call costs the GPU
        self._agreed: set[tuple[torch.Size, ...]] = set()

    def schema(self, *, into: bool) -> str:
        """The operator's schema; with `into`, the outputs are arguments that it writes to."""
        kinds = {name: f"{self._scalar(name).__name__}?" for name in self.names}
        kinds |= dict.fromkeys(self.tensors, "Tensor")
        arguments = [f"{kind} {name}" for name, kind in kinds.items()]
        returns = ["Tensor"] * len(self.outputs)
        if into:
            letters = zip(string.ascii_letters, self.outputs, strict=False)
            arguments += [f"Tensor({letter}!) {name}" for letter, name in letters]
            returns = []
        result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
        return f"({', '.join(arguments)}) -> {result}"

    def signature(self) -> inspect.Signature:
        """The signature in Python: scalars at the end may be left out. `out` comes last."""
        result = tuple[Tensor, ...]
        kinds: dict[str, Any] = {n: self._scalar(n) | None for n in self.names}
        kinds |= dict.fromkeys(self.tensors, Tensor)
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            inspect.Parameter(name, either, annotation=kind)
            for name, kind in kinds.items()
        ]
        for i in range(self.names.index(self.tensors[-1]) + 1, len(parameters)):
            parameters[i] = parameters[i].replace(default=None)
        out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters.append(out.replace(annotation=result | None))
        return inspect.Signature(parameters, return_annotation=result)

    def _scalar(self, name: str) -> type[int] | type[float]:
        return int if "int" in self.op.inputs[name].dtype else float

    def document(self, operator: str) -> str:
        op = self.op
        width = max(map(len, (*self.names, *self.outputs)))
        inputs = [_line(name, spec, width) for name, spec in op.inputs.items()]
        outputs = [_line(name, spec, width) for name, spec in op.outputs.items()]
        fixed = [f"{axis} = {size}" for axis, size in op.axes.items() if size]
        remarks = []
        if op.in_place_only:
            names = op.in_place.items()
            remarks = [IN_PLACE.format(i, output, i) for output, i in names]
        remarks.append(DEVICES.format(" and ".join(self.devices)))
        return DOCUMENT.format(
            op=op,
            algo=self.algo,
            inputs="\n".join(inputs),
            outputs="\n".join(outputs),
            fixed=", ".join(fixed),
            out=self.tuple,
            remarks="\n".join(remarks),
            operator=operator,
        )

    def inputs(self, inputs: Sequence[Any]) -> None:
        """Check a call's inputs; raises TypeError or ValueError. Not `cu_seqlens` on a
        GPU: reading it would wait for it.
        """
        self.kinds(inputs)
        for name, x in self._tensors(inputs).items():
            tensor_checks.stored(name, x)
        self.sizes(inputs)
        if "cu_seqlens" in self.names:
            ends = inputs[self.names.index("cu_seqlens")]
            on_cpu = ends.device.type == "cpu"
            if on_cpu and (fault := seqlens.fault(ends, inputs[0].shape[0])):
                raise ValueError(f"cu_seqlens: {fault}")

    def kinds(self, inputs: Sequence[Any]) -> None:
        """Check ranks, dtypes and devices: all that is known of fake tensors without a guard on
        their sizes."""
        tensors = self._tensors(inputs)
        first = self.tensors[0]
        device = tensors[first].device
        for name, x in tensors.items():
            self._kind(name, self.op.inputs[name], x)
            if x.device != device:
                expected = f"expected on {device}, where {first} is"
                raise ValueError(f"{name}: {expected}, got {x.device}")
        if device.type not in (*self.devices, "meta"):
            runs = f"{self.algo.name} runs on {' and '.join(self.devices)}"
            raise ValueError(f"{runs}, got tensors on {device}")

    def _tensors(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        values = dict(zip(self.names, inputs, strict=True))
        return {name: values[name] for name in self.tensors}

    def _kind(self, name: str, spec: TensorSpec, x: Tensor) -> None:
        tensor_checks.plain(name, x)
        if x.dtype != torch_dtype(spec.dtype):
            got = str(x.dtype).removeprefix("torch.")
            if {x.dtype, torch_dtype(spec.dtype)} <= {torch.int32, torch.int64}:
                got += f"; call .to(torch.{spec.dtype}) on it"
            raise TypeError(f"{name}: expected {spec.dtype}, got {got}")
        if x.dim() != len(spec.axes):
            expected = f"expected {len(spec.axes)} dimensions [{', '.join(spec.axes)}]"
            raise ValueError(f"{name}: {expected}, got {list(x.shape)}")

    def number(self, name: str, x: Any) -> int | float | None:
        """A scalar as the operator takes it."""
        return tensor_checks.number(name, x, self._scalar(name))

    def sizes(self, inputs: Sequence[Any]) -> None:
        """Check that every tensor is contiguous and aligned, and that sizes agree with
        each other and the op's constraints.

        An axis that the definition fixes at 1 must be 1 (a second token would be
        ignored); other fixed axes, such as head counts, are up to the algo.
        """
        tensors = self._tensors(inputs)
        for name, x in tensors.items():
            if not x.is_contiguous():
                cure = "call .contiguous() on it"
                raise ValueError(f"{name}: expected contiguous; {cure}")
            self.aligned(name, x, "call .clone() on it")
        shapes = tuple([x.shape for x in tensors.values()])
        if shapes in self._agreed:
            return
        sizes: dict[str, int] = {}
        owners: dict[str, str] = {}
        for name, x in tensors.items():
            for axis, size in zip(self.op.inputs[name].axes, x.shape, strict=True):
                expected = sizes.setdefault(axis, size)
                owner = owners.setdefault(axis, name)
                if size != expected:
                    wanted = f"{axis} = {expected}, as {owner} has it"
                    raise ValueError(f"{name}: expected {wanted}, got {size}")
                if self.op.axes[axis] == 1 and size != 1:
                    raise ValueError(f"{name}: expected {axis} = 1, got {size}")
        for text, holds in self.constraints:
            try:
                fits = holds(sizes)
            except ValueError:  # it divides by zero
                fits = False
            if not fits:
                axes = [axis for axis in sizes if re.search(rf"\b{axis}\b", text)]
                got = ", ".join(f"{axis} = {sizes[axis]}" for axis in axes)
                raise ValueError(f"expected {text}, got {got}")
        if len(self._agreed) < 1000:
            self._agreed.add(shapes)

    def shapes(self, inputs: Sequence[Any]) -> list[list[int]]:
        """The outputs' shapes from the inputs' sizes (symbolic if those are)."""
        sizes: dict[str, int] = {}
        for name, x in self._tensors(inputs).items():
            sizes |= zip(self.op.inputs[name].axes, x.shape, strict=True)
        outputs = self.op.outputs.values()
        return [list(map(sizes.__getitem__, spec.axes)) for spec in outputs]

    def empty(self, inputs: Sequence[Any]) -> list[Tensor]:
        like = inputs[self.first]
        specs = zip(self.op.outputs.values(), self.shapes(inputs), strict=True)
        return [like.new_empty(x, dtype=torch_dtype(spec.dtype)) for spec, x in specs]

    def overwritten(
        self, inputs: Sequence[Any], outputs: Sequence[Tensor]
    ) -> list[Any]:
        """The inputs for a call with new `outputs`. For an op that is always in place,
        the overwritten inputs are copied into the outputs, which are used instead.
        """
        arguments = list(inputs)
        if self.op.in_place_only:
            for output, source in self.op.overwrites.items():
                arguments[source] = outputs[output].copy_(arguments[source])
        return arguments

    def results(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        prefix: str,
        *,
        sizes: bool = True,
    ) -> None:
        """Check that `outputs`, given or returned as `prefix` says, match the op for
        these inputs.
        """
        count = len(self.outputs)
        if len(outputs) != count:
            raise ValueError(f"{prefix}: expected {count} outputs, got {len(outputs)}")
        device = inputs[self.first].device
        specs = self.op.outputs.items()
        shapes = self.shapes(inputs)
        for (name, spec), shape, x in zip(specs, shapes, outputs, strict=True):
            expected = f"{prefix}: {name}: expected"
            self._kind(f"{prefix}: {name}", spec, x)
            if x.device != device:
                place = f"on {device}, where the inputs are"
                raise ValueError(f"{expected} {place}, got {x.device}")
            if sizes and list(x.shape) != shape:
                raise ValueError(f"{expected} shape {shape}, got {list(x.shape)}")
            if sizes and not x.is_contiguous():
                raise ValueError(f"{expected} contiguous")

    def places(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check that given outputs have memory, aligned and of their own: not an input's, but where
        the op is in place, and the output is that input as a whole."""
        names = [f"out: {name}" for name in self.outputs]
        tensors = dict(zip(names, outputs, strict=True))
        for name, x in tensors.items():
            tensor_checks.stored(name, x)
            self.aligned(name, x, "pass one made by torch.empty")
        in_place = {f"out: {name}": x for name, x in self.op.in_place.items()}
        tensor_checks.outputs_apart(tensors, self._tensors(inputs), in_place)

    def aligned(self, name: str, x: Tensor, cure: str) -> None:
        """On a GPU, a 16-byte load from an unaligned address destroys the context and everything in
        it.

        A CPU's loads take any address, and tensors in safetensors files begin at multiples of 8
        bytes.
        """
        if x.is_cuda and x.data_ptr() % self.alignment:
            expected = f"expected a pointer aligned to {self.alignment} bytes"
            raise ValueError(f"{name}: {expected}; {cure}")


def _devices(algo: Algo) -> tuple[str, ...]:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    on_cpu = "cpu" in algo.modes or (interpreted and "interpreter" in algo.modes)
    return ("cuda",) * ("cuda" in algo.modes) + ("cpu",) * on_cpu


def _line(name: str, spec: TensorSpec, width: int) -> str:
    shape = "a number, or None for the default"
    if spec.shape is not None:
        shape = f"[{', '.join(spec.shape)}]"
    note = f", {spec.note}" if spec.note else ""
    return f"    {name:<{width}}  {spec.dtype:<8}  {shape}{note}"


def _over_axes(op: Op) -> Iterator[tuple[str, Callable[[dict[str, int]], bool]]]:
    """The definition's constraints on sizes; checking one on a tensor's values would
    have to wait for the device.
    """
    axes = {axis for spec in op.inputs.values() for axis in spec.axes}
    for text in op.constraints:
        try:
            holds = condition(text, axes)
        except ValueError:
            continue
        yield text, holds
