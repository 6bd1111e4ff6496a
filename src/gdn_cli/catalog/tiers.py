"""The timing tiers, what each can do, and the names under which floors are recorded.
gdn_cli.worker.timing measures them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """A way to time calls, and its abilities."""

    # cuda or cpu
    mode: str
    # in which states of L2
    l2: tuple[str, ...] = ()
    # calls of several algos can take turns (needed by `gdn compare`)
    interleaves: bool = True
    # it times more than solutions (needed for a floor)
    floors: bool = True
    # the host's part of a call counts, which other work on the host can lengthen
    host: bool = False
    # a subject's buffers change places
    moves: bool = False
    # overwritten inputs (`--in-place`) can be restored before the next call, untimed,
    # L2 cold
    restores: bool = False
    # that it needs, besides torch
    package: str | None = None


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
