"""`gdn` on a host with two GPUs that are only pretended: workers for them run on the
CPU, and time with `wall`.

    python two_gpus.py run --gpus all --algo a,b      # PRETEND=2 GPUs; LACKS: the
      capability of the last

Everything else is as it is: which GPU gets what, the locks, the records, the tables, Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

from msgspec import structs

from gdn_cli import cli
from gdn_cli.machine.inventory import Gpu, Machine
from gdn_cli.run import jobs, planning
from gdn_cli.worker.request import Request

GPUS = tuple(
    Gpu("NVIDIA H200", "9.0", "580.1", f"GPU-{c * 8}", i)
    for i, c in enumerate("abcdefgh")
)


def worker(request: Request, *process, plain=jobs.Worker) -> jobs.Worker:
    tiers = tuple("wall" for _ in request.timing.tiers)
    plan = request.timing.plan | {"l2": "cold"}
    timing = structs.replace(request.timing, tiers=tiers, plan=plan)
    return plain(structs.replace(request, mode="cpu", timing=timing), *process)


if __name__ == "__main__":
    here = GPUS[: int(os.environ.get("PRETEND", "2"))]
    sys.argv[0] = str(Path(sys.argv[0]).with_name("gdn"))
    machine = Machine(
        lambda: here, lambda gpu: frozenset(), lambda module: True, lambda: None
    )
    with (
        mock.patch.object(jobs, "Worker", worker),
        mock.patch.object(
            planning, "tiers_for", lambda mode, wanted, command="bench": ("wall",)
        ),
    ):
        cli.main(machine)
