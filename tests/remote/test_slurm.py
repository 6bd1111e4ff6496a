"""`--engine slurm`: stand-ins for SLURM's commands, submitit's executors on this
machine, and a real SLURM of two nodes where one is installed.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import building
import helpers
import pytest
import slurm_cluster
from msgspec import structs
from remote.test_remote import job

from gdn_cli import errors
from gdn_cli.errors import MissingError, RemoteError, UsageError
from gdn_cli.machine import environment, inventory
from gdn_cli.records import store
from gdn_cli.records.store import Writer
from gdn_cli.remote import engines, host, slurm, wire
from gdn_cli.run import execute, jobs, planning
from gdn_cli.schema.record_types import Environment, Status, Submitted

WHERE = Environment(gpu="NVIDIA H100", gpu_uuid="GPU-7", where="slurm")
HELLO = wire.Hello(host="n1", gpus=["NVIDIA H100"], version="1", allocation="7_0 on n1")


def engine_of(cluster: str, said: list | None = None, **how) -> slurm.Slurm:
    table = engines.Cluster(submitit=cluster, **how)
    return slurm.Slurm(
        name="slurm", config=table, say=(said if said is not None else []).append
    )


def bench(name: str, count: int = 2, mode: str = "cuda", **more) -> jobs.Job:
    return job(name, mode, count, "bench", ("cupti",), **more)


def outcome(of: jobs.Job, where: Environment = WHERE) -> jobs.Outcome:
    names = of.names or ("copy",)
    records = [
        building.record(name, 2.0, w.uuid) for name in names for w in of.workloads
    ]
    return jobs.Outcome(Status.DONE, None, records, where)


def served(data: bytes, keep, before) -> bytes:
    """What a machine with a GPU answers on which everything passes."""
    keep(wire.encode(HELLO))
    pieces = wire.decode(data, wire.Parcel).jobs
    # each algo's on another one
    uuid = f"GPU-{pieces[0].request.name}"
    where = structs.replace(WHERE, gpu_uuid=uuid)
    done = []
    for i, piece in enumerate(pieces):
        done.append(outcome(jobs.Job(piece.request), where))
        keep(wire.encode(wire.Made(i, done[i].records[0], where)))
    return wire.encode(wire.Reply(outcomes=done))


def ran(engine: slurm.Slurm, wanted: list[jobs.Job], file: Path) -> Writer:
    writer = Writer(building.document(), file)
    # a task for each, as `spread` has them
    gpus = [inventory.Gpu("", "99", "", index=i) for i in range(len(wanted))]
    pairs = zip(wanted, gpus, strict=True)
    plan = planning.Plan([jobs.replace(j, gpu=gpu) for j, gpu in pairs], [], [])
    engine.begin(plan, writer)
    execute.run(plan, writer, lambda *_: None, print, engine)
    engine.finish(writer.document)
    return writer


# --- the tasks of a command


def entries(*names: str, mode: str = "cuda") -> list[planning.Entry]:
    place = inventory.Place(mode)
    return [planning.Entry(helpers.REGISTRY.find(name), place) for name in names]


def tasks_of(engine: slurm.Slurm, command: str, mode: str, *names: str) -> list:
    """The names and the number of workloads of each job of each task."""
    chosen = entries(*names, mode=mode)
    spread = engine.spread(chosen, command != "check")
    settings = planning.Settings(command, gpus=spread)
    which = planning.Selected(n=20)
    parts = planning.select(helpers.REGISTRY, chosen, which)
    plan = planning.prepare(helpers.REGISTRY, parts, settings)
    engine.begin(plan, Writer(building.document(), Path("run.json")))
    assert plan.jobs == [each for work in engine.work for each in work.jobs]
    assert {each.gpu for each in plan.jobs} == {None}
    return [
        [(*each.names, len(each.workloads)) for each in work.jobs]
        for work in engine.work
    ]


def test_a_task_has_one_algo_with_floors_and_references_of_its_own():
    assert tasks_of(engine_of("debug"), "bench", "cuda", "cuda-v1", "cuda-v4") == [
        [(20,), ("pt-reference", 20), ("cuda-v1", 20)],
        [(20,), ("pt-reference", 20), ("cuda-v4", 20)],
    ]


def test_fewer_algos_than_tasks_share_the_workloads_out():
    engine = engine_of("debug", tasks=2)
    (one, other) = tasks_of(engine, "check", "cuda", "cuda-v1")
    assert one[0][1] + other[0][1] == 20 and 5 < one[0][1] < 15
    engine = engine_of("debug", tasks=1)
    assert tasks_of(engine, "check", "cuda", "cuda-v1", "cuda-v4") == [
        [("cuda-v1", 20), ("cuda-v4", 20)]
    ]


def test_times_of_a_cpu_are_of_one_task_as_nothing_names_the_cpu():
    names = "cpp-v1", "pt-compiled"
    assert len(tasks_of(engine_of("debug"), "bench", "cpu", *names)) == 1
    assert len(tasks_of(engine_of("debug"), "check", "cpu", *names)) == 2
    with pytest.raises(UsageError, match="--tasks: times of a CPU are of one task"):
        engine_of("debug", tasks=2).spread(entries(*names, mode="cpu"), True)


# --- SLURM's commands


@pytest.mark.parametrize(
    ("says", "partition", "minutes"),
    [
        ("short|30:00\nall*|2-01:00:00", None, 2 * 1440 + 60),
        ("short|30:30", "short", 30.5),
        ("short|5:00\nlong|1:00:00", "short,long", 60),
        ("all*|infinite", None, math.inf),
        ("", "nope", math.inf),
    ],
)
def test_the_limit_of_a_partition(says, partition, minutes, commands):
    commands(sinfo=f"printf '{says}'")
    assert slurm.most_minutes(partition) == minutes


def test_the_time_that_is_asked_for_is_an_estimate_within_the_limit(commands):
    commands(sinfo="echo 'all*|10:00'")
    small, large = [bench("cuda-v1", 2)], [bench("cuda-v1", 54)] * 9
    engine = engine_of("slurm")
    assert engine.limit_s(slurm._estimate(small)) == 240
    assert engine.limit_s(slurm._estimate(large)) == 600
    assert engine.limit_s(math.inf) == 600
    with pytest.raises(
        UsageError, match="--time 11: the partition takes 10 min at most"
    ):
        engine_of("slurm", time=11).limit_s(1)


def test_states_have_the_queues_reason(commands):
    commands(
        squeue="echo '7_0|RUNNING|None'; echo '7_1|PENDING|Resources'; exit 0",
    )
    engine = engine_of("slurm")
    tasks = [slurm.Running(engine, None, job=Job(f"7_{i}")) for i in range(3)]
    states = engine._states(tasks)
    assert states == {
        "7_0": "RUNNING",
        "7_1": "PENDING (Resources)",
        "7_2": slurm._UNKNOWN,
    }
    commands(squeue="echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    assert engine._states(tasks) == {}
    assert slurm._summary({}) == "SLURM does not answer; asking again"


class Job:
    def __init__(self, job_id: str):
        self.job_id = job_id


SBATCH = 'cp "$1" {folder}/script; echo Submitted batch job 7'


@pytest.mark.parametrize("mode", ["cuda", "cpu"])
def test_what_sbatch_is_asked_for(mode, commands, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    commands(
        sbatch=SBATCH.format(folder=tmp_path),
        squeue="echo '7_0|FAILED|NonZeroExitCode'; echo '7_1|TIMEOUT|TimeLimit'",
        sinfo="echo 'a100|1:00:00'",
        scancel="true",
    )
    names = ("cuda-v1", "cuda-v4") if mode == "cuda" else ("cpp-v1", "pt-compiled")
    said = []
    engine = engine_of(
        "slurm", said, partition="a100", account="me", constraint="hbm", cpus_per_task=8
    )
    monkeypatch.setattr(slurm, "_GRACE_S", 0)
    writer = ran(engine, [job(name, mode) for name in names], tmp_path / "run.json")
    script = (tmp_path / "script").read_text()
    for option in (
        "--partition=a100",
        "--account=me",
        "--constraint=hbm",
        "--cpus-per-task=8",
        "--job-name=gdn",
        "--array=0-1%2",
        "--time=4",
    ):
        assert f"#SBATCH {option}\n" in script
    assert ("--gpus-per-node=1" in script) == (mode == "cuda")
    assert "--cpus-per-task=8 --export=ALL" in script
    assert {r.reason for r in writer.document.records} == {
        "job 7_0: FAILED",
        "job 7_1: TIMEOUT; --time gives more",
    }
    assert "slurm: job 7, 2 tasks of at most 4 min" in said
    assert said[-1] == f"slurm: to go on: gdn bench --resume {tmp_path / 'run.json'}"
    assert store.load(writer.path).slurm.calls[1].id == "7_1"


@pytest.mark.parametrize(
    ("why", "hint"),
    [
        ("invalid partition", ""),
        ("Invalid generic resource (gres)", "; --gres none on a cluster without GRES"),
    ],
)
def test_what_sbatch_refuses_is_one_line_and_leaves_nothing(
    why, hint, commands, tmp_path, capfd
):
    pytest.importorskip("submitit")
    commands(sbatch=f"echo 'sbatch: error: {why}' >&2; exit 1")
    before = list(slurm.paths.cluster_dir().glob("*"))
    line = re.escape(f"sbatch: error: {why}{hint}")
    with pytest.raises(RemoteError, match=f"^{line}$"):
        ran(engine_of("slurm"), [job("cpp-v1", "cpu")], tmp_path / "run.json")
    assert list(slurm.paths.cluster_dir().glob("*")) == before
    assert not (tmp_path / "run.json").exists()
    assert why not in capfd.readouterr().err


def test_without_srun_it_says_where_to_go(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="there is no srun here; run gdn where"):
        ran(engine_of("slurm"), [job("cpp-v1", "cpu")], tmp_path / "run.json")


def test_ctrl_c_cancels_every_task(commands, tmp_path):
    pytest.importorskip("submitit")
    commands(
        sbatch="echo Submitted batch job 7",
        squeue="echo '7_0|RUNNING|None'; echo '7_1|PENDING|Resources'",
        sinfo="true",
        scancel=f'echo "$@" >> {tmp_path}/cancelled',
    )
    engine = engine_of("slurm")

    def say(line: str) -> None:
        if line == "slurm: 1 RUNNING, 1 PENDING (Resources)":
            raise KeyboardInterrupt

    engine.say = say
    file = tmp_path / "run.json"
    with pytest.raises(KeyboardInterrupt):
        ran(engine, [bench("cuda-v1"), bench("cuda-v4")], file)
    assert (tmp_path / "cancelled").read_text().split() == ["7_0", "7_1"]
    assert json.loads(file.read_text())["interrupted"]


def test_a_task_that_slurm_started_again_is_ended_once_the_first_has_answered(tmp_path):
    a = bench("cuda-v1")
    ended = []
    for state in ("RUNNING", "PENDING (BeginTime)"):
        pickle = tmp_path / state
        job = SimpleNamespace(
            job_id=state,
            paths=SimpleNamespace(result_pickle=pickle),
            result=lambda: wire.encode(wire.Reply(outcomes=[outcome(a)])),
            cancel=lambda check, state=state: ended.append(state),
        )
        work, made = slurm.Work([a], 60), tmp_path / "made"
        engine = engine_of("slurm")
        task = slurm.Running(engine, work, hello=HELLO, job=job, file=made)
        assert engine._reply(task, state) is None
        pickle.touch()
        assert len(engine._reply(task, "RUNNING").outcomes) == 1
    assert ended == ["PENDING (BeginTime)"]


# --- submitit's debug executor: tasks in this process


def test_replies_of_all_tasks_become_one_document(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(host, "serve", served)
    said = []
    engine = engine_of("debug", said)
    writer = ran(engine, [bench("cuda-v1"), bench("cuda-v4")], tmp_path / "run.json")
    records = writer.document.records
    # numbered, so that a row's ratios are to what was measured on its own GPU
    assert [(r.algo, r.gpu.uuid, r.place) for r in records] == [
        ("cuda-v1", "GPU-cuda-v1", "cuda:0"),
        ("cuda-v1", "GPU-cuda-v1", "cuda:0"),
        ("cuda-v4", "GPU-cuda-v4", "cuda:1"),
        ("cuda-v4", "GPU-cuda-v4", "cuda:1"),
    ]
    environments = writer.document.environments
    assert environments["cuda:1"].gpu_uuid == "GPU-cuda-v4"
    assert f"slurm: runs on {HELLO}" in said
    # nothing is left to resume
    assert writer.document.slurm is None
    assert not Path(engine.submitted.folder).exists()


def test_a_machine_without_a_gpu_is_one_refusal(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    with pytest.raises(RemoteError, match="has no GPU; name a partition or a machine"):
        ran(engine_of("debug"), [bench("cuda-v1"), bench("cuda-v4")], tmp_path / "r")


# --- going on


def kept(tmp_path, *wanted: jobs.Job, **made) -> tuple[slurm.Slurm, Path]:
    """An engine that resumes a run of these jobs, one task each, of which the first
    records were made.
    """
    folder = tmp_path / "folder"
    folder.mkdir()
    calls = []
    for i, each in enumerate(wanted):
        first = outcome(each).records[0]
        line = wire.marked(wire.encode(wire.Made(0, first, WHERE)))
        (folder / f"{i}.made").write_bytes(b"\n" + line + line[:9])
        work = slurm.Work([each], 60)
        keys = slurm._keys(work)
        calls.append({"id": f"7_{i}", "keys": keys, "limit_s": 60})
    document = building.document()
    document.slurm = slurm.msgspec.convert(
        {"folder": str(folder), "cwd": str(tmp_path), "calls": calls}, Submitted
    )
    file = tmp_path / "run.json"
    Writer(document, file).keep()
    engine = engine_of("slurm")
    engine.resumes = file
    return engine, folder


def test_a_task_that_answered_is_fetched_and_one_that_is_gone_goes_on(
    tmp_path, commands, monkeypatch
):
    submitit = pytest.importorskip("submitit")
    a, b = bench("cuda-v1"), bench("cuda-v4")
    engine, folder = kept(tmp_path, a, b)
    commands(
        squeue="echo '7_1|NODE_FAIL|None'; echo '8|COMPLETED|None'",
        sbatch="echo Submitted batch job 8",
        sinfo="true",
    )
    reply = wire.encode(wire.Reply(outcomes=[outcome(a)]))
    submitit.core.utils.cloudpickle_dump(
        ("success", reply), folder / "7_0_0_result.pkl"
    )
    monkeypatch.setattr(slurm, "_GRACE_S", 0)
    writer = ran(engine, [a, b], tmp_path / "run.json")
    found = [(r.algo, r.status, r.reason) for r in writer.document.records]
    assert found == [
        ("cuda-v1", "passed", None),
        ("cuda-v1", "passed", None),
        ("cuda-v4", "passed", None),
        ("cuda-v4", "remote_failed", "job 8: COMPLETED"),
    ]
    # only what was gone is submitted again, and begins after its record
    (task,) = [
        submitit.core.utils.DelayedSubmission.load(file).function
        for file in folder.glob("8_submitted.pkl")
    ]
    assert task.made == folder / "1.made"
    assert len(list(engines.lines(task.made.read_bytes()))) == 1
    assert [call.id for call in store.load(writer.path).slurm.calls] == ["7_0", "8"]


def test_other_sources_are_not_taken_for_those_that_were_submitted(tmp_path):
    pytest.importorskip("submitit")
    engine, _ = kept(tmp_path, bench("cuda-v1"))
    with pytest.raises(UsageError, match="the algos, or .*, have changed since then"):
        ran(engine, [bench("cuda-v4")], tmp_path / "run.json")


# --- submitit's local executor: processes of this machine

OWN = '[here]\nsubmitit = "local"\ncuda = false\n'


@pytest.fixture
def own(tmp_path):
    (tmp_path / "home" / "configs").mkdir(parents=True)
    (tmp_path / "home" / "configs" / "engines.toml").write_text(OWN)
    return {"GDN_HOME": str(tmp_path / "home")}


@pytest.mark.slow
def test_a_run_that_was_killed_is_fetched_by_another_command(own, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("submitit")
    algo = "import os, time\nfrom .right import run as right\n\n\ndef run(*args):\n    while not os.path.exists(GO):\n        time.sleep(0.05)\n    return right(*args)\n"
    go = tmp_path / "go"
    helpers.write_algo(tmp_path / "algos", "waits", algo.replace("GO", repr(str(go))))
    words = (
        f"run waits --algos {tmp_path}/algos --device cpu -w 0 --engine here".split()
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", *words],
        env=helpers.environment(**own),
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if "--resume" in line:
            break
    file = line.split()[-1]
    process.kill()
    process.wait()
    process.stderr.close()
    go.touch()
    folder = Path(store.load(file).slurm.folder)
    end = time.monotonic() + helpers.PATIENCE_S
    while not list(folder.glob("*_result.pkl")):
        assert time.monotonic() < end
        time.sleep(0.05)
    refused = helpers.gdn("run", "--resume", file, "--algo", "cpp-v1", env=own)
    assert refused.code == errors.USAGE
    assert "--resume takes --algo from" in refused.err
    refused = helpers.gdn("bench", "--resume", file, env=own)
    assert f"is a run of gdn run\n  gdn run --resume {file}" in refused.err
    # a variable is no option that was given
    done = helpers.gdn("run", "--resume", file, "--json", env=own | {"ALGO": "cpp-v1"})
    assert done.code == 0, done.err
    (record,) = done.json["records"]
    assert (record["algo"], record["status"]) == ("waits", "passed")
    assert done.json["environments"]["cpu"]["where"] == "here"
    assert "slurm" not in done.json and not folder.exists()
    again = helpers.gdn("run", "--resume", file, env=own)
    assert "is not a run on a cluster" in again.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--partition a", "--partition is an option of a cluster: --engine slurm"),
        ("--engine here --gpus 0", "--engine and --gpus exclude each other"),
        ("--engine none", "unknown engine 'none'"),
    ],
)
def test_options_that_do_not_go_together(words, says, own):
    done = helpers.gdn("run", "cpp-v1", *words.split(), env=own)
    assert (done.code, says in done.err) == (errors.USAGE, True)


# --- an allocation, with and without the engine


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, "7 on n1"),
        (
            {
                "SLURM_JOB_ID": "8",
                "SLURM_ARRAY_JOB_ID": "7",
                "SLURM_ARRAY_TASK_ID": "1",
            },
            "7_1",
        ),
    ],
)
def test_the_name_of_an_allocation(variables, words, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.allocation() == words


# --- SLURM itself


@pytest.fixture(scope="module")
def cluster():
    if not slurm_cluster.installed():
        pytest.skip("no SLURM here, or not root")
    with slurm_cluster.running() as variables:
        yield variables


@pytest.mark.slow
def test_two_algos_on_two_nodes(cluster, tmp_path):
    pytest.importorskip("submitit")
    env = {"GDN_HOME": str(tmp_path), **cluster}
    words = "run cpp-v1 pt-reference --device cpu -n 2 --engine slurm --json"
    done = helpers.gdn(*words.split(), "--cpus-per-task", "3", env=env)
    assert done.code == 0, done.err
    where = {(r["algo"], r["status"], r["allocation"]) for r in done.json["records"]}
    job = min(where)[2].partition("_")[0]
    assert {(algo, status) for algo, status, _ in where} == {
        ("cpp-v1", "passed"),
        ("pt-reference", "passed"),
    }
    assert {at for _, _, at in where} == {f"{job}_0 on n1", f"{job}_1 on n2"}


@pytest.mark.slow
def test_a_preempted_task_goes_on_after_its_records(cluster, tmp_path):
    pytest.importorskip("submitit")
    env = {"GDN_HOME": str(tmp_path), **cluster}
    words = "run cpp-v1 --device cpu --preset contest -n 20 --engine slurm --json"
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", *words.split()],
        env=helpers.environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if "so far" in line:
            break
    number = subprocess.run(
        ["squeue", "--noheader", "--format=%i"],
        env=os.environ | cluster,
        capture_output=True,
        text=True,
    ).stdout.split()[0]
    subprocess.run(
        ["scontrol", "requeue", number], env=os.environ | cluster, check=True
    )
    out, err = process.communicate(timeout=helpers.PATIENCE_S)
    assert process.returncode == 0, err
    records = json.loads(out)["records"]
    assert len(records) == len({r["workload"]["uuid"] for r in records}) == 20
    assert {r["status"] for r in records} == {"passed"}


@pytest.mark.slow
def test_a_cluster_without_gres(tmp_path):
    pytest.importorskip("submitit")
    if not slurm_cluster.installed():
        pytest.skip("no SLURM here, or not root")
    with slurm_cluster.running(gres=False) as variables:
        env = {"GDN_HOME": str(tmp_path), **variables}
        words = "run cpp-v1 --device cpu -n 1 --engine slurm".split()
        assert helpers.gdn(*words, env=env).code == 0
        words = "run cuda-v5 -n 1 --engine slurm".split()
        refused = helpers.gdn(*words, env=env)
        assert "--gres none on a cluster without GRES" in refused.err
        # it is submitted, and this machine has no GPU
        done = helpers.gdn(*words, "--gres", "none", env=env)
        assert "1 task of at most" in done.err
        assert (refused.code, done.code) == (errors.REMOTE, errors.REMOTE)
        assert "has no GPU" in done.err
