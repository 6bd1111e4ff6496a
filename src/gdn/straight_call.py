"""A call of a library without torch's dispatcher: the host's time matters when a kernel takes 2 us.

straight_call.cpp looks at all tensors of a call at once: for ten of them checks in Python take
longer than everything else. It says yes only where nothing traces, compiles, watches or
differentiates, and where every tensor has memory that a kernel may use as it is: no negative bit,
a storage that is large enough, outputs apart from inputs. It looks at every call. For everything
else there is the operator, and tensor_checks.py has the words.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from gdn_cli.errors import MissingError
from gdn_cli.machine import libraries, toolchain

if TYPE_CHECKING:
    from gdn_cli.worker.executor import build

    from .call_checks import Contract


class _Thread(threading.local):
    bound = False  # whether it has called a kernel, and so has the device's context


this_thread = _Thread()
# straight_call.cpp's, once `native` has been called and it works here
module: Any = None
_SOURCE = Path(__file__).with_suffix(".cpp")
_KINDS = 1000  # limits the memory of a program with ever new sizes


class StraightCall:
    """Calls of a library with `out=` that need no operator: their tensors are like
    those of a call that passed its checks, in shapes, strides, dtypes, devices and
    alignments.
    """

    def __init__(self, contract: Contract, kernel: build.Kernel) -> None:
        self.first = contract.first
        # the contract must check its values at every call
        self.on_cpu = "cu_seqlens" not in contract.names
        self.roles = _roles(contract)
        self.run = kernel.entry_point
        library = kernel.destination_passing and kernel.is_library
        self.native: Any = native() if library else None
        self.known: set[bytes] = set()

    def kind(self, arguments: tuple[Any, ...]) -> bytes | None:
        """What this call's checks depend on; None if it must go through the operator."""
        kind = self.native and self.native.kind(self.roles, arguments)
        if kind is None:
            return None
        device = arguments[self.first].get_device()
        if device < 0:
            return kind if self.on_cpu else None
        bound = this_thread.bound and device == torch._C._cuda_getDevice()
        return kind if bound else None

    def __call__(self, arguments: tuple[Any, ...]) -> None:
        self.run(*arguments)
        self.native.wrote(self.roles, arguments)

    def learn(self, kind: bytes | None) -> None:
        """A call of this kind has passed its checks."""
        if kind is not None and len(self.known) < _KINDS:
            self.known.add(kind)


def _roles(contract: Contract) -> bytes:
    """As straight_call.cpp has them: what is read, what is written, and what may be the same."""
    roles = ["r" if name in contract.tensors else "F" for name in contract.names]
    roles += "w" * len(contract.outputs)
    for i, (output, source) in enumerate(contract.op.overwrites.items()):
        roles[source] = "abcdefgh"[i]
        roles[len(contract.names) + output] = str(i)
    return "".join(roles).encode()


@functools.cache
def native() -> Any:
    """straight_call.cpp as a Python module, compiled for this torch once on a machine (a few
    seconds); None if that does not work here: then every call goes through its operator."""
    global module
    try:
        extension = _loaded()
    except Exception:  # no compiler, no Python.h, a full disk, headers of another torch
        return None
    tensor = torch.empty(1)
    parameter = torch.nn.Parameter(tensor)
    if extension.setup(
        torch.Tensor, torch.nn.Parameter, tensor, parameter, vars(forward_ad)
    ):
        module = extension
    return module


def _loaded() -> Any:
    source = _SOURCE.read_bytes()
    versions = f"{torch.__version__} {sys.implementation.cache_tag}"
    key = hashlib.sha256(source + versions.encode()).hexdigest()[:16]
    library = libraries.kept() / _SOURCE.stem / f"{key}.so"
    fault = toolchain.unusable(library.parent)
    if fault:
        raise MissingError(fault)
    if not library.exists():
        with libraries.building():
            _compile(library)
    loader = importlib.machinery.ExtensionFileLoader(_SOURCE.stem, str(library))
    spec = importlib.machinery.ModuleSpec(_SOURCE.stem, loader, origin=str(library))
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    return extension


def _compile(library: Path) -> None:
    import tvm_ffi.cpp

    torch_folder = Path(torch.__file__).parent
    headers = [str(torch_folder / "include"), sysconfig.get_path("include")]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled = tvm_ffi.cpp.build(
            library.stem,
            cpp_files=[str(_SOURCE)],
            extra_cflags=["-w"],  # torch's headers warn
            extra_include_paths=headers,
            extra_ldflags=[f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"],
            build_directory=folder,
        )
        # whole or not at all, whoever compiles at the same time
        os.replace(compiled, library)
