"""Work on several GPUs of one host side by side: which jobs run on which GPU, and on which CPUs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from .inventory import HERE, Gpu, Machine

T = TypeVar("T", bound=Hashable)
_LEAST = 2  # cores for a GPU's worker: with fewer it would wait for itself


def deal(items: Mapping[T, tuple[int, Sequence[Gpu]]]) -> dict[T, Gpu]:
    """Item -> GPU. Each item has a weight and the GPUs that can take it, and goes to
    the least loaded of these, the first if several are equal. Items with the fewest
    GPUs to choose from are placed first, heavy ones before light ones.
    """
    load: dict[Gpu, int] = {}
    found = {}
    for item, (weight, able) in sorted(
        items.items(), key=lambda pair: (len(pair[1][1]), -pair[1][0])
    ):
        found[item] = min(able, key=lambda gpu: load.get(gpu, 0))
        load[found[item]] = load.get(found[item], 0) + weight
    return {item: found[item] for item in items}


def side_by_side(work: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Do all of `work` at once, each in its own thread, and wait for all; a single item
    runs in this thread.

    `stop` is set once one of them has raised, or this thread has (Ctrl-C); the others
    must watch for it. The exception is raised here.
    """
    if len(work) < 2:
        for only in work:
            only()
        return
    pool, lanes = (
        ThreadPoolExecutor(len(work), "gdn-lane"),
        [(threading.Event(), threading.Event()) for _ in work],
    )

    def lane(
        each: Callable[[], None], begun: threading.Event, ended: threading.Event
    ) -> None:
        begun.set()
        try:
            each()
        finally:
            ended.set()

    try:
        for done in as_completed(
            [
                pool.submit(lane, each, *events)
                for each, events in zip(work, lanes, strict=True)
            ]
        ):
            done.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        # Ctrl-C in `submit` can leave a thread that runs out of the pool's list
        for begun, ended in lanes:
            if begun.is_set():
                ended.wait()


# --- the host's share


def cpus(gpus: Sequence[Gpu], machine: Machine = HERE) -> dict[Gpu, frozenset[int]]:
    """GPU -> the CPUs of its worker: near the GPU, whole cores, not shared with other
    workers, so that none waits.

    Empty sets, which mean all CPUs, if there is only one GPU, or too few cores to share out.
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
        text = Path(
            f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        ).read_text()
        ends = [[int(end) for end in run.split("-")] for run in text.strip().split(",")]
    except (OSError, ValueError):  # not Linux, or hidden by a container
        return {cpu}
    return {cpu}.union(*(range(run[0], run[-1] + 1) for run in ends))
