"""configs/*.toml -> Op: an operation, and the same operation at other numbers of heads.
Does not import torch.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from .. import units
from ..errors import UsageError, unknown
from ..parsing import (
    Json,
    Positive,
    Text,
    WrongError,
    check_names,
    decode,
    overlaid,
    read_toml,
)
from .expression import formula, size
from .stress import Family

if TYPE_CHECKING:
    import torch

# the contest's limit of an element's absolute and relative error
CONTEST_TOLERANCE = 1e-2
# dtype of a FlashInfer-Trace definition -> bytes of an element
ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "bool": 1,
}


@cache
def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of this name; torch is imported only here."""
    import torch

    return getattr(torch, name)


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One input or output: its dtype and the names of its axes (None for a scalar)."""

    dtype: Text
    shape: tuple[str, ...] | None = None
    # what its values must be, for an algo's callers
    note: str = ""
    # Of an input: consecutive parts of its last axis, each with its size, a number or
    # an expression of fixed axes. Together they are the whole axis.
    parts: dict[str, Text] = {}
    # Axes whose product is the number of elements that a call reads or writes, if that
    # is not all of them. []: none; an output that overwrites an input then comes back
    # bit for bit.
    moves: tuple[str, ...] | None = None
    # Of an output that overwrites an input: an input of whole numbers, one or several
    # for each row, naming the slots (indices on the first axis) that a call may change.
    # A number below 1 is padding and names none. All other slots must come back bit for
    # bit. Twins name each slot once.
    keeps: Text | None = None
    # of a scalar: the values that stand for its default, such as ["None", 0]
    unset: tuple[Literal["None"] | float, ...] = ()
    # Of an input of whole numbers: the least and the greatest of a twin's, expressions
    # of axes.
    between: tuple[Text, Text] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of its axes; () for a scalar."""
        return self.shape or ()


HEADS = ("num_q_heads", "num_k_heads", "num_v_heads")  # the axes that `--heads` sets
_AT_HEADS = re.compile(r"(?P<family>.+)_qk(?P<qk>[0-9]{1,3})_v(?P<v>[0-9]{1,3})")


class Heads(NamedTuple):
    """Numbers of query/key heads and of value heads, written "4/8"."""

    qk: int
    v: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Raises UsageError for text of another form, and if the value heads are not a
        multiple of the query heads.
        """
        match = re.fullmatch(r"\s*([0-9]{1,3})\s*/\s*([0-9]{1,3})\s*", text)
        qk, v = (int(match[1]), int(match[2])) if match else (0, 0)
        if not qk or not v or v % qk:
            raise UsageError(
                f"heads '{text}'",
                hint="expected query/key heads and value heads, the second a multiple of the"
                " first, such as 4/8",
            )
        return cls(qk, v)

    def __str__(self) -> str:
        return f"{self.qk}/{self.v}"


class Part(NamedTuple):
    """An input's number, and where a part of it begins and ends on the last axis (None
    and None for all of it).
    """

    input: int
    begin: int | None = None
    end: int | None = None


class _Keys(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of configs/<op>.toml, except for its axes: the FlashInfer-Trace
    definition of an op, how its results are checked and shown.
    """

    # {num_q_heads} is replaced by the value of that axis, here and in the summary
    definition: Text
    op_type: Text
    summary: Text
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    constraints: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    # output -> greatest relative Frobenius error against float64
    tolerance: dict[str, Annotated[float, Meta(gt=0)]]
    # an element fails if its absolute and its relative error exceed this
    element_tolerance: Annotated[float, Meta(gt=0)] = CONTEST_TOLERANCE
    # the algo whose source is the definition's reference
    reference: Text
    # the algo that the contest ranks against
    baseline: Text | None = None
    # inputs whose joint negation negates every output; "input.part" for a part
    linear_in: tuple[str, ...]
    # Inputs whose elements may have either sign, "input.part" for a part: the timer
    # changes some before each call, so that no timed call has the values of another.
    # One of them must change every output.
    flips: tuple[str, ...] = ()
    # a workload's name in a table: "B={batch_size}"
    label: Text
    # output -> the input that it may overwrite
    in_place: dict[str, Text] = {}
    # every call does so, except for algos that return their results
    in_place_only: bool = False
    # the sizes to run, for an op that the contest does not have
    workloads: tuple[dict[str, Positive], ...] = ()
    # variable axis -> its value if it is not given, an expression of the others
    defaults: dict[str, Text] = {}
    # floating-point operations of the definition, as a formula of the axes
    flops: Text | None = None
    # the units of a GPU that a kernel would do them with
    peak: Literal["tensor", "fp32"] | None = None
    # name -> hard inputs: `gdn run --stress`
    stress: dict[str, Family] = {}
    # numbers of heads with a published definition, "4/8"; others can be requested
    heads: tuple[str, ...] = ()
    # the op whose keys and sizes it has, where its file does not say otherwise
    like: Text | None = None


class OpFile(_Keys, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """configs/<op>.toml. Raises parsing.WrongError for a name that it does not declare."""

    # a number, "var", or an expression of axes that are numbers
    axes: dict[str, Positive | str]

    def __post_init__(self) -> None:
        axes = self.sizes()
        tensors = self.inputs | self.outputs
        inputs = list(self.inputs)
        for name, spec in tensors.items():
            inputs += [f"{name}.{part}" for part in spec.parts]
            check_names(f"{name}.dtype", [spec.dtype], ITEMSIZE)
            check_names(f"{name}.shape", spec.axes, axes)
        check_names("label", _names(self.label), axes)
        check_names("tolerance", self.tolerance, self.outputs)
        check_names("outputs", self.outputs, self.tolerance)
        check_names("linear_in", self.linear_in, inputs)
        check_names("flips", self.flips, inputs)
        for output, source in self.in_place.items():
            new, old = self.outputs.get(output), self.inputs.get(source)
            if not new or not old or (new.dtype, new.shape) != (old.dtype, old.shape):
                expected = "output = 'input', both of one shape and dtype"
                raise WrongError(["in_place", output], expected, source)

    def sizes(self, heads: Heads | None = None) -> dict[str, int | None]:
        """Each axis's size, None for a variable one; at these heads, or those of the file."""
        numbers = {name: n for name, n in self.axes.items() if isinstance(n, int)}
        if heads:
            numbers |= dict(zip(HEADS, (heads.qk, heads.qk, heads.v), strict=True))
        sizes: dict[str, int | None] = {}
        for name, value in self.axes.items():
            try:
                number = numbers.get(name)
                variable = value == "var"
                sizes[name] = None if variable else number or size(str(value), numbers)
            except ValueError as e:
                expected = f"a number, 'var' or an expression of numbers ({e})"
                raise WrongError(["axes", name], expected, value) from None
        return sizes


class Op(_Keys, frozen=True, kw_only=True):
    """An operation."""

    name: str
    # the op of configs/ that it comes from: its own name, except at other heads
    family: str = ""
    family_definition: str = ""  # that op's definition
    axes: dict[str, int | None]  # None: variable

    @property
    def var_axes(self) -> tuple[str, ...]:
        return tuple(name for name, value in self.axes.items() if value is None)

    @property
    def fixed(self) -> dict[str, int]:
        return {name: value for name, value in self.axes.items() if value is not None}

    def shape(self, spec: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of an input or output at a workload's axes."""
        return self._sizes(axes, spec.axes)

    def moved(self, spec: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the elements that a call reads or writes: `moves`, or all."""
        return (0,) if spec.moves == () else self._sizes(axes, spec.moves or spec.axes)

    def _sizes(self, axes: Mapping[str, int], names: Iterable[str]) -> tuple[int, ...]:
        sizes = {**self.fixed, **axes}
        return tuple(sizes[name] for name in names)

    def work(self, axes: Mapping[str, int]) -> float | None:
        """Floating-point operations at a workload's axes; None where the op does not
        say, or an axis is missing.
        """
        sizes = {**self.fixed, **axes}
        try:
            return formula(self.flops, sizes)(sizes) if self.flops else None
        except ValueError:
            return None

    @property
    def unset(self) -> list[tuple[int, float | None]]:
        """Scalar inputs by number, each with a value that stands for its default."""
        defaults: list[tuple[int, float | None]] = []
        for i, spec in enumerate(self.inputs.values()):
            for value in spec.unset:
                defaults.append((i, None if value == "None" else value))
        return defaults

    @property
    def slots(self) -> dict[str, str]:
        """Input that names slots (`keeps`) -> the output whose slots they are."""
        return {spec.keeps: name for name, spec in self.outputs.items() if spec.keeps}

    def parts(self, name: str) -> dict[str, tuple[int, int]]:
        """An input's parts, each with its begin and end on the last axis."""
        parts = {}
        end = 0
        for part, text in self.inputs[name].parts.items():
            begin, end = end, end + size(text, self.fixed)
            parts[part] = begin, end
        return parts

    @property
    def overwrites(self) -> dict[int, int]:
        """Number of an output -> number of the input that it may overwrite."""
        inputs, outputs = list(self.inputs), list(self.outputs)
        return {
            outputs.index(output): inputs.index(source)
            for output, source in self.in_place.items()
        }

    @property
    def linear(self) -> list[Part]:
        """The inputs and parts in `linear_in`."""
        return self._located(self.linear_in)

    @property
    def flipped(self) -> list[Part]:
        """The inputs and parts in `flips`."""
        return self._located(self.flips)

    def _located(self, names: tuple[str, ...]) -> list[Part]:
        places = []
        for i, name in enumerate(self.inputs):
            if name in names:
                places.append(Part(i))
            for part, (begin, end) in self.parts(name).items():
                if f"{name}.{part}" in names:
                    places.append(Part(i, begin, end))
        return places


def read_op(path: Path) -> Op:
    """An op by its file, which may be `like` another of the same folder."""
    return _op(path.stem, _files([path.parent])[path.stem])


def _files(folders: Iterable[Path]) -> dict[str, OpFile]:
    """The ops of these folders. UsageError, with the file, for an invalid one, and for
    a name that an earlier folder has.
    """
    paths: dict[str, Path] = {}
    tables: dict[str, Json] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.toml"))):
        table, name = read_toml(path), path.stem
        if not table.keys() & {"definition", "inputs"}:
            continue
        if name in paths:
            hint = "give the file another name"
            raise UsageError(f"{path}: gdn has an op {name}", hint=hint)
        paths[name], tables[name] = path, table
    return {
        name: decode(_whole(name, tables, paths), OpFile, path)
        for name, path in paths.items()
    }


def _whole(name: str, tables: Mapping[str, Json], paths: Mapping[str, Path]) -> Json:
    """An op's table with the keys of the one that it is `like`, which may be like another."""
    table = tables[name]
    base = table.get("like")
    if not base:
        return table
    others = {other: tables[other] for other in tables if other != name}
    if base not in others:
        hint = f"`like` in {paths[name]} names another op"
        raise unknown("op", str(base), list(others), hint=hint)
    return overlaid(_whole(base, others, paths), table)


def _op(family: str, file: OpFile, heads: Heads | None = None) -> Op:
    first = file.sizes()
    if heads and heads == (first["num_q_heads"], first["num_v_heads"]):
        heads = None
    sizes = file.sizes(heads)
    changes = {
        "axes": sizes,
        "definition": file.definition.format(**sizes),
        "summary": file.summary.format(**sizes),
    }
    return Op(
        **msgspec.structs.asdict(file) | changes,
        name=f"{family}_qk{heads.qk}_v{heads.v}" if heads else family,
        family=family,
        family_definition=file.definition.format(**first),
    )


class Ops(dict[str, Op]):
    """The ops by name. An op at other heads is made when its name, such as
    `gdn_decode_qk16_v32`, is looked up; iteration gives the ops of files only.
    """

    def __init__(self, folders: Iterable[Path], first: Callable[[str], Any]) -> None:
        """Read the *.toml of these folders; `first` is the sort key of their names.
        UsageError for an invalid file.
        """
        files = _files(folders)
        self._files = {name: files[name] for name in sorted(files, key=first)}
        super().__init__({name: _op(name, file) for name, file in self._files.items()})

    def __missing__(self, name: str) -> Op:
        match = _AT_HEADS.fullmatch(name)
        file = self._files.get(match["family"]) if match else None
        if not match or not file or not file.heads:
            raise KeyError(name)
        try:
            heads = Heads.parse(f"{match['qk']}/{match['v']}")
            return self.at_heads(match["family"], heads)
        except UsageError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None

    def get(self, name: Any, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def at_heads(self, family: str, heads: Heads) -> Op:
        """An op at other numbers of heads. UsageError if its heads cannot be chosen."""
        file = self._files[family]
        if not file.heads:
            able = ", ".join(name for name, file in self._files.items() if file.heads)
            raise UsageError(
                f"{family} has one number of heads", hint=f"--heads is for {able}"
            )
        return _op(family, file, heads)

    def of_definition(self, definition: str) -> Op | None:
        """The op that has a definition of this name."""
        heads = re.search("_qk([0-9]{1,3})_v([0-9]{1,3})(?=_|$)", definition)
        for name, op in self.items():
            other = self.get(f"{name}_qk{heads[1]}_v{heads[2]}") if heads else None
            for candidate in (op, other):
                if candidate and candidate.definition == definition:
                    return candidate
        return None


def _names(text: str) -> list[str]:
    """The names in a text with {NAME}s; any other use of braces counts as an unknown name."""
    names = []
    try:
        for _, name, form, conversion in string.Formatter().parse(text):
            if name is not None:
                names.append(text if form or conversion else name)
    except ValueError:
        return [text]
    return names


def label_axes(op: Op | None, axes: dict[str, int]) -> list[str]:
    """The axes that this op's label shows, in its order."""
    names = _names(op.label) if op else []
    return names if names and all(name in axes for name in names) else list(axes)


def label_names(op: Op) -> dict[str, str]:
    """The short names of axes in this op's label: {"B": "batch_size"} for "B={batch_size}"."""
    short = {}
    for text, name, _, _ in string.Formatter().parse(op.label):
        if name and text.strip(" ="):
            short[text.strip(" =")] = name
    return short


def label_of(op: Op | None, axes: dict[str, int]) -> tuple[str, tuple[float, ...]]:
    """A workload's label, and a key that sorts by size."""
    names = label_axes(op, axes)
    sizes = [axes[name] for name in names]
    order = tuple(float(n) if units.is_positive(n) else 0.0 for n in sizes)
    if op and names == _names(op.label):
        return op.label.format(**axes), order
    return " ".join(f"{name}={axes[name]}" for name in names) or "one size", order
