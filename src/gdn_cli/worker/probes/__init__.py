"""Cheats and faults that one right result does not show: probes of a built kernel that has passed its check.

| probe               | what it catches                                                                            |
|---------------------|--------------------------------------------------------------------------------------------|
| inputs-changed      | an input that does not come back bit for bit, in any of several calls                      |
| out-of-bounds       | writes next to an output: guard bytes lie on both sides of each                            |
| late-work           | work that is not done, or not ordered, when the call returns: another stream, a thread, a  |
|                     | lazy tensor; no timer sees it                                                              |
| overwritten-results | a result that changes after it was handed over: by the next call, or with the inputs       |
| pointer-cache       | results remembered by address: other values in the same buffers give the old ones          |
| content-cache       | results remembered by value, or by a fingerprint of a few elements                         |
| zero-outputs        | results that are right where they are looked at (outputs full of NaN) and zeros elsewhere  |
| nondeterminism      | equal calls whose results differ by more than a tenth of the tolerance: a race             |
| neighbours          | only with `--batch-invariant`: a sequence with other bits alone than in its batch          |

No second oracle is needed: an op is linear in some of its inputs together (`Op.linear_in`), and scaling those by -1/2
scales every output by exactly as much. For an op that is linear in nothing, the probes that rest on this check less:
pointer-cache only compares with a call on other buffers, content-cache looks for no fingerprint.

A probe accuses only on evidence that no honest kernel gives: values and bits wherever that can be had. Only the search
for repeats that are skipped goes by times where no GPU is there to list its kernels: see caching.py.

Calls of the kernel, all probes together, when nothing is found: 31 on a CPU, 24 for a kernel that takes over 0.1 s, and
25 on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ...catalog.ops import Op
from ...errors import one_line
from ...runner import calls, client
from . import async_work, buffers, caching, neighbours
from .harness import Case, Caught

PROBES: dict[str, Callable[[Case], str | None]] = {
    "inputs-changed": buffers.inputs_changed,
    "out-of-bounds": buffers.out_of_bounds,
    "late-work": async_work.late_work,
    "overwritten-results": buffers.overwritten_results,
    "pointer-cache": caching.pointer_cache,
    "content-cache": caching.content_cache,
    "zero-outputs": buffers.zero_outputs,
    "nondeterminism": buffers.nondeterminism,
    "neighbours": neighbours.other_bits,
}
USUAL = tuple(name for name in PROBES if name != "neighbours")


def run(
    kernel: Any,
    op: Op,
    axes: dict[str, int],
    inputs: list,
    expected: list[torch.Tensor],
    names: Iterable[str] | None = None,
    in_place: Mapping[int, int] | None = None,
) -> dict[str, str | None]:
    """Probe a kernel that `check.check` has passed: probe -> None, or one line that says what was caught.

    inputs    the call's tensors and scalars; values are changed in place, and are back bit for bit when this returns
    expected  the float64 oracle's outputs for them
    names     the probes to run, of PROBES; the usual ones where None
    in_place  number of an output -> that of the input which it overwrites, in each call

    What the kernel raises is that probe's catch. Running out of memory is not: it is raised, as from any other call.
    """
    chosen = list(USUAL if names is None else names)
    found: dict[str, str | None] = {}
    with torch.no_grad():
        case = Case(kernel, op, axes, inputs, expected, in_place)
        for name in chosen:
            try:
                found[name] = _probed(case, PROBES[name])
            except (RuntimeError, client.Raised) as e:
                if calls.out_of_memory(e) or not case.gpu:
                    raise
                # a fault on a GPU leaves its context unusable: every later call would fail with the same words
                found[name] = f"left the GPU unusable: {one_line(e)}"
                found |= {rest: f"not probed: {name} came before" for rest in chosen if rest not in found}
                break
    return found


def _probed(case: Case, probe: Callable[[Case], str | None]) -> str | None:
    try:
        return probe(case)
    except Caught as e:
        return str(e)
    finally:
        case.restore()
