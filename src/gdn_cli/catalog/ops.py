"""configs/*.toml -> Op: an operation, and the same operation at other numbers of heads.
Does not import torch.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from .. import units
from ..errors import UsageError, unknown
from ..parsing import Json, Positive, Text, Wrong, decode, read_toml
from .expression import condition, formula, size
from .stress import Family, fault


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One input or output: a FlashInfer-Trace dtype name and axis names (None for a scalar).

    parts  of an input: names of consecutive parts of its last axis, each with its size,
      a number or an expression of
           fixed axes; together they are the whole axis
    moves  axes whose product is the number of elements that a call reads or writes, if
      that is not all of them. []:
           none; an output that overwrites an input then comes back bit for bit
    keeps  of an output that overwrites an input: an input of whole numbers, one or
      several for each row, naming the
           slots (indices on the first axis) that a call may change. A number below 1 is
           padding and names none. All other slots must come back bit for bit. Twins
           name each slot once
    between  of an input of whole numbers: the least and the greatest of a twin's,
      expressions of axes
    unset  of a scalar: the values that stand for its default, such as ["None", 0]
    """

    dtype: Text
    shape: tuple[str, ...] | None = None
    note: str = ""  # what its values must be, for an algo's callers
    parts: dict[str, Text] = {}
    moves: tuple[str, ...] | None = None
    keeps: Text | None = None
    unset: tuple[Literal["None"] | float, ...] = ()
    between: tuple[Text, Text] | None = None


HEADS = ("num_q_heads", "num_k_heads", "num_v_heads")  # the axes that `--heads` sets
_AT_HEADS = re.compile(r"(?P<family>.+)_qk(?P<qk>[0-9]{1,3})_v(?P<v>[0-9]{1,3})")


class Heads(NamedTuple):
    """Numbers of query/key heads and of value heads, written "4/8"."""

    qk: int
    v: int

    @classmethod
    def of(cls, text: str) -> Heads:
        """Raises UsageError for text of another form, and if the value heads are not a
        multiple of the query heads.
        """
        found = re.fullmatch(r"\s*([0-9]{1,3})\s*/\s*([0-9]{1,3})\s*", text)
        if not found or not (qk := int(found[1])) or not (v := int(found[2])) or v % qk:
            hint = (
                "expected query/key heads and value heads, the second a multiple of the first,"
                " such as 4/8"
            )
            raise UsageError(f"heads '{text}'", hint=hint)
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


_AXIS = "a positive whole number or 'var', or an expression of axes that are numbers"


class OpFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """configs/<op>.toml: the FlashInfer-Trace definition of an op, how its results are
    checked and shown.

    Raises parsing.Wrong if its parts are inconsistent.
    """

    # {num_q_heads} is replaced by the value of that axis, here and in the summary
    definition: Text
    op_type: Text
    summary: Text
    axes: dict[str, Annotated[Positive | str, Meta(description=_AXIS)]]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    constraints: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    # output -> greatest relative Frobenius error against float64
    tolerance: dict[str, Annotated[float, Meta(gt=0)]]
    reference: Text  # the algo whose source is the definition's reference
    baseline: Text | None = None  # the algo that the contest ranks against
    # inputs whose joint negation negates every output; "input.part" for a part
    linear_in: tuple[str, ...]
    # inputs whose elements may have either sign, "input.part" for a part: the timer
    # changes some before each call, so that no timed call has the values of another.
    # One of them must change every output
    flips: tuple[str, ...] = ()
    label: Text  # a workload's name in a table: "B={batch_size}"
    in_place: dict[str, Text] = {}  # output -> the input that it may overwrite
    # every call does so, except for algos that return their results
    in_place_only: bool = False
    defaults: dict[
        str,
        Text,
        # variable axis -> its value if it is not given: an expression of the other variable
        # axes
    ] = {}
    # floating-point operations of the definition, as a formula of the axes
    flops: Text | None = None
    # the units of a GPU that a kernel would do them with
    peak: Literal["tensor", "fp32"] | None = None
    stress: dict[str, Family] = {}  # name -> hard inputs: `gdn run --stress`
    # numbers of heads with a published definition, "4/8"; others can be requested
    heads: tuple[str, ...] = ()
    # the op whose keys and sizes it has, where its file does not say otherwise
    like: Text | None = None

    def __post_init__(self) -> None:
        axes = self._sizes()
        fixed = {name: value for name, value in axes.items() if value is not None}
        for key, names in (("definition", fixed), ("summary", fixed), ("label", axes)):
            if not set(_names(getattr(self, key))) <= set(names):
                said = f"text; {{NAME}} may be one of {', '.join(names)}"
                raise Wrong((key,), said, getattr(self, key))
        for text in self.heads:
            if not set(HEADS) <= set(fixed):
                raise Wrong(
                    ("heads",),
                    f"nothing, without the fixed axes {', '.join(HEADS)}",
                    list(self.heads),
                )
            try:
                Heads.of(text)
            except UsageError as e:
                raise Wrong(("heads",), e.hint, text) from None
        for kind, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            for name, spec in specs.items():
                self._check_tensor(kind, name, spec, fixed)
        if set(self.tolerance) != set(self.outputs):
            raise Wrong(
                ("tolerance",),
                f"a positive number for each of {', '.join(self.outputs)}",
                self.tolerance,
            )
        named = [
            *self.inputs,
            *(
                f"{name}.{part}"
                for name, spec in self.inputs.items()
                for part in spec.parts
            ),
        ]
        for key in ("linear_in", "flips"):
            for name in getattr(self, key):
                if name not in named:
                    raise Wrong((key,), f"inputs: {', '.join(named)}", name)
        if (self.flops is None) != (self.peak is None):
            raise Wrong(
                ("flops" if self.flops is None else "peak",),
                "a value, as flops and peak go together",
            )
        anywhere = dict.fromkeys(axes, 7) | fixed  # a call that is as good as any other
        if self.flops is not None:
            try:
                formula(self.flops, axes)(anywhere)
            except ValueError as e:
                said = f"a formula of {', '.join(axes)} ({e})"
                raise Wrong(("flops",), said, self.flops) from None
        for i, text in enumerate(self.constraints):
            try:
                holds = condition(text, axes)
            except ValueError:
                continue  # of tensors' values, not of axes alone
            try:
                holds(anywhere)
            except ValueError as e:
                said = f"a condition that has an answer ({e})"
                raise Wrong(("constraints", i), said, text) from None
        for output, source in self.in_place.items():
            pair = self.outputs.get(output), self.inputs.get(source)
            if None in pair or (pair[0].dtype, pair[0].shape) != (
                pair[1].dtype,
                pair[1].shape,
            ):
                raise Wrong(
                    ("in_place", output),
                    "output = 'input', both of one shape and dtype",
                    source,
                )
        if self.in_place_only and not self.in_place:
            raise Wrong(("in_place_only",), "false, without in_place", True)
        variable = [name for name, value in axes.items() if value is None]
        for name, text in self.defaults.items():
            if name not in variable:
                raise Wrong(
                    ("defaults", name), f"a variable axis: {', '.join(variable)}", text
                )
            try:
                size(text, {other: 1 for other in variable if other != name})
            except ValueError as e:
                raise Wrong(
                    ("defaults", name),
                    f"an expression of the other variable axes ({e})",
                    text,
                ) from None
        for name, family in self.stress.items():
            if found := fault(family, variable):
                raise Wrong(("stress", name, found.steps[0]), found.expected, found.got)

    def _check_tensor(
        self, kind: str, name: str, spec: TensorSpec, fixed: Mapping[str, int]
    ) -> None:
        """Raises Wrong if a tensor's keys do not fit the axes or each other."""
        for key in ("shape", "moves"):
            for axis in getattr(spec, key) or ():
                if axis not in self.axes:
                    raise Wrong(
                        (kind, name, key),
                        f"axes of [axes]: {', '.join(self.axes)}",
                        axis,
                    )
        if spec.parts:
            whole = (
                fixed.get(spec.shape[-1]) if spec.shape and kind == "inputs" else None
            )
            if whole is None:
                raise Wrong(
                    (kind, name, "parts"),
                    "nothing, except for an input whose last axis is fixed",
                    spec.parts,
                )
            try:
                found = sum(size(text, fixed) for text in spec.parts.values())
            except ValueError as e:
                raise Wrong(
                    (kind, name, "parts"),
                    f"expressions of fixed axes ({e})",
                    spec.parts,
                ) from None
            if found != whole:
                raise Wrong(
                    (kind, name, "parts"),
                    f"parts that add up to {spec.shape[-1]} = {whole}",
                    found,
                )
        if spec.unset and (kind != "inputs" or spec.shape is not None):
            raise Wrong(
                (kind, name, "unset"),
                "nothing, except for a scalar input",
                list(spec.unset),
            )
        if spec.keeps:
            by = self.inputs.get(spec.keeps)
            if (
                name not in self.in_place
                or not by
                or "int" not in by.dtype
                or not by.shape
            ):
                said = "an input of whole numbers with one axis or more, for an output of in_place"
                raise Wrong((kind, name, "keeps"), said, spec.keeps)
        if spec.between:
            try:
                low, high = (
                    size(text, dict.fromkeys(self.axes, 1) | fixed)
                    for text in spec.between
                )
            except ValueError as e:
                raise Wrong(
                    (kind, name, "between"),
                    f"two expressions of axes ({e})",
                    list(spec.between),
                ) from None
            if kind != "inputs" or "int" not in spec.dtype or low > high:
                said = "the least and the greatest value, for an input of whole numbers"
                raise Wrong((kind, name, "between"), said, list(spec.between))

    def _sizes(self, heads: Heads | None = None) -> dict[str, int | None]:
        """Each axis's size (None: variable) at these heads; None for the heads of the
        file. Raises Wrong.
        """
        numbers = {
            name: value for name, value in self.axes.items() if isinstance(value, int)
        }
        if heads:
            numbers |= dict(zip(HEADS, (heads.qk, heads.qk, heads.v), strict=True))
        found = {}
        for name, value in self.axes.items():
            try:
                variable = value in ("var", None)
                found[name] = (
                    None
                    if variable
                    else numbers[name]
                    if name in numbers
                    else size(value, numbers)
                )
            except ValueError as e:
                raise Wrong(("axes", name), f"{_AXIS} ({e})", value) from None
        return found


class Op(OpFile, frozen=True, kw_only=True):
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
        known = self.fixed | dict(axes)
        return tuple(known[axis] for axis in spec.shape or ())

    def work(self, axes: Mapping[str, int]) -> float | None:
        """Floating-point operations at a workload's axes; None where the op does not
        say, or an axis is missing.
        """
        known = self.fixed | dict(axes)
        try:
            return formula(self.flops, known)(known) if self.flops else None
        except ValueError:
            return None

    def moved(self, spec: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the elements that a call reads or writes: `moves`, or all."""
        known = self.fixed | dict(axes)
        if spec.moves == ():
            return (0,)
        return tuple(known[axis] for axis in spec.moves or spec.shape or ())

    @property
    def unset(self) -> list[tuple[int, float | None]]:
        """Scalar inputs by number, each with a value that stands for its default."""
        values = enumerate(spec.unset for spec in self.inputs.values())
        return [
            (i, None if value == "None" else value)
            for i, many in values
            for value in many
        ]

    @property
    def slots(self) -> dict[str, str]:
        """Input that names slots (`keeps`) -> the output whose slots they are."""
        return {spec.keeps: name for name, spec in self.outputs.items() if spec.keeps}

    def parts(self, name: str) -> dict[str, tuple[int, int]]:
        """An input's parts, each with its begin and end on the last axis."""
        found, end = {}, 0
        for part, text in self.inputs[name].parts.items():
            begin, end = end, end + size(text, self.fixed)
            found[part] = begin, end
        return found

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
    """Read `configs/<op>.toml`; a UsageError names the file, the key and what was expected."""
    return _op(path.stem, _read(path))


def _read(path: Path) -> OpFile:
    said = read_toml(path)
    if base := said.get("like"):
        bases = [
            p.stem
            for p in sorted(path.parent.glob("*.toml"))
            if p != path and "definition" in read_toml(p)
        ]
        if base not in bases:
            raise unknown(
                "op", str(base), bases, hint=f"`like` in {path} names a file beside it"
            )
        said = _over(read_toml(path.with_stem(base)), said)
    return decode(said, OpFile, path)


def _over(base: Json, changes: Json) -> Json:
    """A table with these changes; those to a table in it change only what they name."""
    into = {
        key: _over(base[key], value)
        for key, value in changes.items()
        if isinstance(value, dict) and key in base
    }
    return base | changes | into


def _op(family: str, file: OpFile, heads: Heads | None = None) -> Op:
    own = file._sizes()
    made = {
        "name": family,
        "family": family,
        "family_definition": file.definition.format(**own),
    }
    other = heads if heads and heads != _own_heads(file) else None
    if other:
        made["name"] = f"{family}_qk{other.qk}_v{other.v}"
    axes = file._sizes(other)
    made |= {
        key: getattr(file, key).format(**axes) for key in ("definition", "summary")
    }
    return Op(**msgspec.structs.asdict(file) | made | {"axes": axes})


def _own_heads(file: OpFile) -> Heads:
    return Heads(file.axes["num_q_heads"], file.axes["num_v_heads"])


class Ops(dict[str, Op]):
    """The ops by name. An op at other heads is made when its name, such as
    `gdn_decode_qk16_v32`, is looked up; iteration gives the ops of configs/ only.
    """

    def __init__(self, folder: Path, first: Callable[[str], Any]) -> None:
        """Read `folder`/*.toml; `first` is the sort key of their names. UsageError for
        an invalid file.
        """
        found = {
            p.stem: _read(p)
            for p in folder.glob("*.toml")
            if "definition" in read_toml(p)
        }
        self._files = {name: found[name] for name in sorted(found, key=first)}
        super().__init__({name: _op(name, file) for name, file in self._files.items()})

    def __missing__(self, name: str) -> Op:
        found = _AT_HEADS.fullmatch(name)
        if (
            not found
            or not (file := self._files.get(found["family"]))
            or not file.heads
        ):
            raise KeyError(name)
        try:
            return self.at(found["family"], Heads.of(f"{found['qk']}/{found['v']}"))
        except UsageError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None

    def get(self, name: Any, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def at(self, family: str, heads: Heads) -> Op:
        """An op of configs/ at other numbers of heads. UsageError for an op whose heads
        cannot be chosen.
        """
        if not (file := self._files[family]).heads:
            able = ", ".join(name for name, file in self._files.items() if file.heads)
            raise UsageError(
                f"{family} has one number of heads", hint=f"--heads is for {able}"
            )
        return _op(family, file, heads)

    def of_definition(self, definition: str) -> Op | None:
        """The op that has a definition of this name."""
        for name, op in self.items():
            found = re.search("_qk([0-9]{1,3})_v([0-9]{1,3})(?=_|$)", definition)
            at = (
                self.get(f"{name}_qk{found[1]}_v{found[2]}")
                if found and op.heads
                else None
            )
            for one in (op, at):
                if one and one.definition == definition:
                    return one
        return None


def _names(text: str) -> list[str]:
    """The names in a text with {NAME}s; any other use of braces counts as an unknown name."""
    try:
        parts = [part for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError:
        return [text]
    return [
        name if not form and not conversion else text
        for _, name, form, conversion in parts
    ]


def label_axes(op: Op | None, axes: dict[str, int]) -> list[str]:
    """The axes that this op's label shows, in its order."""
    if op is None:
        return list(axes)
    named = _names(op.label)
    return named if all(name in axes for name in named) else list(axes)


def label_names(op: Op) -> dict[str, str]:
    """What this op's label calls its axes: {"B": "batch_size"} for "B={batch_size}"."""
    parts = [
        (text.strip(" ="), name)
        for text, name, _, _ in string.Formatter().parse(op.label)
    ]
    return {text: name for text, name in parts if text and name}


def label_of(op: Op | None, axes: dict[str, int]) -> tuple[str, tuple[float, ...]]:
    """A workload's label, and a key that sorts by size."""
    shown = label_axes(op, axes)
    order = tuple(
        float(axes[name]) if units.is_positive(axes[name]) else 0.0 for name in shown
    )
    if op is not None and shown == _names(op.label):
        return op.label.format(**axes), order
    return " ".join(f"{name}={axes[name]}" for name in shown) or "one size", order
