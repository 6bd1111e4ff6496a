"""[tune] of algo.toml, as types."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct

from ..parsing import Text, Wrong
from .expression import condition

# of the generated table, in addition to the constants
_COLUMNS = ("gpu", "sms", "length_up_to", "up_to")
_VALUES = Meta(min_length=1, description="a list of different whole numbers of 32 bits")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class Invariant(Struct, frozen=True, forbid_unknown_fields=True):
    """[tune.invariant] of algo.toml: how a batch-invariant table is made from the tuned
    one (batch_invariance.py).
    """

    # for every row
    constants: dict[str, Annotated[int, Meta(ge=-(2**31), lt=2**31)]] = {}
    # a condition on the constants: other rows are replaced by the next that meets it
    where: Text | None = None


class Tune(Struct, frozen=True, forbid_unknown_fields=True):
    """[tune] of algo.toml: which constants `gdn tune` may choose, and where it writes them."""

    # the generated file in the algo's folder: .h for C++ and CUDA, .py for Triton and
    # Python
    file: Text
    # axes of the op: their product decides which row of the file is used
    size: Annotated[
        tuple[str, ...], Meta(min_length=1, description="at least one axis of the op")
    ]
    # name -> the values to try, in the order of algo.toml
    constants: dict[
        str, Annotated[tuple[Annotated[int, Meta(ge=-(2**31), lt=2**31)], ...], _VALUES]
    ]
    where: Text | None = None  # a condition on the constants: see expression.py
    # axes of the op: rows are looked up by their product first, then by size; none: by size alone
    length: tuple[str, ...] = ()
    invariant: Invariant | None = None

    def __post_init__(self) -> None:
        for name in self.invariant.constants if self.invariant else ():
            if name not in self.constants:
                raise Wrong(
                    ("invariant", "constants"),
                    f"constants of [tune]: {', '.join(self.constants)}",
                    name,
                )
        if self.invariant and not (self.invariant.where or self.invariant.constants):
            raise Wrong(("invariant",), "constants, or where", {})
        for name, values in self.constants.items():
            if not _IDENTIFIER.fullmatch(name) or name in _COLUMNS:
                rule = (
                    "a name that is valid in C++ and Python, and not one of"
                    f" {', '.join(_COLUMNS)}"
                )
                raise Wrong(("constants", name), rule, name)
            if len(set(values)) < len(values):
                raise Wrong(("constants", name), _VALUES.description, list(values))
        if not self.constants:
            raise Wrong(
                ("constants",), "at least one constant, such as rows = [1, 2, 4]", {}
            )
        for steps, where in (
            (("where",), self.where),
            (("invariant", "where"), self.invariant and self.invariant.where),
        ):
            try:
                if where is not None:
                    condition(where, self.constants)
            except ValueError as e:
                raise Wrong(
                    steps, f"a condition on the constants, but {e}", where
                ) from None
