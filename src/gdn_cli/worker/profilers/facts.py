"""Facts and tables by their keys, for all tools: facts.toml has their labels, units,
groups and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...parsing import read_toml
from ...schema.profile_types import Fact, Table, Value


class Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fixed texts of a fact, and what it is by ncu's metrics: the first of these
    sums whose parts are all known, times `scale`.
    """

    label: str
    unit: str = ""
    group: str = ""
    better: str = ""
    note: str = ""
    metrics: tuple[tuple[str, ...], ...] = ()
    scale: float = 1


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fixed texts of a table."""

    title: str
    columns: tuple[tuple[str, str], ...]
    note: str = ""


class _Catalogue(msgspec.Struct):
    facts: dict[str, Words]
    tables: dict[str, Shape]


_CATALOGUE = msgspec.convert(read_toml(Path(__file__).with_suffix(".toml")), _Catalogue)
WORDS = _CATALOGUE.facts


def fact(key: str, value: Value, note: str = "") -> Fact:
    """The fact of this key (KEY, or TOOL.KEY if facts.toml has one); without `note`,
    with the note from facts.toml.
    """
    words = WORDS[key]
    note = note or words.note
    bare = key.rpartition(".")[2]
    return Fact(bare, words.label, value, words.unit, words.group, note, words.better)


def table(key: str, rows: Sequence[tuple[Any, ...]], note: str = "") -> list[Table]:
    """The table of this key in a list, which is empty if there are no rows."""
    shape = _CATALOGUE.tables[key]
    bare = key.rpartition(".")[2]
    note = note or shape.note
    return [Table(bare, shape.title, shape.columns, tuple(rows), note)] if rows else []
