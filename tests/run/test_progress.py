"""What progress says of a job, and what is said of jobs that were not reached."""

from __future__ import annotations

import building
import helpers
import pytest

from gdn_cli import paths
from gdn_cli.catalog import pack
from gdn_cli.catalog.workloads import embedded
from gdn_cli.records import store
from gdn_cli.run import execute, first_results
from gdn_cli.run.jobs import Job
from gdn_cli.run.planning import Plan

OP = helpers.REGISTRY.ops["gdn_decode"]


def job(name: str, command: str = "check", edit: str = "") -> Job:
    algo = helpers.REGISTRY.find(name)
    solution = pack.pack(algo, OP)
    solution["sources"][0]["content"] += edit
    definition = pack.definition(OP, helpers.REGISTRY)
    work = embedded(OP)[:2]
    return Job.of(command, OP, definition, "cpu", work, [(algo, solution)])


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("GDN_HOME", str(tmp_path))


def test_a_first_result_takes_as_long_as_it_did_here(home):
    old, new, other = job("cpp-v1"), job("cpp-v1", edit="// x"), job("pt-reference")
    assert first_results.usual_s(old) is None and not paths.builds_dir().exists()
    first_results.note(old, 41.6)
    assert [first_results.usual_s(j) for j in (old, new, other)] == [41.6, 41.6, None]
    # built already: it is quick, but for sources that are new it says nothing
    first_results.note(old, 3.2)
    assert [first_results.usual_s(j) for j in (old, new)] == [3.2, 41.6]
    assert first_results.of_new_sources_s(OP.name, "cpu", "cpp-v1") == 41.6
    first_results.note(old, 0.4)
    assert first_results.usual_s(old) is None


def test_progress_says_what_is_done_and_how_long_that_took_before(home, tmp_path):
    said = []
    writer = store.Writer(building.document(), tmp_path / "x.json")
    mine = job("cpp-v1")
    first_results.note(mine, 41.6)
    tally = execute._Tally(Plan([mine]), writer, lambda *line: said.append(line))
    tally.begin(mine)
    uuids = [workload.uuid for workload in mine.workloads]
    for uuid in uuids:
        tally.add(mine, building.record("cpp-v1", uuid=uuid, mode="cpu"), None)
    assert said == [
        ("gdn_decode/cpp-v1", 0, 2, False, "compiling, 42 s usually"),
        ("gdn_decode/cpp-v1", 1, 2, False, "checking"),
        ("gdn_decode/cpp-v1", 2, 2, False, "checking"),
    ]
    # the next time it is as long as this time, which was short
    assert first_results.usual_s(mine) is None
    assert execute._starting(job("pt-reference")) == "starting"


def test_what_was_not_reached():
    plan = Plan([job("cpp-v1"), job("pt-reference"), job("pt-compiled")])
    document = building.document(building.record("pt-reference"))
    assert execute.not_reached(plan, document) == [
        "gdn_decode/cpp-v1",
        "gdn_decode/pt-compiled",
    ]
