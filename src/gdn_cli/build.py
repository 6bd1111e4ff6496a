"""Solution -> callable, through flashinfer-bench's own builders: what is run here is what a judge runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from . import machine

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class BuildFailed(Exception):
    """The builder's reason, whole: a missing package, a compiler's errors, a signature that does not match."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing  # a package that is not here: not the algo's fault


class Kernel:
    """A built solution, called in destination-passing style whatever its own style is.

    `kernel(inputs, outputs)` fills `outputs` (tensors in the definition's order). For a value-returning solution
    `returns(inputs)` gives what it returned, so that a check sees its shapes and dtypes before anything is copied.
    """

    def __init__(self, runnable: Any) -> None:
        self.runnable = runnable
        self.entry_point = runnable._callable  # flashinfer-bench wraps it in a variadic one
        self.destination_passing = runnable.metadata.destination_passing_style
        self.module = _module_of(runnable)

    def backend(self, inputs: list) -> str | None:
        """Which way the algo takes on these inputs, in its own words; None where it has but one, or does not say.

        A Python module says it by `backend(*inputs)`, a library by `fallback()`.
        """
        if callable(tell := getattr(self.module, "backend", None)):
            return str(tell(*inputs))
        return self.fallback()

    def fallback(self) -> str | None:
        """The slower way that a library takes on the current device where it could have a faster one, and why; or None.

        A C++ or CUDA algo tells by a second function, TVM_FFI_DLL_EXPORT_TYPED_FUNC(fallback, ...): no arguments, a
        text, empty where it takes the fastest way that it has.
        """
        binary = self.runnable.metadata.misc.get("binary")
        if binary is None:  # Python's
            return None
        import tvm_ffi

        library = tvm_ffi.load_module(str(binary))
        return str(library.get_function("fallback")()) or None if library.implements_function("fallback") else None

    def __call__(self, inputs: list, outputs: list) -> None:
        """One call, as a judge times it: a value-returning solution allocates its own results."""
        if self.destination_passing:
            self.runnable(*inputs, *outputs)
        else:
            self.runnable(*inputs)

    def returns(self, inputs: list) -> list:
        result = self.runnable(*inputs)
        return list(result) if isinstance(result, (tuple, list)) else [result]


def _module_of(runnable: Any) -> Any:
    """The Python module that holds the entry point, for the extras that an algo may offer (None for C++ and CUDA)."""
    import sys

    return sys.modules.get(runnable.metadata.misc.get("module_name", ""))


def build(definition: dict[str, Any], solution: dict[str, Any], *, specific: bool = False) -> Kernel:
    """Build a solution; raises BuildFailed with the full cause.

    `specific` (algo.toml): for all that this GPU has, such as sm_90a, where the builder takes what later GPUs have too,
    such as sm_90. Whoever has set TVM_FFI_CUDA_ARCH_LIST has chosen.
    """
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.data import Definition, Solution
    from pydantic import ValidationError

    if arch := _own_architecture() if specific else None:
        # the builder's cache key knows the name, and not the architecture
        solution = solution | {"name": f"{solution['name']}-sm_{arch.replace('.', '')}"}
    try:
        parsed = Definition.model_validate(definition), Solution.model_validate(solution)
    except ValidationError as e:
        first = e.errors()[0]
        raise BuildFailed(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    try:
        with _alone(parsed[1].hash()), _compiling_for(arch):
            return Kernel(BuilderRegistry.get_instance().build(*parsed))
    except Exception as e:  # builders wrap most causes in BuildError, and let some through
        raise _cause(e) from None


def _own_architecture() -> str | None:
    """ "9.0a" on a GPU of compute capability 9.0; None where a list is set, or no GPU has features of its own."""
    import torch

    if os.environ.get(machine.ARCHITECTURES) or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return machine.specific(f"{major}.{minor}")


@contextlib.contextmanager
def _compiling_for(arch: str | None) -> Iterator[None]:
    if arch is None:
        yield
        return
    os.environ[machine.ARCHITECTURES] = arch
    try:
        yield
    finally:
        del os.environ[machine.ARCHITECTURES]


def reference(definition: dict[str, Any]) -> Kernel:
    """The definition's own reference, as flashinfer-bench builds it."""
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.data import Definition

    parsed = Definition.model_validate(definition)
    with _alone(parsed.name):
        return Kernel(BuilderRegistry.get_instance().build_reference(parsed))


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """One process at a time builds what has this name.

    flashinfer-bench writes a Python solution's files anew for each process, into the same folder, and imports them
    there: without a lock a second process may import one that the first is just writing. Its C++ builder has a lock.
    """
    from flashinfer_bench.env import get_fib_cache_path

    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # no locks on this file system; a folder that is not ours: the builder tells
            folder = get_fib_cache_path() / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((folder / re.sub(r"[^A-Za-z0-9._-]", "_", name)).open("a"))
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed, or its holder ends
        yield


def _cause(e: BaseException) -> BuildFailed:
    """The innermost message, with a compiler's error lines rather than its whole command line."""
    text = str(e)
    while e.__cause__ is not None or e.__context__ is not None:
        e = e.__cause__ or e.__context__
        if str(e) and str(e) not in text:
            text = f"{text}\n{e}"
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error\s*:|fatal", line)]  # ptxas pads its colons
    if isinstance(e, ModuleNotFoundError):
        return BuildFailed(f"package '{e.name}' is missing: {lines[0]}", missing=True)
    return BuildFailed("\n".join(errors[:8] or lines[:12]) or type(e).__name__)
