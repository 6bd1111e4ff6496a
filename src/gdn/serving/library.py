"""Functions that compiled rungs export for engines, looked up in their libraries on first use."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gdn_cli import __version__
from gdn_cli.errors import GdnError, MissingError, one_line
from gdn_cli.machine import compiling, libraries

from .. import straight_call

# where a library has one name per dtype
_SUFFIX = {torch.float32: "", torch.bfloat16: "_bf16", torch.float16: "_f16"}
_lock = threading.RLock()
_log = logging.getLogger("gdn.serving")
_known: list[Exported] = []
_together = threading.Event()


class Exported(dict[tuple[torch.dtype, bool], Callable[..., None]]):
    """A function by (dtype of the pool, whether it is on a GPU). No lock is taken for
    one that has been looked up.

    name    the function's name in its library
    cuda    the rung for a GPU, "op/name"
    cpu     the rung for a CPU
    halves  the rung for a GPU and a pool of bfloat16 or float16, if that is another
    rare    compiled where it is called, not with the others, and not in the log's line
    """

    def __init__(
        self,
        name: str,
        cuda: str,
        cpu: str | None = None,
        halves: str | None = None,
        *,
        rare: bool = False,
    ) -> None:
        self.name, self.cuda, self.cpu, self.halves = name, cuda, cpu, halves
        # a build that fails takes as long as one that works
        self.failed: dict[tuple[torch.dtype, bool], GdnError] = {}
        self.rare = rare
        _known.append(self)

    def __missing__(self, kind: tuple[torch.dtype, bool]) -> Callable[..., None]:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            reason = "its library cannot be loaded while a CUDA graph is captured"
            hint = (
                "call gdn.serving.prepare(), or the function itself, before the capture"
            )
            raise GdnError(f"{self.name}: {reason}", hint=hint)
        with _lock:
            if kind in self.failed:
                raise self.failed[kind].with_traceback(None)
            if kind not in self:
                _announce(kind[1])
                if kind[1] and _together.is_set():
                    _compile_for(kind[0])
                try:
                    self[kind] = self._function(*kind)
                    straight_call.native()  # with the library, not later in a capture
                except GdnError as e:
                    self.failed[kind] = e
                    raise
            return self[kind]

    def rung(self, dtype: torch.dtype, cuda: bool) -> str | None:
        if not cuda:
            return self.cpu
        return self.cuda if dtype == torch.float32 else self.halves or self.cuda

    def _function(self, dtype: torch.dtype, cuda: bool) -> Callable[..., None]:
        if dtype not in _SUFFIX:
            hint = "use float32, bfloat16 or float16"
            reason = f"{self.name}: no function for a pool of {dtype}"
            raise MissingError(reason, hint=hint)
        rung = self.rung(dtype, cuda)
        if rung is None:
            hint = "move the tensors to a GPU"
            raise MissingError(f"{self.name}: no function for a CPU", hint=hint)
        kernel = _kernel(rung)
        for name in (self.name + _SUFFIX[dtype], self.name):
            function: Callable[..., None] | None = kernel.exported(name)
            if function:
                return function
        reason = f"{rung}: its library has no function {self.name}"
        raise MissingError(reason, hint="update gdn")


def compile_together() -> None:
    """From now on the first library that a GPU needs has all others for the same dtype compiled in
    the background: an engine asks for them one after another."""
    _together.set()


@functools.cache
def _compile_for(dtype: torch.dtype) -> None:
    """Start to compile what a GPU needs for pools of this dtype and has not."""
    jobs = []
    rungs = {exported.rung(dtype, True) for exported in _known if not exported.rare}
    for rung in sorted(filter(None, rungs)):
        # one that cannot be there raises where it is called
        with contextlib.suppress(GdnError):
            job = _state(rung).job
            if job:
                jobs.append(job)
    compiling.start_all(libraries.kept(), jobs)


class Library:
    """A loaded library."""

    def __init__(self, file: Path) -> None:
        import tvm_ffi

        self._module = tvm_ffi.load_module(str(file))

    def exported(self, name: str) -> Any:
        """The function of this name, None if it has none."""
        module = self._module
        return module.get_function(name) if module.implements_function(name) else None


def _kernel(rung: str) -> Library:
    """The library of a rung on the current device: built beforehand, else compiled here."""
    algo = libraries.source(rung)
    platform = _platform(algo)
    file = libraries.prebuilt(algo, *platform)
    if file:
        try:
            return Library(file)
        except Exception as e:  # it is damaged, or was linked with what is not here
            _log.warning("%s cannot be loaded, and is compiled: %s", file, one_line(e))
    file = libraries.compiled(algo, *platform)
    try:
        return Library(file)
    except Exception:  # an old build, linked with libraries that have changed since
        file.unlink(missing_ok=True)
        return Library(libraries.compiled(algo, *platform))


def _platform(algo: libraries.Source) -> tuple[tuple[int, int] | None, str | None]:
    """The current GPU's capability and torch's CUDA; None of both for a CPU's library."""
    if algo.language == "cpp":
        return None, None
    if not torch.cuda.is_available():
        hint = "`python -c 'import torch; torch.cuda.init()'` says why"
        raise MissingError(f"{algo.name}: no GPU here", hint=hint)
    capability = torch.cuda.get_device_capability()
    if capability < algo.capability:
        needs, has = (".".join(map(str, x)) for x in (algo.capability, capability))
        reason = f"{algo.name} needs compute capability {needs}, here is {has}"
        raise MissingError(reason, hint="another GPU")
    return capability, torch.version.cuda


@functools.cache
def _announce(cuda: bool) -> None:
    """One line in the log for the kernels of this device, before the first is loaded."""
    states: dict[str, _State] = {}
    for exported in _known:
        if exported.rare:
            continue
        rungs = (exported.cuda, exported.halves) if cuda else (exported.cpu,)
        for rung in filter(None, rungs):
            # one that cannot be there raises where it is called
            with contextlib.suppress(GdnError):
                states[rung] = _state(rung)
    described = ", ".join(f"{rung} {state.words}" for rung, state in states.items())
    later = any(state.job for state in states.values())
    level = logging.WARNING if later else logging.INFO
    _log.log(level, "gdn %s: %s", __version__, described)


class _State(NamedTuple):
    """Of a rung's library: in words, and what there is to compile."""

    words: str
    job: compiling.Job | None


def _state(rung: str) -> _State:
    algo = libraries.source(rung)
    capability, cuda = _platform(algo)
    arch = libraries.architecture(algo, capability)
    target = libraries.target(arch)
    file = libraries.prebuilt(algo, capability, cuda)
    if file:
        return _State(f"prebuilt for {file.stem.rpartition('-')[2]}", None)
    place = libraries.kept() / libraries.platform_name(cuda)
    if (place / algo.file(target)).is_file():
        return _State(f"compiled before for {target}", None)
    return _State(f"to be compiled for {target}", compiling.Job(algo, arch, cuda))
