"""A program that calls Gated Delta Net, a client: what of it our functions take the place of, by
which hook of its own, and what falls back to the client's function.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import logging
import pkgutil
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_cli import units
from gdn_cli.errors import GdnError, MissingError, one_line
from gdn_cli.text import folded_for

from .library import compile_together

Function = Callable[..., Any]
Values = tuple[Any, ...]  # of a call's arguments, to be compared

_log = logging.getLogger("gdn.serving")
# strides of calls, reasons: limits the memory of a program with ever new sizes
_REMEMBERED = 1000
# client -> how often it called its own function, by the function's name
FALLBACKS: dict[str, Counter[str]] = {}


class Hook(NamedTuple):
    """A place of the client.

    name       what is replaced, in a word
    takes      "module:name" of the client -> functions that have the signatures we know of it;
      keyword-only parameters are our own
    put        called once: puts ours there
    falls_back in words, which calls still go to the client's own
    """

    name: str
    takes: dict[str, tuple[Function, ...]]
    put: Callable[[], None]
    falls_back: str


class Client:
    """What our functions are put into.

    package       its import name
    distribution  where its version is from
    releases      how the known versions begin
    moved         of one of these, modules that lie elsewhere there than in the newest
    fallbacks     how often the client's own function was called, because ours does not take the
      arguments, by the function's name
    """

    def __init__(
        self,
        package: str,
        distribution: str,
        releases: tuple[str, ...],
        hooks: list[Hook],
        moved: dict[str, dict[str, str]] | None = None,
    ) -> None:
        self.package, self.distribution = package, distribution
        self.releases, self.hooks, self.moved = releases, hooks, moved or {}
        self.fallbacks: Counter[str] = Counter()
        FALLBACKS[package] = self.fallbacks
        self.active = False
        self._replaced: set[str] = set()
        self._reports: dict[str, _Reports] = {}
        self._lock = threading.RLock()

    def check(self) -> dict[str, str | None]:
        """The name of each hook -> None, or why it is left alone. MissingError: no client."""
        return {hook.name: self._difference(hook) for hook in self.hooks}

    def install(self) -> list[str]:
        """Put our functions where the client is the one we know. Their names are returned; a line
        in the log (`gdn.serving`) names the others. It does not touch a GPU: libraries are loaded
        at the first call, or by gdn.serving.prepare. MissingError: no client.
        """
        with self._lock:
            for hook in self.hooks:
                if hook.name not in self._replaced:
                    self._install(hook)
            self.active = True
            compile_together()
            return [hook.name for hook in self.hooks if hook.name in self._replaced]

    def _install(self, hook: Hook) -> None:
        reason = self._difference(hook)
        if reason is None:
            try:
                hook.put()
                self._replaced.add(hook.name)
                return
            except (
                AssertionError
            ) as e:  # vLLM's, of a name that another plug-in has taken
                reason = str(e)
        _log.warning("%s: %s is not replaced: %s", self.package, hook.name, reason)

    def uninstall(self) -> None:
        """From now on the client's own functions are called. CUDA graphs that were captured before
        keep ours.
        """
        self.active = False

    def main(self) -> int:
        """`python -m`: two lines for each hook, 0 if all can be used."""
        version = f"{self.package} {self._version() or ''}".strip()
        try:
            differences = self.check()
        except MissingError as e:
            print(folded_for(sys.stdout, str(e)))
            return 1
        for hook in self.hooks:
            reason = differences[hook.name]
            state = f"stays as it is: {reason}" if reason else "can be replaced"
            print(folded_for(sys.stdout, f"{version}: {hook.name} {state}"))
            if not reason:
                print(folded_for(sys.stdout, f"  falls back: {hook.falls_back}"))
        return int(any(differences.values()))

    def _version(self) -> str | None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self.distribution)
        return None

    def _difference(self, hook: Hook) -> str | None:
        own = {path: self.own(path) for path in hook.takes}
        version = self._version()
        if version and not version.startswith(self.releases):
            known = " or ".join(f"{release}x" for release in self.releases)
            return f"version {version}, known is {known}; update gdn"
        for path, expected in hook.takes.items():
            difference = _difference(own[path], expected)
            if difference:
                return f"{path.partition(':')[2]} {difference}"
        return None

    def own(self, path: str) -> Any:
        """What the client has at "module:name" of the newest release. MissingError."""
        path = self.place(path)
        try:
            return pkgutil.resolve_name(path)
        # whatever the client's import does where it does not fit
        except Exception as e:
            hint = (
                f"is {self.package} installed in this environment, and what it needs?"
            )
            reason = f"{path.replace(':', ': no ')} to replace: {one_line(e)}"
            raise MissingError(reason, hint=hint) from None

    def place(self, path: str) -> str:
        """Where the client here has "module:name" of the newest release."""
        module, _, name = path.partition(":")
        version = self._version() or ""
        for release, homes in self.moved.items():
            if version.startswith(release):
                module = homes.get(module, module)
        return f"{module}:{name}"

    def fell_back(self, name: str, reason: str) -> None:
        """Count it; a line in the log for the 1st, 10th, 100th, ... time for the same reason."""
        with self._lock:
            self.fallbacks[name] += 1
            if name not in self._reports:
                self._reports[name] = _Reports(name, self.package)
            self._reports[name].add(reason)

    def guarded(self, name: str, ours: Function) -> Function:
        """A function of (own, *arguments): ours, or own for what ours refuses before it launches
        anything."""
        # kinds of calls -> reason, as a library's refusal takes longer than a call; by what is
        # quicker to look at
        refused: dict[Values, dict[Values, str]] = {}

        def call(own: Function, /, *args: Any, **named: Any) -> Any:
            if not self.active:
                return own(*args, **named)
            kinds = refused.get(_strides(args, named)) if refused else None
            reason = kinds.get(_kind(args, named)) if kinds else None
            if reason is None:
                try:
                    return ours(*args, **named)
                # before anything was launched
                except (ValueError, TypeError, GdnError) as e:
                    reason = str(e)
                    # on a CPU values are looked at too: the next call of the kind may be right
                    lasting = not isinstance(e, GdnError) and not _on_cpu(args, named)
                    if lasting and len(refused) < _REMEMBERED:
                        kinds = refused.setdefault(_strides(args, named), {})
                        kinds[_kind(args, named)] = reason
            self.fell_back(name, reason)
            return own(*args, **named)

        return call


@contextlib.contextmanager
def no_way_back() -> Iterator[None]:
    """The convolution's state has changed: the client's own layer cannot take the call any more."""
    try:
        yield
    except (ValueError, TypeError, GdnError) as e:
        raise RuntimeError(f"gdn: {e}; the cache cannot be used any more") from e


class _Reports:
    """A line in the log for a function's 1st, 10th, 100th, ... fallback for the same reason."""

    def __init__(self, name: str, package: str) -> None:
        self.name, self.package = name, package
        self.counts: Counter[str] = Counter()

    def add(self, message: str) -> None:
        reason = re.sub(r"\d+", "", message)  # the same whatever the sizes
        if reason not in self.counts and len(self.counts) >= _REMEMBERED:
            reason = "other reasons"
        self.counts[reason] += 1
        count = self.counts[reason]
        if str(count).rstrip("0") == "1":
            calls = units.count(count, "call")
            line = "%s falls back to %s's own (%s so far): %s"
            _log.warning(line, self.name, self.package, calls, message)


def _on_cpu(args: Values, named: dict[str, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.is_cpu for x in (*args, *named.values()))


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
    shared = [p for p in parameters if p.kind != p.KEYWORD_ONLY and p.name != "self"]
    return ", ".join(str(p.replace(annotation=p.empty)) for p in shared)


def _difference(own: Function, expected: tuple[Function, ...]) -> str | None:
    taken, known = _signature(own), [_signature(function) for function in expected]
    if taken in known:
        return None
    return f"takes ({taken}), expected ({') or ('.join(known)})"
