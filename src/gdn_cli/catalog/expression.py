"""A condition on whole numbers, written as a Python expression: `rows * lanes <= 128`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping

_KINDS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.Load)
_REFUSED = (
    ast.Pow, ast.LShift, ast.RShift, ast.BitOr, ast.BitXor, ast.BitAnd, ast.MatMult, ast.Invert,
    ast.Is, ast.IsNot, ast.In, ast.NotIn,
)  # fmt: skip


def condition(text: str, names: Collection[str]) -> Callable[[Mapping[str, int]], bool]:
    """The condition as a function of the values of `names`.

    It may hold these names, numbers, `+ - * / // %`, comparisons, `and`, `or`, `not` and brackets. Raises ValueError,
    with what is wrong, for anything else; the function raises ZeroDivisionError where it divides by zero.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        _refuse(tree.body, names)
        code = compile(tree, "condition", "eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("it is not valid Python") from None
    return lambda values: bool(eval(code, {"__builtins__": {}}, dict(values)))


def _refuse(node: ast.AST, names: Collection[str]) -> None:
    """Raise ValueError for the first part that is not allowed."""
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ValueError(f"'{node.id}' is none of {', '.join(names)}")
    elif isinstance(node, ast.Constant):
        if type(node.value) not in (int, float):
            raise ValueError(f"{node.value!r} is no number")
    elif not isinstance(node, _KINDS):
        raise ValueError(f"'{ast.unparse(node)}' is neither a name, a number, arithmetic nor a comparison")
    parts = list(ast.iter_child_nodes(node))
    if any(isinstance(part, _REFUSED) for part in parts):
        raise ValueError(f"'{ast.unparse(node)}' uses an operator that is not allowed")
    for part in parts:
        _refuse(part, names)
