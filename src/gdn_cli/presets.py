"""Presets: configs/presets.toml says which workloads a name stands for, and how long to measure each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import paths
from .errors import unknown
from .parsing import Fields, read_toml


@dataclass(frozen=True)
class Preset:
    """One table of configs/presets.toml."""

    name: str
    summary: str
    settings: dict[str, float]  # {"seconds"} or {"warmup", "iterations", "trials"}
    axes: dict[str, str | list[dict[str, Any]]]  # op -> "all", or entries of axes (or of seq_lens, a tuple)
    op_settings: dict[str, dict[str, float]] = field(default_factory=dict)  # op -> settings of its own
    scored: bool = False  # whether a contest makes its score from these workloads

    def settings_for(self, op_name: str) -> dict[str, float]:
        return dict(self.op_settings.get(op_name, self.settings))


def presets_file() -> Path:
    return paths.CONFIGS_DIR / "presets.toml"


def preset_names() -> list[str]:
    return list(read_toml(presets_file()))


def load_preset(name: str) -> Preset:
    """A preset by name; a UsageError names file, key and what was expected."""
    path = presets_file()
    tables = read_toml(path)
    if name not in tables:
        raise unknown("preset", name, tables, hint=f"presets are in {path}")
    top = Fields(path, tables)
    f = Fields(path, top.take(name, dict), f"{name}.")
    summary, settings, workloads = f.take("summary", str), f.take("settings", dict), f.take("workloads", dict)
    scored = f.take("scored", bool, False)
    f.done()
    own = {op: _settings(path, f"{name}.settings.{op}.", s) for op, s in settings.items() if isinstance(s, dict)}
    common = _settings(path, f"{name}.settings.", {k: v for k, v in settings.items() if not isinstance(v, dict)})
    axes = {op: _entries(Fields(path, workloads, f"{name}.workloads."), op) for op in workloads}
    return Preset(name, summary, common, axes, own, scored)


def _settings(path: Path, where: str, table: dict[str, Any]) -> dict[str, float]:
    f = Fields(path, table, where)
    if "seconds" in table:
        seconds = f.table.pop("seconds")
        if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
            raise f.wrong("seconds", "a positive number", seconds)
        settings = {"seconds": float(seconds)}
    elif not table:
        raise f.wrong("seconds", "a positive number, or warmup, iterations and trials instead")
    else:
        settings = {}
        for key, least in (("warmup", 0), ("iterations", 1), ("trials", 1)):
            settings[key] = f.take(key, int)
            if settings[key] < least:
                raise f.wrong(key, f"a whole number, {least} or more", settings[key])
    f.done()
    return settings


def _entries(f: Fields, op: str) -> str | list[dict[str, Any]]:
    value = f.table[op]
    if value == "all":
        return value
    expected = '"all", or a list of axes such as [{ batch_size = 1 }]'
    if not isinstance(value, list) or not value:
        raise f.wrong(op, expected, value)
    entries = []
    for i, entry in enumerate(value):
        if not isinstance(entry, dict) or not entry:
            raise f.wrong(f"{op}[{i}]", "axes such as { batch_size = 1 }", entry)
        entry = dict(entry)
        for key, number in entry.items():
            if key == "seq_lens":
                if not isinstance(number, str) or not (lens := parse_seq_lens(number)) or len(entry) > 1:
                    raise f.wrong(f"{op}[{i}].{key}", 'only lengths such as "4x2048" or "1024+7168"', value[i])
                entry[key] = lens
            elif type(number) is not int or number < 1:
                raise f.wrong(f"{op}[{i}].{key}", "a positive whole number", number)
        entries.append(entry)
    return entries


def parse_seq_lens(text: str) -> tuple[int, ...] | None:
    """ "4x2048" -> four sequences of 2048, "1024+7168" -> two, and both mixed; None where it is neither."""
    lens: list[int] = []
    for part in text.split("+"):
        m = re.fullmatch(r"\s*(?:([1-9]\d{0,5})\s*x\s*)?([1-9]\d{0,8})\s*", part)
        if not m:
            return None
        lens += [int(m[2])] * int(m[1] or 1)
    return tuple(lens)
