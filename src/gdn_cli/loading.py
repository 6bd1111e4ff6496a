"""An algo as a callable for other programs: `decode = load("cuda-v4")`, in torch.compile and CUDA graphs as well.

The algo is built as for every command (registry, pack, flashinfer-bench's builder), but in the calling process. Around
it stand two operators of torch.library: `gdn::<op>__<algo>` returns new tensors, `gdn::<op>__<algo>_out` writes into
given ones. Each has a fake implementation that derives the shapes from the inputs' own, so a compiler needs no values
and no fixed sizes. Nothing here synchronises or asks the device for a value.

Streams: flashinfer-bench hands torch's tensors to TVM-FFI as they are, which takes torch's current stream of their
device for the call; Triton launches on torch's current stream too, of the current device, which is therefore set.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import build, jobs, machine, pack, registry, seqlens
from .dtypes import DTYPES
from .errors import GdnError, MissingError
from .expression import condition
from .registry import Algo, Op

NAMESPACE = "gdn"
# What jobs.environ sets for the builders; the rest of a worker's environment is no business of the caller's process.
_FOR_BUILDING = ("CUDA_HOME", "PATH", "FIB_CACHE_PATH")

_lock = threading.Lock()
_loaded: dict[tuple, Callable[..., tuple[torch.Tensor, ...]]] = {}
_operators: set[str] = set()
# Not torch.library.custom_op: its first call imports torch._dynamo, 3 to 6 s, where an eager call needs nothing of it.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def load(
    name: str, op: str | None = None, algos: str | os.PathLike | None = None
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Build an algo and return it as a function of the definition's inputs.

    name   "cuda-v4", or in full "gdn_decode/cuda-v4"; see `gdn list`
    op     which op's, where several have an algo of that name (without it decode's, as on the command line)
    algos  a folder of your own with <op>/<algo>/algo.toml; without it those of the environment variable GDN_ALGOS

    The function takes the inputs by position or by name, all contiguous and on one device; scalars may be left out
    (None: the definition's default). It returns a tuple with the outputs as new tensors, one output included. With
    `out=` (a tuple of contiguous tensors in the order of the outputs) it writes there and returns these. They go to the
    algo as they are: `out=(output, state)`, the state updated in place, is for algos that read each element before they
    write it; ask the algo's source. Its own docstring has the shapes and dtypes.

    A call raises TypeError or ValueError before anything runs on inputs that are not the op's. `cu_seqlens` is among
    them on a CPU; on a GPU a look at it would wait for the device, so there it is the caller's. There is no backward:
    inputs that require grad are refused, unless under torch.no_grad(). Call it once before capturing a CUDA graph:
    Triton compiles at its first call, and CUDA loads a kernel at its first launch. Under torch.compile the sizes may be
    dynamic; another scale compiles anew.

    Loading the same algo again gives the same function; sources that have changed since give another.
    Raises UsageError (no such algo), MissingError (no GPU, nvcc or package here), GdnError (it does not build).
    """
    known = registry.load(os.fspath(algos) if algos is not None else os.environ.get("GDN_ALGOS"))
    algo = known.find(name, op)
    of = known.ops[algo.op]
    solution = pack.pack(algo, of)
    digest = pack.source_hash(solution)
    key = (algo.op, algo.name, algo.modes, digest)
    with _lock:
        if key not in _loaded:
            kernel = _built(algo, of, pack.definition(of, known), solution)
            _loaded[key] = _function(algo, Contract(of, algo), kernel, _operator_name(algo, digest))
        return _loaded[key]


# --- building ---------------------------------------------------------------------------------------------------


def _built(algo: Algo, op: Op, definition: dict[str, Any], solution: dict[str, Any]) -> build.Kernel:
    place = machine.place(algo)
    if place.mode is None:
        raise MissingError(f"{algo.full_name}: {place.reason}", hint=place.hint)
    if place.mode == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":  # a worker sets it, a library may not
        hint = "TRITON_INTERPRET=1, set before Triton is imported, runs it on the CPU, slowly"
        raise MissingError(f"{algo.full_name}: no GPU here", hint=hint)
    wanted = jobs.environ(jobs.Job("check", op, definition, solution, place.mode, ()))
    with _environment({name: wanted[name] for name in _FOR_BUILDING if name in wanted}):
        try:
            return build.build(definition, solution, specific=algo.specific and place.mode == "cuda")
        except build.BuildFailed as e:
            raise (MissingError if e.missing else GdnError)(f"{algo.full_name} does not build: {e}") from None


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- what a call takes ------------------------------------------------------------------------------------------


class Contract:
    """An op's inputs and outputs in torch's terms, for the devices of one algo: schemas, checks, shapes."""

    def __init__(self, op: Op, algo: Algo) -> None:
        self.op, self.algo = op, algo
        self.names, self.outputs = tuple(op.inputs), tuple(op.outputs)
        self.tensors = tuple(name for name, spec in op.inputs.items() if spec.shape is not None)
        interpreted = "interpreter" in algo.modes and os.environ.get("TRITON_INTERPRET") == "1"
        self.devices = tuple(
            device for device in ("cuda", "cpu") if device in algo.modes or (device == "cpu" and interpreted)
        )
        self.constraints = tuple(_over_axes(op))
        self._agreed: set[tuple] = set()  # shapes that were found right: a call costs the host more than the GPU

    def schema(self, *, into: bool) -> str:
        """The operator's schema; `into`: with the outputs as arguments that it writes to."""
        arguments = [f"{'Tensor' if name in self.tensors else f'{self._scalar(name).__name__}?'} {name}"
                     for name in self.names]  # fmt: skip
        if into:
            arguments += [f"Tensor({chr(ord('a') + i)}!) {name}" for i, name in enumerate(self.outputs)]
            return f"({', '.join(arguments)}) -> ()"
        returns = ", ".join(["Tensor"] * len(self.outputs))
        return f"({', '.join(arguments)}) -> {f'({returns})' if len(self.outputs) > 1 else returns}"

    def of_python(self) -> inspect.Signature:
        """What inspect.signature tells: scalars at the end may be left out."""
        kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
        for i, name in enumerate(self.names):
            is_tensor = name in self.tensors
            default = None if self.optional(i) else inspect.Parameter.empty
            annotation = torch.Tensor if is_tensor else self._scalar(name) | None
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        out = inspect.Parameter(
            "out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=tuple[torch.Tensor, ...] | None
        )
        return inspect.Signature([*parameters, out], return_annotation=tuple[torch.Tensor, ...])

    def _scalar(self, name: str) -> type:
        return int if "int" in self.op.inputs[name].dtype else float

    def optional(self, i: int) -> bool:
        """Whether the i-th input may be left out: a scalar with nothing but scalars behind it."""
        return not any(name in self.tensors for name in self.names[i:])

    def document(self, operator: str) -> str:
        def line(name: str, spec: Any) -> str:
            shape = "a number, or None for the default" if spec.shape is None else f"[{', '.join(spec.shape)}]"
            return f"    {name:<{width}}  {spec.dtype:<8}  {shape}"

        width = max(map(len, (*self.names, *self.outputs)))
        fixed = ", ".join(f"{name} = {value}" for name, value in self.op.axes.items() if value is not None)
        return "\n".join([
            f"{self.op.name} by {self.algo.name}: {self.algo.summary}.", "", f"{self.op.summary}.", "",
            "Inputs:", *(line(*item) for item in self.op.inputs.items()), "",
            "Returns a tuple of:", *(line(*item) for item in self.op.outputs.items()), "",
            f"The definition has {fixed}.", "The algo may take other head counts.",
            f"out={_tuple(self.outputs)} writes into these tensors instead of new ones, and returns them.",
            f"Runs on {' and '.join(self.devices)}; all tensors contiguous and on one device. No backward.",
            f"As an operator: torch.ops.{NAMESPACE}.{operator}, torch.ops.{NAMESPACE}.{operator}_out.",
        ])  # fmt: skip

    def kinds(self, inputs: Sequence[Any]) -> None:
        """Ranks, dtypes and devices: all that is known of fake tensors without a guard on their sizes. And that nobody
        wants gradients: an operator without a backward would leave them out with no more than a warning."""
        where, grad = None, torch.is_grad_enabled()
        for name, x in zip(self.names, inputs, strict=True):
            if name in self.tensors:
                self._kind(name, self.op.inputs[name], x)
                if grad and x.requires_grad:
                    whose = f"{self.algo.name} has no backward"
                    raise RuntimeError(f"{name}: requires grad, and {whose}; call it under torch.no_grad()")
                where = where or (name, x.device)
                if x.device != where[1]:
                    raise ValueError(f"{name}: expected on {where[1]}, where {where[0]} is, got {x.device}")
        if where and where[1].type not in (*self.devices, "meta"):
            raise ValueError(f"{self.algo.name} runs on {' and '.join(self.devices)}, got tensors on {where[1]}")

    def _kind(self, name: str, spec: Any, x: torch.Tensor) -> None:
        if x.dtype != DTYPES[spec.dtype]:
            raise TypeError(f"{name}: expected {spec.dtype}, got {str(x.dtype).removeprefix('torch.')}")
        if x.dim() != len(spec.shape):
            raise ValueError(
                f"{name}: expected {len(spec.shape)} dimensions [{', '.join(spec.shape)}], got {list(x.shape)}"
            )

    def sizes(self, inputs: Sequence[Any]) -> None:
        """Whether every tensor is contiguous, and the sizes agree with each other and with the op's constraints.

        An axis that the definition fixes at 1 must be 1 (a second token would be dropped); other fixed ones, such as
        head counts, are up to the algo.
        """
        tensors = [(name, x) for name, x in zip(self.names, inputs, strict=True) if name in self.tensors]
        for name, x in tensors:
            if not x.is_contiguous():
                raise ValueError(f"{name}: expected contiguous; call .contiguous() on it")
        shapes = tuple([x.shape for _, x in tensors])
        if shapes in self._agreed:
            return
        axes: dict[str, tuple[int, str]] = {}
        for name, x in tensors:
            for axis, size in zip(self.op.inputs[name].shape, x.shape, strict=True):
                first, owner = axes.setdefault(axis, (size, name))
                if size != first:
                    raise ValueError(f"{name}: expected {axis} = {first}, as {owner} has it, got {size}")
                if self.op.axes[axis] == 1 and size != 1:
                    raise ValueError(f"{name}: expected {axis} = 1, got {size}")
        known = {axis: size for axis, (size, _) in axes.items()}
        for text, holds in self.constraints:
            try:
                right = holds(known)
            except ZeroDivisionError:
                right = False
            if not right:
                got = ", ".join(f"{axis} = {size}" for axis, size in known.items() if re.search(rf"\b{axis}\b", text))
                raise ValueError(f"expected {text}, got {got}")
        if len(self._agreed) < 1000:
            self._agreed.add(shapes)

    def values(self, inputs: Sequence[Any]) -> None:
        """Whether cu_seqlens cuts the tokens into sequences: on a CPU only, reading it on a GPU would wait for that."""
        if "cu_seqlens" in self.names:
            ends = inputs[self.names.index("cu_seqlens")]
            if ends.device.type == "cpu" and (wrong := seqlens.fault(ends, inputs[0].shape[0])):
                raise ValueError(f"cu_seqlens: {wrong}")

    def shapes(self, inputs: Sequence[Any]) -> list[list[int]]:
        """The outputs' shapes, from the inputs' own sizes (symbols, where those are symbols)."""
        axes: dict[str, Any] = {}
        for name, x in zip(self.names, inputs, strict=True):
            if name in self.tensors:
                for axis, size in zip(self.op.inputs[name].shape, x.shape, strict=True):
                    axes.setdefault(axis, size)
        return [[axes[axis] for axis in spec.shape] for spec in self.op.outputs.values()]

    def empty(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        like = next(x for name, x in zip(self.names, inputs, strict=True) if name in self.tensors)
        specs = self.op.outputs.values()
        return [
            like.new_empty(shape, dtype=DTYPES[spec.dtype])
            for shape, spec in zip(self.shapes(inputs), specs, strict=True)
        ]

    def results(self, inputs: Sequence[Any], outputs: Sequence[Any], whose: str, *, sizes: bool = True) -> None:
        """Whether `outputs` (given or returned: `whose` says it) are what the op has for these inputs."""
        if len(outputs) != len(self.outputs):
            raise ValueError(f"{whose}: expected {len(self.outputs)} outputs, got {len(outputs)}")
        device = next(x.device for name, x in zip(self.names, inputs, strict=True) if name in self.tensors)
        for (name, spec), shape, x in zip(self.op.outputs.items(), self.shapes(inputs), outputs, strict=True):
            self._kind(f"{whose}: {name}", spec, x)
            if x.device != device:
                raise ValueError(f"{whose}: {name}: expected on {device}, where the inputs are, got {x.device}")
            if sizes and list(x.shape) != shape:
                raise ValueError(f"{whose}: {name}: expected shape {shape}, got {list(x.shape)}")
            if sizes and not x.is_contiguous():
                raise ValueError(f"{whose}: {name}: expected contiguous")


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _over_axes(op: Op) -> Iterator[tuple[str, Callable[[dict[str, int]], bool]]]:
    """The definition's constraints that need sizes only: one on a tensor's values would have to wait for the device."""
    for text in op.constraints:
        try:
            holds = condition(text, op.axes)
        except ValueError:
            continue
        yield text, holds


# --- the operators, and the function around them ----------------------------------------------------------------


def _operator_name(algo: Algo, digest: str) -> str:
    """gdn_decode__cuda_v4; with the sources' hash behind it where other sources have that name already."""
    plain = re.sub(r"\W", "_", f"{algo.op}__{algo.name}")
    hashed = f"{plain}__{digest}"
    for name in itertools.chain((plain, hashed), (f"{hashed}_{i}" for i in itertools.count(2))):
        if not {name, f"{name}_out"} & _operators:
            return name
    raise AssertionError("there is always another number")


def _register(contract: Contract, kernel: build.Kernel, name: str) -> None:
    takes = len(contract.names)

    def returning(*inputs: Any) -> Any:
        contract.kinds(inputs)
        contract.sizes(inputs)
        contract.values(inputs)
        with _device(inputs):
            if kernel.destination_passing:
                outputs = contract.empty(inputs)
                kernel(list(inputs), outputs)
            else:
                outputs = _returned(inputs)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def writing(*arguments: Any) -> None:
        inputs, outputs = arguments[:takes], arguments[takes:]
        contract.kinds(inputs)
        contract.sizes(inputs)
        contract.values(inputs)
        contract.results(inputs, outputs, "out")
        with _device(inputs):
            if kernel.destination_passing:
                kernel(list(inputs), list(outputs))
            else:
                for given, result in zip(outputs, _returned(inputs), strict=True):
                    given.copy_(result)
        torch.autograd.graph.increment_version(outputs)

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

    for operator, real, fake, into in (
        (name, returning, fake_returning, False),
        (f"{name}_out", writing, fake_writing, True),
    ):
        _library.define(operator + contract.schema(into=into), tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(operator, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{operator}", fake, lib=_library)
        _operators.add(operator)


def _device(inputs: Sequence[Any]) -> Any:
    """Triton launches on the current device, which need not be the one of the tensors."""
    device = next(x.device for x in inputs if isinstance(x, torch.Tensor))
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _function(
    algo: Algo, contract: Contract, kernel: build.Kernel, operator: str
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function that load returns: what torch's dispatcher would refuse in its own words is refused in ours."""
    _register(contract, kernel, operator)
    returning = getattr(getattr(torch.ops, NAMESPACE), operator).default
    writing = getattr(getattr(torch.ops, NAMESPACE), f"{operator}_out").default
    names, outputs, tensors = contract.names, contract.outputs, frozenset(contract.tensors)
    optional = frozenset(name for i, name in enumerate(names) if contract.optional(i))

    def call(*args: Any, out: Any = None, **named: Any) -> tuple[torch.Tensor, ...]:
        inputs = args if len(args) == len(names) and not named else _bound(args, named)
        for name, x in zip(names, inputs, strict=True):
            if name not in tensors:
                if x is not None and not isinstance(x, (int, float)):
                    raise TypeError(f"{name}: expected a number or None, got {type(x).__name__}")
            elif not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if out is None:
            result = returning(*inputs)
            return result if len(outputs) > 1 else (result,)
        if not isinstance(out, (tuple, list)) or not all(isinstance(x, torch.Tensor) for x in out):
            raise TypeError(f"out: expected a tuple of tensors {_tuple(outputs)}")
        if len(out) != len(outputs):
            raise ValueError(f"out: expected a tuple of tensors {_tuple(outputs)}, got {len(out)}")
        writing(*inputs, *out)
        return tuple(out)

    def _bound(args: tuple, named: dict[str, Any]) -> list[Any]:
        if len(args) > len(names):
            raise TypeError(f"{algo.name} takes {len(names)} inputs ({', '.join(names)}), got {len(args)}")
        values = dict(zip(names, args))  # noqa: B905  fewer may come by position
        for name, value in named.items():
            if name not in names:
                raise TypeError(f"{algo.name} has no input '{name}'; it takes {', '.join(names)}")
            if name in values:
                raise TypeError(f"{algo.name} got '{name}' twice, by position and by name")
            values[name] = value
        missing = [name for name in names if name not in values and name not in optional]
        if missing:
            raise TypeError(f"{algo.name} needs {', '.join(missing)} as well")
        return [values.get(name) for name in names]

    call.__name__ = call.__qualname__ = operator
    call.__doc__ = contract.document(operator)
    call.__signature__ = contract.of_python()
    return call
