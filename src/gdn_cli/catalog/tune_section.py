"""[tune] of algo.toml, as types."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..parsing import Text, WrongError, check_names
from .expression import condition

_Value = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
# valid in C++ and Python, and not one of the generated table's other columns
_Name = Annotated[
    str, Meta(pattern=r"^(?!(gpu|sms|length_up_to|up_to)$)[A-Za-z_]\w*(?!\n)$")
]


class Invariant(Struct, frozen=True, forbid_unknown_fields=True):
    """[tune.invariant] of algo.toml: how a batch-invariant table is made from the tuned
    one (batch_invariance.py).
    """

    # for every row
    constants: dict[str, _Value] = {}
    # a condition on the constants: other rows are replaced by the next that meets it
    where: Text | None = None


class Tune(Struct, frozen=True, forbid_unknown_fields=True):
    """[tune] of algo.toml: which constants `gdn tune` may choose, and where it writes them."""

    # the generated file in the algo's folder: .h for C++ and CUDA, .py for Triton and
    # Python
    file: Text
    # axes of the op: their product decides which row of the file is used
    size: Annotated[tuple[str, ...], Meta(min_length=1)]
    # name -> the values to try, in the order of algo.toml
    constants: dict[_Name, Annotated[tuple[_Value, ...], Meta(min_length=1)]]
    # a condition on the constants: see expression.py
    where: Text | None = None
    # axes of the op: rows are looked up by their product first, then by size; none: by size alone
    length: tuple[str, ...] = ()
    invariant: Invariant | None = None

    def __post_init__(self) -> None:
        self._check_condition("where", self.where)
        if not self.invariant:
            return
        if not (self.invariant.where or self.invariant.constants):
            raise WrongError(["invariant"], "constants, or where", {})
        check_names("invariant", self.invariant.constants, self.constants)
        self._check_condition("invariant.where", self.invariant.where)

    def _check_condition(self, key: str, where: str | None) -> None:
        try:
            if where is not None:
                condition(where, self.constants)
        except ValueError as e:
            expected = f"a condition on the constants, but {e}"
            raise WrongError([key], expected, where) from None
