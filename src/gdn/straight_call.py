"""A call of a library without torch's dispatcher: the host's time matters when a kernel takes 2 us.

straight_call.cpp looks at all tensors of a call at once: for ten of them checks in Python take
longer than everything else. It says yes only where nothing traces, compiles, watches or
differentiates, and where every tensor has memory that a kernel may use as it is: no negative bit,
a storage that is large enough, outputs apart from inputs. It looks at every call. For everything
else there is the operator, and tensor_checks.py has the words.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from gdn_cli.errors import MissingError
from gdn_cli.machine import inventory
from gdn_cli.machine.builders import environment, with_builders
from gdn_cli.worker.executor import build, build_cache

from .call_checks import Contract

# .bound: it has called a kernel, and so has the device's context
this_thread = threading.local()
# straight_call.cpp's, once `native` has been called and it works here
module: Any = None
_SOURCE = Path(__file__).with_suffix(".cpp")
_KINDS = 1000  # limits the memory of a program with ever new sizes


class StraightCall:
    """Calls of a library with `out=` that need no operator: their tensors are like
    those of a call that passed its checks, in shapes, strides, dtypes, devices and
    alignments.
    """

    def __init__(
        self, contract: Contract, kernel: build.Kernel, machine: inventory.Machine
    ) -> None:
        self.first = contract.names.index(contract.tensors[0])
        # the contract must check its values at every call
        self.on_cpu = "cu_seqlens" not in contract.names
        self.roles = _roles(contract)
        self.run = kernel.entry_point
        library = kernel.destination_passing and kernel.is_library
        self.native: Any = native(machine) if library else None
        self.known: set[bytes] = set()

    def kind(self, arguments: tuple[Any, ...]) -> bytes | None:
        """What this call's checks depend on; None if it must go through the operator."""
        kind = self.native and self.native.kind(self.roles, arguments)
        if kind is None:
            return None
        device = arguments[self.first].get_device()
        if device < 0:
            return kind if self.on_cpu else None
        bound = hasattr(this_thread, "bound") and device == torch._C._cuda_getDevice()
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


@contextlib.contextmanager
def building(machine: inventory.Machine, mode: str) -> Iterator[Path]:
    """The environment of a build in this process, with the folder for what it compiles.
    The caller's other variables stay.
    """
    builders = with_builders(os.environ, mode, machine=machine)
    names = {"CUDA_HOME", "PATH", "FIB_CACHE_PATH"} & set(builders)
    with environment({name: builders[name] for name in names}):
        yield Path(builders["FIB_CACHE_PATH"])


@functools.cache
def native(machine: inventory.Machine = inventory.HERE) -> Any:
    """straight_call.cpp as a Python module, compiled for this torch once on a machine (a few
    seconds); None if that does not work here: then every call goes through its operator."""
    global module
    try:
        extension = _loaded(machine)
    except Exception:  # no compiler, no Python.h, a full disk, headers of another torch
        return None
    tensor = torch.empty(1)
    parameter = torch.nn.Parameter(tensor)
    if extension.setup(
        torch.Tensor, torch.nn.Parameter, tensor, parameter, vars(forward_ad)
    ):
        module = extension
    return module


def _loaded(machine: inventory.Machine) -> Any:
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    with building(machine, "cpu") as cache:
        fault = build_cache.unusable(cache)
        if fault:
            raise MissingError(fault)
        library = cache / _SOURCE.stem / f"{key}.so"
        if not library.exists():
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
    library.parent.mkdir(parents=True, exist_ok=True)
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
