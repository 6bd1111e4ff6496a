"""Triton kernels compiled for a GPU that is not here: the algo runs as usual, and each
launch compiles and stops.

Triton asks its active driver for the compile target; a substitute driver answers with
any architecture. A kernel is compiled for its launch's arguments, so the workload's own
tensors (on the CPU) and the algo's host code decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...errors import GdnError, MissingError, one_line

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel


class _Driver:
    """The parts of a driver that compiling needs, and no more: anything that needs a GPU fails."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self.target.arch, 10)


def compiled(
    call: Callable[[], None], capability: int
) -> tuple[list[CompiledKernel], list[str]]:
    """Compile what `call` launches for a compute capability (90, 100, ...), and return
    notes on it; nothing is run.

    Raises MissingError if nothing was launched, GdnError if Triton cannot compile a kernel.
    """
    # by hash: a second launch of the same code is not a new kernel
    kernels: dict[str, CompiledKernel] = {}
    notes: list[str] = []
    with _compiling(capability, kernels, notes):
        try:
            call()
        except GdnError:
            raise
        except Exception as e:  # of the algo's host code
            if not kernels:
                raise MissingError(
                    "the algo's host code fails without a GPU before it launches a kernel:"
                    f" {one_line(e)}",
                    hint="profile it on a GPU: --tool ncu",
                ) from None
            notes.append(
                f"compiled up to where the algo's host code fails without a GPU: {one_line(e)}"
            )
    if not kernels:
        raise MissingError(
            "the call launches no Triton kernel", hint="--tool torch says what it does"
        )
    return list(kernels.values()), notes


@contextlib.contextmanager
def _compiling(
    capability: int, kernels: dict[str, CompiledKernel], notes: list[str]
) -> Iterator[None]:
    """Make every launch compile its kernel into `kernels` instead."""
    from triton.runtime import Autotuner, JITFunction, driver

    run, tune = JITFunction.run, Autotuner.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            kernel = run(self, *args, **kwargs | {"warmup": True})
        except Exception as e:
            raise GdnError(
                f"Triton cannot compile {self.fn.__name__} for sm_{capability}: {_reason(e)}"
            ) from None
        kernels.setdefault(kernel.hash, kernel)
        return kernel

    def first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1:
            notes.append(
                f"autotuned: the first of {len(self.configs)} configs, {self.configs[0]}; on a"
                " GPU another may win"
            )
            self.configs = self.configs[:1]  # with one, nothing is timed
        return tune(self, *args, **kwargs)

    driver.set_active(_Driver(capability))
    JITFunction.run, Autotuner.run = compile_only, first_config
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = run, tune


def _reason(e: BaseException) -> str:
    """The line of a compiler's message that has the error."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    for word in ("fatal", "error"):
        for line in lines:
            if word in line.lower() and not line.endswith(("error", "error:")):
                return line[:300]
    return (lines or [type(e).__name__])[0][:300]
