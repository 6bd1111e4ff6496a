"""The timing tiers, what each can do, and the names under which floors are recorded.
gdn_cli.worker.timing measures them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """What a tier can do: which mode it times, in which states of L2, whether calls of
    several algos can take turns in it (needed by `gdn compare`), whether it times more
    than solutions (needed for a floor), whether the host's part of a call counts, which
    other work on the host can lengthen, and whether a subject's buffers change places.
    """

    mode: str
    l2: tuple[str, ...] = ()
    interleaves: bool = True
    floors: bool = True
    host: bool = False
    moves: bool = False
    # can restore overwritten inputs (`--in-place`) before the next call, untimed, L2
    # cold
    restores: bool = False
    package: str | None = None  # that it needs, besides torch


# in the order of `--tier all`; the first that fits a mode is the default there
TIERS = {
    "cupti": Tier("cuda", ("cold", "warm"), moves=True, restores=True),
    "events": Tier("cuda", ("cold", "warm"), host=True, moves=True, restores=True),
    "graph": Tier("cuda", ("cold", "warm")),
    "nvbench": Tier("cuda", ("cold",), interleaves=False, package="cuda-bench"),
    "fib": Tier(
        "cuda",
        ("cold",),
        interleaves=False,
        floors=False,
        host=True,
        package="flashinfer-bench",
    ),
    "wall": Tier("cpu", host=True, restores=True),
}


# the algo names under which floor.py's floors are recorded
FLOORS = COPY, EMPTY, COPY_RATE = "copy", "empty", "copy-rate"
