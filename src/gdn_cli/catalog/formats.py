"""The JSON of flashinfer-bench, a Definition and a Solution, as far as gdn reads and writes it.

Both remain tables all the way: they come from files, go to flashinfer-bench's own
models unchanged, and a Solution may be written by anyone. `decode` in parsing.py checks
a file against these types; keys not named here are dropped.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from ..parsing import Positive, Text

Language = Literal["python", "triton", "cpp", "cuda"]


class Source(TypedDict):
    path: Text
    content: Text


class _Spec(TypedDict):
    language: Language
    target_hardware: Annotated[list[str], Meta(min_length=1)]
    entry_point: Text


class Spec(_Spec, total=False):
    """flashinfer-bench's BuildSpec."""

    dependencies: list[str] | None
    destination_passing_style: bool
    binding: str | None


class _Solution(TypedDict):
    name: Text
    definition: Text
    author: Text
    spec: Spec
    sources: Annotated[list[Source], Meta(min_length=1)]


class Solution(_Solution, total=False):
    description: str | None


class Axis(TypedDict, total=False):
    type: str
    value: Positive | None  # None or left out: variable


class _Tensor(TypedDict):
    shape: list[str] | None  # names of axes; None: a scalar
    dtype: Text


class Tensor(_Tensor, total=False):
    optional: bool  # an input that a call may leave out


class Calls(TypedDict):
    """A definition's calls: all that gdn reads of a definition written by others."""

    axes: dict[str, Axis]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class Input(TypedDict, total=False):
    """One input of a workload; each type has its own keys (trace_set.py)."""

    type: Literal["random", "scalar", "safetensors"]
    value: float
    path: str
    tensor_key: str


class Definition(Calls):
    """A definition that gdn writes."""

    name: str
    description: str
    op_type: str
    tags: list[str]
    constraints: list[str]
    reference: str
