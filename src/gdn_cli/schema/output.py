"""The forms of what commands print with `--json`, where they have no file: errors,
progress, algos, packed files. Those of records, profiles and tunings are with their
files.
"""

from __future__ import annotations

from typing import TypedDict

import msgspec
from msgspec import Struct

from .statuses import Status

# --- every command


class Error(Struct):
    """What went wrong, and what to do next."""

    id: str  # names its kind and stays the same
    message: str
    hint: str | None
    suggestion: str | None  # the name that was probably meant
    code: int  # the exit code


class Failure(Struct):
    """In place of a result, of any command."""

    error: Error


class Progress(Struct, kw_only=True):
    """A line of stderr: what runs now, and how much is done. Again each 30 s."""

    phase: str  # the command, or a part of it: compiling, survey ...
    algo: str  # what runs
    done: int  # workloads, or steps of a profile
    total: int  # of these
    seconds: float  # since the command began


# --- gdn list, gdn show and gdn new


class Listed(Struct, kw_only=True):
    """An algo, and where it runs here."""

    op: str
    algo: str
    language: str
    devices: tuple[str, ...]
    here: str | None  # cuda, cpu or interpreter; None: it does not run here
    reason: str | None  # why not
    hint: str | None  # what to do
    after: str | None  # the rung below it
    peer: bool  # another project's kernel
    setup: str | None  # what prepares the inputs, and is not timed
    summary: str


class Unreadable(Struct):
    """An algo.toml that cannot be read."""

    op: str
    algo: str
    error: str


class Algos(Struct):
    """`gdn list`: the algos, and where they run here."""

    algos: list[Listed]
    broken: list[Unreadable]


class SourceFile(Struct):
    """A file that is packed."""

    path: str
    lines: int


class LastRun(Struct, kw_only=True):
    """An algo's last run on one device in one tier."""

    device: str | None
    mode: str | None
    tier: str | None
    l2: str | None
    time: str
    commit: str | None
    source_hash: str | None
    medians_us: dict[str, float]  # by size
    doubted: list[str]  # sizes whose time is in doubt


class Shown(Listed, kw_only=True):
    """`gdn show`: everything about one algo."""

    entry_point: str
    capability: str | None  # the lowest compute capability
    packages: dict[str, str]  # import name -> what pip installs
    provenance: dict[str, str]
    batch_invariant: bool
    folder: str
    contract: str  # the op's file: inputs, outputs, tolerances
    reference: str  # the source that defines the results
    tuned: str | None  # the generated file of its constants
    files: list[SourceFile]
    log: str | None  # the README of its op
    history: list[LastRun]


class Copied(Struct):
    """`gdn new`: the new algo."""

    op: str
    algo: str
    source: str = msgspec.field(name="from")
    folder: str
    files: list[str]


# --- gdn watch


class Saved(Struct, kw_only=True, omit_defaults=True):
    """`gdn watch`: a line of JSON for each save."""

    time: str  # of the day: 12:03:11
    algo: str
    size: str = ""  # the smallest: "B=1"
    status: Status = Status.UNPACKABLE  # passed, or what went wrong
    reason: str | None = None  # what went wrong, in words
    first_wrong: dict[str, str] = {}  # output -> its first wrong element, in words
    ratio: float | None = None  # the last right one's time over this one's
    low: float | None = None  # low end of the ratio's 99 % interval
    high: float | None = None  # high end
    verdict: str | None = None  # FASTER, SLOWER, SAME or UNCLEAR


# --- gdn pack and gdn data


class Packed(Struct):
    """`gdn pack`: the file or folder that was written, and what was proved of it."""

    file: str
    name: str
    definition: str
    source_hash: str
    sources: list[str]
    algos: list[str]  # op/algo of each algo in it
    proof: list[dict[str, str]] | None  # step, state (ok, skipped or failed) and detail


class Library(Struct):
    """One that `gdn build` compiled."""

    algo: str
    source_hash: str
    arch: str
    file: str
    bytes: int


class Compiled(Struct):
    """`gdn build`: the folder, CUDA's version, and the libraries."""

    out: str
    cuda: str
    libraries: list[Library]


class Built(Struct):
    """`gdn data build`: the folder, and how many of each it got."""

    folder: str
    written: int  # blobs
    kept: int  # blobs that were there
    bytes: int
    solutions: int


class Named(Struct):
    """A workload."""

    op: str
    index: int | None
    uuid: str
    axes: dict[str, int]
    origin: str


class Workloads(Struct):
    """`gdn data list`: the workloads."""

    workloads: list[Named]


# --- gdn doctor and gdn commands

Finding = TypedDict(
    "Finding",
    {
        "state": str,  # ok, missing or bad
        "what": str,
        "found": str,
        "for": str,  # the commands that need it
        "mend": str | None,  # the command that brings it
    },
)


class Findings(Struct):
    """`gdn doctor`: what is here, what is missing, and how to get it."""

    findings: list[Finding]
    summary: str


class Parameter(Struct, kw_only=True):
    """An option or an argument."""

    names: list[str]  # of an option; [] for an argument
    value: str | None
    flag: bool
    repeatable: bool
    required: bool
    environment: str | list[str] | None  # variable
    help: str | None


class Command(Struct, kw_only=True):
    """A command. `schema`: `gdn schema NAME` prints the schema of its --json."""

    name: str
    summary: str
    examples: list[str]
    parameters: list[Parameter]
    schema: str | None


class Commands(Struct):
    """`gdn commands`: every command, with its arguments and options."""

    commands: list[Command]
