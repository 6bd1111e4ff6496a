"""Python expressions over whole numbers: a condition, `rows * lanes <= 128`, or a
value, `2 * batch_size + 1`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping

_ALLOWED = (
    ast.Name,
    ast.Constant,
    ast.Load,
    ast.UnaryOp,
    ast.USub,
    ast.UAdd,
    ast.Not,
    ast.BoolOp,
    ast.boolop,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
)


def condition(text: str, names: Collection[str]) -> Callable[[Mapping[str, int]], bool]:
    """The condition as a function of the values of `names`; errors as in `formula`."""
    value = formula(text, names)
    return lambda values: bool(value(values))


def formula(text: str, names: Collection[str]) -> Callable[[Mapping[str, int]], float]:
    """The value as a function of the values of `names`.

    It may contain these names, numbers, `+ - * / // %`, comparisons, `and`, `or`, `not`
    and brackets. Raises ValueError for anything else, with the reason; so does the
    function where there is no value (1/0).
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        for node in ast.walk(tree.body):
            if isinstance(node, ast.Name) and node.id not in names:
                raise ValueError(f"'{node.id}' is not one of {', '.join(names)}")
            odd = isinstance(node, ast.Constant) and type(node.value) not in (
                int,
                float,
            )
            if odd or not isinstance(node, _ALLOWED):
                raise ValueError(
                    "it has more than names, numbers, `+ - * / // %`, comparisons, and, or, not"
                )
        code = compile(tree, "formula", "eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("it is not valid Python") from None

    def value(values: Mapping[str, int]) -> float:
        try:
            return eval(code, {"__builtins__": {}}, dict(values))
        except ZeroDivisionError:
            raise ValueError("it divides by zero") from None
        except (OverflowError, MemoryError):
            raise ValueError("its numbers are too large") from None

    return value


def size(text: str, values: Mapping[str, int]) -> int:
    """The value of `text`, which must be a positive whole number: otherwise raises
    ValueError, with the reason.
    """
    value = formula(text, values)(values)
    if type(value) is not int or value < 1:
        raise ValueError(f"it is {value}, not a positive whole number")
    return value
