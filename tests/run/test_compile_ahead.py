"""What compiles is compiled ahead of the timing, side by side, and once."""

from __future__ import annotations

import threading

import helpers
import pytest

from gdn_cli.catalog import pack
from gdn_cli.catalog.workloads import embedded
from gdn_cli.run import compile_ahead
from gdn_cli.run.jobs import Job, Outcome
from gdn_cli.schema.record_types import Status
from gdn_cli.worker.request import Timing

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode"]


def job(*names: str, command: str = "bench", sizes: int = 6) -> Job:
    """A bench of one algo, or a comparison of several, on the first workloads of decode."""
    algos = [REGISTRY.find(name, OP.name) for name in names]
    return Job.of(
        command,
        OP,
        pack.definition(OP, REGISTRY),
        "cpu",
        embedded(OP)[:sizes],
        [(algo, pack.pack(algo, OP)) for algo in algos],
        timing=Timing(() if command == "check" else ("wall",)),
    )


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """The checks that were made, in a gdn that has eight CPUs and has compiled nothing."""
    monkeypatch.setenv("GDN_HOME", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "cpus", lambda: 8)
    found, meet = [], threading.Barrier(2)

    def execute(job, given_up):
        assert not given_up()
        meet.wait(timeout=helpers.PATIENCE_S)  # none passes alone
        found.append(job)
        return Outcome(Status.DONE, records=[None] * len(job.workloads))

    monkeypatch.setattr(compile_ahead, "execute", execute)
    return found


def ahead(*jobs: Job) -> list[str]:
    lines = []

    def progress(name: str, phase: str) -> None:
        lines.append(f"{phase} {name}")

    compile_ahead.ahead(jobs, progress, lambda: False)
    return lines


def test_each_algo_that_compiles_is_checked_on_a_few_workloads_at_once(ran):
    lines = ahead(
        job("cpp-v1"),
        job("pt-reference"),
        job("pt-compiled"),
        job("cuda-v4", command="check"),
    )
    assert sorted(j.algo.name for j in ran) == ["cpp-v1", "pt-compiled"]
    for each in ran:
        assert (each.command, each.tiers, each.due) == ("check", (), 4)
        assert [w.uuid for w in each.workloads] == [
            job("cpp-v1").workloads[i].uuid for i in (0, 2, 3, 5)
        ]
    assert sorted(lines) == ["compiling cpp-v1", "compiling pt-compiled"]


def test_kernels_are_compiled_once(ran):
    ahead(job("cpp-v1"), job("pt-compiled"))
    assert ahead(job("cpp-v1"), job("pt-compiled")) == [] and len(ran) == 2
    # other sizes, other constants
    assert ahead(job("cpp-v1", sizes=1), job("pt-compiled", sizes=1)) and len(ran) == 4


def test_the_rivals_of_a_comparison_each_for_itself(ran):
    ahead(job("cpp-v1", "pt-reference", "pt-compiled", command="compare"))
    assert sorted(j.algo.name for j in ran) == ["cpp-v1", "pt-compiled"]
    assert not any(j.request.rivals for j in ran)


def test_one_alone_or_two_cpus_are_nothing_to_gain(ran, monkeypatch):
    assert ahead(job("cpp-v1")) == []
    monkeypatch.setattr(compile_ahead, "cpus", lambda: 2)
    assert ahead(job("cpp-v1"), job("pt-compiled")) == [] and ran == []
