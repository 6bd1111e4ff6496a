"""Presets: configs/presets.toml says which workloads a name stands for, and how long to
measure each.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ..errors import unknown
from ..parsing import Json, Positive, Text, WrongError, decode, read_config

_FILE = "presets.toml"

# axes such as { batch_size = 1 }, or lengths: { seq_lens = "4x2048" }
Entry = dict[str, Positive | str]
Entries = Literal["all"] | Annotated[list[Entry], Meta(min_length=1)]


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long to measure: `seconds`, or the contest's three numbers."""

    seconds: Annotated[float, Meta(gt=0)] | None = None
    warmup: Annotated[int, Meta(ge=0)] | None = None
    iterations: Positive | None = None
    trials: Positive | None = None

    def __post_init__(self) -> None:
        missing = [self.warmup, self.iterations, self.trials].count(None)
        if missing != (3 if self.seconds else 0):
            expected = "either a number, or warmup, iterations and trials"
            raise WrongError(["seconds"], expected, self.seconds)


class Preset(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of configs/presets.toml."""

    # the table's name
    name: str = ""
    # the files that have it
    files: str = ""
    summary: Text
    # keys of Sampling; an op that differs has a table of its name
    settings: Json
    workloads: dict[str, Entries]

    def settings_for(self, op_name: str | None) -> dict[str, float]:
        """{"seconds"} or {"warmup", "iterations", "trials"}; for None the settings of
        an op without its own table.
        """
        for_op = self.settings.get(op_name or "")
        if isinstance(for_op, dict):
            return for_op
        common = self.settings.items()
        return {key: value for key, value in common if not isinstance(value, dict)}


def names() -> list[str]:
    """All presets, in the order of their files."""
    return list(read_config(_FILE)[0])


def load_preset(name: str) -> Preset:
    """A preset by name; a UsageError names file, key and what was expected."""
    tables, files = read_config(_FILE)
    if name not in tables:
        raise unknown("preset", name, tables, hint=f"presets are in {files}")
    preset = decode(tables[name], Preset, f"{files}: [{name}]")
    decode(preset.settings_for(None), Sampling, f"{files}: [{name}.settings]")
    for key, value in preset.settings.items():
        if isinstance(value, dict):
            decode(value, Sampling, f"{files}: [{name}.settings.{key}]")
    return msgspec.structs.replace(preset, name=name, files=files)
