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
from ..errors import UsageError, one_line, unknown
from ..parsing import Text, Wrong, decode, read_toml, wrong
from . import file_kinds
from .formats import Language, Solution
from .ops import Heads, Op, Ops
from .tune_section import Tune

# Where an algo can run. `interpreter` is Triton's, on a CPU: for checks, never timed.
MODES = ("cuda", "cpu", "interpreter")
Mode = Literal["cuda", "cpu", "interpreter"]
DEFAULT_OP = "gdn_decode"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


_ENTRY = Meta(
    pattern=r"^[^:/\\\x00-\x1f]+::[A-Za-z_]\w*(?!\n)$",
    description="'file::symbol', such as 'kernel.cu::run'",
)
_SETUP = Meta(
    pattern=r"^[^:/\\\x00-\x1f]+\.py::[A-Za-z_]\w*(?!\n)$",
    description="'file.py::function', a Python algo's file of this folder or one it shares",
)
_CAPABILITY = Meta(
    pattern=r"^[0-9]+\.[0-9](?!\n)$", description="a compute capability such as '9.0'"
)


class AlgoFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """algo.toml: an algo's description. Raises parsing.Wrong if its parts are inconsistent."""

    summary: Text
    language: Language
    entry_point: Annotated[str, _ENTRY]
    destination_passing: bool
    modes: Annotated[
        tuple[Mode, ...],
        Meta(min_length=1, description=f"a list of {', '.join(MODES)}"),
    ] = msgspec.field(name="devices")
    packages: dict[str, str] = {}  # import name -> what pip installs
    provenance: dict[str, str]
    tune: Tune | None = None
    # files of other algos that are packed with its own: <op>/<algo>/<file>
    shares: tuple[str, ...] = ()
    # the lowest CUDA compute capability
    capability: Annotated[str, _CAPABILITY] | None = None
    # built for its GPU's own features (sm_90a), not for what later GPUs have too
    # (sm_90)
    specific: bool = False
    after: Text | None = None  # the rung below it
    peer: bool = False  # another project's kernel, which ours are compared with
    # the only numbers of heads that it supports, "4/8"; empty: any
    heads: tuple[str, ...] = ()
    # a sequence's bits do not depend on its neighbours, whatever the sizes
    batch_invariant: bool = False
    setup: Annotated[str, _SETUP] | None = (
        None  # work that is done once for the inputs, and not timed: executor/prepared.py
    )

    def __post_init__(self) -> None:
        if "interpreter" in self.modes and self.language != "triton":
            raise Wrong(
                ("devices",),
                "'interpreter' only where language is triton",
                list(self.modes),
            )
        if self.setup and self.language not in ("python", "triton"):
            raise Wrong(("setup",), _SETUP.description, self.setup)
        if self.peer and self.after:
            raise Wrong(("peer",), "either this or after", True)
        if self.batch_invariant and self.tune and self.tune.invariant:
            raise Wrong(("batch_invariant",), "either this or [tune.invariant]", True)


class Algo(AlgoFile, frozen=True, kw_only=True):
    """One implementation of an op: a folder with an algo.toml, or a packed solution file."""

    op: str
    name: str
    folder: Path | None = None
    provenance: dict[str, str] = {}
    shares: tuple[Path, ...] = ()
    solution: Solution | None = None  # a packed file's content, unchanged

    @property
    def full_name(self) -> str:
        return f"{self.op}/{self.name}"


@dataclass(frozen=True)
class Broken:
    """An algo.toml that could not be read: the algo's name, and the one line that says why."""

    op: str
    name: str
    error: UsageError


# --- reading TOML


def read_algo(path: Path, op: str) -> Algo:
    """Read `<op>/<algo>/algo.toml`; a UsageError names the file, the key and what was expected."""
    algo, folder = decode(read_toml(path), AlgoFile, path), path.parent
    if not NAME.fullmatch(folder.name):
        raise UsageError(
            f"{folder}: folder name '{folder.name}': expected lower case letters, digits, '.',"
            " '_' or '-'"
        )
    shares, file = _shares(algo, path), algo.entry_point.split("::")[0]
    for key, named in (("entry_point", algo.entry_point), ("setup", algo.setup)):
        source = named and named.split("::")[0]
        if (
            source
            and not is_source(folder / source, folder)
            and source not in [shared.name for shared in shares]
        ):
            raise wrong(
                path, [key], "a file of this folder, or one that it shares", named
            )
    if algo.tune:
        suffix, named = _TUNED[algo.language], algo.tune.file
        own = re.fullmatch(rf"[A-Za-z_]\w*\{suffix}", named) and files.inside(
            folder / named, folder
        )
        if not own or named == file:
            raise wrong(
                path,
                ["tune", "file"],
                f"a file of its own in this folder, such as 'tuned{suffix}'",
                named,
            )
    return Algo(
        **msgspec.structs.asdict(algo)
        | {
            "op": op,
            "name": folder.name,
            "folder": folder,
            "shares": shares,
        }
    )


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
    found = []
    for name in algo.shares:
        parts = Path(name).parts
        named = len(parts) == 3 and ".." not in parts and not Path(name).is_absolute()
        roots = (path.parent.parent.parent, paths.ALGOS_DIR) if named else ()
        file = next(
            (
                root.joinpath(*parts)
                for root in roots
                if is_source(root.joinpath(*parts), root)
            ),
            None,
        )
        if file is None:
            raise wrong(
                path,
                ["shares"],
                "files of other algos, such as 'gdn_decode/cuda-v5/decode.cuh'",
                name,
            )
        if os.path.exists(path.parent / file.name) or file.name in [
            other.name for other in found
        ]:
            raise wrong(
                path, ["shares"], "files whose names are not taken in this folder", name
            )
        found.append(file)
    return tuple(found)


# --- finding


@dataclass(frozen=True)
class Registry:
    """All ops and algos of this installation and of the user's own folders."""

    ops: Ops
    algos: tuple[Algo, ...]
    broken: tuple[Broken, ...]
    # the numbers of heads at which ops and algos are found; None: those of configs/
    heads: Heads | None = None

    def op(self, name: str) -> Op:
        """Raises UsageError for an unknown name, and for an op at other heads than `self.heads`."""
        if name not in self.ops:
            raise unknown("op", name, self.ops)
        op = self.ops[name]
        if not self.heads:
            return op
        at = self.ops.at(op.family, self.heads)
        if name not in (op.family, at.name):
            raise UsageError(
                f"--op {name} --heads {self.heads}: these are different heads",
                hint="leave one out",
            )
        return at

    def of(self, op: str) -> list[Algo]:
        """The algos of an op, in ladder order: each rung after the one that its `after`
        names, otherwise by name. [] for an unknown op, because a document of records
        may name any.
        """
        if op not in self.ops:
            return []
        found = self.op(op)
        return [
            _moved(a, found)
            for a in self.algos
            if a.op == found.family and _takes(a, found)
        ]

    def find(self, name: str, op: str | None = None) -> Algo:
        """By full name, or by short name: the one in `op`; without `op` decode's, else
        the only op that has it.
        """
        given, _, short = name.rpartition("/")
        there = {(a.op, a.name): a for a in (*self.algos, *self.broken)}
        known = short in [algo for _, algo in there] and (
            not given or given in self.ops
        )
        if not known and (other := file_kinds.kind(Path(name))):
            raise UsageError(
                f"{name}: an algo's name was expected, and this is {other[0]}",
                hint=other[1],
            )
        wanted = self.op(given or op) if given or op else None
        family = self.op(op).family if op else None
        full = f"{wanted.family}/{short}" if given and wanted else short
        found = there[named(full, family, there, hint="`gdn list` shows all")]
        if isinstance(found, Broken):
            raise found.error
        target = wanted or self.op(found.op)
        if not _takes(found, target):
            hint = f"other algos of it do: gdn list --op {target.name}"
            raise UsageError(
                f"{name} takes {' and '.join(found.heads)} heads, not those of {target.name}",
                hint=hint,
            )
        return _moved(found, target)

    def reference(self, op: Op) -> Algo:
        """The shipped algo that defines an op's results: a user's folder may replace
        any other algo, but not this one.
        """
        return _moved(
            read_algo(
                paths.ALGOS_DIR / op.family / op.reference / "algo.toml", op.family
            ),
            op,
        )


def _takes(algo: Algo, op: Op) -> bool:
    return (
        not algo.heads
        or f"{op.axes.get('num_q_heads')}/{op.axes.get('num_v_heads')}" in algo.heads
    )


def _moved(algo: Algo, op: Op) -> Algo:
    """The algo at the heads of this op of its family."""
    return algo if algo.op == op.name else msgspec.structs.replace(algo, op=op.name)


def named(
    name: str, op: str | None, known: Iterable[tuple[str, str]], hint: str
) -> tuple[str, str]:
    """Which (op, algo) of `known` a name means: `op/algo`, or a short name as in
    `Registry.find`.
    """
    given, _, short = name.rpartition("/")
    if given and op and given != op:
        raise UsageError(
            f"'{name}' is not an algo of {op}",
            hint="drop --op, or name one of its algos",
        )
    op = given or op
    there = [pair for pair in known if op in (None, pair[0])]
    found = [pair for pair in there if pair[1] == short]
    found = [pair for pair in found if pair[0] == DEFAULT_OP] or found
    if not found:
        raise unknown(
            f"algo of {op}" if op else "algo",
            short,
            [algo for _, algo in there],
            hint=hint,
        )
    if len(found) > 1:
        raise UsageError(
            f"several ops have '{short}': {', '.join(map('/'.join, found))}",
            hint="add --op",
        )
    return found[0]


def _ladder(algos: list[Algo], reference: str | None = None) -> list[Algo]:
    """Climb each ladder from its lowest rung; algos that are on no ladder come last, by name.

    The reference is the lowest rung of all, even if nothing is above it yet.
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

    # a cycle (`after` pointing at each other) has no lowest rung: the last pass adds those
    lowest = sorted(
        above.get(None, []),
        key=lambda a: (a.name != reference, a.name not in above, a.name),
    )
    for algo in lowest + algos:
        climb(algo)
    return list(climbed.values())


def names(text: str | None) -> list[str]:
    """The names in --algo, separated by commas; [] if it is not given. UsageError if it
    is given but empty: that is a variable left empty by mistake, and does not mean all
    algos.
    """
    found = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not found:
        raise UsageError(
            f"--algo '{text}' names nothing", hint="name one, or leave it out"
        )
    return found


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
        if next(folder.glob("algo.toml"), None) or next(
            folder.glob("*/algo.toml"), None
        ):
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
        paths.CONFIGS_DIR,
        lambda name: (name != DEFAULT_OP, not name.startswith("gdn"), name),
    )
    algos: dict[tuple[str, str], Algo | Broken] = {}
    for root in [*own_folders(own), paths.ALGOS_DIR]:
        for path in sorted(root.glob("*/*/algo.toml")):
            op, name = path.parent.parent.name, path.parent.name
            if (op, name) in algos:
                continue
            try:
                if op not in list(ops):
                    raise UsageError(
                        f"{path}: folder '{op}': expected an op, one of {', '.join(ops)}"
                    )
                if not os.path.isfile(path):
                    raise UsageError(f"{path}: not a plain file")
                algos[op, name] = read_algo(path, op)
                for key in ("size", "length") if algos[op, name].tune else ():
                    for axis in getattr(algos[op, name].tune, key):
                        if axis not in ops[op].axes:
                            raise wrong(
                                path,
                                ["tune", key],
                                f"axes of {op} ({', '.join(ops[op].axes)})",
                                axis,
                            )
            except UsageError as e:
                algos[op, name] = Broken(op, name, e)
            except Exception as e:  # an error in one does not stop the others
                algos[op, name] = Broken(
                    op, name, UsageError(f"{path}: cannot be read: {one_line(e)}")
                )
    whole = [a for a in algos.values() if isinstance(a, Algo)]
    return Registry(
        ops=ops,
        algos=tuple(
            a
            for name in ops
            for a in _ladder([a for a in whole if a.op == name], ops[name].reference)
        ),
        broken=tuple(a for a in algos.values() if isinstance(a, Broken)),
        heads=Heads.of(heads) if heads else None,
    )
