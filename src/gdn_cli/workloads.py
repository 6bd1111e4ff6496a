"""Workloads: which calls to make of an op, and how a user picks some of them. Imports neither torch nor numpy.

A workload is axes and, for a FlashInfer-Trace folder, the places of its tensors. The contest's 54 decode and 100
prefill workloads are embedded as twins: real uuids and axes, tensors drawn from the uuid (see `twins`). Attention has
twins of its own, S = 128 to 4096.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from . import paths
from .errors import GdnError, MissingError, UsageError, unknown
from .registry import Fields, Op, read_toml

ATTENTION_SEQ_LENS = (128, 256, 512, 1024, 2048, 4096)
# Generated twins get their uuid from this and their axes: the same axes have the same tensors everywhere.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "gdn:workload")
_LFS_POINTER = "version https://git-lfs"


@dataclass(frozen=True)
class Workload:
    """The axes and inputs of one call."""

    uuid: str
    axes: dict[str, int]  # the op's variable axes, all of them
    index: int | None = None  # place in the contest's (or the folder's) order; None for a generated twin
    origin: str = "twin"  # "twin": tensors drawn from the uuid; "dataset": a FlashInfer-Trace folder's
    inputs: dict[str, dict] | None = None  # FlashInfer-Trace input specs, for origin "dataset"
    seq_lens: tuple[int, ...] | None = None  # prefill twins made for given lengths

    def to_json(self) -> dict[str, Any]:
        return {
            "uuid": self.uuid,
            "axes": dict(self.axes),
            "index": self.index,
            "origin": self.origin,
            "inputs": self.inputs,
            "seq_lens": None if self.seq_lens is None else list(self.seq_lens),
        }

    @classmethod
    def from_json(cls, d: Mapping[str, Any]) -> Workload:
        lens = d.get("seq_lens")
        return cls(
            uuid=d["uuid"],
            axes=dict(d["axes"]),
            index=d.get("index"),
            origin=d.get("origin", "twin"),
            inputs=d.get("inputs"),
            seq_lens=None if lens is None else tuple(lens),
        )


# --- embedded ---------------------------------------------------------------------------------------------------


@cache
def contest() -> dict[str, Any]:
    """data/contest.json: by definition, the workloads in dataset order, their sources and published statistics."""
    return json.loads((Path(__file__).parent / "data" / "contest.json").read_text(encoding="utf-8"))["definitions"]


def embedded(op: Op) -> list[Workload]:
    """The contest's workloads of this op as twins, in dataset order; attention: B = 1, S = 128 to 4096."""
    if op.definition in contest():
        rows = contest()[op.definition]["workloads"]
        return [Workload(row["uuid"], dict(row["axes"]), index=i) for i, row in enumerate(rows)]
    if op.name == "attention_fwd":
        every = [{"batch_size": 1, "seq_len": s} for s in ATTENTION_SEQ_LENS]
        return [Workload(_uuid(op, axes), axes, index=i) for i, axes in enumerate(every)]
    return []


def _uuid(op: Op, axes: Mapping[str, int], seq_lens: Sequence[int] | None = None) -> str:
    parts = {"seq_lens": "+".join(map(str, seq_lens))} if seq_lens else axes
    return str(uuid.uuid5(_NAMESPACE, f"{op.definition}?" + "&".join(f"{k}={parts[k]}" for k in sorted(parts))))


def twin(op: Op, wanted: Mapping[str, int], seq_lens: Sequence[int] | None = None) -> Workload | None:
    """A twin at axes that no workload has, or None where `wanted` leaves an axis open.

    batch_size may be left out (1) beside another axis, and len_cu_seqlens always (num_seqs + 1).
    """
    axes = dict(wanted)
    if seq_lens is not None:
        axes |= {"total_seq_len": sum(seq_lens), "num_seqs": len(seq_lens)}
    if "len_cu_seqlens" in op.var_axes:
        if "num_seqs" in axes:
            axes.setdefault("len_cu_seqlens", axes["num_seqs"] + 1)
        elif "len_cu_seqlens" in axes:
            axes["num_seqs"] = axes["len_cu_seqlens"] - 1
    if axes and "batch_size" in op.var_axes:
        axes.setdefault("batch_size", 1)
    if set(axes) != set(op.var_axes):
        return None
    if "num_seqs" in axes:
        if axes["len_cu_seqlens"] != axes["num_seqs"] + 1:
            raise UsageError(
                f"len_cu_seqlens={axes['len_cu_seqlens']} with num_seqs={axes['num_seqs']}",
                hint="len_cu_seqlens is num_seqs + 1: leave it out",
            )
        if not 1 <= axes["num_seqs"] <= axes["total_seq_len"]:
            raise UsageError(
                f"num_seqs={axes['num_seqs']} sequences do not fit total_seq_len={axes['total_seq_len']}",
                hint="each sequence has at least one token",
            )
    axes = {name: axes[name] for name in op.var_axes}
    if seq_lens is not None and len(seq_lens) == 1:
        seq_lens = None  # one sequence: the axes say it all, and the twin is the same
    return Workload(_uuid(op, axes, seq_lens), axes, seq_lens=None if seq_lens is None else tuple(seq_lens))


# --- presets ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """One table of configs/presets.toml."""

    name: str
    summary: str
    settings: dict[str, float]  # {"seconds"} or {"warmup", "iterations", "trials"}
    axes: dict[str, str | list[dict[str, Any]]]  # op -> "all", or entries of axes (or of seq_lens, a tuple)
    op_settings: dict[str, dict[str, float]] = field(default_factory=dict)  # op -> settings of its own

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
    f.done()
    own = {op: _settings(path, f"{name}.settings.{op}.", s) for op, s in settings.items() if isinstance(s, dict)}
    common = _settings(path, f"{name}.settings.", {k: v for k, v in settings.items() if not isinstance(v, dict)})
    axes = {op: _entries(Fields(path, workloads, f"{name}.workloads."), op) for op in workloads}
    return Preset(name, summary, common, axes, own)


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


# --- selecting --------------------------------------------------------------------------------------------------


def select(
    op: Op,
    workloads: Sequence[Workload],
    *,
    chosen: Sequence[str] = (),
    first: int | None = None,
    preset: Preset | None = None,
) -> list[Workload]:
    """The workloads that `--workload`, `-n` and `--preset` mean; a UsageError says what there is instead.

    chosen  each one of: an index ("12"), a range of them ("0-9"), a uuid prefix of at least 4 hex digits, or an axis
            filter ("batch_size=64", "total_seq_len=8192,num_seqs=1"). Digits that are a valid index are an index.
            The result is the union in the order of the data set. Axes that no workload has, but that leave none
            open (decode: batch_size; attention: seq_len, batch_size is 1 if not given; prefill: total_seq_len and
            num_seqs, or "seq_lens=4x2048"), give a twin drawn at those axes, behind the others; with a data set
            folder too (the twin's origin says so).
    first   so many of the result, from its start.
    preset  its workloads, in its order; with `chosen` given as well, that decides and the preset only gives settings.
    """
    if first is not None and first < 1:
        raise UsageError(f"-n {first}", hint="expected 1 or more")
    if chosen:
        picked = _union(op, workloads, chosen)
    elif preset is not None:
        picked = _preset(op, workloads, preset)
    else:
        picked = list(workloads)
    if not picked:
        raise UsageError(
            f"{op.name} has no workloads of its own",
            hint=f"name axes: --workload {','.join(f'{axis}=...' for axis in op.var_axes)}",
        )
    return picked[:first]


def _union(op: Op, workloads: Sequence[Workload], chosen: Sequence[str]) -> list[Workload]:
    places: set[int] = set()
    twins: dict[str, Workload] = {}
    # "3,7" is two indices; within an axis filter the comma means "and"
    tokens = [t.strip() for text in chosen for t in ([text] if "=" in text else text.split(","))]
    for token in tokens:
        if "=" in token:
            wanted, seq_lens = _parse_filter(op, token)
            found = _having(op, workloads, wanted, seq_lens)
            if isinstance(found, Workload):
                twins[found.uuid] = found
            else:
                places.update(found)
        else:
            places.update(_named(op, workloads, token))
    return [workloads[i] for i in sorted(places)] + list(twins.values())


def _named(op: Op, workloads: Sequence[Workload], token: str) -> list[int]:
    """Places of an index, a range, or a uuid prefix."""
    count = len(workloads)
    what = f"an index 0-{count - 1}, a range such as 0-9, " if count else ""
    hint = f"expected {what}a uuid prefix of at least 4 hex digits, or an axis filter such as {op.var_axes[0]}=64"
    if m := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", token):
        low, high = int(m[1]), int(m[2] or m[1])
        if low <= high < count:
            return list(range(low, high + 1))
    exact = [i for i, w in enumerate(workloads) if w.uuid == token]
    if exact:
        return exact
    if len(token) >= 4:
        found = [i for i, w in enumerate(workloads) if w.uuid.lower().startswith(token.lower())]
        if len(found) > 1:
            names = [workloads[i].uuid for i in found[:8]] + ["..."] * (len(found) > 8)
            raise UsageError(
                f"uuid prefix '{token}' fits {len(found)} workloads of {op.name}: {', '.join(names)}",
                hint="give more digits",
            )
        if found:
            return found
    if m:
        raise UsageError(
            f"no workload '{token}' of {op.name}: its {count} workloads have "
            f"{f'indices 0-{count - 1}' if count else 'no indices'}",
            hint=hint,
        )
    raise UsageError(f"no workload '{token}' of {op.name}", hint=hint)


def _parse_filter(op: Op, token: str) -> tuple[dict[str, int], tuple[int, ...] | None]:
    wanted: dict[str, int] = {}
    seq_lens = None
    for part in token.split(","):
        axis, _, text = (s.strip() for s in part.partition("="))
        if axis == "seq_lens" and "num_seqs" in op.var_axes:
            if not (seq_lens := parse_seq_lens(text)):
                raise UsageError(f"seq_lens='{text}'", hint="expected lengths such as seq_lens=4x2048 or 1024+7168")
            continue
        if op.axes.get(axis) is not None:
            raise UsageError(
                f"axis '{axis}' of {op.name} is always {op.axes[axis]}", hint=f"choose by {', '.join(op.var_axes)}"
            )
        if axis not in op.axes:
            raise unknown(f"axis of {op.name}", axis, op.var_axes)
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < 1:
            raise UsageError(f"axis {axis}='{text}'", hint=f"expected a positive whole number, such as {axis}=64")
        wanted[axis] = int(text)
    if seq_lens and wanted:
        raise UsageError(f"'{token}': seq_lens stands alone", hint="it fixes total_seq_len and num_seqs")
    return wanted, seq_lens


def _having(
    op: Op, workloads: Sequence[Workload], wanted: Mapping[str, int], seq_lens: tuple[int, ...] | None
) -> list[int] | Workload:
    """Places of the workloads with these axes, else the twin drawn at them."""
    made = twin(op, {}, seq_lens) if seq_lens else None
    if made is not None and made.seq_lens is None:
        wanted = made.axes
    if made is not None and made.seq_lens is not None:  # lengths, not axes, decide: only the twin itself has them
        found = [i for i, w in enumerate(workloads) if w.uuid == made.uuid]
    else:
        found = [i for i, w in enumerate(workloads) if all(w.axes.get(k) == v for k, v in wanted.items())]
    made = made or twin(op, wanted)
    if found or made is not None:
        return found or made
    axes = ", ".join(f"{k}={v}" for k, v in wanted.items())
    missing = [a for a in op.var_axes if a not in wanted and a not in ("len_cu_seqlens", "batch_size")]
    missing = missing or [a for a in op.var_axes if a not in wanted]
    raise UsageError(
        f"no workload of {op.name} has {axes}",
        hint=f"there are {present(workloads, wanted)}; add {' and '.join(missing)} for a twin drawn at those axes",
    )


def present(workloads: Sequence[Workload], axes: Mapping[str, Any] | Sequence[str]) -> str:
    """The values that axes have among the workloads, for a message: "batch_size 1, 4, 8"."""
    texts = []
    for axis in axes:
        values = [str(v) for v in sorted({w.axes[axis] for w in workloads if axis in w.axes})]
        if len(values) > 12:
            values = [*values[:8], "...", f"{values[-1]} ({len(values)} values)"]
        texts.append(f"{axis} {', '.join(values) or '(none)'}")
    return "; ".join(texts)


def _preset(op: Op, workloads: Sequence[Workload], preset: Preset) -> list[Workload]:
    where = f"{presets_file()}: key '{preset.name}.workloads"
    if op.name not in preset.axes:
        raise UsageError(f"{where}': no workloads for {op.name}, it has {', '.join(preset.axes) or 'none'}")
    entries = preset.axes[op.name]
    if entries == "all":
        return list(workloads)
    picked: dict[str, Workload] = {}
    for i, entry in enumerate(entries):
        for axis in entry:
            if axis not in op.var_axes and not (axis == "seq_lens" and "num_seqs" in op.var_axes):
                raise UsageError(
                    f"{where}.{op.name}[{i}].{axis}': expected an axis of {op.name}: {', '.join(op.var_axes)}"
                )
        try:
            found = _having(op, workloads, {k: v for k, v in entry.items() if k != "seq_lens"}, entry.get("seq_lens"))
        except UsageError as e:
            raise UsageError(f"{where}.{op.name}[{i}]': {e.message}", hint=e.hint) from None
        workload = found if isinstance(found, Workload) else workloads[found[0]]
        picked[workload.uuid] = workload
    return list(picked.values())


# --- a FlashInfer-Trace folder ----------------------------------------------------------------------------------


def from_folder(op: Op, root: Path) -> list[Workload]:
    """The op's workloads in a FlashInfer-Trace folder, in its order. Tensors are read later, by `dataset`.

    Files are found as flashinfer-bench's TraceSet.from_path finds them: definitions/**/*.json, workloads/**/*.jsonl.
    The definition's inputs and outputs must be ours. What is wrong is one MissingError line.
    """
    root = Path(root)
    if not root.exists():
        raise MissingError(f"no such data set folder: {root}", hint="`gdn data build DIR` writes one")
    if not root.is_dir():
        raise MissingError(f"{root} is a file, not a data set folder", hint="name the folder that has definitions/")
    absent = [name for name in ("definitions", "workloads") if not (root / name).is_dir()]
    if absent:
        raise MissingError(
            f"{root} is no FlashInfer-Trace data set: it has no {'/ and no '.join(absent)}/",
            hint="name the folder that holds both, or write one with `gdn data build DIR`",
        )
    path, definition = _find_definition(op, root)
    _same_definition(op, path, definition)
    workloads: list[Workload] = []
    others: set[str] = set()
    for file in sorted((root / "workloads").rglob("*.jsonl")):
        for number, line in enumerate(_lines(file), 1):
            # lines of other definitions need not be ours to judge; a folder of all of FlashInfer has thousands
            if file.stem != op.definition and f'"{op.definition}"' not in line:
                others.add(file.stem)
                continue
            if line.strip():
                workload = _row(op, f"{file}:{number}", line, len(workloads))
                if workload is not None:
                    workloads.append(workload)
    if not workloads:
        raise MissingError(f"{root / 'workloads'} has no workloads of {op.definition}", hint=f"it has {_some(others)}")
    return workloads


def _some(names: set[str] | list[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "none"


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise MissingError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if text.startswith(_LFS_POINTER):
        raise lfs_error(path)
    return text


def _lines(path: Path) -> Iterator[str]:
    return iter(_read(path).split("\n"))


def lfs_error(path: Path) -> MissingError:
    return MissingError(
        f"{path}: a git-LFS pointer, the data itself was not downloaded",
        hint="run `git lfs pull` in the data set's folder",
    )


def _json(where: Any, text: str) -> dict:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        place = f"column {e.colno}" if e.lineno == 1 else f"line {e.lineno} column {e.colno}"
        raise MissingError(f"{where}: not valid JSON: {e.msg} at {place}") from None
    if not isinstance(value, dict):
        raise MissingError(f"{where}: expected a JSON object, got {text.strip():.40}")
    return value


def _find_definition(op: Op, root: Path) -> tuple[Path, dict]:
    files = sorted((root / "definitions").rglob("*.json"))
    names = set()
    # the file that has the name first: then the others need not be read
    for path in sorted(files, key=lambda p: p.stem != op.definition):
        try:
            definition = _json(path, _read(path))
        except GdnError:
            if path.stem == op.definition:
                raise
            continue
        if definition.get("name") == op.definition:
            return path, definition
        names.add(str(definition.get("name")))
    raise MissingError(
        f"{root / 'definitions'} has no definition {op.definition} ({op.name})", hint=f"it has {_some(names)}"
    )


def _same_definition(op: Op, path: Path, definition: dict) -> None:
    """Same inputs and outputs, in order. Fixed axes are compared by value: their names are nobody's business."""
    hint = "the folder is made for another version of the definition"
    try:
        axes = {name: spec.get("value", name) for name, spec in definition["axes"].items()}
        theirs = {
            kind: {
                name: (s["dtype"], None if s["shape"] is None else [axes[a] for a in s["shape"]])
                for name, s in definition[kind].items()
            }
            for kind in ("inputs", "outputs")
        }
    except (KeyError, TypeError, AttributeError) as e:
        raise MissingError(f"{path}: not a FlashInfer-Trace definition: {type(e).__name__} {e}", hint=hint) from None
    for kind, specs in (("inputs", op.inputs), ("outputs", op.outputs)):
        if list(theirs[kind]) != list(specs):
            raise MissingError(
                f"{path}: its {kind} are {', '.join(theirs[kind])}; those of {op.name} are {', '.join(specs)}",
                hint=hint,
            )
        for name, spec in specs.items():
            shape = None if spec.shape is None else [a if op.axes[a] is None else op.axes[a] for a in spec.shape]
            if theirs[kind][name] != (spec.dtype, shape):
                raise MissingError(
                    f"{path}: {name} is {_spec(*theirs[kind][name])}; that of {op.name} is {_spec(spec.dtype, shape)}",
                    hint=hint,
                )


def _spec(dtype: str, shape: Sequence[Any] | None) -> str:
    return f"{dtype} scalar" if shape is None else f"{dtype} [{', '.join(map(str, shape))}]"


_KEYS = {"random": (), "scalar": ("value",), "safetensors": ("path", "tensor_key")}


def _row(op: Op, where: str, line: str, index: int) -> Workload | None:
    """One line of a JSONL file; None for another definition's."""
    row = _json(where, line)
    if row.get("definition") != op.definition:
        return None
    if row.get("solution") or row.get("evaluation"):
        raise MissingError(f"{where}: a trace, not a workload", hint="traces belong in traces/")
    workload = row.get("workload")
    if not isinstance(workload, dict):
        raise MissingError(f"{where}: no 'workload' object")
    name, axes, inputs = (workload.get(key) for key in ("uuid", "axes", "inputs"))
    if not isinstance(name, str) or not name:
        raise MissingError(f"{where}: workload has no 'uuid'")
    if not isinstance(axes, dict) or not all(type(v) is int and v >= 1 for v in axes.values()):
        raise MissingError(f"{where}: workload 'axes': expected positive whole numbers by name, got {axes!r:.60}")
    # flashinfer-bench ignores fixed axes in a row; a fixed axis of another value is another op
    fixed = {k: v for k, v in axes.items() if op.axes.get(k) is not None}
    if set(axes) - set(fixed) != set(op.var_axes) or any(op.axes[k] != v for k, v in fixed.items()):
        got = ", ".join(f"{k}={v}" for k, v in axes.items()) or "none"
        raise MissingError(f"{where}: axes {got}; those of {op.name} are {', '.join(op.var_axes)}")
    if not isinstance(inputs, dict):
        raise MissingError(f"{where}: workload has no 'inputs' object")
    for key, spec in inputs.items():
        kind = spec.get("type") if isinstance(spec, dict) else None
        if kind not in _KEYS:
            raise MissingError(f"{where}: input {key}: expected type {', '.join(_KEYS)}, got {kind!r:.40}")
        for needed in _KEYS[kind]:
            value = spec.get(needed)
            if not isinstance(value, (int, float) if needed == "value" else str) or value == "":
                raise MissingError(f"{where}: input {key}: {kind} without '{needed}'")
    return Workload(name, {a: axes[a] for a in op.var_axes}, index=index, origin="dataset", inputs=inputs)
