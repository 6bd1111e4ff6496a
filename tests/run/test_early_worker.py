"""On a GPU the next algo's worker is started while one is timed, and waits until it
gets its request.
"""

from __future__ import annotations

from types import SimpleNamespace

import helpers
import pytest

from gdn_cli.catalog import pack
from gdn_cli.catalog.workloads import embedded, select
from gdn_cli.run import compile_ahead, execute, jobs, worker_process
from gdn_cli.run.jobs import Job, Outcome
from gdn_cli.schema.record_types import Status

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode"]


def job(name: str, mode: str = "cuda") -> Job:
    algo = REGISTRY.find(name, OP.name)
    return Job.of(
        "check",
        OP,
        pack.definition(OP, REGISTRY),
        mode,
        select(OP, embedded(OP), chosen=["batch_size=2"]),
        [(algo, pack.pack(algo, OP))],
    )


@pytest.fixture
def events(monkeypatch):
    """What was started, run and closed, in order."""
    found = []

    def start(job):
        found.append(f"start {job.algo.name}")
        return SimpleNamespace(
            name=job.algo.name, close=lambda: found.append(f"close {job.algo.name}")
        )

    def run(job, on_record, given_up, worker):
        found.append(f"run {job.algo.name} in {worker and worker.name}")
        if job.algo.name == "cuda-v5":
            raise KeyboardInterrupt
        return Outcome(Status.DONE)

    monkeypatch.setattr(execute, "start", start)
    monkeypatch.setattr(execute, "execute", run)
    monkeypatch.setattr(compile_ahead, "cpus", lambda: 8)
    return found


def lane(*wanted: Job) -> None:
    tally = SimpleNamespace(
        show=lambda line: None,
        begin=lambda job: None,
        end=lambda *_: None,
        add=lambda *_: None,
    )
    execute._lane(None, list(wanted), tally, print, lambda: False)


def test_it_is_started_before_the_one_before_it_runs(events):
    lane(job("cuda-v1"), job("cuda-v4"), job("triton-v2"))
    assert events == [
        "start cuda-v1", "start cuda-v4", "run cuda-v1 in cuda-v1", "start triton-v2",
        "run cuda-v4 in cuda-v4", "run triton-v2 in triton-v2",
    ]  # fmt: skip


def test_it_is_closed_if_it_is_not_needed(events):
    with pytest.raises(KeyboardInterrupt):
        lane(job("cuda-v5"), job("cuda-v4"))
    assert events[-2:] == ["run cuda-v5 in cuda-v5", "close cuda-v4"]


def test_none_is_started_early_for_a_cpu_or_with_few_cpus(events, monkeypatch):
    lane(job("cpp-v1", "cpu"), job("pt-reference", "cpu"))
    monkeypatch.setattr(compile_ahead, "cpus", lambda: 2)
    lane(job("cuda-v1"), job("cuda-v4"))
    assert not [event for event in events if event.startswith("start")]


@pytest.mark.slow
def test_a_worker_waits_for_its_request():
    wanted = job("pt-reference", "cpu")
    worker = jobs.start(wanted)
    try:
        assert not worker._read(0.1), "it sent something without a request"
        assert jobs.execute(wanted, worker=worker).status is Status.DONE
    finally:
        worker.close()
    assert not worker.folder.exists()


def test_a_tail_keeps_where_a_crash_begins_and_the_last_lines():
    lines = [f"line {i}" for i in range(50)]
    assert worker_process.tail("\n".join(lines)) == lines[30:]
    lines[3] = "!!!!!!! Segfault encountered !!!!!!!"
    assert worker_process.tail("\n".join(lines)) == lines[3:13] + lines[40:]


def test_a_worker_that_gets_no_request_ends():
    worker = jobs.start(job("pt-reference", "cpu"))
    worker.close()
    assert worker.process.returncode is not None and not worker.folder.exists()
