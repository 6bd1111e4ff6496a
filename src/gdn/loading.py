"""An algo as a callable for other programs: `decode = load("cuda-v4")`, also in
torch.compile and CUDA graphs.

The algo is built as for every command, but in the calling process, and wrapped in two
operators of torch.library: `gdn::<op>__<algo>` returns new tensors,
`gdn::<op>__<algo>_out` writes into given ones. Their fake implementations derive the
shapes from the inputs' own. Nothing here synchronises or asks the device for a value.

Streams: flashinfer-bench passes torch's tensors unchanged to TVM-FFI, which uses
torch's current stream of their device for the call. Triton launches on torch's current
stream of the current device, so the current device is set.

Threads: calls may come from any thread. A new thread has no current CUDA context until
it has launched something, and driver calls other than launches fail without one, so
each thread gets the device's context at its first call.

Autocast is off inside a call: an algo's own products have the precision that its definition says.

The host's time matters when a kernel takes 2 us: an eager call with `out=` of a C++ or
CUDA algo, on tensors with shapes, strides, types and devices seen before, goes straight
to the library (straight_call.py) without torch's dispatcher.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gdn_cli.catalog import batch_invariance, pack, registry
from gdn_cli.catalog.registry import Algo
from gdn_cli.errors import GdnError, MissingError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.machine.builders import environment, with_builders
from gdn_cli.parsing import Json
from gdn_cli.worker.executor import build, prepared

from . import tensor_checks
from .call_checks import Contract
from .registration import NAMESPACE, is_registered, register
from .straight_call import FOR_BUILDING, StraightCall, this_thread

_lock = threading.Lock()
_loaded: dict[tuple, Callable[..., tuple[torch.Tensor, ...]]] = {}


def load(
    name: str,
    op: str | None = None,
    algos: str | os.PathLike | None = None,
    *,
    batch_invariant: bool = False,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Build an algo and return it as a function of the definition's inputs.

    name   "cuda-v4", or in full "gdn_decode/cuda-v4"; see `gdn list`
    op     the op, if several have an algo of that name (default: decode, as on the command line)
    algos  your own folder with <op>/<algo>/algo.toml; default: those in the environment
      variable GDN_ALGOS
    batch_invariant
           the bits of a sequence's results do not depend on its neighbours or their
           number: for algos whose algo.toml says how. It costs time: `gdn compare NAME
           --batch-invariant` shows how much

    The function takes the inputs by position or by name. All must be contiguous and on
    one device; on a GPU their addresses must be multiples of 16 bytes, as torch's are,
    or of what a CUDA algo needs. Scalars are Python or NumPy numbers, and may be left
    out (None: the definition's default). It returns a tuple with the outputs as new
    tensors, even for one output. With `out=` (a tuple of tensors in the order of the
    outputs) it writes into those and returns them. They are passed on unchanged:
    `out=(output, state)`, with the state updated in place, is only for algos that read
    each element before they write it; see the algo's source. Any other output must have
    memory of its own. The function's docstring has the shapes and dtypes, and what the
    values must be.

    A call raises TypeError or ValueError before anything runs if its inputs do not fit
    the op. That includes `cu_seqlens` on a CPU; on a GPU reading it would wait for the
    device, so the caller is responsible for it. There is no backward: inputs that
    require grad are refused, unless under torch.no_grad(). So are tensors with the
    negative or conjugate bit, and those whose storage was freed or shrunk. Call it once
    before capturing a CUDA graph: Triton compiles at its first call, and CUDA loads a
    kernel at its first launch. Under torch.compile the sizes may be dynamic; another
    scale compiles again.

    Any thread may call it, on tensors of any GPU. A warning is given if it falls back
    to a slower path on this GPU.

    Loading the same algo again returns the same function, unless its sources have
    changed. Raises UsageError (no such algo, or not batch-invariant), MissingError (no
    GPU, nvcc or package here), GdnError (it does not build).
    """
    return on(inventory.HERE, name, op, algos, batch_invariant=batch_invariant)


def on(
    machine: inventory.Machine,
    name: str,
    op: str | None = None,
    algos: str | os.PathLike | None = None,
    *,
    batch_invariant: bool = False,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`load` for the given machine."""
    if not isinstance(name, str):
        got = type(name).__name__
        raise UsageError(f"load: name: expected a text such as 'cuda-v5', got {got}")
    if not isinstance(op, (str, type(None))):
        raise UsageError(
            f"load: op: expected a text such as 'gdn_decode', got {type(op).__name__}"
        )
    if not isinstance(algos, (str, os.PathLike, type(None))):
        raise UsageError(
            f"load: algos: expected a folder's path, got {type(algos).__name__}"
        )
    known = registry.load(
        os.fspath(algos) if algos is not None else os.environ.get("GDN_ALGOS")
    )
    algo = known.find(name, op)
    of = known.ops[algo.op]
    if batch_invariant:
        algo = batch_invariance.variant(algo, of)
    solution = pack.pack(algo, of)
    digest = pack.source_hash(solution)
    key = (algo.op, algo.name, algo.modes, digest)
    with _lock:
        if key not in _loaded:
            kernel = built(machine, algo, pack.definition(of, known), solution)
            if slower := kernel.fallback():
                warnings.warn(f"{algo.full_name}: {slower}", stacklevel=3)
            _loaded[key] = _function(
                algo,
                Contract(of, algo, known),
                kernel,
                machine,
                _operator_name(algo, digest),
            )
        return _loaded[key]


# --- building


def built(
    machine: inventory.Machine, algo: Algo, definition: Json, solution: Json
) -> build.Kernel:
    """An algo's kernel in this process; MissingError or GdnError if it cannot be built here."""
    place = machine.place(algo)
    if place.mode is None:
        raise MissingError(f"{algo.full_name}: {place.reason}", hint=place.hint)
    # a worker sets it, a library may not
    if place.mode == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        hint = "TRITON_INTERPRET=1, set before Triton is imported, runs it on the CPU, slowly"
        raise MissingError(f"{algo.full_name}: no GPU here", hint=hint)
    wanted = with_builders(os.environ, place.mode, machine=machine)
    with environment({name: wanted[name] for name in FOR_BUILDING if name in wanted}):
        try:
            specific = algo.specific and place.mode == "cuda"
            return prepared.built(definition, solution, algo.setup, specific=specific)
        except build.BuildFailedError as e:
            raise (MissingError if e.missing else GdnError)(
                f"{algo.full_name} does not build: {e}"
            ) from None


# --- the operators, and the function around them


def _operator_name(algo: Algo, digest: str) -> str:
    """gdn_decode__cuda_v4; with the sources' hash appended if other sources have that
    name already.
    """
    plain = re.sub(r"\W", "_", f"{algo.op}__{algo.name}")
    hashed = f"{plain}__{digest}"
    for name in itertools.chain(
        (plain, hashed), (f"{hashed}_{i}" for i in itertools.count(2))
    ):
        if not is_registered(name) and not is_registered(f"{name}_out"):
            return name
    raise AssertionError("there is always another number")


def _registered(contract: Contract, kernel: build.Kernel, name: str) -> tuple[Any, Any]:
    """The operators that return new outputs and that write into given ones."""
    takes = len(contract.names)

    def returning(*inputs: Any) -> Any:
        contract.inputs(inputs)
        with _around(inputs):
            if kernel.destination_passing:
                outputs = contract.empty(inputs)
                kernel(contract.overwritten(inputs, outputs), outputs)
            else:
                outputs = _returned(inputs)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def writing(*arguments: Any) -> None:
        inputs, outputs = arguments[:takes], arguments[takes:]
        contract.inputs(inputs)
        contract.results(inputs, outputs, "out")
        contract.places(inputs, outputs)
        with _around(inputs):
            if kernel.destination_passing:
                kernel(list(inputs), list(outputs))
            else:
                for given, result in zip(outputs, _returned(inputs), strict=True):
                    given.copy_(result)

    def _returned(inputs: tuple) -> list[torch.Tensor]:
        outputs = [x.contiguous() for x in kernel.returns(list(inputs))]
        contract.results(inputs, outputs, f"{contract.algo.name} is at fault")
        return outputs

    def fake_returning(*inputs: Any) -> Any:
        contract.kinds(inputs)
        outputs = contract.empty(inputs)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def fake_writing(*arguments: Any) -> None:
        inputs, outputs = arguments[:takes], arguments[takes:]
        contract.kinds(inputs)
        contract.results(inputs, outputs, "out", sizes=False)

    whose = contract.algo.name
    return (
        register(name, contract.schema(into=False), returning, fake_returning, whose),
        register(
            f"{name}_out", contract.schema(into=True), writing, fake_writing, whose
        ),
    )


_NOTHING = contextlib.nullcontext()


def _around(inputs: Sequence[Any]) -> Any:
    """The context of a call: the tensors' device, its CUDA context, and no autocast."""
    device = next(x.device for x in inputs if isinstance(x, torch.Tensor))
    plain = (
        torch.autocast(device.type, enabled=False)
        if torch.is_autocast_enabled(device.type)
        else None
    )
    if device.type != "cuda":
        return plain or _NOTHING
    if getattr(this_thread, "bound", False) and plain is None:
        return torch.cuda.device(device)
    return _first(device, plain or _NOTHING)


@contextlib.contextmanager
def _first(device: torch.device, plain: Any) -> Iterator[None]:
    """Make the tensors' device current: Triton launches on the current one. Torch does
    not bind a context if this device is the thread's current one already; a CUDA
    runtime call that needs one, such as mem_get_info, does.
    """
    with torch.cuda.device(device), plain:
        if not getattr(this_thread, "bound", False):
            torch.cuda.mem_get_info(device)
            this_thread.bound = True
        yield


def _function(
    algo: Algo,
    contract: Contract,
    kernel: build.Kernel,
    machine: inventory.Machine,
    operator: str,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function that load returns. It checks arguments first, so that errors are
    ours and not the dispatcher's.
    """
    returning, writing = _registered(contract, kernel, operator)
    names, outputs, tensors = (
        contract.names,
        contract.outputs,
        frozenset(contract.tensors),
    )
    taken = contract.of_python()
    inputs_only = [
        parameter for parameter in taken.parameters.values() if parameter.name != "out"
    ]
    bind = taken.replace(parameters=inputs_only).bind
    straight = StraightCall(contract, kernel, machine)
    count = len(names) + len(outputs)

    def call(*args: Any, out: Any = None, **named: Any) -> tuple[torch.Tensor, ...]:
        inputs = args if len(args) == len(names) and not named else _bound(args, named)
        compiling = torch.compiler.is_compiling()
        kind = None
        if type(out) is tuple and not compiling:
            arguments = (*inputs, *out)
            kind = straight.kind(arguments) if len(arguments) == count else None
            if kind in straight.known:
                straight(arguments)
                return out
        for i, (name, x) in enumerate(zip(names, inputs, strict=True)):
            if name in tensors:
                tensor_checks.tensor(name, x)
                if not compiling:
                    tensor_checks.plain(name, x)
            elif x is not None and not isinstance(x, (int, float)):
                inputs = (*inputs[:i], contract.number(name, x), *inputs[i + 1 :])
        if out is None:
            result = returning(*inputs)
            return result if len(outputs) > 1 else (result,)
        if not isinstance(out, (tuple, list)) or not all(
            isinstance(x, torch.Tensor) for x in out
        ):
            raise TypeError(f"out: expected a tuple of tensors {contract.tuple}")
        if len(out) != len(outputs):
            raise ValueError(
                f"out: expected a tuple of tensors {contract.tuple}, got {len(out)}"
            )
        if not compiling:
            for name, x in zip(outputs, out, strict=True):
                tensor_checks.plain(f"out: {name}", x)
        writing(*inputs, *out)
        straight.learn(kind)
        return tuple(out)

    def _bound(args: tuple, named: dict[str, Any]) -> list[Any]:
        try:
            values = bind(*args, **named).arguments
        except TypeError as e:
            raise TypeError(f"{algo.name} takes {', '.join(names)}: {e}") from None
        return [values.get(name) for name in names]

    call.__name__ = call.__qualname__ = operator
    call.__doc__ = contract.document(f"{NAMESPACE}.{operator}")
    call.__signature__ = taken
    return call
