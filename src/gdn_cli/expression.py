"""A condition on whole numbers, written as a Python expression: `rows * lanes <= 128`. It is walked, never executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}


def condition(text: str, names: Collection[str]) -> Callable[[Mapping[str, int]], bool]:
    """The condition as a function of the values of `names`.

    It may hold these names, numbers, `+ - * / // %`, comparisons, `and`, `or`, `not` and brackets. Raises ValueError,
    with what is wrong, for anything else; the function raises ZeroDivisionError where it divides by zero.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("it is not valid Python") from None
    _refuse(tree, names)
    return lambda values: bool(_value(tree, values))


def _refuse(node: ast.AST, names: Collection[str]) -> None:
    """Raise ValueError for the first part that is not allowed."""
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ValueError(f"'{node.id}' is none of {', '.join(names)}")
        return
    if isinstance(node, ast.Constant):
        if type(node.value) not in (int, float):
            raise ValueError(f"{node.value!r} is no number")
        return
    operators: list[ast.AST] = []
    if isinstance(node, ast.BinOp):
        known, operators, parts = _BINARY, [node.op], [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        known, operators, parts = _UNARY, [node.op], [node.operand]
    elif isinstance(node, ast.Compare):
        known, operators, parts = _COMPARE, [*node.ops], [node.left, *node.comparators]
    elif isinstance(node, ast.BoolOp):
        known, parts = {}, node.values
    else:
        raise ValueError(f"'{ast.unparse(node)}' is neither a name, a number, arithmetic nor a comparison")
    for op in operators:
        if type(op) not in known:
            raise ValueError(f"'{ast.unparse(node)}' uses an operator that is not allowed")
    for part in parts:
        _refuse(part, names)


def _value(node: Any, values: Mapping[str, int]) -> Any:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, values))
    if isinstance(node, ast.Compare):
        sides = [_value(side, values) for side in [node.left, *node.comparators]]
        pairs = zip(node.ops, sides, sides[1:], strict=False)
        return all(_COMPARE[type(op)](left, right) for op, left, right in pairs)
    each = (_value(part, values) for part in node.values)
    return all(each) if isinstance(node.op, ast.And) else any(each)
