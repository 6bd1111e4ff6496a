"""Python expressions over whole numbers: a condition, `rows * lanes <= 128`, or a number, `2 * batch_size + 1`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping

_ALLOWED = (
    ast.Name, ast.Constant, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd, ast.Not, ast.BoolOp, ast.boolop,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip


def condition(text: str, names: Collection[str]) -> Callable[[Mapping[str, int]], bool]:
    """The condition as a function of the values of `names`.

    It may hold these names, numbers, `+ - * / // %`, comparisons, `and`, `or`, `not` and brackets. Raises ValueError,
    with what is wrong, for anything else; the function raises ZeroDivisionError where it divides by zero.
    """
    value = _function(text, names)
    return lambda values: bool(value(values))


def size(text: str, values: Mapping[str, int]) -> int:
    """The positive whole number that an expression of `values` is. Raises ValueError, with what is wrong."""
    try:
        found = _function(text, values)(values)
    except ZeroDivisionError:
        raise ValueError("it divides by zero") from None
    if type(found) is not int or found < 1:
        raise ValueError(f"it is {found}, not a positive whole number")
    return found


def _function(text: str, names: Collection[str]) -> Callable[[Mapping[str, int]], int | float | bool]:
    try:
        tree = ast.parse(text.strip(), mode="eval")
        for node in ast.walk(tree.body):
            if isinstance(node, ast.Name) and node.id not in names:
                raise ValueError(f"'{node.id}' is none of {', '.join(names)}")
            number = not isinstance(node, ast.Constant) or type(node.value) in (int, float)
            if not isinstance(node, _ALLOWED) or not number:
                raise ValueError("it holds more than names, numbers, `+ - * / // %`, comparisons, and, or, not")
        code = compile(tree, "expression", "eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("it is not valid Python") from None
    return lambda values: eval(code, {"__builtins__": {}}, dict(values))
