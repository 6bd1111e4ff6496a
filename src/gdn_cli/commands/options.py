"""Options that several commands share, each written once, and what they mean together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..errors import UsageError, unknown

AlgoNames = Annotated[
    Optional[str],
    typer.Option(
        "--algo", envvar="ALGO", metavar="NAME[,NAME...]", help="Algos by name, or `all` of --op (else of decode)."
    ),
]
OpName = Annotated[Optional[str], typer.Option("--op", metavar="OP", help="Narrow to one op, such as gdn_prefill.")]
OwnAlgos = Annotated[
    Optional[str],
    typer.Option("--algos", envvar="GDN_ALGOS", metavar="DIR", help="Your own folder of <op>/<algo>/algo.toml."),
]
Solutions = Annotated[
    Optional[list[Path]], typer.Argument(metavar="[SOLUTION.json]...", help="Packed solutions, anyone's.")
]
Workloads = Annotated[
    Optional[list[str]],
    typer.Option(
        "--workload", "-w", metavar="W", help="An index, a range (0-9), a uuid prefix, or axes (batch_size=64). Repeat."
    ),
]
First = Annotated[Optional[int], typer.Option("-n", metavar="N", min=1, help="The first N workloads of the selection.")]
PresetName = Annotated[
    Optional[str],
    typer.Option("--preset", metavar="NAME", help="One of configs/presets.toml: quick, contest, sweep, peers."),
]
Dataset = Annotated[
    Optional[Path],
    typer.Option("--dataset", envvar="FIB_DATASET_PATH", metavar="DIR", help="A FlashInfer-Trace folder."),
]
Gpus = Annotated[
    Optional[str],
    typer.Option(
        "--gpus",
        metavar="N[,N...]",
        help="Spread the algos over these GPUs, or `all`; with fewer algos than GPUs, the workloads. "
        "Ratios stay on one GPU.",
    ),
]
Device = Annotated[str, typer.Option("--device", metavar="D", help="auto, cuda or cpu.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="S", min=1.0, help="Seconds that one algo may take.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]
Out = Annotated[Optional[Path], typer.Option("--out", metavar="FILE", help="Write the records to FILE.")]
Tiers = Annotated[
    Optional[str],
    typer.Option("--tier", metavar="T[,T...]", help="cupti, events, graph, nvbench, fib (GPU), wall (CPU), or `all`."),
]
L2 = Annotated[str, typer.Option("--l2", metavar="STATE", help="The GPU's L2 before each call: cold or warm.")]
Strict = Annotated[bool, typer.Option("--strict", help="Probe for cheats and faults on every workload; no fall-back.")]
Sandbox = Annotated[
    bool,
    typer.Option(
        "--sandbox", help="Run the algos' code in bubblewrap: no network, no home, read-only but for its own folder."
    ),
]
InPlace = Annotated[
    bool,
    typer.Option("--in-place", help="Outputs overwrite the inputs that the op says they may: decode's state."),
]
Target = Annotated[
    Optional[float],
    typer.Option("--target", metavar="X", help="Sample until the median is known to this share of it (0.01)."),
]
Seconds = Annotated[
    Optional[float], typer.Option("--seconds", min=0.01, help="How long to sample each measurement at most.")
]


def timing(
    *, tier: str | None, l2: str, target: float | None, seconds: float | None, device: str, timeout: float
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The tiers that were asked for, and timing.Plan's fields that go before a preset's; UsageError on what is none."""
    from ..timing import TIERS

    for name, value, known in (("device", device, ("auto", "cuda", "cpu")), ("l2 state", l2, ("cold", "warm"))):
        if value not in known:
            raise unknown(name, value, known)
    for name, value in (("--timeout", timeout), ("--seconds", seconds)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{name} {value}: expected a number of seconds")
    if target is not None and not 0 < target < 1:
        raise UsageError(f"--target {target:g}: expected a share between 0 and 1, such as 0.01")
    tiers = tuple(name.strip() for name in (tier or "").split(",") if name.strip())
    for name in tiers:
        if name not in (*TIERS, "all"):
            raise unknown("tier", name, [*TIERS, "all"])
    fields: dict[str, Any] = {"l2": l2}
    if seconds or target:  # then the preset's exact counts no longer hold
        fields |= {"iterations": None} | {k: v for k, v in (("seconds", seconds), ("target", target)) if v}
    return tiers, fields


def trust(solutions: list[Path], sandbox: bool) -> None:
    """Say once whose rights packed files get, before any of their code runs; MissingError where a sandbox cannot be."""
    from .. import report
    from ..isolation import sandbox as bubblewrap

    if sandbox:
        bubblewrap.find()
    elif solutions:
        what = "a packed file's code runs" if len(solutions) == 1 else "the packed files' code runs"
        report.say(
            f"{what} with your rights on this machine; --sandbox takes away its network, your home and your files"
        )


def gpus(text: str | None, device: str) -> tuple[tuple[Any, ...], str]:
    """The GPUs of --gpus, () without it; and the device, which with it can only be a GPU."""
    if text is None:
        return (), device
    if device == "cpu":
        raise UsageError("--gpus and --device cpu exclude each other", hint="drop one of them")
    from .. import machine

    return machine.chosen(text), "cuda"


def preset(name: str | None, workload: list[str] | None, n: int | None, dataset: Path | None) -> tuple[Any, Any]:
    """The name of the preset in use, and the preset: `quick` where nothing else says which workloads."""
    from .. import presets

    if name is None and not (workload or n or dataset):
        name = "quick"
    return name, presets.load_preset(name) if name else None


def official(name: str | None) -> tuple[str, Any]:
    """The same with the contest's counts: all of its workloads where nothing else says which."""
    from dataclasses import replace

    from .. import presets

    contest = presets.load_preset("contest")
    loaded = presets.load_preset(name) if name else contest
    return name or contest.name, replace(loaded, settings=contest.settings, op_settings=contest.op_settings)
