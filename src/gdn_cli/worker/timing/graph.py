"""Tier `graph`: a call's share of a CUDA graph of many calls, replayed between two CUDA events.

It includes the gap between two nodes but no host time: the cost of a call in a server
that replays graphs. With L2 cold the calls rotate over buffer sets that together are
larger than twice L2, so that none finds its own data there. Each replay gets other
values. Only where there is no room for 20 sets, or with L2 warm, do calls of one replay
repeat a set.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from ...errors import one_line
from .subject import Subject, listed
from .tier import About, Sample, TierUnavailableError, Warmed

# the least number of calls in a graph, so that launching it is a small part
_NODES = 20
_MOST_SETS = 400
_ROOM = 1 / 8  # of the memory that is free, for the sets that L2 does not need
_BATCH = 50  # replays in flight
# cycles of the GPU, about 100 us: a replay and its events take the host less
_HEAD_START = 200_000


class Sampler(Warmed):
    """One graph per subject, replayed in the order asked for."""

    def _open(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        # each graph's buffers, and what its calls return
        self.kept: list[tuple[list[Subject], Any]] = []

    def _round(self) -> None:
        _on_the_side(self.subjects)

    def _prepare(self) -> None:
        if self.plan.warmup == 0:
            self._round()  # a call can be captured only after a first call
        sets = [1 if self.plan.l2 == "warm" else _sets(s.nbytes) for s in self.subjects]
        self._build(sets, [n * max(1, -(-_NODES // n)) for n in sets])
        for _ in range(self.plan.warmup):
            for graph in self.graphs:
                graph.replay()
        torch.cuda.synchronize()

    def _build(self, sets: list[int], nodes: list[int]) -> None:
        """A graph for each subject: its `nodes` calls over its `sets` of buffers."""
        self.close()
        self.sets, self.nodes = sets, nodes
        for subject, n, calls in zip(self.subjects, sets, nodes, strict=True):
            copies = [subject, *(subject.copy() for _ in range(n - 1))]
            self.graphs.append(_capture(copies, calls))
            returned = None if subject.kernel is None else subject.kernel.last
            # a graph holds addresses, so the buffers must be kept
            self.kept.append((copies, returned))

    def take(self, order: Sequence[int]) -> list[Sample]:
        # slow calls: one each is long compared with the graph's launch and with L2
        if not self.graphs:
            self._build([1] * len(self.subjects), [1] * len(self.subjects))
        began = perf_counter()
        samples: list[Sample] = []
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            pairs = [
                (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                for _ in batch
            ]
            for i, (first, last) in zip(batch, pairs, strict=True):
                self._renew(i)
                first.record()
                self.graphs[i].replay()
                last.record()
            torch.cuda.synchronize()
            for i, (first, last) in zip(batch, pairs, strict=True):
                samples.append(Sample(first.elapsed_time(last) * 1e3 / self.nodes[i]))
        self.busy_s += perf_counter() - began
        return samples

    def _renew(self, i: int) -> None:
        """Other values in all sets; then a wait on the GPU, in which the host gets ahead of it.

        Not a flush of L2: it made a call of 2.3 us 20 % slower, as what describes the
        graph's nodes lies there too.
        """
        copies, _ = self.kept[i]
        for copy in copies:
            if copy.refresh:
                copy.refresh()
        if copies[0].refresh:
            torch.cuda._sleep(_HEAD_START)

    def hold(self, held: bool = True) -> None:
        super().hold(held)
        for copies, _ in self.kept:
            for copy in copies:
                copy.hold(held)

    def results(self, i: int) -> list:
        """Of a random set of buffers; of what is returned, the last call's."""
        copies, returned = self.kept[i]
        chosen = random.choice(copies)
        if returned is None:
            return chosen.results()
        return [x.clone() for x in listed(returned)]

    def about(self, i: int, samples: list[Sample]) -> About:
        sets = f"{self.sets[i]} sets" if self.sets[i] > 1 else "one set"
        calls = f"{self.nodes[i]} calls" if self.nodes[i] > 1 else "one call"
        how = f"a graph of {calls} over {sets} of buffers, gaps between them included"
        return how, None

    def close(self) -> None:
        for graph in self.graphs:
            graph.reset()
        self.graphs, self.kept = [], []


def _sets(nbytes: int) -> int:
    """The number of buffer sets that together are larger than twice L2, so that a call
    finds none of its data there; and a set for each call of a graph, if there is room.
    """
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    size = max(nbytes, 1)
    cold = max(2, -(-2 * l2 // size) + 1)
    room = int(torch.cuda.mem_get_info()[0] * _ROOM) // size
    return min(_MOST_SETS, max(cold, min(_NODES, room)))


def _on_the_side(subjects: list[Subject]) -> None:
    """Call each once, not on the legacy stream, which cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for subject in subjects:
            subject.call()
    torch.cuda.synchronize()


def _capture(copies: list[Subject], nodes: int) -> torch.cuda.CUDAGraph:
    """A graph of calls; the first of them has been called before."""
    _on_the_side(copies[1:])
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for n in range(nodes):
                copies[n % len(copies)].call()
    except Exception as e:
        torch.cuda.synchronize()
        raise TierUnavailableError(
            f"a call cannot be captured in a CUDA graph: {one_line(e)[:120]}"
        ) from None
    return graph
