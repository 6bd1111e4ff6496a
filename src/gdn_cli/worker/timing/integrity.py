"""Has an algo's code changed a part of the timer, which runs in the same process?

Compared are gdn's own functions and classes that time calls, and the clocks below them:
the objects and, of a function, its code, its defaults and what it closes over. Of the
timer's instances: no attribute may hide a method. What C code changes in memory is not
seen.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

_OURS = (
    "gdn_cli.worker.timing",
    "gdn_cli.worker.executor",
    "gdn_cli.records.statistics",
    "gdn_cli.machine.host_load",
)
_ON_CPU = ("measurement", "wall")
_ON_GPU = ("cupti", "events", "graph", "kernels", "nvbench", "trace")
_BELOW = (
    "time:perf_counter",
    "time:perf_counter_ns",
    "time:monotonic",
    "statistics:median",
    "statistics:quantiles",
    "torch.cuda:Event",
    "torch.cuda:Event.record",
    "torch.cuda:Event.elapsed_time",
    "torch.cuda:synchronize",
    "torch.cuda:CUDAGraph.replay",
    "torch.autograd.profiler:profile",
)

# names, each with objects that must stay the same ones
State = tuple[tuple[str, tuple[Any, ...]], ...]


class TamperedError(Exception):
    """Parts of the timer are not what they were before the algo's code was loaded."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


def state(device: str) -> State:
    """The timer's parts as they are now. Holds the objects, so that none of them can be
    freed and replaced by another at the same address.
    """
    for name in (*_ON_CPU, *(_ON_GPU if device == "cuda" else ())):
        with contextlib.suppress(ImportError):  # the tier will say so
            importlib.import_module(f"gdn_cli.worker.timing.{name}")
    ours = [name for name in sorted(sys.modules) if name.startswith(_OURS)]
    parts: list[tuple[str, tuple[Any, ...]]] = []
    for name in ours:
        parts.append((name, (sys.modules[name],)))
        parts += _of_module(name)
    parts += [(name, _parts_of(_named(name))) for name in _BELOW]
    return tuple(parts)


def changed(before: State) -> list[str]:
    """The names of the parts that are not what they were."""
    names = []
    for name, were in before:
        are = _parts_of(_named(name)) if ":" in name else (sys.modules.get(name),)
        # by identity: what is equal may have been exchanged
        if [*map(id, are)] != [*map(id, were)]:
            names.append(name)
    return names


def hidden(instance: Any) -> list[str]:
    """The methods of an instance that an attribute of the same name hides."""
    kind = type(instance)
    attributes = vars(instance) if hasattr(instance, "__dict__") else ()
    return [
        f"{kind.__module__}:{kind.__qualname__}.{name}"
        for name in attributes
        if callable(getattr(kind, name, None))
    ]


def _of_module(name: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for attribute, value in list(vars(sys.modules[name]).items()):
        if callable(value):
            yield f"{name}:{attribute}", _parts_of(value)
        if inspect.isclass(value) and value.__module__ == name:
            # inherited ones too: a new one in the class would hide them
            for method in dir(value):
                inner = inspect.getattr_static(value, method)
                if callable(inner) or isinstance(inner, _METHODS):
                    yield f"{name}:{attribute}.{method}", _parts_of(inner)


_METHODS = staticmethod, classmethod, property


def _named(name: str) -> Any:
    module, path = name.split(":")
    value: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in path.split("."):
        look = inspect.getattr_static if inspect.isclass(value) else getattr
        value = look(value, part, None)
    return value


def _parts_of(value: Any) -> tuple[Any, ...]:
    """The object, and of a function what decides what it does."""
    function = getattr(value, "__func__", value)
    if isinstance(value, property):
        function = value.fget
    if callable(function):
        function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return (value,)
    keywords = (function.__kwdefaults__ or {}).values()
    cells = [cell for cell in function.__closure__ or () if _filled(cell)]
    closed = [cell.cell_contents for cell in cells]
    return value, function, function.__code__, function.__defaults__, *keywords, *closed


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if it is empty
    except ValueError:
        return False
    return True
