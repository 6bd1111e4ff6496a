"""A function of a compiled library as an operator of torch, and the way past torch's dispatcher.

Dynamo, exporters and whoever else traces see torch.ops.gdn.<name>: its tensors, and
which of them it writes to. An eager call whose tensors are plain memory goes straight
to the library, which checks shapes, dtypes, devices and alignments itself. What a
library cannot see is checked here: storages, overlap, negative bits, gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import straight_call, tensor_checks
from ..registration import register
from .library import Exported

BF16, F32 = (torch.bfloat16,), (torch.float32,)
TOKENS = (*BF16, torch.float16)
POOLS = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument: how many axes it may have, and its dtypes (none: the library knows)."""

    ranks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    written: bool = False
    optional: bool = False

    @property
    def role(self) -> str:
        """As straight_call.cpp has it."""
        role = "w" if self.written else "r"
        return role.upper() if self.optional else role

    def check(self, name: str, x: Any) -> None:
        """TypeError or ValueError for what is no such tensor."""
        tensor_checks.tensor(name, x, *self.ranks)
        tensor_checks.plain(name, x)
        if self.dtypes and x.dtype not in self.dtypes:
            expected = " or ".join(map(_name, self.dtypes))
            raise TypeError(f"{name}: expected {expected}, got {_name(x.dtype)}")


@dataclass(frozen=True)
class Fixed:
    """What the library is always given: its argument of that name once more, or None."""

    argument: str | None = None
    role = "-"


@dataclass(frozen=True)
class Number:
    """A number; kind is the schema's type: "int", "float", or "float?" for one that may be None."""

    kind: str

    @property
    def role(self) -> str:
        return {"int": "i", "float": "f", "float?": "F"}[self.kind]

    def taken(self, name: str, x: Any) -> int | float | None:
        number = tensor_checks.number(name, x, int if self.kind == "int" else float)
        if number is None and self.kind != "float?":
            raise TypeError(f"{name}: expected a number, got NoneType")
        return number


class Operator:
    """torch.ops.gdn.<name>. A call takes the library's arguments, writes into
    given tensors.

    exported   the library's function, by dtype and device of the pool
    arguments  the library's, in their order. The operator has them without the Fixed
    pool       which of them the pool is, or what has its dtype and device
    name       the operator's, if it is not the function's
    """

    def __init__(
        self,
        exported: Exported,
        arguments: dict[str, TensorArgument | Number | Fixed],
        pool: str = "initial_state",
        name: str | None = None,
    ) -> None:
        self.exported, self.pool = exported, pool
        self.fixed: dict[str, str | None] = {}
        self.takes: dict[str, TensorArgument | Number] = {}
        self._written: list[str] = []
        self._places: list[int] = []  # of what it takes, among the library's arguments
        self._names = list(arguments)
        self._pool = self._names.index(pool)
        roles = ""
        for place, (argument, kind) in enumerate(arguments.items()):
            roles += kind.role
            if isinstance(kind, Fixed):
                self.fixed[argument] = kind.argument
                continue
            self.takes[argument] = kind
            self._places.append(place)
            if kind.role in "wW":
                self._written.append(argument)
        self._roles = roles.encode()
        name = name or exported.name
        schema = _schema(self.takes)
        self.operator = register(name, schema, self._real, self._fake, name)

    def __call__(self, *args: Any) -> None:
        if is_dynamo_compiling():
            self.operator(*[args[i] for i in self._places])
            return
        native = straight_call.module
        if native is not None and native.fits(self._roles, args):
            pool = args[self._pool]
            self.exported[pool.dtype, pool.is_cuda](*args)
            native.wrote(self._roles, args)
            return
        self.operator(*self._plain([args[i] for i in self._places]))

    def _plain(self, args: list[Any]) -> list[Any]:
        """What torch would answer with an error of its own, or with a copy that nobody
        asked for.
        """
        for i, (name, argument) in enumerate(self.takes.items()):
            if isinstance(argument, Number):
                args[i] = argument.taken(name, args[i])
            elif args[i] is not None or not argument.optional:
                tensor_checks.plain(name, tensor_checks.tensor(name, args[i]))
        return args

    def _real(self, *values: Any) -> None:
        args = dict(zip(self.takes, values, strict=True))
        pool = tensor_checks.tensor(self.pool, args[self.pool])
        # first of all: where there is none, the reason is more than a dtype
        function = self.exported[pool.dtype, pool.is_cuda]
        given = self._given(args)
        native = straight_call.module
        if native is None or not native.fits(self._roles, given):
            self._in_words(args)
        function(*given)

    def _given(self, args: dict[str, Any]) -> tuple[Any, ...]:
        """All of the library's arguments."""
        values = dict(args)
        for name, source in self.fixed.items():
            values[name] = args[source] if source else None
        return tuple(values[name] for name in self._names)

    def _in_words(self, args: dict[str, Any]) -> None:
        """Check what a library cannot see."""
        inputs = self._checked(args)
        for name, x in inputs.items():
            tensor_checks.stored(name, x)
        outputs = {}
        for name in self._written:
            if name in inputs:
                outputs[name] = inputs.pop(name)
        tensor_checks.outputs_apart(outputs, inputs)

    def _fake(self, *values: Any) -> None:
        self._checked(dict(zip(self.takes, values, strict=True)))

    def _checked(self, args: dict[str, Any]) -> dict[str, Tensor]:
        """Check all that is known of fake tensors without a guard on their sizes. The tensors by
        name."""
        device = args[self.pool].device
        tensors = {}
        for name, argument in self.takes.items():
            x = args[name]
            if isinstance(argument, Number):
                continue
            if x is None and argument.optional:
                continue
            argument.check(name, x)
            if x.device != device:
                place = f"{device}, where {self.pool} is"
                raise ValueError(f"{name}: expected on {place}, got {x.device}")
            tensors[name] = x
        return tensors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _schema(takes: dict[str, TensorArgument | Number]) -> str:
    declared = []
    for letter, (name, argument) in zip(ascii_letters, takes.items(), strict=False):
        if isinstance(argument, Number):
            kind = argument.kind
        else:
            alias = f"({letter}!)" if argument.written else ""
            kind = f"Tensor{alias}{'?' * argument.optional}"
        declared.append(f"{kind} {name}")
    return f"({', '.join(declared)}) -> ()"
