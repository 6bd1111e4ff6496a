"""Work on several GPUs of one host side by side: which jobs run on which GPU, and on which CPUs."""

from __future__ import annotations

import os
import threading
from collections import Counter
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

    def order(item: T) -> tuple[int, int]:
        weight, candidates = items[item]
        return len(candidates), -weight

    load: Counter[Gpu] = Counter()
    dealt = {}
    for item in sorted(items, key=order):
        weight, candidates = items[item]
        dealt[item] = min(candidates, key=load.__getitem__)
        load[dealt[item]] += weight
    return {item: dealt[item] for item in items}


def side_by_side(work: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Do all of `work` at once, each in its own thread, and wait for all; a single item
    runs in this thread.

    `stop` is set once one of them has raised, or this thread has (Ctrl-C); the others
    must watch for it. The exception is raised here.
    """
    if len(work) < 2:
        for task in work:
            task()
        return
    pool = ThreadPoolExecutor(len(work), "gdn-lane")
    running = threading.Condition()
    count = 0

    def lane(task: Callable[[], None]) -> None:
        nonlocal count
        with running:
            count += 1
        try:
            task()
        finally:
            with running:
                count -= 1
                running.notify_all()

    try:
        for future in as_completed([pool.submit(lane, task) for task in work]):
            future.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        # Ctrl-C in `submit` can leave a thread that runs out of the pool's list
        with running:
            running.wait_for(lambda: count == 0)


# --- the host's share


def cpus(gpus: Sequence[Gpu], machine: Machine = HERE) -> dict[Gpu, frozenset[int]]:
    """GPU -> the CPUs of its worker: near the GPU, whole cores, not shared with other
    workers, so that none waits.

    Empty sets, which mean all CPUs, if there is only one GPU, or too few cores to share out.
    """
    everywhere: dict[Gpu, frozenset[int]] = dict.fromkeys(gpus, frozenset())
    if len(gpus) < 2 or not hasattr(os, "sched_getaffinity"):
        return everywhere
    allowed = frozenset(os.sched_getaffinity(0))
    sides = {gpu: machine.near(gpu) & allowed or allowed for gpu in gpus}
    different = set(sides.values())
    if sum(map(len, different)) > len(frozenset().union(*different)):  # they overlap
        sides = dict.fromkeys(gpus, allowed)
    shares = {}
    for side in dict.fromkeys(sides.values()):
        group = [gpu for gpu in gpus if sides[gpu] == side]
        cores = _cores(side)
        if len(cores) < _LEAST * len(group):
            return everywhere
        for i, gpu in enumerate(group):
            first, end = (len(cores) * k // len(group) for k in (i, i + 1))
            shares[gpu] = frozenset[int]().union(*cores[first:end])
    return shares


def _cores(side: frozenset[int]) -> list[frozenset[int]]:
    """The cores of these CPUs, in order: hardware threads of one core stay together."""
    cores = {frozenset(_siblings(cpu)) & side for cpu in side}
    return sorted(cores, key=min)


def _siblings(cpu: int) -> set[int]:
    file = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    siblings = {cpu}
    try:
        for span in Path(file).read_text().strip().split(","):
            first, _, last = span.partition("-")
            siblings.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):  # not Linux, or hidden by a container
        return {cpu}
    return siblings
