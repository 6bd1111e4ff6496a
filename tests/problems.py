"""Workloads with their oracle's results, for kernels of this process, and throw-away
algos that are built.
"""

from __future__ import annotations

import itertools
import os
from unittest import mock

import helpers
import torch

from gdn_cli.catalog import pack, registry
from gdn_cli.run import jobs
from gdn_cli.worker.executor import build
from gdn_cli.worker.judge import check, dataset, probes

_numbers = itertools.count()


def kernel(folder, op, sources, device: str = "cpu", **keys):
    """The kernel of a throw-away algo, through the real builder, with the worker's paths
    to the compilers. Its name is new: flashinfer-bench gives a solution that it has built
    before, with all it remembers.
    """
    name = f"throw-away-{next(_numbers)}"
    keys |= {"op": op.family, "devices": [device]}
    file = helpers.write_algo(folder, name, sources, **keys) / "algo.toml"
    definition = pack.definition(op, helpers.REGISTRY)
    solution = pack.pack(registry.read_algo(file, op.family), op)
    with mock.patch.dict(os.environ, jobs.environ_of(device)):
        return build.build(definition, solution)


class Work:
    """A workload of an op with its oracle's results."""

    def __init__(self, op, workload, device: str = "cpu") -> None:
        self.op, self.axes = op, workload.axes
        self.inputs = dataset.load_inputs(op, workload, device)
        self.expected = self.right()
        self.before = check.cloned(self.inputs)

    def right(self) -> list:
        reference = build.reference(pack.definition(self.op, helpers.REGISTRY))
        return check.oracle(reference, self.inputs)

    def problem(self, kernel, op=None) -> check.Problem:
        op = op or self.op
        in_place = helpers.in_place(op) if kernel.destination_passing else {}
        return check.Problem(op, self.axes, self.inputs, self.expected, in_place)

    def check(self, kernel) -> check.Check:
        return check.check(helpers.local(kernel), self.problem(kernel))

    def probe(self, kernel, names=probes.USUAL, op=None) -> dict[str, str | None]:
        """The probes' findings; the inputs must come back bit for bit."""
        before = check.cloned(self.inputs)
        found = probes.run(helpers.local(kernel), self.problem(kernel, op), names)
        for x, was in zip(self.inputs, before, strict=True):
            assert check.same_bits(x, was) if isinstance(x, torch.Tensor) else x == was
        return found


def caught(found: dict[str, str | None]) -> dict[str, str]:
    return {name: what for name, what in found.items() if what}
