"""algo.toml -> Algo, and all ops and algos found by name. Does not import torch, so
that `gdn list` is instant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from .. import files, paths
from ..errors import UsageError, unknown
from ..parsing import Text, WrongError, decode, read_toml, wrong
from ..units import listed
from .formats import Language, Solution
from .ops import Heads, Op, Ops
from .tune_section import Tune

# Where an algo can run. `interpreter` is Triton's, on a CPU: for checks, never timed.
Mode = Literal["cuda", "cpu", "interpreter"]
DEFAULT_OP = "gdn_decode"
_NO_ALGO = (
    "`gdn new NAME --from cpp-v1 --into DIR` makes a folder for a kernel; --algos DIR names"
    " one that holds <op>/<algo>/algo.toml"
)
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


_ENTRY = Meta(
    pattern=r"^[^:/\\\x00-\x1f]+::[A-Za-z_]\w*(?!\n)$",
    description="'file::symbol', such as 'kernel.cu::run'",
)
_SETUP = Meta(
    pattern=r"^[^:/\\\x00-\x1f]+\.py::[A-Za-z_]\w*(?!\n)$",
    description="'file.py::function', a Python file of this folder or one it shares",
)
_CAPABILITY = Meta(pattern=r"^[0-9]+\.[0-9](?!\n)$")


class _Keys(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of algo.toml that an Algo has as they are."""

    summary: Text
    language: Language
    entry_point: Annotated[str, _ENTRY]
    destination_passing: bool
    modes: Annotated[tuple[Mode, ...], Meta(min_length=1)] = msgspec.field(
        name="devices"
    )
    # import name -> what pip installs
    packages: dict[str, str] = {}
    tune: Tune | None = None
    # the lowest CUDA compute capability, such as "9.0"
    capability: Annotated[str, _CAPABILITY] | None = None
    # built for its GPU's own features (sm_90a), not for what later GPUs have too
    # (sm_90)
    specific: bool = False
    # the rung below it
    after: Text | None = None
    # another project's kernel, which ours are compared with
    peer: bool = False
    # the only numbers of heads that it supports, "4/8"; empty: any
    heads: tuple[str, ...] = ()
    # a sequence's bits do not depend on its neighbours, whatever the sizes
    batch_invariant: bool = False
    # gdn.serving calls its library on a GPU
    serving: bool = False
    # work that is done once for the inputs, and not timed: executor/prepared.py
    setup: Annotated[str, _SETUP] | None = None


class AlgoFile(_Keys, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """algo.toml: an algo's description. Raises parsing.WrongError if its parts are inconsistent."""

    provenance: dict[str, str]
    # files of other algos that are packed with its own: <op>/<algo>/<file>
    shares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.setup and self.language not in ("python", "triton"):
            raise WrongError(["setup"], "a Python algo's file", self.setup)


class Algo(_Keys, frozen=True, kw_only=True):
    """One implementation of an op: a folder with an algo.toml, or a packed solution file."""

    op: str
    name: str
    # None for a packed solution
    folder: Path | None = None
    provenance: dict[str, str] = {}
    shares: tuple[Path, ...] = ()
    # a packed file's content, unchanged
    solution: Solution | None = None

    @property
    def full_name(self) -> str:
        return f"{self.op}/{self.name}"

    @property
    def own_folder(self) -> Path:
        """Its folder, for an algo that is not a packed solution."""
        assert self.folder
        return self.folder

    @property
    def tuning(self) -> Tune:
        """[tune] of its algo.toml, for an algo that has one."""
        assert self.tune
        return self.tune


@dataclass(frozen=True)
class Broken:
    """An algo.toml that could not be read: the algo's name, and the one line that says why."""

    op: str
    name: str
    error: UsageError


# --- reading TOML


def read_algo(path: Path, op: str) -> Algo:
    """Read `<op>/<algo>/algo.toml`; a UsageError names the file, the key and what was expected."""
    algo = decode(read_toml(path), AlgoFile, path)
    folder = path.parent
    if not NAME.fullmatch(folder.name):
        raise UsageError(
            f"{folder}: folder name '{folder.name}': expected lower case letters, digits, '.',"
            " '_' or '-'"
        )
    shares = _shares(algo, path)
    for key, value in (("entry_point", algo.entry_point), ("setup", algo.setup)):
        file = (value or "").partition("::")[0]
        shared = file in [other.name for other in shares]
        if file and not shared and not is_source(folder / file, folder):
            expected = "a file of this folder, or one that it shares"
            raise wrong(path, [key], expected, value)
    if algo.tune:
        suffix = _TUNED[algo.language]
        file = algo.tune.file
        fits = re.fullmatch(rf"[A-Za-z_]\w*\{suffix}", file)
        inside = files.inside(folder / file, folder)
        if not fits or not inside or file == algo.entry_point.partition("::")[0]:
            expected = f"a file of its own in this folder, such as 'tuned{suffix}'"
            raise wrong(path, ["tune", "file"], expected, file)
    changes = {"op": op, "name": folder.name, "folder": folder, "shares": shares}
    return Algo(**msgspec.structs.asdict(algo) | changes)


def numbers(capability: str) -> tuple[int, ...]:
    """A compute capability to compare with others: "9.0" -> (9, 0)."""
    return tuple(map(int, capability.split(".")))


def is_source(path: Path, folder: Path) -> bool:
    """Whether it is a plain file of `folder`, or a link to one in it: files from
    elsewhere are not packed.
    """
    return os.path.isfile(path) and files.inside(path, folder)


# language -> suffix of the generated file
_TUNED = {"cpp": ".h", "cuda": ".h", "python": ".py", "triton": ".py"}


def _shares(algo: AlgoFile, path: Path) -> tuple[Path, ...]:
    """The files that `shares` names, as `<op>/<algo>/<file>`: from this folder of
    algos, else from gdn's own.
    """
    shares: list[Path] = []
    for name in algo.shares:
        parts = Path(name).parts
        inner = len(parts) == 3 and ".." not in parts and not Path(name).is_absolute()
        roots = (path.parents[2], paths.ALGOS_DIR) if inner else ()
        sources = [root / name for root in roots if is_source(root / name, root)]
        if not sources:
            expected = "files of other algos, such as 'gdn_decode/cuda-v5/decode.cuh'"
            raise wrong(path, ["shares"], expected, name)
        file = sources[0]
        taken = [other.name for other in shares]
        if file.name in taken or os.path.exists(path.parent / file.name):
            expected = "files whose names are not taken in this folder"
            raise wrong(path, ["shares"], expected, name)
        shares.append(file)
    return tuple(shares)


# --- finding


@dataclass(frozen=True)
class Registry:
    """All ops and algos of this installation and of the user's own folders."""

    ops: Ops
    algos: tuple[Algo, ...]
    broken: tuple[Broken, ...]
    # the numbers of heads at which ops and algos are found; None: those of configs/
    heads: Heads | None = None
    roots: tuple[Path, ...] = ()  # the folders that were read

    def op(self, name: str) -> Op:
        """The op of this name, at `self.heads`. Raises UsageError for an unknown name."""
        if name not in self.ops:
            raise unknown("op", name, self.ops)
        op = self.ops[name]
        if not self.heads:
            return op
        return self.ops.at_heads(op.family, self.heads)

    def algos_of(self, op: str) -> list[Algo]:
        """The algos of an op, in ladder order: each rung after the one that its `after`
        names, otherwise by name. [] for an unknown op, because a document of records
        may name any.
        """
        if op not in self.ops:
            return []
        target = self.op(op)
        family = [algo for algo in self.algos if algo.op == target.family]
        return [_at_heads(algo, target) for algo in family if _takes(algo, target)]

    def find(self, name: str, op: str | None = None) -> Algo:
        """By full name, or by short name: the one in `op`; without `op` decode's, else
        the only op that has it. Or by path: the folder of its algo.toml, or a file there.
        """
        short_names = {algo.name for algo in self.algos}
        if name not in short_names and os.path.exists(name):
            return self._at_path(Path(name), op)
        given, _, short = name.rpartition("/")
        entries: list[Algo | Broken] = [*self.algos, *self.broken]
        known = {(algo.op, algo.name): algo for algo in entries}
        wanted = given or op
        target = self.op(wanted) if wanted else None
        family = self.op(op).family if op else None
        full = f"{target.family}/{short}" if given and target else short
        algo = known[named(full, family, known, self._hint)]
        if isinstance(algo, Broken):
            raise algo.error
        target = target or self.op(algo.op)
        if not _takes(algo, target):
            raise UsageError(
                f"{name} takes {' and '.join(algo.heads)} heads, not those of {target.name}",
                hint=f"other algos of it do: gdn list --op {target.name}",
            )
        return _at_heads(algo, target)

    def _at_path(self, path: Path, op: str | None) -> Algo:
        """The algo of a folder, or of a file in it."""
        folder = Path(os.path.abspath(path if path.is_dir() else path.parent))
        if not os.path.isfile(folder / "algo.toml"):
            place = "" if path.is_dir() else " beside it"
            reason = f"{path}: no algo.toml{place}, so it is no algo"
            raise UsageError(reason, hint=_NO_ALGO)
        algo = _read_for(folder / "algo.toml", self.ops)
        target = self.op(op or algo.op)
        if target.family != algo.op:
            raise UsageError(f"{path} is of {algo.op}, not of {op}", hint="drop --op")
        return _at_heads(algo, target)

    @property
    def _hint(self) -> str:
        """What to do about a name that is not there."""
        folders = listed(map(str, self.roots))
        return (
            f"looked in {folders}; GDN_ALGOS or --algos adds a folder of yours;"
            " `gdn list` shows all"
        )

    def reference(self, op: Op) -> Algo:
        """The algo that defines an op's results. For an op of gdn's it is the shipped
        one: a user's folder may replace any other algo, but not this one.
        """
        path = paths.ALGOS_DIR / op.family / op.reference / "algo.toml"
        if not path.is_file():
            return self.find(f"{op.family}/{op.reference}", op.name)
        return _at_heads(read_algo(path, op.family), op)


def _takes(algo: Algo, op: Op) -> bool:
    heads = f"{op.axes.get('num_q_heads')}/{op.axes.get('num_v_heads')}"
    return not algo.heads or heads in algo.heads


def _at_heads(algo: Algo, op: Op) -> Algo:
    """The algo at the heads of this op of its family."""
    return algo if algo.op == op.name else msgspec.structs.replace(algo, op=op.name)


def named(
    name: str, op: str | None, known: Iterable[tuple[str, str]], hint: str
) -> tuple[str, str]:
    """The (op, algo) of `known` that a name means: `op/algo`, or a short name as in
    `Registry.find`.
    """
    given, _, short = name.rpartition("/")
    if given and op and given != op:
        raise UsageError(
            f"'{name}' is not an algo of {op}",
            hint="drop --op, or name one of its algos",
        )
    op = given or op
    candidates = [pair for pair in known if op in (None, pair[0])]
    pairs = [pair for pair in candidates if pair[1] == short]
    pairs = [pair for pair in pairs if pair[0] == DEFAULT_OP] or pairs
    if not pairs:
        kind = f"algo of {op}" if op else "algo"
        raise unknown(kind, short, [algo for _, algo in candidates], hint=hint)
    if len(pairs) > 1:
        raise UsageError(
            f"several ops have '{short}': {', '.join(map('/'.join, pairs))}",
            hint="add --op",
        )
    return pairs[0]


def _ladder(algos: list[Algo], reference: str) -> list[Algo]:
    """Each ladder from its lowest rung, the reference's first; algos that are on no
    ladder last, by name.
    """
    by_name = {algo.name: algo for algo in algos}
    below = {algo.after for algo in algos}

    def place(algo: Algo) -> tuple[bool, bool, list[str]]:
        rungs = [algo.name]
        # a cycle (`after` pointing at each other) has no lowest rung
        while algo.after in by_name and algo.after not in rungs:
            algo = by_name[algo.after]
            rungs.insert(0, algo.name)
        return rungs[0] != reference, rungs[0] not in below, rungs

    return sorted(algos, key=place)


def names(text: str | None) -> list[str]:
    """The names in --algo, separated by commas; [] if it is not given. UsageError if it
    is given but empty: that is a variable left empty by mistake, and does not mean all
    algos.
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise UsageError(
            f"--algo '{text}' names nothing", hint="name one, or leave it out"
        )
    return names


def own_folders(option: str | None) -> list[Path]:
    """The user's own algo folders: `--algos`, else `GDN_ALGOS` (separated like the
    entries of PATH).
    """
    folders = [paths.expanded(p) for p in (option or "").split(os.pathsep) if p]
    for folder in folders:
        if not os.path.isdir(folder):
            raise UsageError(
                f"no such algos folder: {folder}", hint="it holds <op>/<algo>/algo.toml"
            )
        if [*folder.glob("algo.toml"), *folder.glob("*/algo.toml")]:
            raise UsageError(
                f"{folder} is inside an algos folder",
                hint="name the one that holds <op>/<algo>/algo.toml",
            )
    return folders


def load(own: str | None = None, heads: str | None = None) -> Registry:
    """Read everything. The user's folders come first: their algos replace ours of the same name.

    own    folders of algos (own_folders)
    heads  the value of --heads, such as "16/32": all ops and algos are found at these
      numbers of heads
    """
    # decode first: most users want it
    ops = Ops(
        paths.config_dirs(),
        lambda name: (name != DEFAULT_OP, not name.startswith("gdn"), name),
    )
    algos: dict[tuple[str, str], Algo] = {}
    broken: dict[tuple[str, str], Broken] = {}
    roots = *own_folders(own), paths.ALGOS_DIR
    for root in roots:
        for path in sorted(root.glob("*/*/algo.toml")):
            op, name = key = path.parts[-3], path.parts[-2]
            if key in algos or key in broken:
                continue
            try:
                algos[key] = _read_for(path, ops)
            except UsageError as e:  # an error in one does not stop the others
                broken[key] = Broken(op, name, e)
    ordered: list[Algo] = []
    for name in ops:
        of_op = [algo for algo in algos.values() if algo.op == name]
        ordered += _ladder(of_op, ops[name].reference)
    return Registry(
        ops=ops,
        algos=tuple(ordered),
        broken=tuple(broken.values()),
        heads=Heads.parse(heads) if heads else None,
        roots=roots,
    )


def _read_for(path: Path, ops: Ops) -> Algo:
    """Read algo.toml, whose folder and axes must be of an op."""
    name = path.parts[-3]
    if name not in list(ops):
        expected = f"expected an op, one of {', '.join(ops)}"
        raise UsageError(f"{path}: folder '{name}': {expected}")
    if not os.path.isfile(path):
        raise UsageError(f"{path}: not a plain file")
    algo = read_algo(path, name)
    axes = ops[name].axes
    for axis in (*algo.tune.size, *algo.tune.length) if algo.tune else ():
        if axis not in axes:
            expected = f"axes of {name} ({', '.join(axes)})"
            raise wrong(path, ["tune", "size"], expected, axis)
    return algo
