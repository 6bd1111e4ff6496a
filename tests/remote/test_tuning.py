"""`gdn modal tune`: the rounds of `gdn tune` in a container, and the choice here from
the lines that come home.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import helpers
import pytest
from cli.test_modal import rent, under_way
from modal_server import Server
from remote.test_remote import Cloud, answered, opened, rented
from remote.test_slurm import engine_of
from tune.test_search import Workers, by_tile, wide

from gdn_cli import errors
from gdn_cli.catalog import registry, scaffold, tuned_table
from gdn_cli.errors import RemoteError
from gdn_cli.machine import inventory
from gdn_cli.records import store
from gdn_cli.remote import (
    container,
    engine,
    modal_client,
    modal_errors,
    profiles,
    replies,
    slurm,
    wire,
)
from gdn_cli.schema.record_types import Environment
from gdn_cli.tune import away, evidence, search
from gdn_cli.tune import race as racing


@pytest.fixture
def tuning(tmp_path, write_algo, monkeypatch):
    """(plan, settings) of 25 candidates at two sizes; the container has no volume."""
    plan = wide(tmp_path, write_algo, monkeypatch)
    monkeypatch.setattr(container, "CACHE", str(tmp_path / "no-volume"))
    return plan(1, 64), search.Settings("wall")


def parcel(plan, settings, minutes=None) -> bytes:
    asked = away.wanted(plan, settings, None)
    return rented(minutes=minutes).parcel(engine.Work([], 60, tunings=[asked]), None)


def served(data: bytes, workers: Workers, monkeypatch, **more) -> away.Measured:
    monkeypatch.setattr(racing, "execute", workers)
    reply = answered(container.serve(data, **more))
    assert reply.lost is None, reply.lost
    (found,) = reply.tuned
    monkeypatch.setattr(
        racing, "execute", lambda *_, **__: pytest.fail("measured here")
    )
    return found


def chosen_as_here(plan, settings, found, monkeypatch) -> dict:
    """The choice from what came home, which must be the one that `gdn tune` makes with
    the same times.
    """
    there = away.choose(plan, settings, found, print)
    table, measured = plan.algo.folder / "tuned.py", plan.algo.folder / "tuning.json"
    text, gpus = table.read_text(), json.loads(measured.read_text())["gpus"]
    monkeypatch.setattr(racing, "execute", Workers(by_tile))
    fresh = search.Settings("wall", fresh=True)
    here = search.begin(plan, fresh, lambda *_: None, print)
    racing.run(here)
    evidence.write(here)
    assert text == table.read_text() and there.choices == here.choices
    return gpus


def test_what_is_measured_there_is_chosen_here(tuning, monkeypatch):
    plan, settings = tuning
    workers, kept = Workers(by_tile), []
    found = served(parcel(plan, settings), workers, monkeypatch, keep=kept.append)
    assert found.done and len(workers.jobs) == 29
    notes = [noted.line for noted in wire.readable(kept, away.Noted)]
    assert notes == [found.key, *found.lines]
    gpus = chosen_as_here(plan, settings, found, monkeypatch)
    chosen = [w["chosen"] for w in gpus["A CPU"]["workloads"]]
    assert chosen == [{"tile": 12}, {"tile": 24}]


def test_a_preempted_tuning_goes_on(tuning, monkeypatch):
    plan, settings = tuning
    data, kept = parcel(plan, settings), []
    served(data, Workers(by_tile), monkeypatch, keep=kept.append)
    again = Workers(by_tile)
    # the key, 50 checks, and all but three times
    found = served(data, again, monkeypatch, before=kept[:-3])
    assert found.done and [job.command for job in again.jobs] == ["compare"] * 2
    chosen_as_here(plan, settings, found, monkeypatch)


def test_one_whose_time_is_up_is_kept_and_the_next_call_goes_on(tuning, monkeypatch):
    plan, settings = tuning

    class Slow(Workers):
        def __call__(self, job, *args, given_up, **more):
            if len(self.jobs) == 27:
                given_up.__self__.set()
                raise KeyboardInterrupt
            return super().__call__(job, *args, **more)

    found = served(parcel(plan, settings), Slow(by_tile), monkeypatch)
    end = (found.done, found.reason, found.code)
    assert end == (False, "its time was up", errors.REMOTE)
    table = plan.algo.folder / "tuned.py"
    before = table.read_text()
    state = away.choose(plan, settings, found, print)
    assert state.interrupted and state.choices == [] and table.read_text() == before
    rest = Workers(by_tile)
    whole = served(parcel(plan, settings), rest, monkeypatch)
    assert whole.done and len(rest.jobs) == 2
    assert whole.lines[: len(found.lines)] == found.lines
    chosen_as_here(plan, settings, whole, monkeypatch)


def test_a_lost_call_leaves_the_lines_that_it_had_kept(tuning, monkeypatch):
    plan, settings = tuning
    kept = []
    whole = served(
        parcel(plan, settings), Workers(by_tile), monkeypatch, keep=kept.append
    )
    Cloud([modal_errors.CallFailedError("preempted")]).install(monkeypatch)
    monkeypatch.setattr(modal_client, "kept", lambda id: kept[:-3])
    found = profiles.tuned(rented(minutes=5), plan, settings)
    assert (found.done, found.reason) == (False, "preempted")
    assert found.key == whole.key and found.lines == whole.lines[:-3]
    Cloud([modal_errors.CallFailedError("preempted")]).install(monkeypatch)
    with pytest.raises(RemoteError, match="preempted"):
        profiles.tuned(rented(minutes=5), plan, settings)


def test_what_had_come_before_ctrl_c_is_kept(tuning, monkeypatch):
    plan, settings = tuning
    kept = []
    whole = served(
        parcel(plan, settings), Workers(by_tile), monkeypatch, keep=kept.append
    )
    fake = Cloud([None]).install(monkeypatch)
    fake.live["fc-0"] = kept[:-3]

    def first(calls, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(modal_client, "first", first)
    found = profiles.tuned(rented(minutes=5), plan, settings)
    assert (found.done, found.code) == (False, errors.INTERRUPTED)
    assert found.lines == whole.lines[:-3] and fake.cancelled == [0]


def test_a_tuning_on_a_cluster_is_fetched_by_the_same_command(
    tuning, tmp_path, monkeypatch, commands
):
    submitit = pytest.importorskip("submitit")
    plan, settings = tuning
    whole = served(parcel(plan, settings), Workers(by_tile), monkeypatch)
    commands(
        sinfo="true",
        sbatch="echo Submitted batch job 8",
        squeue="echo '8|FAILED|None'",
    )
    monkeypatch.setattr(slurm, "_GRACE_S", 0)
    file, kept = tmp_path / "tuning.json", tmp_path / "kept.json"

    def say(line: str) -> None:
        if "if this command is lost: the same command" in line:
            shutil.copy(file, kept)

    cluster = engine_of("slurm")
    cluster.say = say
    with cluster.followed(file), pytest.raises(RemoteError, match="job 8: FAILED"):
        profiles.tuned(cluster, plan, settings)

    # as a command that was killed leaves it
    assert not file.exists()
    shutil.copy(kept, file)
    folder = Path(store.load(file).slurm.folder)
    folder.mkdir()
    reply = wire.encode(wire.Reply(tuned=[whole]))
    pickle = folder / "8_0_result.pkl"
    submitit.core.utils.cloudpickle_dump(("success", reply), pickle)
    commands(sbatch="exit 1")
    cluster = engine_of("slurm")
    with cluster.followed(file):
        assert profiles.tuned(cluster, plan, settings) == whole
    assert not file.exists() and not folder.exists()


def test_lines_of_another_machine_are_not_mixed(tuning, monkeypatch):
    plan, settings = tuning
    first = served(parcel(plan, settings), Workers(by_tile), monkeypatch)
    away.choose(plan, settings, first, print)
    asked = opened(parcel(plan, settings))
    assert asked.tunings[0].lines == first.lines
    asked.tunings[0].key.driver = "another"
    workers = Workers(by_tile)
    assert served(wire.encode(asked), workers, monkeypatch).done
    assert len(workers.jobs) == 29


def test_a_reply_of_another_gpu_is_refused():
    gpu = rented().rent.gpu
    other = "asked for B200, and the container has NVIDIA H200"
    for name, why in ("NVIDIA B200", None), ("NVIDIA H200", other):
        found = away.Measured(key=None, lines=[], gpu=inventory.Gpu(name, "10.0", ""))
        work = engine.Work([], 60, tunings=[None])
        assert replies.fault(work, wire.Reply(tuned=[found]), gpu) == why
    assert "it has 0 tunings for 1" in replies.fault(work, wire.Reply(), gpu)


@pytest.mark.slow
def test_the_command_writes_the_rows_of_that_gpu(tmp_path, monkeypatch):
    source = helpers.REGISTRY.find("cuda-v5", "gdn_decode")
    folder = scaffold.new(helpers.REGISTRY, "my-v5", source, tmp_path / "own")
    before = (folder / "tuned.h").read_text()
    gpu = inventory.Gpu("NVIDIA B200", "10.0", "580", "GPU-1")
    machine = inventory.Machine(gpus=lambda: (gpu,))
    workers = Workers(lambda name, batch: 3.0 if "rows=2" in name else 2.0)
    workers.env = Environment(gpu=gpu.name, sms=148, versions={"torch": "2"})
    monkeypatch.setattr(racing, "execute", workers)
    monkeypatch.setattr(container, "CACHE", str(tmp_path / "no-volume"))
    args = ["tune", "--algo", "my-v5", "--algos", tmp_path / "own"]
    args += ["-w batch_size=64 -n 1 --only lanes=16 --only rows=1,2 --only passes=1"]
    args += ["--only warps=2 --only load=0 --only store=0 --only resident=1"]
    home = {"GDN_HOME": str(tmp_path / "home")}
    line = " ".join(map(str, args))
    with Server(answer=lambda n, data: None) as s:
        # its call goes on: the same command fetches it
        with under_way(s, lambda s: "FunctionGetOutputs" in s.rpcs, line, **home) as p:
            p.kill()
            said = p.communicate()[1]
        s.answer = lambda n, data: container.serve(data, machine=machine)
        first = rent(s, *args, **home)
        assert len(s.calls) == 1
        jobs = len(workers.jobs)
        again = rent(s, *args, **home)
    assert first.code == again.code == 0 and len(s.calls) == 2, first.err
    assert "B200, 1 container, 1 call of at most 60 min" in said
    assert jobs == len(workers.jobs) > 0  # the lines were sent along
    text = (folder / "tuned.h").read_text()
    assert text != before and "NVIDIA B200" in text and "NVIDIA H200" in text
    mine = registry.load(str(tmp_path / "own")).find("my-v5")
    (row,) = tuned_table.load(mine)["NVIDIA B200"]["rows"]
    assert row["rows"] == 1
