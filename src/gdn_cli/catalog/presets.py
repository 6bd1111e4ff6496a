"""Presets: configs/presets.toml says which workloads a name stands for, and how long to
measure each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from .. import paths
from ..errors import unknown
from ..parsing import Json, Positive, Text, Wrong, decode, read_toml

Entry = Annotated[
    dict[str, Positive | str],
    Meta(
        min_length=1,
        description="axes such as { batch_size = 1 }, positive whole numbers",
    ),
]
Entries = Annotated[
    Literal["all"] | Annotated[list[Entry], Meta(min_length=1)],
    Meta(description='"all", or a list of axes such as [{ batch_size = 1 }]'),
]


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long to measure: `seconds`, or the contest's three numbers."""

    seconds: Annotated[float, Meta(gt=0)] | None = None
    warmup: Annotated[int, Meta(ge=0)] | None = None
    iterations: Positive | None = None
    trials: Positive | None = None

    def __post_init__(self) -> None:
        counts = {
            "warmup": self.warmup,
            "iterations": self.iterations,
            "trials": self.trials,
        }
        given = [name for name, value in counts.items() if value is not None]
        if self.seconds is None and not given:
            raise Wrong(
                ("seconds",),
                "a positive number, or warmup, iterations and trials instead",
            )
        if self.seconds is None and len(given) < 3:
            raise Wrong(
                (next(name for name in counts if name not in given),), "a whole number"
            )
        if self.seconds is not None and given:
            raise Wrong((given[0],), "no value together with seconds", counts[given[0]])


class Preset(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of configs/presets.toml."""

    name: str = ""  # the table's name
    summary: Text
    settings: Json  # keys of Sampling; an op that differs has a table of its name
    workloads: dict[str, Entries]
    scored: bool = False  # whether a contest's score is made from these workloads

    def __post_init__(self) -> None:
        for op, entries in self.workloads.items():
            for i, entry in enumerate(entries if entries != "all" else ()):
                for key, value in entry.items():
                    steps = ("workloads", op, i, key)
                    if key != "seq_lens" and isinstance(value, str):
                        raise Wrong(steps, "a positive whole number", value)
                    if key == "seq_lens" and (
                        not parse_seq_lens(str(value)) or len(entry) > 1
                    ):
                        raise Wrong(
                            steps, 'only lengths such as "4x2048" or "1024+7168"', entry
                        )

    def settings_for(self, op_name: str | None) -> dict[str, float]:
        """{"seconds"} or {"warmup", "iterations", "trials"}; for None the settings of
        an op without its own table.
        """
        common = {
            key: value
            for key, value in self.settings.items()
            if not isinstance(value, dict)
        }
        own = self.settings.get(op_name)
        return own if isinstance(own, dict) else common


def presets_file() -> Path:
    return paths.CONFIGS_DIR / "presets.toml"


def names() -> list[str]:
    """All presets, in the order of their file."""
    return list(read_toml(presets_file()))


def load_preset(name: str) -> Preset:
    """A preset by name; a UsageError names file, key and what was expected."""
    path = presets_file()
    tables = read_toml(path)
    if name not in tables:
        raise unknown("preset", name, tables, hint=f"presets are in {path}")
    preset = decode({name: tables[name]}, dict[str, Preset], path)[name]
    for op in [
        None,
        *(key for key, value in preset.settings.items() if isinstance(value, dict)),
    ]:
        where = f"$.{name}.settings" + (f".{op}" if op else "")
        decode(preset.settings_for(op), Sampling, path, root=where)
    return msgspec.structs.replace(preset, name=name)


def parse_seq_lens(text: str) -> tuple[int, ...] | None:
    """ "4x2048" -> four sequences of 2048, "1024+7168" -> two, and combinations; None if
    the text is neither.
    """
    lens: list[int] = []
    for part in text.split("+"):
        m = re.fullmatch(r"\s*(?:([1-9]\d{0,5})\s*x\s*)?([1-9]\d{0,8})\s*", part)
        if not m:
            return None
        lens += [int(m[2])] * int(m[1] or 1)
    return tuple(lens)
