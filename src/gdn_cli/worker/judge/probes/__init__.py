"""Cheats and faults that a single right result does not show: probes of a built kernel
that has passed its check.

| probe               | what it catches                                                        |
|---------------------|------------------------------------------------------------------------|
| inputs-changed      | an input that is not the same bit for bit after any of several calls   |
| out-of-bounds       | writes next to an output: guard bytes lie on both sides of each        |
| late-work           | work that is not done, or not ordered, when the call returns: another  |
|                     | stream, a thread, a lazy tensor; no timer sees it                      |
| nondeterminism      | equal calls whose results differ by more than a tenth of the           |
|                     | tolerance: a race                                                      |
| overwritten-results | a result that changes after it was returned: by the next call, or with |
|                     | the inputs                                                             |
| pointer-cache       | results remembered by address: new values in the same buffers give the |
|                     | old results                                                            |
| content-cache       | results remembered by value, or by a fingerprint of a few elements     |
| zero-outputs        | results that are right only where the outputs were full of NaN before  |
|                     | the call                                                               |
| neighbours          | only with `--batch-invariant`: a sequence with different bits alone    |
|                     | than in its batch                                                      |

No second oracle is needed: an op is linear in some of its inputs together
(`Op.linear_in`), and scaling those by -1/2 scales every output by exactly that. For an
op that is not linear in any input, the probes that rely on this check less:
pointer-cache only compares with a call on other buffers, content-cache does not look
for fingerprints.

A probe reports only evidence that an honest kernel cannot give: values and bits
wherever possible. Only the search for skipped repeats uses times, if there is no GPU to
list its kernels: see caching.py.

Calls of the kernel, all probes together, when nothing is found: 31 on a CPU, 24 for a
kernel that takes over 0.1 s, and 25 on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ....errors import one_line
from ...executor import calls, client
from ..check import Problem
from . import async_work, buffers, caching, neighbours
from .harness import Case, CaughtError

Findings = dict[str, str | None]  # probe -> what it found
PROBES: dict[str, Callable[[Case], str | None]] = {
    "inputs-changed": buffers.inputs_changed,
    "out-of-bounds": buffers.out_of_bounds,
    "late-work": async_work.late_work,
    # before what it would look like: results of other calls, other buffers
    "nondeterminism": buffers.nondeterminism,
    "overwritten-results": buffers.overwritten_results,
    "pointer-cache": caching.pointer_cache,
    "content-cache": caching.content_cache,
    "zero-outputs": buffers.zero_outputs,
    "neighbours": neighbours.other_bits,
}
USUAL = tuple(name for name in PROBES if name != "neighbours")


def run(
    kernel: Any,
    problem: Problem,
    names: Iterable[str] = USUAL,
    hard: bool = False,
) -> Findings:
    """Probe a kernel that `check.check` has passed: probe -> None, or one line that
    says what was found.

    problem   its inputs are changed in place and restored bit for bit before this
              returns
    names     the probes to run, of PROBES
    hard      look longer for races: many equal calls while the machine is busy

    An exception from the kernel counts as that probe's finding. Running out of memory
    does not: it is raised, as from any other call.
    """
    chosen = list(names)
    findings: Findings = {}
    with torch.no_grad():
        case = Case(kernel, problem, hard)
        for name in chosen:
            try:
                findings[name] = _probed(case, PROBES[name])
            except (RuntimeError, client.RaisedError) as e:
                if calls.out_of_memory(e) or not case.gpu:
                    raise
                # a fault on a GPU makes its context unusable: every later call would
                # fail with the same error
                findings[name] = f"left the GPU unusable: {one_line(e)}"
                for rest in chosen[chosen.index(name) + 1 :]:
                    findings[rest] = f"not probed: {name} came before"
                break
    return findings


def _probed(case: Case, probe: Callable[[Case], str | None]) -> str | None:
    try:
        return probe(case)
    except CaughtError as e:
        return str(e)
    finally:
        case.restore()
