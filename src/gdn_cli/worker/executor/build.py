"""Solution -> callable, through flashinfer-bench's own builders, so that the contest's
judge builds the same.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ... import files
from ...catalog.formats import Definition, Solution
from ...errors import FAILED, MISSING, GdnError, MissingError
from ...machine import inventory, locks
from ...machine.inventory import environment
from ..timing.subject import listed
from . import build_cache, emulation

_ERRORS = 5  # of a compiler: the later ones often follow from the first

# compilers' messages about a full or unwritable disk
_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|File too large"
)
_ELSEWHERE = "TMPDIR and GDN_HOME name other folders"


class BuildFailedError(GdnError):
    """The builder's full reason: a missing package, a compiler's errors, a signature
    that does not match. `missing`: a package, or a cache that cannot be written: not
    the algo's fault.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message, code=MISSING if missing else FAILED)
        self.missing = missing


class Kernel:
    """A built solution, called in destination-passing style whatever its own style.

    `kernel(inputs, outputs)` fills `outputs` (tensors in the definition's order). For a
    value-returning solution `returns(inputs)` gives the returned values, so that a
    check sees their shapes and dtypes before anything is copied.
    """

    def __init__(self, runnable: Any) -> None:
        self.runnable = runnable
        # flashinfer-bench wraps it in a variadic one
        self.entry_point = runnable._callable
        self.destination_passing = runnable.metadata.destination_passing_style
        # the Python module of the entry point, for optional functions of the algo
        self.module: Any = sys.modules.get(
            runnable.metadata.misc.get("module_name", "")
        )
        self.last: Any = None  # what the last call returned

    @property
    def is_library(self) -> bool:
        """Whether it is compiled from C++ or CUDA: no Python runs in a call."""
        return self.runnable.metadata.misc.get("binary") is not None

    def backend(self, inputs: list) -> str | None:
        """Which path the algo takes on these inputs, in its own words; None if it has
        only one or does not say.

        A Python module says it by `backend(*inputs)`, a library by `fallback()`.
        """
        tell = getattr(self.module, "backend", None)
        return str(tell(*inputs)) if callable(tell) else self.fallback()

    def fallback(self) -> str | None:
        """The slower path that a library takes on the current device although it has a
        faster one, and why; or None.

        A C++ or CUDA algo says it with a second function,
        TVM_FFI_DLL_EXPORT_TYPED_FUNC(fallback, ...): no arguments, returns a text that
        is empty if it takes its fastest path.
        """
        tell = self.exported("fallback") if self.is_library else None
        return str(tell()) or None if tell else None

    def exported(self, name: str) -> Any:
        """The function of this name in a library, None if it has none."""
        import tvm_ffi

        library = tvm_ffi.load_module(str(self.runnable.metadata.misc["binary"]))
        return library.get_function(name) if library.implements_function(name) else None

    def __call__(self, inputs: list, outputs: list) -> None:
        """One call, as the contest's judge times it: a value-returning solution
        allocates its own results.
        """
        if self.destination_passing:
            self.runnable(*inputs, *outputs)
        else:
            # freed first: a call finds as much free memory as if nothing were kept
            self.last = None
            self.last = self.runnable(*inputs)

    def returns(self, inputs: list) -> list:
        return listed(self.runnable(*inputs))


def build(
    definition: Definition,
    solution: Solution,
    *,
    specific: bool = False,
    emulated: bool = False,
) -> Kernel:
    """Build a solution; raises BuildFailedError with the full cause.

    `specific` (algo.toml): compile for all features of this GPU, such as sm_90a; by
    default the builder uses only those that later GPUs have too, such as sm_90. A
    TVM_FFI_CUDA_ARCH_LIST that is set takes precedence.
    `emulated`: CUDA as C++ for the CPU.
    """
    from flashinfer_bench import data

    variables = {}
    if emulated:
        variables = emulation.compiler()
        solution = emulation.for_cpu(solution)
    if arch := _own_architecture() if specific else None:
        # the builder's cache key has the name, but not the architecture
        variables[inventory.ARCHITECTURES] = arch
        solution = solution | {"name": f"{solution['name']}-sm_{arch.replace('.', '')}"}
    cache = _cache()
    try:
        meant = data.Definition.model_validate(definition)
        parsed = data.Solution.model_validate(solution)
        with (
            _alone(cache, parsed.hash(), solution["name"]),
            environment(variables),
        ):
            return Kernel(_built(meant, parsed))
    # builders wrap most causes in BuildError, and let some through
    except Exception as e:
        failed = _cause(e, cache)
        if emulated and not failed.missing:
            failed = BuildFailedError(emulation.explained(str(failed)))
        raise failed from None


def _built(definition: Any, solution: Any) -> Any:
    """Build with flashinfer-bench. A damaged library in the cache is compiled again."""
    from flashinfer_bench.compile import BuilderRegistry

    registry = BuilderRegistry.get_instance()
    library = build_cache.library(registry, solution)
    if library is None or solution.hash() in registry._cache:  # it is loaded already
        return registry.build(definition, solution)
    was_there = build_cache.drop_damaged(library)
    try:
        runnable = registry.build(definition, solution)
    except Exception:
        if not was_there or registry._cache.pop(solution.hash(), None) is None:
            raise
        # complete but cannot be loaded: built against versions no longer installed
        build_cache.drop(library)
        runnable = registry.build(definition, solution)
    build_cache.sign(library)
    return runnable


def _own_architecture() -> str | None:
    """9.0a on a GPU of compute capability 9.0; None if a list is set or the GPU has
    no features of its own.
    """
    import torch

    if os.environ.get(inventory.ARCHITECTURES) or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return inventory.specific(f"{major}.{minor}")


def reference(definition: Definition) -> Kernel:
    """The definition's own reference, as flashinfer-bench builds it; MissingError if
    the cache cannot be used.
    """
    from flashinfer_bench import data
    from flashinfer_bench.compile import BuilderRegistry

    parsed = data.Definition.model_validate(definition)
    try:
        with _alone(_cache(), parsed.name, f"the reference of {parsed.name}"):
            return Kernel(BuilderRegistry.get_instance().build_reference(parsed))
    except BuildFailedError as e:
        raise MissingError(str(e)) from None


def _cache() -> Path:
    """The folder of builds, created if needed; BuildFailedError if it cannot be used."""
    from flashinfer_bench.env import get_fib_cache_path

    folder = get_fib_cache_path()
    if wrong := build_cache.unusable(folder):
        raise BuildFailedError(wrong, missing=True)
    return folder


# a lock on a file is the whole process's
_threads: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


@contextlib.contextmanager
def _alone(cache: Path, key: str, name: str) -> Iterator[None]:
    """One process at a time builds with this key; a waiting process says what it waits
    for, on stderr.

    flashinfer-bench writes a Python solution's files again for each process, into the
    same folder, and imports them there: without a lock a process may import a file that
    another one is just writing. Its C++ builder has a lock.
    """
    folder = cache / "locks"
    # then there is no lock, and the builder reports the error
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    file = folder / re.sub(r"[^A-Za-z0-9._-]", "_", key)
    with _threads[key], locks.hold(file, _say, f"the build of {name}"):
        yield


def _say(line: str) -> None:
    print(f"gdn: {line}", file=sys.stderr, flush=True)


def _cause(e: BaseException, cache: Path) -> BuildFailedError:
    """The innermost message: a compiler's error lines rather than its whole command line."""
    causes = [str(e)]
    wrong = build_cache.unusable(cache)
    while (inner := e.__cause__ or e.__context__) is not None:
        e = inner
        causes.append(str(e))
        if isinstance(e, OSError) and e.errno in files.MACHINE:
            wrong = f"the build cache {cache} cannot be written: {e.strerror}"
    if not wrong and (full := _FULL.search("\n".join(causes))):
        wrong = f"the compiler could not write its files: {full[0]}; {_ELSEWHERE}"
    if wrong:
        return BuildFailedError(wrong, missing=True)
    lines = [line for text in causes for line in text.splitlines() if line.strip()]
    if isinstance(e, ModuleNotFoundError):
        reason = f"package '{e.name}' is missing: {lines[0]}"
        return BuildFailedError(reason, missing=True)
    # ptxas pads its colons; a cause may repeat another's text
    errors = [line for line in lines if re.search(r"error\s*:|fatal", line)]
    shown = [*dict.fromkeys(errors)][:_ERRORS] or [*dict.fromkeys(lines)][:12]
    return BuildFailedError("\n".join(shown) or type(e).__name__)
