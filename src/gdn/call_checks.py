"""Inputs and outputs of an algo's call in torch's terms: schemas, checks, shapes, the docstring."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gdn_cli.catalog import seqlens
from gdn_cli.catalog.expression import condition
from gdn_cli.catalog.ops import Op, torch_dtype
from gdn_cli.catalog.registry import Algo, Registry

from . import tensor_checks

# bytes: of every address on a GPU; wide loads need it, and Triton compiles for it
ALIGNMENT = 16


class Contract:
    """An op's inputs and outputs in torch's terms, for the devices of one algo:
    schemas, checks, shapes.

    known  where to look for another op that takes inputs that this one does not
    """

    def __init__(self, op: Op, algo: Algo, known: Registry | None = None) -> None:
        self.op, self.algo, self.known = op, algo, known
        self.names, self.outputs = tuple(op.inputs), tuple(op.outputs)
        self.tuple = (
            f"({', '.join(self.outputs)}{',' if len(self.outputs) == 1 else ''})"
        )
        self.tensors = tuple(
            name for name, spec in op.inputs.items() if spec.shape is not None
        )
        interpreted = (
            "interpreter" in algo.modes and os.environ.get("TRITON_INTERPRET") == "1"
        )
        self.devices = tuple(
            device
            for device in ("cuda", "cpu")
            if device in algo.modes or (device == "cpu" and interpreted)
        )
        self.constraints = tuple(_over_axes(op))
        # a library's binding knows what its kernel needs of each address
        self.alignment = 1 if algo.language in ("cpp", "cuda") else ALIGNMENT
        # shapes that passed: checking costs the host more than the call costs the GPU
        self._agreed: set[tuple] = set()

    def schema(self, *, into: bool) -> str:
        """The operator's schema; with `into`, the outputs are arguments that it writes to."""
        arguments = [
            f"{'Tensor' if name in self.tensors else f'{self._scalar(name).__name__}?'} {name}"
            for name in self.names
        ]
        if into:
            arguments += [
                f"Tensor({chr(ord('a') + i)}!) {name}"
                for i, name in enumerate(self.outputs)
            ]
            return f"({', '.join(arguments)}) -> ()"
        returns = ", ".join(["Tensor"] * len(self.outputs))
        return f"({', '.join(arguments)}) -> {f'({returns})' if len(self.outputs) > 1 else returns}"

    def of_python(self) -> inspect.Signature:
        """The signature for inspect.signature: scalars at the end may be left out."""
        kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
        for i, name in enumerate(self.names):
            is_tensor = name in self.tensors
            default = None if self.optional(i) else inspect.Parameter.empty
            annotation = torch.Tensor if is_tensor else self._scalar(name) | None
            parameters.append(
                inspect.Parameter(name, kind, default=default, annotation=annotation)
            )
        out = inspect.Parameter(
            "out",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=tuple[torch.Tensor, ...] | None,
        )
        return inspect.Signature(
            [*parameters, out], return_annotation=tuple[torch.Tensor, ...]
        )

    def _scalar(self, name: str) -> type:
        return int if "int" in self.op.inputs[name].dtype else float

    def optional(self, i: int) -> bool:
        """Whether the i-th input may be left out: a scalar followed by nothing but scalars."""
        return not any(name in self.tensors for name in self.names[i:])

    def document(self, operator: str) -> str:
        def line(name: str, spec: Any) -> str:
            shape = (
                "a number, or None for the default"
                if spec.shape is None
                else f"[{', '.join(spec.shape)}]"
            )
            return f"    {name:<{width}}  {spec.dtype:<8}  {shape}" + (
                f", {spec.note}" if spec.note else ""
            )

        width = max(map(len, (*self.names, *self.outputs)))
        fixed = ", ".join(
            f"{name} = {value}"
            for name, value in self.op.axes.items()
            if value is not None
        )
        return "\n".join(
            [
                f"{self.op.name} by {self.algo.name}: {self.algo.summary}.",
                "",
                f"{self.op.summary}.",
                "",
                "Inputs:",
                *(line(*item) for item in self.op.inputs.items()),
                "",
                "Returns a tuple of:",
                *(line(*item) for item in self.op.outputs.items()),
                "",
                f"The definition has {fixed}.",
                "The algo may take other head counts.",
                (
                    f"out={self.tuple} writes into these tensors instead of new ones, and returns"
                    " them."
                ),
                *(
                    f"It updates {i} in place, given as {o} too; without out= it works on a copy"
                    f" of all of {i}."
                    for o, i in self.op.in_place.items()
                    if self.op.in_place_only
                ),
                (
                    f"Runs on {' and '.join(self.devices)}; all tensors contiguous and on one"
                    " device. No backward."
                ),
                *self._about_addresses(),
                f"As an operator: torch.ops.{operator}, torch.ops.{operator}_out.",
            ]
        )

    def _about_addresses(self) -> list[str]:
        if "cuda" not in self.devices:
            return []
        if self.alignment == 1:
            return [
                "On a GPU addresses are as its kernel needs them; those of .clone() are."
            ]
        multiple = f"a multiple of {self.alignment} bytes"
        return [f"On a GPU every tensor begins at {multiple}; one of .clone() does."]

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
            if ends.device.type == "cpu" and (
                wrong := seqlens.fault(ends, inputs[0].shape[0])
            ):
                raise ValueError(f"cu_seqlens: {wrong}")

    def kinds(self, inputs: Sequence[Any]) -> None:
        """Check ranks, dtypes and devices: all that is known of fake tensors without a guard on
        their sizes."""
        where = None
        for name, x in self._tensors(inputs).items():
            self._kind(name, self.op.inputs[name], x)
            where = where or (name, x.device)
            if x.device != where[1]:
                first, device = where
                raise ValueError(
                    f"{name}: expected on {device}, where {first} is, got {x.device}"
                )
        if where and where[1].type not in (*self.devices, "meta"):
            raise ValueError(
                f"{self.algo.name} runs on {' and '.join(self.devices)}, got tensors on"
                f" {where[1]}"
            )

    def _tensors(self, inputs: Sequence[Any]) -> dict[str, Any]:
        return {
            name: x
            for name, x in zip(self.names, inputs, strict=True)
            if name in self.tensors
        }

    def _kind(self, name: str, spec: Any, x: torch.Tensor) -> None:
        tensor_checks.plain(name, x)
        if x.dtype != torch_dtype(spec.dtype):
            got = str(x.dtype).removeprefix("torch.")
            raise TypeError(
                f"{name}: expected {spec.dtype}, got {got}{self._cure(name, spec, x.dtype)}"
            )
        if x.dim() != len(spec.shape):
            raise ValueError(
                f"{name}: expected {len(spec.shape)} dimensions [{', '.join(spec.shape)}], got"
                f" {list(x.shape)}"
            )

    def _cure(self, name: str, spec: Any, dtype: torch.dtype) -> str:
        """What to do about an input of another dtype: a lossless conversion, or the op
        that takes this dtype.
        """
        if dtype in _WHOLE and torch_dtype(spec.dtype) in _WHOLE:
            return f"; call .to(torch.{spec.dtype}) on it"
        for op in self.known.ops.values() if self.known else ():
            of = op.inputs.get(name)
            if (
                of
                and torch_dtype(of.dtype) == dtype
                and _shapes(op) == _shapes(self.op)
            ):
                names = [
                    a.name
                    for a in self.known.of(op.name)
                    if set(self.devices) & set(a.modes)
                ]
                if self.algo.name in names or len(names) == 1:
                    name = self.algo.name if self.algo.name in names else names[0]
                    return f"; {op.name} takes it: load('{name}', op='{op.name}')"
                return (
                    f"; {op.name} takes it: load(..., op='{op.name}') with one of"
                    f" {', '.join(names)}"
                )
        return ""

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
                raise ValueError(
                    f"{name}: expected contiguous; call .contiguous() on it"
                )
            self.aligned(name, x, "call .clone() on it")
        shapes = tuple([x.shape for x in tensors.values()])
        if shapes in self._agreed:
            return
        axes: dict[str, tuple[int, str]] = {}
        for name, x in tensors.items():
            for axis, size in zip(self.op.inputs[name].shape, x.shape, strict=True):
                first, owner = axes.setdefault(axis, (size, name))
                if size != first:
                    raise ValueError(
                        f"{name}: expected {axis} = {first}, as {owner} has it, got {size}"
                    )
                if self.op.axes[axis] == 1 and size != 1:
                    raise ValueError(f"{name}: expected {axis} = 1, got {size}")
        known = {axis: size for axis, (size, _) in axes.items()}
        for text, holds in self.constraints:
            try:
                right = holds(known)
            except ValueError:  # it divides by zero
                right = False
            if not right:
                got = ", ".join(
                    f"{axis} = {size}"
                    for axis, size in known.items()
                    if re.search(rf"\b{axis}\b", text)
                )
                raise ValueError(f"expected {text}, got {got}")
        if len(self._agreed) < 1000:
            self._agreed.add(shapes)

    def shapes(self, inputs: Sequence[Any]) -> list[list[int]]:
        """The outputs' shapes from the inputs' sizes (symbolic if those are)."""
        axes: dict[str, int | torch.SymInt] = {}
        for name, x in self._tensors(inputs).items():
            for axis, size in zip(self.op.inputs[name].shape, x.shape, strict=True):
                axes.setdefault(axis, size)
        return [
            [axes[axis] for axis in spec.shape] for spec in self.op.outputs.values()
        ]

    def empty(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        like = next(iter(self._tensors(inputs).values()))
        dtypes = [torch_dtype(spec.dtype) for spec in self.op.outputs.values()]
        return [
            like.new_empty(shape, dtype=dtype)
            for shape, dtype in zip(self.shapes(inputs), dtypes, strict=True)
        ]

    def overwritten(
        self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> list[Any]:
        """The inputs for a call with new `outputs`. For an op that is always in place,
        the overwritten inputs are copied into the outputs, which are used instead.
        """
        given = list(inputs)
        for output, source in (
            self.op.overwrites.items() if self.op.in_place_only else ()
        ):
            given[source] = outputs[output].copy_(given[source])
        return given

    def results(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        whose: str,
        *,
        sizes: bool = True,
    ) -> None:
        """Check that `outputs`, given or returned as `whose` says, match the op for
        these inputs.
        """
        if len(outputs) != len(self.outputs):
            raise ValueError(
                f"{whose}: expected {len(self.outputs)} outputs, got {len(outputs)}"
            )
        device = next(iter(self._tensors(inputs).values())).device
        for (name, spec), shape, x in zip(
            self.op.outputs.items(), self.shapes(inputs), outputs, strict=True
        ):
            self._kind(f"{whose}: {name}", spec, x)
            if x.device != device:
                raise ValueError(
                    f"{whose}: {name}: expected on {device}, where the inputs are, got {x.device}"
                )
            if sizes and list(x.shape) != shape:
                raise ValueError(
                    f"{whose}: {name}: expected shape {shape}, got {list(x.shape)}"
                )
            if sizes and not x.is_contiguous():
                raise ValueError(f"{whose}: {name}: expected contiguous")

    def places(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check that given outputs have memory, aligned and of their own: not an input's, but where
        the op is in place, and the output is that input as a whole."""
        named = {
            f"out: {name}": x for name, x in zip(self.outputs, outputs, strict=True)
        }
        for name, x in named.items():
            tensor_checks.stored(name, x)
            self.aligned(name, x, "pass one made by torch.empty")
        in_place = {
            f"out: {output}": source for output, source in self.op.in_place.items()
        }
        tensor_checks.outputs_apart(named, self._tensors(inputs), in_place)

    def aligned(self, name: str, x: torch.Tensor, cure: str) -> None:
        """On a GPU, a 16-byte load from an unaligned address destroys the context and everything in
        it.

        A CPU's loads take any address, and tensors in safetensors files begin at multiples of 8
        bytes.
        """
        if x.is_cuda and x.data_ptr() % self.alignment:
            expected = f"expected a pointer aligned to {self.alignment} bytes"
            raise ValueError(f"{name}: {expected}; {cure}")


_WHOLE = (torch.int32, torch.int64)


def _shapes(op: Op) -> list[tuple]:
    return [(name, spec.shape) for name, spec in op.inputs.items()]


def _over_axes(op: Op) -> Iterator[tuple[str, Callable[[dict[str, int]], bool]]]:
    """The definition's constraints on sizes; checking one on a tensor's values would
    have to wait for the device.
    """
    seen = {axis for spec in op.inputs.values() for axis in spec.shape or ()}
    for text in op.constraints:
        try:
            holds = condition(text, seen)
        except ValueError:
            continue
        yield text, holds
