"""Several GPUs of one host, a lane each: what goes into which, on which CPUs, and all of them side by side."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from .inventory import HERE, Gpu, Machine

T = TypeVar("T", bound=Hashable)
_LEAST = 2  # cores for a lane of its own: below that it would wait for itself


def deal(items: Mapping[T, tuple[int, Sequence[Gpu]]]) -> dict[T, Gpu]:
    """Item -> GPU. Each item has a weight and the GPUs that can take it, and goes to the one of these that has the
    least so far, the first of equals. Those with the fewest to choose from are dealt first, of these the heaviest."""
    load: dict[Gpu, int] = {}
    found = {}
    for item, (weight, able) in sorted(items.items(), key=lambda pair: (len(pair[1][1]), -pair[1][0])):
        found[item] = min(able, key=lambda gpu: load.get(gpu, 0))
        load[found[item]] = load.get(found[item], 0) + weight
    return {item: found[item] for item in items}


def side_by_side(work: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Do all of `work` at once, a thread each, to the end of the last; one alone is done in this thread.

    `stop` is set, and all of them are to look out for it, once one has raised, which is raised here then, or once this
    thread has: Ctrl-C.
    """
    if len(work) < 2:
        for only in work:
            only()
        return
    pool = ThreadPoolExecutor(len(work), "gdn-lane")
    try:
        for done in as_completed([pool.submit(each) for each in work]):
            done.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# --- the host's share -----------------------------------------------------------------------------------------------


def cpus(gpus: Sequence[Gpu], machine: Machine = HERE) -> dict[Gpu, frozenset[int]]:
    """GPU -> the CPUs of its worker: near it, whole cores, and no other worker's, so that none waits for another's.

    Empty sets, which mean all CPUs, where there is one GPU only, or too few cores to share out.
    """
    everywhere = {gpu: frozenset[int]() for gpu in gpus}
    if len(gpus) < 2 or not hasattr(os, "sched_getaffinity"):
        return everywhere
    mine = frozenset(os.sched_getaffinity(0))
    sides = {gpu: machine.near(gpu) & mine or mine for gpu in gpus}
    if any(a != b and a & b for a in sides.values() for b in sides.values()):
        sides = dict.fromkeys(gpus, mine)
    found = {}
    for side in dict.fromkeys(sides.values()):
        here = [gpu for gpu in gpus if sides[gpu] == side]
        whole = _cores(side)
        if len(whole) < _LEAST * len(here):
            return everywhere
        ends = [len(whole) * i // len(here) for i in range(len(here) + 1)]
        for gpu, start, end in zip(here, ends, ends[1:], strict=False):
            found[gpu] = frozenset[int]().union(*whole[start:end])
    return found


def _cores(side: frozenset[int]) -> list[frozenset[int]]:
    """The cores of these CPUs, in order: hardware threads of one core stay together."""
    found = dict.fromkeys(frozenset(_siblings(cpu)) & side for cpu in sorted(side))
    return sorted(found, key=min)


def _siblings(cpu: int) -> set[int]:
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        ends = [[int(end) for end in run.split("-")] for run in text.strip().split(",")]
    except (OSError, ValueError):  # no Linux, or a container that hides it
        return {cpu}
    return {cpu}.union(*(range(run[0], run[-1] + 1) for run in ends))
