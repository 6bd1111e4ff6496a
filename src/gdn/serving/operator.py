"""A function of a compiled library as an operator of torch, and the way past torch's dispatcher.

Dynamo, exporters and whoever else traces see torch.ops.gdn.<name>: its tensors, and
which of them it writes to. An eager call whose tensors are plain memory goes straight
to the library, which checks shapes, dtypes, devices and alignments itself. What a
library cannot see is checked here: storages, overlap, negative bits, gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .. import straight_call, tensor_checks
from ..registration import register
from .library import Exported

BF16, F32 = (torch.bfloat16,), (torch.float32,)
POOLS = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Tensor:
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


@dataclass(frozen=True)
class Fixed:
    """What the library is always given: its argument of that name once more, or None."""

    of: str | None = None
    role = "-"


@dataclass(frozen=True)
class Number:
    """A number; kind is the schema's type: "int", "float", or "float?" for one that may be None."""

    kind: str

    @property
    def role(self) -> str:
        return {"int": "i", "float": "f", "float?": "F"}[self.kind]

    def taken(self, name: str, x: Any) -> int | float | None:
        x = tensor_checks.number(name, x, int if self.kind == "int" else float)
        if x is None and self.kind != "float?":
            raise TypeError(f"{name}: expected a number, got NoneType")
        return x


class Operator:
    """torch.ops.gdn.<exported.name>. A call takes the library's arguments, writes into
    given tensors.

    exported   the library's function, by dtype and device of the pool
    arguments  the library's, in their order; "initial_state" is the pool. The operator has them
               without the Fixed
    """

    def __init__(
        self, exported: Exported, arguments: dict[str, Tensor | Number | Fixed]
    ) -> None:
        self.exported, self.arguments = exported, arguments
        self.takes = {
            name: of for name, of in arguments.items() if not isinstance(of, Fixed)
        }
        self._own = [
            i for i, of in enumerate(arguments.values()) if not isinstance(of, Fixed)
        ]
        self._pool = list(arguments).index("initial_state")
        self._roles = "".join(of.role for of in arguments.values()).encode()
        name = exported.name
        self.operator = register(
            name, _schema(self.takes), self._real, self._fake, name
        )

    def __call__(self, *args: Any) -> None:
        if is_dynamo_compiling():
            self.operator(*[args[i] for i in self._own])
            return
        native = straight_call.module
        if native is not None and native.fits(self._roles, args):
            pool = args[self._pool]
            self.exported[pool.dtype, pool.is_cuda](*args)
            native.wrote(self._roles, args)
            return
        self.operator(*self._plain([args[i] for i in self._own]))

    def _plain(self, args: list) -> list:
        """What torch would answer with an error of its own, or with a copy that nobody
        asked for.
        """
        for i, (name, of) in enumerate(self.takes.items()):
            if isinstance(of, Number):
                args[i] = of.taken(name, args[i])
            elif args[i] is not None or not of.optional:
                tensor_checks.plain(name, tensor_checks.tensor(name, args[i]))
        return args

    def _real(self, *own: Any) -> None:
        args = dict(zip(self.takes, own, strict=True))
        pool = tensor_checks.tensor("initial_state", args["initial_state"])
        # first of all: where there is none, the reason is more than a dtype
        function = self.exported[pool.dtype, pool.is_cuda]
        fixed = {
            name: args.get(of.of)
            for name, of in self.arguments.items()
            if name not in args
        }
        both = args | fixed
        given = tuple([both[name] for name in self.arguments])
        native = straight_call.module
        if native is None or not native.fits(self._roles, given):
            self._in_words(args)
        function(*given)

    def _in_words(self, args: dict[str, Any]) -> None:
        """Check what a library cannot see."""
        tensors = self._checked(args)
        for name, x in tensors.items():
            tensor_checks.stored(name, x)
        written = {name: x for name, x in tensors.items() if self.takes[name].written}
        read = {name: x for name, x in tensors.items() if name not in written}
        tensor_checks.outputs_apart(written, read)

    def _fake(self, *own: Any) -> None:
        self._checked(dict(zip(self.takes, own, strict=True)))

    def _checked(self, args: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Check all that is known of fake tensors without a guard on their sizes. The tensors by
        name."""
        device, tensors = args["initial_state"].device, {}
        for name, of in self.takes.items():
            x = args[name]
            if isinstance(of, Number) or (x is None and of.optional):
                continue
            tensor_checks.tensor(name, x, *of.ranks)
            tensor_checks.plain(name, x)
            if of.dtypes and x.dtype not in of.dtypes:
                expected = " or ".join(map(_name, of.dtypes))
                raise TypeError(f"{name}: expected {expected}, got {_name(x.dtype)}")
            if x.device != device:
                where = f"{device}, where initial_state is"
                raise ValueError(f"{name}: expected on {where}, got {x.device}")
            tensors[name] = x
        return tensors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _schema(takes: dict[str, Tensor | Number]) -> str:
    arguments = []
    for i, (name, of) in enumerate(takes.items()):
        kind = of.kind if isinstance(of, Number) else "Tensor"
        if isinstance(of, Tensor):
            kind += f"({chr(ord('a') + i)}!)" if of.written else ""
            kind += "?" if of.optional else ""
        arguments.append(f"{kind} {name}")
    return f"({', '.join(arguments)}) -> ()"
