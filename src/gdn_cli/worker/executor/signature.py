"""Does a built entry point fit the definition: number of arguments, order and style?"""

from __future__ import annotations

import inspect
import re
from typing import Any

from ...catalog.formats import Definition, Solution


def match(function: Any, definition: Definition, solution: Solution) -> dict[str, str]:
    """{"state": ok | skipped | failed, "detail"} for a built entry point."""
    inputs = list(definition["inputs"])
    outputs = list(definition["outputs"])
    passing = solution["spec"]["destination_passing_style"]
    wanted = inputs + outputs if passing else inputs
    style = "destination passing" if passing else "value returning"
    count, names = _parameters(function)
    if count is None:
        detail = "the entry point does not say which parameters it has"
        return {"state": "skipped", "detail": detail}
    if count != len(wanted):
        other = len(inputs) if passing else len(inputs) + len(outputs)
        advice = "; set destination_passing the other way?" if count == other else ""
        passed = f"{style} passes {len(wanted)} ({', '.join(wanted)})"
        detail = f"takes {count} arguments, {passed}{advice}"
        return {"state": "failed", "detail": detail}
    if names and sorted(names) == sorted(wanted) and names != wanted:
        detail = f"order ({', '.join(names)}), expected ({', '.join(wanted)})"
        return {"state": "failed", "detail": detail}
    detail = f"{count} arguments, {style}, as the definition has them"
    return {"state": "ok", "detail": detail}


def _parameters(function: Any) -> tuple[int | None, list[str]]:
    """The number of arguments, and their names if Python knows them; (None, []) for a
    variadic function.

    A TVM-FFI function checks the number of arguments first, so calling it with none is
    safe, and the error gives the number that was compiled in.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
        if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            return len(parameters), [p.name for p in parameters]
    except (ValueError, TypeError):
        pass
    if not inspect.isfunction(function):
        try:
            function()
        except Exception as e:
            if match := re.search(r"[Ee]xpected (\d+) but got 0", str(e)):
                return int(match[1]), []
    return None, []
