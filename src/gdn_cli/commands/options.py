"""Options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

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
    Optional[str], typer.Option("--preset", metavar="NAME", help="quick, contest or sweep (configs/presets.toml).")
]
Dataset = Annotated[
    Optional[Path],
    typer.Option("--dataset", envvar="FIB_DATASET_PATH", metavar="DIR", help="A FlashInfer-Trace folder."),
]
Device = Annotated[str, typer.Option("--device", metavar="D", help="auto, cuda or cpu.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="S", min=1.0, help="Seconds that one algo may take.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]
Out = Annotated[Optional[Path], typer.Option("--out", metavar="FILE", help="Write the records to FILE.")]
