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
import os
import re
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cli.catalog import batch_invariance, pack, registry
from gdn_cli.catalog.formats import Definition, Solution
from gdn_cli.catalog.registry import Algo
from gdn_cli.errors import GdnError, MissingError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.machine.inventory import environment, with_builders
from gdn_cli.worker.executor import build, prepared

from . import tensor_checks
from .call_checks import Contract
from .registration import NAMESPACE, is_registered, register
from .straight_call import StraightCall, this_thread

_lock = threading.Lock()
Function = Callable[..., tuple[Tensor, ...]]
_loaded: dict[Hashable, Function] = {}


def load(
    name: str,
    op: str | None = None,
    algos: str | os.PathLike[str] | None = None,
    *,
    batch_invariant: bool = False,
) -> Function:
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
    return load_for(inventory.HERE, name, op, algos, batch_invariant=batch_invariant)


def load_for(
    machine: inventory.Machine,
    name: str,
    op: str | None = None,
    algos: str | os.PathLike[str] | None = None,
    *,
    batch_invariant: bool = False,
) -> Function:
    """`load` for the given machine."""
    _expect("name", name, "a text such as 'cuda-v5'", str)
    _expect("op", op, "a text such as 'gdn_decode'", str, type(None))
    _expect("algos", algos, "a folder's path", str, os.PathLike, type(None))
    folder = os.environ.get("GDN_ALGOS") if algos is None else os.fspath(algos)
    known = registry.load(folder)
    algo = known.find(name, op)
    target = known.ops[algo.op]
    if batch_invariant:
        algo = batch_invariance.variant(algo, target)
    solution = pack.pack(algo, target)
    digest = pack.source_hash(solution)
    key = (algo.op, algo.name, algo.modes, digest)
    with _lock:
        if key not in _loaded:
            definition = pack.definition(target, known)
            kernel = built(machine, algo, definition, solution)
            if slower_way := kernel.fallback():
                warnings.warn(f"{algo.full_name}: {slower_way}", stacklevel=3)
            operator = _operator_name(algo, digest)
            _loaded[key] = _function(Contract(target, algo), kernel, operator)
        return _loaded[key]


def _expect(argument: str, value: object, expected: str, *types: type) -> None:
    if not isinstance(value, types):
        got = type(value).__name__
        raise UsageError(f"load: {argument}: expected {expected}, got {got}")


# --- building


def built(
    machine: inventory.Machine, algo: Algo, definition: Definition, solution: Solution
) -> build.Kernel:
    """An algo's kernel in this process; MissingError or GdnError if it cannot be built here."""
    place = machine.place(algo)
    if place.mode is None:
        raise MissingError(f"{algo.full_name}: {place.reason}", hint=place.hint)
    # a worker sets it, a library may not
    if place.mode == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        hint = "TRITON_INTERPRET=1, set before Triton is imported, runs it on the CPU, slowly"
        raise MissingError(f"{algo.full_name}: no GPU here", hint=hint)
    specific = algo.specific and place.mode == "cuda"
    with _building(machine, place.mode):
        try:
            return prepared.built(definition, solution, algo.setup, specific=specific)
        except build.BuildFailedError as e:
            error = MissingError if e.missing else GdnError
            raise error(f"{algo.full_name} does not build: {e}") from None


@contextlib.contextmanager
def _building(machine: inventory.Machine, mode: str) -> Iterator[None]:
    """The environment of a build in this process. The caller's other variables stay."""
    builders = with_builders(os.environ, mode, machine=machine)
    names = {"CUDA_HOME", "PATH", "FIB_CACHE_PATH"} & set(builders)
    with environment({name: builders[name] for name in names}):
        yield


# --- the operators, and the function around them


def _operator_name(algo: Algo, digest: str) -> str:
    """gdn_decode__cuda_v4; with the sources' hash appended if other sources have that
    name already.
    """
    plain = re.sub(r"\W", "_", f"{algo.op}__{algo.name}")
    name = plain
    number = 1
    while is_registered(name) or is_registered(f"{name}_out"):
        name = f"{plain}__{digest}" + (f"_{number}" if number > 1 else "")
        number += 1
    return name


def _registered(contract: Contract, kernel: build.Kernel, name: str) -> tuple[Any, Any]:
    """The operators that return new outputs and that write into given ones."""
    count = len(contract.names)
    label = contract.algo.name

    def returning(*inputs: Any) -> Any:
        contract.inputs(inputs)
        with _around(inputs):
            if not kernel.destination_passing:
                return _for_torch(kernel_outputs(inputs))
            outputs = contract.empty(inputs)
            kernel(contract.overwritten(inputs, outputs), outputs)
        return _for_torch(outputs)

    def writing(*arguments: Any) -> None:
        inputs, outputs = arguments[:count], arguments[count:]
        contract.inputs(inputs)
        contract.results(inputs, outputs, "out")
        contract.places(inputs, outputs)
        with _around(inputs):
            if kernel.destination_passing:
                kernel(list(inputs), list(outputs))
            else:
                results = kernel_outputs(inputs)
                for output, result in zip(outputs, results, strict=True):
                    output.copy_(result)

    def kernel_outputs(inputs: Sequence[Any]) -> list[Tensor]:
        outputs = [x.contiguous() for x in kernel.returns(list(inputs))]
        contract.results(inputs, outputs, f"{label} is at fault")
        return outputs

    def fake_returning(*inputs: Any) -> Any:
        contract.kinds(inputs)
        return _for_torch(contract.empty(inputs))

    def fake_writing(*arguments: Any) -> None:
        inputs, outputs = arguments[:count], arguments[count:]
        contract.kinds(inputs)
        contract.results(inputs, outputs, "out", sizes=False)

    schema = contract.schema(into=False)
    out_schema = contract.schema(into=True)
    return (
        register(name, schema, returning, fake_returning, label),
        register(f"{name}_out", out_schema, writing, fake_writing, label),
    )


def _for_torch(outputs: list[Tensor]) -> Any:
    """An operator returns a tuple of several tensors, or one as it is."""
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


_NOTHING = contextlib.nullcontext()


def _around(inputs: Sequence[Any]) -> Any:
    """The context of a call: the tensors' device, its CUDA context, and no autocast."""
    device = next(x.device for x in inputs if isinstance(x, Tensor))
    no_autocast: Any = _NOTHING
    if torch.is_autocast_enabled(device.type):
        no_autocast = torch.autocast(device.type, enabled=False)
    if device.type != "cuda":
        return no_autocast
    if this_thread.bound and no_autocast is _NOTHING:
        return torch.cuda.device(device)
    return _on_device(device, no_autocast)


@contextlib.contextmanager
def _on_device(device: torch.device, no_autocast: Any) -> Iterator[None]:
    """Make the tensors' device current: Triton launches on the current one. Torch does
    not bind a context if this device is the thread's current one already; a CUDA
    runtime call that needs one, such as mem_get_info, does.
    """
    with torch.cuda.device(device), no_autocast:
        if not this_thread.bound:
            torch.cuda.mem_get_info(device)
            this_thread.bound = True
        yield


def _function(contract: Contract, kernel: build.Kernel, operator: str) -> Function:
    """The function that load returns. It checks arguments first, so that errors are
    ours and not the dispatcher's.
    """
    returning, writing = _registered(contract, kernel, operator)
    names, outputs = contract.names, contract.outputs
    tensors = frozenset(contract.tensors)
    signature = contract.signature()
    inputs_only = list(signature.parameters.values())[:-1]
    bind = signature.replace(parameters=inputs_only).bind
    straight = StraightCall(contract, kernel)
    count = len(names) + len(outputs)

    def call(*args: Any, out: Any = None, **named: Any) -> tuple[Tensor, ...]:
        inputs: Sequence[Any] = args
        if named or len(args) != len(names):
            inputs = by_position(args, named)
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
        expected = f"out: expected a tuple of tensors {contract.tuple}"
        sequence = isinstance(out, (tuple, list))
        if not sequence or not all(isinstance(x, Tensor) for x in out):
            raise TypeError(expected)
        if len(out) != len(outputs):
            raise ValueError(f"{expected}, got {len(out)}")
        if not compiling:
            for name, x in zip(outputs, out, strict=True):
                tensor_checks.plain(f"out: {name}", x)
        writing(*inputs, *out)
        straight.learn(kind)
        return tuple(out)

    def by_position(args: Sequence[Any], named: dict[str, Any]) -> Sequence[Any]:
        try:
            values = bind(*args, **named).arguments
        except TypeError as e:
            takes = f"{contract.algo.name} takes {', '.join(names)}"
            raise TypeError(f"{takes}: {e}") from None
        return [values.get(name) for name in names]

    call.__name__ = call.__qualname__ = operator
    call.__doc__ = contract.document(f"{NAMESPACE}.{operator}")
    # as inspect.signature looks for it; mypy does not know it of functions
    setattr(call, "__signature__", signature)  # noqa: B010
    return call
