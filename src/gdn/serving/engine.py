"""Functions of an installed engine, replaced by ours and given back."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn_cli import units
from gdn_cli.errors import GdnError, MissingError, one_line
from gdn_cli.text import folded_for

Function = Callable[..., Any]
Values = tuple[Any, ...]  # of a call's arguments, to be compared

_log = logging.getLogger("gdn.serving")
# strides of calls, reasons: limits the memory of a program with ever new sizes
_REMEMBERED = 1000
# how the engines' functions call the pool
_POOLS = ("initial_state", "initial_state_source")


class Engine:
    """The functions of an engine that ours replace.

    package    its import name
    functions  "module:function" of the engine -> ours, of the same signature;
      keyword-only parameters are our own
    fallbacks  how often a replaced function called the engine's own, because ours does not take its
               arguments. A call with a pool of two axes, vLLM's warm-up, is not counted
    """

    def __init__(self, package: str, functions: dict[str, Function]) -> None:
        self.package, self.functions = package, functions
        self.fallbacks: Counter[str] = Counter()
        # where -> the engine's, ours
        self._replaced: dict[str, tuple[Function, Function]] = {}
        self._lock = threading.Lock()

    def check(self) -> dict[str, str | None]:
        """The engine's name of each function -> None, or what differs in its signature.
        MissingError: no engine.
        """
        return {
            _name(path): _difference(self._own(path), ours)
            for path, ours in self.functions.items()
        }

    def install(self) -> list[str]:
        """Replace the functions that have the signature we know, wherever the engine's
        modules hold them. Their names are returned; a line in the log
        (`gdn.serving`) names the others. It does not touch a GPU: libraries are
        loaded at the first call, or by gdn.serving.prepare. MissingError: no
        engine.
        """
        with self._lock:
            for path, ours in self.functions.items():
                name, own = _name(path), self._own(path)
                if path in self._replaced:
                    continue
                difference = _difference(own, ours)
                if difference:
                    _log.warning("%s is not replaced: %s", name, difference)
                    continue
                self._replaced[path] = own, self._replacement(name, own, ours)
                self._swap(*self._replaced[path])
            return list(map(_name, self._replaced))

    def uninstall(self) -> None:
        """Give the engine its own functions back. CUDA graphs that were captured before
        keep ours.
        """
        with self._lock:
            for own, ours in self._replaced.values():
                self._swap(ours, own)
            self._replaced.clear()

    def main(self) -> int:
        """`python -m`: a line for each function, 0 if all can be replaced."""
        version = self.package
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version += f" {importlib.metadata.version(self.package)}"
        try:
            differences = self.check()
        except MissingError as e:
            print(folded_for(sys.stdout, str(e)))
            return 1
        for name, difference in differences.items():
            state = difference or "has the signature that is replaced"
            print(folded_for(sys.stdout, f"{version}: {name} {state}"))
        return int(any(differences.values()))

    def _own(self, path: str) -> Function:
        if path in self._replaced:
            return self._replaced[path][0]
        module, _, name = path.partition(":")
        try:
            own: Function = getattr(importlib.import_module(module), name)
        # whatever the engine's import does where it does not fit
        except Exception as e:
            hint = f"is {self.package} installed in this environment?"
            reason = f"{module}: no {name} to replace: {one_line(e)}"
            raise MissingError(reason, hint=hint) from None
        return own

    def _swap(self, old: Any, new: Any) -> None:
        """In all of the engine's modules: most import the function by its name."""
        for name, module in list(sys.modules.items()):
            if name == self.package or name.startswith(f"{self.package}."):
                for attribute, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, attribute, new)

    def _replacement(self, name: str, own: Function, ours: Function) -> Function:
        # kinds of calls -> why, as a library's refusal takes longer than a call; by what is
        # quicker to look at
        refused: dict[Values, dict[Values, str]] = {}
        reports = _Reports(name, self.package)
        parameters = list(inspect.signature(ours).parameters)
        pool_name = next((x for x in _POOLS if x in parameters), "")
        position = parameters.index(pool_name) if pool_name else sys.maxsize

        @functools.wraps(own)
        def call(*args: Any, **named: Any) -> Any:
            given = args[position] if position < len(args) else named.get(pool_name)
            pool = given if isinstance(given, Tensor) else None
            # vLLM's warm-up, which is none of states
            if pool is not None and pool.dim() == 2:
                return own(*args, **named)
            kinds = refused.get(_strides(args, named)) if refused else None
            why = kinds.get(_kind(args, named)) if kinds else None
            if why is None:
                try:
                    return ours(*args, **named)
                # before anything was launched
                except (ValueError, TypeError, GdnError) as e:
                    why = str(e)
                    # on a CPU values are looked at too: the next call of the kind may be right
                    on_cpu = pool is not None and pool.is_cpu
                    lasting = not isinstance(e, GdnError) and not on_cpu
                    if lasting and len(refused) < _REMEMBERED:
                        kinds = refused.setdefault(_strides(args, named), {})
                        kinds[_kind(args, named)] = why
            with self._lock:
                self.fallbacks[name] += 1
                reports.add(why)
            return own(*args, **named)

        return call


class _Reports:
    """A line in the log for a function's 1st, 10th, 100th, ... fallback for the same reason."""

    def __init__(self, name: str, package: str) -> None:
        self.name, self.package = name, package
        self.counts: Counter[str] = Counter()

    def add(self, why: str) -> None:
        reason = re.sub(r"\d+", "", why)  # the same whatever the sizes
        if reason not in self.counts and len(self.counts) >= _REMEMBERED:
            reason = "other reasons"
        self.counts[reason] += 1
        count = self.counts[reason]
        if str(count).rstrip("0") == "1":
            calls = units.count(count, "call")
            line = "%s falls back to %s's own (%s so far): %s"
            _log.warning(line, self.name, self.package, calls, why)


def _name(path: str) -> str:
    return path.partition(":")[2]


def _plain(x: Any) -> Any:
    """What stands for an argument that is no tensor: itself, if it can be compared."""
    return x if x is None or isinstance(x, (bool, int, float, str)) else type(x)


def _strides(args: Values, named: dict[str, Any]) -> Values:
    values = (*args, *named.values())
    return tuple([x.stride() if isinstance(x, Tensor) else _plain(x) for x in values])


def _kind(args: Values, named: dict[str, Any]) -> Values:
    """What the checks of a call on a GPU look at: alignments up to 32 bytes, which tensors share
    memory, gradients, and everything but values."""
    values = (*args, *named.values())
    storages = [x.untyped_storage().data_ptr() for x in values if isinstance(x, Tensor)]
    shared = tuple(map(storages.index, storages))
    described = [_described(x) if isinstance(x, Tensor) else _plain(x) for x in values]
    return torch.is_grad_enabled(), shared, tuple(named), tuple(described)


def _described(x: Tensor) -> Values:
    address = x.data_ptr()
    layout = x.dtype, x.shape, x.stride(), x.device, address % 32, address == 0
    return *layout, x.requires_grad, x.is_neg(), x.is_conj()


def _signature(function: Function) -> str:
    """Names in their order, and defaults."""
    parameters = inspect.signature(function).parameters.values()
    shared = [p for p in parameters if p.kind != p.KEYWORD_ONLY]
    return ", ".join(str(p.replace(annotation=p.empty)) for p in shared)


def _difference(own: Function, ours: Function) -> str | None:
    taken, expected = _signature(own), _signature(ours)
    if taken == expected:
        return None
    return f"takes ({taken}), expected ({expected})"
