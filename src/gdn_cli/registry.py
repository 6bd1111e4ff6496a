"""algo.toml -> Algo, configs/*.toml -> Op: what there is, found by name. Imports no torch: `gdn list` is instant."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import files, paths
from .errors import UsageError, one_line, unknown
from .expression import condition
from .parsing import Fields, read_toml
from .stress import Family, families

LANGUAGES = ("python", "triton", "cpp", "cuda")
# Where an algo can run: `interpreter` is Triton's, on a CPU, good for checks and never timed.
MODES = ("cuda", "cpu", "interpreter")
DEFAULT_OP = "gdn_decode"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: axis names (None for a scalar) and a FlashInfer-Trace dtype name."""

    shape: tuple[str, ...] | None
    dtype: str
    note: str = field(default="", compare=False)  # what its values must be, for whoever calls an algo


@dataclass(frozen=True)
class Op:
    """An operation: the FlashInfer-Trace definition it stands for, and how its results are judged and shown."""

    name: str
    definition: str
    op_type: str
    summary: str
    axes: dict[str, int | None]  # None: variable
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    constraints: tuple[str, ...]
    tags: tuple[str, ...]
    tolerance: dict[str, float]  # output -> greatest relative Frobenius error against float64
    reference: str  # the algo whose source is the definition's reference
    baseline: str | None  # the algo that the contest ranks against
    linear_in: tuple[str, ...]  # inputs whose joint negation negates every output
    label: str  # how a workload is called in a table: "B={batch_size}"
    in_place: dict[str, str] = field(default_factory=dict)  # output -> the input that it may overwrite
    stress: dict[str, Family] = field(default_factory=dict)  # name -> inputs that are hard: `gdn run --stress`

    @property
    def var_axes(self) -> tuple[str, ...]:
        return tuple(name for name, value in self.axes.items() if value is None)

    def shape(self, spec: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of an input or output at a workload's axes."""
        known = {name: value for name, value in self.axes.items() if value is not None} | dict(axes)
        return tuple(known[axis] for axis in spec.shape or ())


@dataclass(frozen=True)
class Tune:
    """[tune] of algo.toml: which constants `gdn tune` may choose, and where the chosen ones go."""

    file: str  # of the algo's folder: what is generated, .h for C++ and CUDA, .py for Triton and Python
    size: tuple[str, ...]  # axes of the op: their product decides which row of the file is used
    constants: dict[str, tuple[int, ...]]  # name -> the values to try, in the order of algo.toml
    where: str | None = None  # a condition on the constants: see expression.py


@dataclass(frozen=True)
class Algo:
    """One implementation of an op: a folder with an algo.toml, or a packed solution file."""

    op: str
    name: str
    summary: str
    language: str
    entry_point: str
    destination_passing: bool
    modes: tuple[str, ...]  # of MODES, `devices` in algo.toml
    folder: Path | None = None
    packages: dict[str, str] = field(default_factory=dict)  # import name -> what pip installs
    provenance: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    tune: Tune | None = None
    shares: tuple[Path, ...] = ()  # files of other algos that are packed with its own
    capability: str | None = None  # the least CUDA compute capability
    specific: bool = False  # built for its GPU's own features (sm_90a), not for what later GPUs have too (sm_90)
    after: str | None = None  # the rung below it
    setup: str | None = None  # "file.py::name": work that is done once for the inputs, and not timed
    solution: dict[str, Any] | None = None  # a packed file's content, as it was read

    @property
    def full_name(self) -> str:
        return f"{self.op}/{self.name}"


@dataclass(frozen=True)
class Broken:
    """An algo.toml that could not be read: which algo it would be, and the one line that says why."""

    op: str
    name: str
    error: UsageError


# --- reading TOML -----------------------------------------------------------------------------------------------


def read_algo(path: Path, op: str) -> Algo:
    """Read `<op>/<algo>/algo.toml`; a UsageError names the file, the key and what was expected."""
    f = Fields(path, read_toml(path))
    name = path.parent.name
    if not NAME.fullmatch(name):
        raise UsageError(f"{path.parent}: folder name '{name}': expected lower case letters, digits, '.', '_' or '-'")
    language = f.take("language", str, one_of=LANGUAGES)
    entry_point = f.take("entry_point", str)
    if not re.fullmatch(r"[^:/\\]+::[A-Za-z_]\w*", entry_point):
        raise f.wrong("entry_point", "'file::symbol', such as 'kernel.cu::run'", entry_point)
    shares, file = _shares(f, path), entry_point.split("::")[0]
    if not is_source(path.parent / file, path.parent) and file not in [shared.name for shared in shares]:
        raise f.wrong("entry_point", "a file of this folder, or one that it shares", entry_point)
    modes = f.texts("devices", one_of=MODES)
    if not modes:
        raise f.wrong("devices", f"at least one of {', '.join(MODES)}", [])
    if "interpreter" in modes and language != "triton":
        raise f.wrong("devices", "'interpreter' only where language is triton", list(modes))
    setup = f.take("setup", str, None)
    if setup is not None:
        file, _, symbol = setup.partition("::")
        there = is_source(path.parent / file, path.parent) or file in [shared.name for shared in shares]
        if language not in ("python", "triton") or not (there and file.endswith(".py") and symbol.isidentifier()):
            raise f.wrong("setup", "'file.py::function', a Python algo's file of this folder or one it shares", setup)
    packages, provenance = f.take("packages", dict, {}), f.take("provenance", dict)
    for table, values in (("packages", packages), ("provenance", provenance)):
        for key, value in values.items():
            if not isinstance(value, str):
                raise f.wrong(f"{table}.{key}", "text", value)
    capability = f.take("capability", str, None)
    if capability is not None and not re.fullmatch(r"\d+\.\d", capability):
        raise f.wrong("capability", "a compute capability such as '9.0'", capability)
    algo = Algo(
        op=op,
        name=name,
        summary=f.take("summary", str),
        language=language,
        entry_point=entry_point,
        destination_passing=f.take("destination_passing", bool),
        modes=modes,
        folder=path.parent,
        packages=packages,
        provenance=provenance,
        constants=f.take("constants", dict, {}),
        tune=_tune(f, path, language, entry_point),
        shares=shares,
        capability=capability,
        specific=f.take("specific", bool, False),
        after=f.take("after", str, None),
        setup=setup,
    )
    f.done()
    return algo


def is_source(path: Path, folder: Path) -> bool:
    """A plain file of `folder`, or a link to one in it: an algo carries away nothing of what lies elsewhere."""
    return path.is_file() and files.inside(path, folder)


def _shares(f: Fields, path: Path) -> tuple[Path, ...]:
    """The files that `shares` names, as `<op>/<algo>/<file>`: of this folder of algos, else of gdn's own."""
    found = []
    for name in f.texts("shares", []):
        parts = Path(name).parts
        named = len(parts) == 3 and ".." not in parts and not Path(name).is_absolute()
        roots = (path.parent.parent.parent, paths.ALGOS_DIR) if named else ()
        file = next((root.joinpath(*parts) for root in roots if is_source(root.joinpath(*parts), root)), None)
        if file is None:
            raise f.wrong("shares", "files of other algos, such as 'gdn_decode/cuda-v5/decode.cuh'", name)
        if (path.parent / file.name).exists() or file.name in [other.name for other in found]:
            raise f.wrong("shares", "files whose names are not taken in this folder", name)
        found.append(file)
    return tuple(found)


_TUNED = {"cpp": ".h", "cuda": ".h", "python": ".py", "triton": ".py"}  # language -> suffix of the generated file
_COLUMNS = ("gpu", "sms", "up_to")  # of the generated table, beside the constants
_INT = range(-(2**31), 2**31)


def _tune(algo: Fields, path: Path, language: str, entry_point: str) -> Tune | None:
    """[tune], or None where there is none."""
    if (table := algo.take("tune", dict, None)) is None:
        return None
    f = Fields(path, table, "tune.")
    file, suffix = f.take("file", str), _TUNED[language]
    own = re.fullmatch(rf"[A-Za-z_]\w*\{suffix}", file) and files.inside(path.parent / file, path.parent)
    if not own or file == entry_point.split("::")[0]:
        raise f.wrong("file", f"a file of its own in this folder, such as 'tuned{suffix}'", file)
    size, where = f.texts("size"), f.take("where", str, None)
    if not size:
        raise f.wrong("size", "at least one axis of the op", [])
    constants = {}
    for name, values in f.take("constants", dict).items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name in _COLUMNS:
            raise f.wrong(
                f"constants.{name}", f"a name that C++ and Python take, and none of {', '.join(_COLUMNS)}", name
            )
        whole = isinstance(values, list) and values and all(type(v) is int and v in _INT for v in values)
        if not whole or len(set(values)) < len(values):
            raise f.wrong(f"constants.{name}", "a list of different whole numbers of 32 bits", values)
        constants[name] = tuple(values)
    if not constants:
        raise f.wrong("constants", "at least one constant, such as rows = [1, 2, 4]", {})
    if where is not None:
        try:
            condition(where, constants)
        except ValueError as e:
            raise f.wrong("where", f"a condition on the constants, but {e}", where) from None
    f.done()
    return Tune(file, size, constants, where)


def _check_size(path: Path, algo: Algo, op: Op) -> None:
    for axis in algo.tune.size if algo.tune else ():
        if axis not in op.axes:
            known = ", ".join(op.axes)
            raise UsageError(f"{path}: key 'tune.size': expected axes of {op.name} ({known}), got '{axis}'")


def read_op(path: Path) -> Op:
    """Read `configs/<op>.toml`."""
    f = Fields(path, read_toml(path))

    def specs(key: str) -> dict[str, TensorSpec]:
        found = {}
        for name, spec in f.take(key, dict).items():
            if not isinstance(spec, dict) or not isinstance(spec.get("dtype"), str):
                raise f.wrong(f"{key}.{name}", "{ shape = [axes], dtype = name }", spec)
            shape = spec.get("shape")
            found[name] = TensorSpec(None if shape is None else tuple(shape), spec["dtype"], spec.get("note", ""))
            for axis in shape or ():
                if axis not in axes:
                    raise f.wrong(f"{key}.{name}.shape", f"axes of [axes]: {', '.join(axes)}", axis)
        return found

    axes = {name: None if value == "var" else value for name, value in f.take("axes", dict).items()}
    for name, value in axes.items():
        if value is not None and (type(value) is not int or value < 1):
            raise f.wrong(f"axes.{name}", "a positive whole number or 'var'", value)
    outputs = specs("outputs")
    tolerance = f.take("tolerance", dict)
    if set(tolerance) != set(outputs) or not all(isinstance(v, float) and v > 0 for v in tolerance.values()):
        raise f.wrong("tolerance", f"a positive number for each of {', '.join(outputs)}", tolerance)
    in_place = f.take("in_place", dict, {})
    inputs = specs("inputs")
    for name, source in in_place.items():
        pair = outputs.get(name), inputs.get(source) if isinstance(source, str) else None
        if None in pair or pair[0] != pair[1]:
            raise f.wrong(f"in_place.{name}", "output = 'input', both of one shape and dtype", source)
    op = Op(
        name=path.stem,
        definition=f.take("definition", str),
        op_type=f.take("op_type", str),
        summary=f.take("summary", str),
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        constraints=f.texts("constraints", ()),
        tags=f.texts("tags", ()),
        tolerance=tolerance,
        reference=f.take("reference", str),
        baseline=f.take("baseline", str, None),
        linear_in=f.texts("linear_in"),
        label=f.take("label", str),
        in_place=in_place,
        stress=families(path, f.take("stress", dict, {}), axes),
    )
    for name in op.linear_in:
        if name not in op.inputs:
            raise f.wrong("linear_in", f"inputs: {', '.join(op.inputs)}", name)
    f.done()
    return op


# --- finding ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registry:
    """All ops and algos of this installation and of the user's own folders."""

    ops: dict[str, Op]
    algos: tuple[Algo, ...]
    broken: tuple[Broken, ...]

    def op(self, name: str) -> Op:
        if name not in self.ops:
            raise unknown("op", name, self.ops)
        return self.ops[name]

    def of(self, op: str) -> list[Algo]:
        """The algos of an op, in ladder order: a rung after the one that it names, else by name."""
        return [a for a in self.algos if a.op == op]

    def find(self, name: str, op: str | None = None) -> Algo:
        """By full name, or by short name: the one in `op`; without it decode's, else the only op that has it."""
        if "/" in name:
            wanted_op, short = name.split("/", 1)
            self.op(wanted_op)
            if op and wanted_op != op:
                raise UsageError(f"'{name}' is not an algo of {op}", hint="drop --op, or name one of its algos")
            op = wanted_op
        else:
            short = name
        found = [a for a in (*self.algos, *self.broken) if a.name == short and op in (None, a.op)]
        if len(found) > 1:
            found = [a for a in found if a.op == DEFAULT_OP] or found
        if not found:
            known = [a.name for a in self.algos if op in (None, a.op)]
            raise unknown(f"algo of {op}" if op else "algo", short, known, hint="`gdn list` shows all")
        if len(found) > 1:
            full = ", ".join(f"{a.op}/{a.name}" for a in found)
            raise UsageError(f"several ops have '{short}': {full}", hint="add --op")
        if isinstance(found[0], Broken):
            raise found[0].error
        return found[0]

    def reference(self, op: Op) -> Algo:
        """The shipped algo that an op is judged by: a folder of the user's may stand in for any other one."""
        return read_algo(paths.ALGOS_DIR / op.name / op.reference / "algo.toml", op.name)


def _ladder(algos: list[Algo], reference: str | None = None) -> list[Algo]:
    """Climb each ladder from its lowest rung; the algos that belong to none (peers, baselines) come last, by name.

    The reference is the lowest rung of all, even where nothing stands on it yet.
    """
    names = {a.name for a in algos}
    above: dict[str | None, list[Algo]] = {}
    for algo in sorted(algos, key=lambda a: a.name):
        above.setdefault(algo.after if algo.after in names else None, []).append(algo)
    climbed: dict[str, Algo] = {}

    def climb(algo: Algo) -> None:
        if algo.name not in climbed:
            climbed[algo.name] = algo
            for next_rung in above.get(algo.name, []):
                climb(next_rung)

    # a ring (`after` pointing at each other) has no lowest rung: the last pass picks those up
    lowest = sorted(above.get(None, []), key=lambda a: (a.name != reference, a.name not in above, a.name))
    for algo in lowest + algos:
        climb(algo)
    return list(climbed.values())


def names(text: str | None, option: str = "--algo") -> list[str]:
    """What an option names, with commas between; [] where it is not given. UsageError where it is, and names nothing:
    that is a variable that was left empty, and not everything that there is."""
    found = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not found:
        raise UsageError(f"{option} '{text}' names nothing", hint="name one, or leave it out")
    return found


def own_folders(option: str | None) -> list[Path]:
    """The user's own algo folders: `--algos`, else `GDN_ALGOS` (several with the path separator between)."""
    folders = [Path(p).expanduser() for p in (option or "").split(os.pathsep) if p]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"no such algos folder: {folder}", hint="it holds <op>/<algo>/algo.toml")
        if next(folder.glob("algo.toml"), None) or next(folder.glob("*/algo.toml"), None):
            raise UsageError(
                f"{folder} is inside an algos folder", hint="name the one that holds <op>/<algo>/algo.toml"
            )
    return folders


def load(own: str | None = None) -> Registry:
    """Read everything. The user's folders come first: an algo of theirs stands in for ours of the same name."""
    ops = {p.stem: read_op(p) for p in sorted(paths.CONFIGS_DIR.glob("*.toml")) if "definition" in read_toml(p)}
    algos: dict[tuple[str, str], Algo | Broken] = {}
    for root in [*own_folders(own), paths.ALGOS_DIR]:
        for path in sorted(root.glob("*/*/algo.toml")):
            op, name = path.parent.parent.name, path.parent.name
            if (op, name) in algos:
                continue
            try:
                if op not in ops:
                    raise UsageError(f"{path}: folder '{op}': expected an op, one of {', '.join(ops)}")
                if not path.is_file():
                    raise UsageError(f"{path}: not a plain file")
                algos[op, name] = read_algo(path, op)
                _check_size(path, algos[op, name], ops[op])
            except UsageError as e:
                algos[op, name] = Broken(op, name, e)
            except Exception as e:  # whatever is wrong with one, the others go on
                algos[op, name] = Broken(op, name, UsageError(f"{path}: cannot be read: {one_line(e)}"))
    # decode first: it is what most people come for
    order = sorted(ops, key=lambda name: (name != DEFAULT_OP, not name.startswith("gdn"), name))
    whole = [a for a in algos.values() if isinstance(a, Algo)]
    return Registry(
        ops={name: ops[name] for name in order},
        algos=tuple(a for name in order for a in _ladder([a for a in whole if a.op == name], ops[name].reference)),
        broken=tuple(a for a in algos.values() if isinstance(a, Broken)),
    )
