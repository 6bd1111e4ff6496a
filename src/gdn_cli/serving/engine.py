"""Functions of an installed engine, replaced by ours and given back."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ..errors import GdnError, MissingError, one_line
from ..text import folded_for

_log = logging.getLogger("gdn_cli.serving")
_REMEMBERED = 1000  # strides of calls: limits the memory of a program with ever new sizes


class Engine:
    """The functions of an engine that ours replace.

    package    its import name
    functions  "module:function" of the engine -> ours, of the same signature; keyword-only parameters are our own
    fallbacks  how often a replaced function called the engine's own, because ours does not take its arguments
    """

    def __init__(self, package: str, functions: dict[str, Callable[..., Any]]) -> None:
        self.package, self.functions = package, functions
        self.fallbacks: Counter[str] = Counter()
        self._replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # where -> the engine's, ours
        self._lock = threading.Lock()

    def check(self) -> dict[str, str | None]:
        """The engine's name of each function -> None, or what differs in its signature. MissingError: no engine."""
        return {where.partition(":")[2]: _difference(self._own(where), ours) for where, ours in self.functions.items()}

    def install(self) -> list[str]:
        """Replace the functions that have the signature we know, wherever the engine's modules hold them. Their names
        are returned; a line in the log (`gdn_cli.serving`) names the others. It does not touch a GPU: libraries are
        loaded at the first call, or by gdn_cli.serving.prepare. MissingError: no engine."""
        with self._lock:
            for where, ours in self.functions.items():
                name, own = where.partition(":")[2], self._own(where)
                if where in self._replaced:
                    continue
                if different := _difference(own, ours):
                    _log.warning("%s is not replaced: %s", name, different)
                    continue
                self._replaced[where] = own, self._replacement(name, own, ours)
                self._swap(*self._replaced[where])
            return [where.partition(":")[2] for where in self._replaced]

    def uninstall(self) -> None:
        """Give the engine its own functions back. CUDA graphs that were captured before keep ours."""
        with self._lock:
            for own, ours in self._replaced.values():
                self._swap(ours, own)
            self._replaced.clear()

    def main(self) -> int:
        """`python -m`: a line for each function, 0 if all can be replaced."""
        try:
            found = self.check()
        except MissingError as e:
            print(folded_for(sys.stdout, str(e)))
            return 1
        for name, different in found.items():
            line = f"{self._version()}: {name} {different or 'has the signature that is replaced'}"
            print(folded_for(sys.stdout, line))
        return int(any(found.values()))

    def _version(self) -> str:
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            return self.package

    def _own(self, where: str) -> Callable[..., Any]:
        if where in self._replaced:
            return self._replaced[where][0]
        module, _, name = where.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as e:  # whatever the engine's import does where it does not fit
            hint = f"is {self.package} installed in this environment?"
            raise MissingError(f"{module}: no {name} to replace: {one_line(e)}", hint=hint) from None

    def _swap(self, old: Any, new: Any) -> None:
        """In all of the engine's modules: most import the function by its name."""
        for name, module in list(sys.modules.items()):
            if name == self.package or name.startswith(f"{self.package}."):
                for attribute, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, attribute, new)

    def _replacement(self, name: str, own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        # kinds of calls, as a library's refusal takes longer than a call; by what is quicker to look at
        refused: dict[tuple, set[tuple]] = {}
        said: set[str] = set()  # what the refused argument was

        @functools.wraps(own)
        def call(*args: Any, **named: Any) -> Any:
            kinds = refused.get(_strides(args, named)) if refused else None
            if kinds is None or _kind(args, named) not in kinds:
                try:
                    return ours(*args, **named)
                except (ValueError, TypeError, GdnError) as e:  # before anything was launched
                    if (about := str(e).partition(":")[0]) not in said:
                        said.add(about)
                        _log.warning("%s falls back to %s's own (said once): %s", name, self.package, e)
                    if not isinstance(e, GdnError) and len(refused) < _REMEMBERED:
                        refused.setdefault(_strides(args, named), set()).add(_kind(args, named))
            self.fallbacks[name] += 1
            return own(*args, **named)

        return call


def _strides(args: tuple, named: dict[str, Any]) -> tuple:
    return tuple([x.stride() if isinstance(x, torch.Tensor) else x for x in (*args, *named.values())])


def _kind(args: tuple, named: dict[str, Any]) -> tuple:
    """What a library's checks look at: alignments up to 32 bytes, and everything but values."""
    return tuple(
        (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 32) if isinstance(x, torch.Tensor) else x
        for x in (*args, *named, *named.values())
    )


def _signature(function: Callable[..., Any]) -> str:
    """Names in their order, and defaults."""
    of = inspect.signature(function).parameters.values()
    return ", ".join(str(p.replace(annotation=p.empty)) for p in of if p.kind != p.KEYWORD_ONLY)


def _difference(own: Callable[..., Any], ours: Callable[..., Any]) -> str | None:
    if _signature(own) != (expected := _signature(ours)):
        return f"takes ({_signature(own)}), expected ({expected})"
    return None
