"""`--gpus`: what goes to which GPU, workers side by side, and numbers that never cross
from one GPU to another.

No GPU is needed: workers are faked, or run on the CPU (two_gpus.py). On a host that has
two: the end of this file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import building
import helpers
import msgspec
import pytest
import reports
import two_gpus
from msgspec import structs

from gdn_cli import errors
from gdn_cli.catalog import pack, registry
from gdn_cli.catalog.registry import Algo
from gdn_cli.catalog.workloads import embedded, select, twin
from gdn_cli.errors import MissingError, UsageError
from gdn_cli.machine import environment, gpu_sharing, inventory, locks
from gdn_cli.machine.inventory import Gpu, Machine
from gdn_cli.records import store
from gdn_cli.records.history import documents
from gdn_cli.report import terminal
from gdn_cli.run import complete, jobs, planning
from gdn_cli.run import execute as execution
from gdn_cli.schema.record_types import Environment, GpuName, Status, document_of
from gdn_cli.tune import evidence, race, search
from gdn_cli.worker.executor import build
from gdn_cli.worker.request import Timing

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]
G0, G1, G2 = two_gpus.GPUS[:3]
SMALL = Gpu("GT 1030", "6.1", "580.1", "GPU-small", 3)


def having(*gpus: Gpu, near=lambda gpu: frozenset()) -> Machine:
    """A machine with these GPUs, and all packages."""
    return Machine(gpus=lambda: gpus, near=near, has_package=lambda module: True)


BOTH = having(G0, G1)


@pytest.fixture(autouse=True)
def host(monkeypatch, tmp_path):
    """Two GPUs that no other process holds."""
    monkeypatch.setenv("GDN_LOCK_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# --- which GPUs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", [0, 1, 2]),
        (" all ", [0, 1, 2]),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("GPU-bb", [1]),
        ("GPU-c,0", [2, 0]),
    ],
)
def test_gpus_by_number_and_uuid(text, expected):
    assert [g.index for g in having(G0, G1, G2).chosen(text)] == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2", "--gpus 2: '2' names no GPU; visible here: 0 (GPU-aaaaaaaa), 1 (GPU-bb"),
        ("", "--gpus '': '' names no GPU"),
        ("0,", "--gpus 0,: '' names no GPU"),
        ("all,0", "--gpus all,0: 'all' names no GPU"),
        ("0,GPU-aa", "--gpus 0,GPU-aa names a GPU twice"),
        ("GPU-", "--gpus GPU-: 'GPU-' names several GPUs"),
    ],
)
def test_an_unknown_gpu_is_one_line(text, says):
    with pytest.raises(UsageError) as e:
        BOTH.chosen(text)
    assert str(e.value).startswith(says) and "\n" not in e.value.message


def test_no_gpu_is_missing():
    with pytest.raises(MissingError, match="--gpus all: no GPU here"):
        having().chosen("all")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--gpus", "9"), "'9' names no GPU"),
        (("bench", "--gpus", "0", "--device", "cpu"), "exclude each other"),
        (("tune", "--algo", "cuda-v5", "--gpus", ""), "names no GPU"),
    ],
)
@pytest.mark.sampled(2)
def test_the_commands_say_so(args, message):
    done = pretended(*args)
    assert (done.returncode, done.stdout) == (errors.USAGE, "")
    assert message in done.stderr


def test_one_of_several_gpus_will_do():
    (algo,) = named("x", capability="9.0")
    assert BOTH.place(algo, "cuda", (SMALL, G0)).mode == "cuda"
    old = replace(SMALL, capability="7.5")
    reason = BOTH.place(algo, "cuda", (SMALL, old)).reason
    assert "9.0, here is 6.1, 7.5" in reason
    on_cpu = structs.replace(algo, modes=("cpu",))
    assert BOTH.place(on_cpu, "cuda", (G0,)).hint == "it runs on cpu: drop --gpus"


# --- what goes where


def plan_of(
    algos: list[Algo], gpus: tuple[Gpu, ...], chosen: list[str], command: str = "bench"
) -> planning.Plan:
    entries = [planning.Entry(algo, inventory.Place("cuda")) for algo in algos]
    part = planning.Part(
        DECODE, entries, select(DECODE, embedded(DECODE), chosen=chosen), {"l2": "cold"}
    )
    return planning.prepare(
        REGISTRY, [part], planning.Settings(command, gpus=gpus, machine=BOTH)
    )


def named(*names: str, capability: str | None = None) -> list[Algo]:
    algo = REGISTRY.find("pt-reference")
    return [structs.replace(algo, name=name, capability=capability) for name in names]


def work(plan: planning.Plan) -> dict[int, list[tuple[str, bool, list[int]]]]:
    """GPU -> its jobs in order: the algo, whether gdn added it, its batch sizes."""
    found: dict[int, list] = {}
    for job in plan.jobs:
        sizes = sorted({w.axes["batch_size"] for w in job.workloads})
        found.setdefault(job.gpu.index, []).append(
            (job.algo.name if job.algo else "copy", job.added, sizes)
        )
    return found


def test_algos_are_spread_and_each_gpu_measures_its_own_floor_and_reference():
    plan = plan_of(named("a", "b", "c"), (G0, G1), ["batch_size=1", "batch_size=4"])
    both = [1, 4]
    yardsticks = [("copy", False, both), ("pt-reference", True, both)]
    assert work(plan) == {
        0: [*yardsticks, ("a", False, both), ("c", False, both)],
        1: [*yardsticks, ("b", False, both)],
    }


def test_a_reference_that_was_asked_for_is_added_on_the_other_gpus_only():
    reference = REGISTRY.find("pt-reference")
    plan = plan_of([reference, *named("b")], (G0, G1), ["0"])
    assert work(plan) == {
        0: [("copy", False, [1]), ("pt-reference", False, [1])],
        1: [("copy", False, [1]), ("pt-reference", True, [1]), ("b", False, [1])],
    }


def test_with_fewer_algos_than_gpus_workloads_are_spread_and_a_row_stays_whole():
    # 10, 8, 7, 7, 7, 7, 8 of B = 1, 4, 8, 16, 32, 48, 64
    plan = plan_of(named("a"), (G0, G1), [])
    spread = []
    for jobs_ in work(plan).values():
        names, _, sizes = zip(*jobs_, strict=True)
        assert names == ("copy", "pt-reference", "a")
        assert sizes[0] == sizes[1] == sizes[2]
        spread += sizes[0]
    assert sorted(spread) == [1, 4, 8, 16, 32, 48, 64]
    counts = [len(job.workloads) for job in plan.jobs[2::3]]
    assert sum(counts) == 54 and max(counts) <= 30


def test_an_algo_goes_to_a_gpu_that_has_its_capability():
    algos = [*named("any", "other"), *named("hopper", "late", capability="9.0")]
    found = work(plan_of(algos, (SMALL, G0), ["0"], "check"))
    assert {gpu: [name for name, *_ in jobs] for gpu, jobs in found.items()} == {
        3: ["any", "other"], 0: ["hopper", "late"],
    }  # fmt: skip


def test_workloads_are_not_spread_over_gpus_of_different_kinds():
    gpus = (G0, replace(SMALL, capability="9.0"))
    found = work(plan_of(named("a"), gpus, ["batch_size=1", "batch_size=4"]))
    assert list(found) == [0] and found[0][-1] == ("a", False, [1, 4])


def test_an_algo_that_cannot_be_packed_is_reported_once(monkeypatch):
    monkeypatch.setattr(
        planning, "pack", lambda algo, op: (_ for _ in ()).throw(UsageError("no"))
    )
    plan = plan_of(named("a"), (G0, G1), ["batch_size=1", "batch_size=4"], "check")
    (record,) = plan.unpackable
    assert (record.algo, record.mode, record.reason) == ("a", "cuda", "no")
    assert plan.jobs == []


def test_the_heaviest_are_dealt_first_to_whom_has_least():
    gpus = (G0, G1)
    assert gpu_sharing.deal({"a": (1, gpus), "b": (3, gpus), "c": (1, gpus), "d": (1, gpus)}) == {
        "b": G0, "a": G1, "c": G1, "d": G1,
    }  # fmt: skip


# --- the host's CPUs


def test_each_worker_gets_whole_cores_near_its_gpu(monkeypatch):
    """16 cores of two threads: CPU n and n + 16 are one core. GPUs 0 and 1 are at cores
    0-7, GPU 2 at the others.
    """
    first, second = {*range(8), *range(16, 24)}, {*range(8, 16), *range(24, 32)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(gpu_sharing, "_siblings", lambda cpu: {cpu % 16, cpu % 16 + 16})
    machine = having(near=lambda g: frozenset(second if g == G2 else first))
    assert gpu_sharing.cpus((G0, G1, G2), machine) == {
        G0: {*range(0, 4), *range(16, 20)},
        G1: {*range(4, 8), *range(20, 24)},
        G2: second,
    }
    # one of them does not tell: then all share all
    machine = having(near=lambda g: frozenset() if g == G2 else frozenset(range(8)))
    shares = gpu_sharing.cpus((G0, G1, G2), machine).values()
    assert sorted(map(len, shares)) == [10, 10, 12]
    assert frozenset().union(*shares) == set(range(32))


@pytest.mark.parametrize("gpus", [(G0,), (G0, G1)])
def test_one_gpu_or_few_cores_share_nothing_out(gpus, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(gpu_sharing, "_siblings", lambda cpu: {cpu})
    assert gpu_sharing.cpus(gpus, BOTH) == {gpu: frozenset() for gpu in gpus}


def test_the_cpus_near_a_gpu_are_nvml_s(monkeypatch):
    """CPUs 1, 63 and 64, of 64 bits a word; nothing where NVML does not know."""
    known = {G0.uuid: [1 << 1 | 1 << 63, 1, 0]}
    fake = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetCpuAffinity=lambda handle, words: known[handle],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert inventory.near(G0) == {1, 63, 64} and inventory.near(G1) == frozenset()


def test_the_worker_finds_its_gpu_by_the_uuid_that_torch_has():
    assert environment._matching_gpu("bbbbbbbb", (G0, G1)) == G1
    assert environment._matching_gpu("another", (G0, G1)) is None
    # a slice, which torch may call by its GPU
    assert environment._matching_gpu("another", (G2,)) == G2
    assert environment._matching_gpu("another", ()) is None


# --- side by side


def job_on(
    gpu: Gpu | None, algo: str = "a", sizes=(1, 2), mode: str = "cuda", **more
) -> jobs.Job:
    tiers = more.pop("tiers", ("cupti",))
    return jobs.Job.of(
        "bench",
        DECODE,
        {},
        mode,
        [twin(DECODE, {"batch_size": n}) for n in sizes],
        [(named(algo)[0], {"sources": []})],
        timing=Timing(tiers),
        gpu=gpu,
        **{"machine": BOTH} | more,
    )


def run(monkeypatch, tmp_path, execute, *work: jobs.Job, order=None, say=print):
    monkeypatch.setattr(execution, "execute", execute)
    # no worker is started early
    monkeypatch.setattr(execution.compile_ahead, "cpus", lambda: 1)
    for module in (complete, execution.first_results):
        monkeypatch.setattr(module, "source_hash", lambda solution: "0" * 12)
    writer, shown = store.Writer(building.document(), tmp_path / "records.json"), []
    plan = planning.Plan(list(work), order=order or {})
    try:
        execution.run(plan, writer, lambda *line: shown.append(line), say)
    finally:
        run.shown, run.document = shown, writer.document
    return writer.document


def passed(job: jobs.Job, on_record) -> jobs.Outcome:
    for w in job.workloads:
        on_record(
            building.record(job.algo.name, None, w.uuid, axes=w.axes), Environment()
        )
    return jobs.Outcome(Status.DONE)


def test_gpus_work_at_once_under_a_lock_each_and_records_come_in_order(
    monkeypatch, tmp_path
):
    together, held = threading.Barrier(2), {}

    def meet():
        together.wait(timeout=helpers.PATIENCE_S)

    def execute(job, on_record, given_up, worker):
        name = job.algo.name
        if name in ("a", "b"):
            meet()  # neither ends unless both are there
        held[name] = {path.name for path in locks._held}
        if name == "a":
            meet()  # b has measured before a has
        done = passed(job, on_record)
        if name == "b":
            meet()
        return done

    work = job_on(G0, "a"), job_on(G1, "b"), job_on(G0, "c")
    keys = [("gdn_decode", "cuda", f"gdn_decode/{name}") for name in "abc"]
    keys += [("gdn_decode", w.uuid) for w in work[0].workloads]
    order = {key: i for i, key in enumerate(keys)}
    document = run(monkeypatch, tmp_path, execute, *work, order=order)
    found = [
        (r.algo, r.workload.axes["batch_size"], r.gpu.index) for r in document.records
    ]
    assert found == [(a, b, a == "b") for a in "abc" for b in (1, 2)]
    assert f"gdn-{G0.uuid}.lock" in held["a"] and f"gdn-{G1.uuid}.lock" in held["b"]
    assert not locks._held
    assert document.records[2].gpu == GpuName(index=1, uuid=G1.uuid, name="NVIDIA H200")
    assert document.environments["cuda:1"].gpu_uuid == G1.uuid
    assert {line[0][:6] for line in run.shown} == {"GPU 0:", "GPU 1:"}
    assert run.shown[-1][1:] == (6, 6, True, "")
    assert store.load(tmp_path / "records.json").records == document.records


def test_a_dead_worker_stops_no_other_and_names_its_gpu(monkeypatch, tmp_path):
    def execute(job, on_record, given_up, worker):
        if job.gpu == G1:
            return jobs.Outcome(Status.CRASHED, "crashed with SIGSEGV")
        return passed(job, on_record)

    work = job_on(G0, "a"), job_on(G1, "b"), job_on(G0, "c")
    document = run(monkeypatch, tmp_path, execute, *work)
    fates = {(r.algo, r.gpu.index, r.status) for r in document.records}
    assert fates == {("a", 0, "passed"), ("b", 1, "crashed"), ("c", 0, "passed")}
    assert document.environments["cuda:1"].gpu_uuid == G1.uuid


def test_a_fault_of_gdn_ends_the_others_too(monkeypatch, tmp_path):
    def execute(job, on_record, given_up, worker):
        if job.gpu == G1:
            raise OSError("no process can be started")
        deadline = time.monotonic() + helpers.PATIENCE_S
        while not given_up() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(OSError, match="no process can be started"):
        run(monkeypatch, tmp_path, execute, job_on(G0), job_on(G1))


def test_ctrl_c_reaches_every_gpu_and_keeps_the_results(monkeypatch, tmp_path):
    ended, ready = [], threading.Barrier(2)

    def execute(job, on_record, given_up, worker):
        passed(job.asking(workloads=job.workloads[:1]), on_record)
        if ready.wait(timeout=helpers.PATIENCE_S) == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        deadline = time.monotonic() + helpers.PATIENCE_S
        while not given_up():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ended.append(job.gpu.index)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, tmp_path, execute, job_on(G0), job_on(G1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1] and not locks._held
    assert sorted(r.gpu.index for r in run.document.records) == [0, 1]


def test_a_gpu_that_is_busy_keeps_only_its_own_lane_waiting(monkeypatch, tmp_path):
    """Another process has GPU 0; the lane of GPU 1 comes to its end, and frees it by that."""
    child = (
        "import sys\nfrom gdn_cli.machine import locks\n"
        "with locks.gpu(sys.argv[1], print):\n    print('held', flush=True)\n    input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", child, G0.uuid], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=helpers.environment(),
    )  # fmt: skip
    try:
        assert other.stdout.readline() == "held\n"
        said, told, ended = [], threading.Event(), []

        def say(line):
            said.append(line)
            told.set()

        def execute(job, on_record, given_up, worker):
            if job.gpu == G1:
                assert told.wait(30)
                other.stdin.write("\n")
                other.stdin.flush()
            ended.append(job.gpu.index)
            return passed(job, on_record)

        document = run(monkeypatch, tmp_path, execute, job_on(G0), job_on(G1), say=say)
    finally:
        other.kill()
        other.communicate()
    assert ended == [1, 0] and len(document.records) == 4
    assert len(said) == 1 and said[0].startswith("GPU 0 is in use by ")


def test_a_wait_for_a_lock_can_be_given_up(monkeypatch):
    asked = []

    def nap(seconds):
        raise AssertionError("it waits on")

    monkeypatch.setattr(locks.time, "sleep", nap)
    with locks.gpu(G0.uuid, print):
        held = dict(locks._held)
        locks._held.clear()  # as if another process had it
        try:
            with (
                pytest.raises(KeyboardInterrupt),
                locks.gpu(G0.uuid, asked.append, "GPU 0", lambda: bool(asked)),
            ):
                pass
        finally:
            locks._held.update(held)
    assert len(asked) == 1


def test_the_worker_gets_one_gpu_by_uuid_and_its_cpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert jobs.environ(job_on(G1))["CUDA_VISIBLE_DEVICES"] == G1.uuid
    assert jobs.environ(job_on(None))["CUDA_VISIBLE_DEVICES"] == G0.uuid
    monkeypatch.delenv("FIB_CACHE_PATH")
    # not the first GPU's
    assert jobs.environ(job_on(SMALL))["FIB_CACHE_PATH"].endswith("-6.1")
    slice_ = replace(G1, uuid="MIG-c7384736-a75d-5afc-978f-d2f1294409fd")
    assert jobs.environ(job_on(slice_))["CUDA_VISIBLE_DEVICES"] == slice_.uuid


@pytest.mark.slow
def test_a_worker_stays_on_its_cpus():
    """As the worker itself says: its environment has its affinity."""
    one = min(os.sched_getaffinity(0))
    algo = REGISTRY.find("pt-reference")
    job = jobs.Job.of(
        "check",
        DECODE,
        pack.definition(DECODE, REGISTRY),
        "cpu",
        select(DECODE, embedded(DECODE), chosen=["0"]),
        [(algo, pack.pack(algo, DECODE))],
        cpus=frozenset({one}),
    )
    outcome = jobs.execute(job)
    assert outcome.status == "done" and outcome.environment.affinity == str(one)


def test_two_workers_do_not_write_one_build_at_once(monkeypatch, tmp_path):
    """flashinfer-bench writes a Python solution's files again each time, while another
    process may import them.
    """
    import fcntl

    from flashinfer_bench.compile import BuilderRegistry

    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    free = []

    class Builder:
        _builders = ()  # none that compiles

        def look(self, *args):
            for path in (tmp_path / "locks").iterdir():
                with path.open() as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        free.append(path.name)
                    except BlockingIOError:
                        pass
            raise ValueError("looked")

        build = build_reference = look

    monkeypatch.setattr(BuilderRegistry, "get_instance", Builder)
    definition, solution = (
        pack.definition(DECODE, REGISTRY),
        pack.pack(REGISTRY.find("pt-reference"), DECODE),
    )
    with pytest.raises(build.BuildFailedError, match="looked"):
        build.build(definition, solution)
    assert free == []  # nobody else could have had it
    (tmp_path / "locks").rename(tmp_path / "before")
    with pytest.raises(ValueError, match="looked"):
        build.reference(definition)
    assert free == [] and len(list((tmp_path / "locks").iterdir())) == 1


# --- numbers stay on one GPU


def record(algo: str, on: int, us: float | None, size: int = 1, **more) -> dict:
    """GPU 1 is three times as fast here: a ratio across GPUs would show."""
    status = {"status": "crashed", "reason": "crashed"} if us is None else {}
    found = building.record(
        algo, us, f"{size:032x}", axes={"batch_size": size}, **status
    )
    gpu = two_gpus.GPUS[on].to_json()
    return msgspec.to_builtins(found) | {"gpu": gpu, "bytes_moved": 10**6} | more


def bench(*found: dict) -> dict:
    environments = {}
    for r in found:
        gpu = r["gpu"]
        environments[f"cuda:{gpu['index']}"] = {
            "gpu": gpu["name"],
            "gpu_index": gpu["index"],
            "gpu_uuid": gpu["uuid"],
            "driver": "580.1",
        }
    head = {"schema": 2, "command": "bench", "time": "2026-11-21T14:12:11Z"}
    return head | {"environments": environments, "records": list(found)}


def screen(capsys, document: dict) -> str:
    terminal.show(reports.typed(document), REGISTRY, False, Path("x.json"))
    return capsys.readouterr().out


APART = bench(
    record("copy", 0, 3.0),
    record("copy", 1, 1.0),
    record("pt-reference", 0, 30.0),
    record("pt-reference", 1, 10.0),
    record("a", 0, 6.0),
    record("b", 1, 5.0),
)


def test_ratios_in_the_table_are_to_the_rows_own_gpu(capsys):
    out = screen(capsys, APART)
    assert out.startswith("gdn_decode | NVIDIA H200 (GPU 0, 1) | tier cupti, L2 cold")
    # 30 / 6 and 6 / 3; 10 / 5 and 5 / 1, where by GPU 0's they would be 6x and 1.67
    assert re.search(r" a, GPU 0 +6\.00 us .* 5\.00x .* 2\.00$", out, re.M)
    assert re.search(r" b, GPU 1 +5\.00 us .* 2\.00x .* 5\.00$", out, re.M)
    assert "GPU 0 *" not in out and "GPU 1 *" not in out and "not ranked" in out
    # the copy of each GPU
    assert re.search(r" copy, GPU 0 +3\.00 us.*\n +copy, GPU 1 +1\.00 us", out)


@pytest.mark.parametrize(("second", "marked"), [("GPU-1", True), ("GPU-2", False)])
def test_of_rented_gpus_none_is_the_fastest_where_there_were_several(
    second, marked, capsys
):
    """Those have no number here: they share a place, and their times a table without a
    column for the GPU.
    """
    gpus = [{"uuid": uuid, "name": "NVIDIA B200"} for uuid in ("GPU-1", second)]
    found = [
        record("pt-reference", 0, 30.0, gpu=gpus[0]),
        record("a", 0, 6.0, gpu=gpus[1]),
    ]
    rented = {"cuda": {"gpu": "NVIDIA B200", "where": "modal"}}
    document = bench() | {"records": found, "environments": rented}
    out = screen(capsys, document)
    assert out.startswith("gdn_decode | NVIDIA B200 (modal) | tier cupti, L2 cold\n")
    assert "GPU " not in out and (" a *" in out) is marked and " 5.00x" in out


def places(document: dict) -> dict[str, list[list[str]]]:
    """Algo -> the places of each of its parts in the history."""
    found: dict[str, list[list[str]]] = {}
    for part in documents.parts(document_of(document)):
        algo = part.records[0].algo
        found.setdefault(algo, []).append([r.place for r in part.records])
    return found


def test_the_history_keeps_what_two_gpus_measured_alike_apart():
    found = places(APART)
    assert (found["a"], found["b"]) == ([["cuda:0"]], [["cuda:1"]])
    assert found["pt-reference"] == [["cuda:0"], ["cuda:1"]]


def test_the_history_joins_the_workloads_that_gpus_of_a_kind_shared():
    """A mean over a GPU's share of the workloads would compare with no other run."""
    shared = bench(record("a", 0, 6.0), record("a", 1, 5.0, 4))
    assert places(shared) == {"a": [["cuda:0", "cuda:1"]]}
    shared["environments"]["cuda:1"]["gpu"] = "NVIDIA B200"
    assert places(shared) == {"a": [["cuda:0"], ["cuda:1"]]}


# --- tune


class Workers:
    """Stands in for jobs.execute: what tile=2 takes is 90 us on every GPU, any other 100."""

    def __init__(self, gpus: int = 1) -> None:
        self.jobs: list[jobs.Job] = []
        # the first process that times on each GPU waits for the others'
        self.first = threading.Barrier(gpus)
        self.waited: set[Gpu] = set()

    def __call__(self, job, on_record=lambda record, env: None, given_up=None):
        self.jobs.append(job)
        if given_up and given_up():
            raise KeyboardInterrupt
        if job.command == "compare" and job.gpu not in self.waited:
            self.waited.add(job.gpu)
            self.first.wait(timeout=helpers.PATIENCE_S)
        versions = {"torch": "2"}
        env = Environment(gpu="NVIDIA H200", sms=132, driver="1", versions=versions)
        found = []
        for w in job.workloads:
            compared = job.command == "compare"
            for name in job.request.turns[w.uuid] if compared else [job.algo.name]:
                us = 90.0 if "tile=2" in name else 100.0
                rounds = [us, us * 1.001, us * 1.002] * 20
                found.append(building.record(name, None, w.uuid, rounds_us=rounds))
                on_record(found[-1], env)
        return jobs.Outcome(Status.DONE, None, found, env)


@pytest.fixture
def tune(tmp_path, monkeypatch, write_algo):
    """tune(workers, gpus, *batch sizes) -> the State after its run: tile = 1, 2, 3."""
    toml = '[tune]\nfile = "tuned.py"\nsize = ["batch_size"]\n[tune.constants]\ntile = [1, 2, 3]\n'
    row = {"gpu": "untuned", "sms": 0, "up_to": 2**63 - 1, "tile": 1}
    sources = {
        "main.py": "run = None",
        "tuned.py": f"TUNED = [\n    {json.dumps(row)},\n]\n",
    }
    write_algo(tmp_path / "own", "slow", sources, extra=toml, devices=["cuda"])
    known = registry.load(str(tmp_path / "own"))
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "home"))

    def run(workers: Workers, gpus: tuple[Gpu, ...], *batches: int):
        monkeypatch.setattr(race, "execute", workers)
        entry = planning.Entry(known.find("slow"), inventory.Place("cuda"))
        workloads = [twin(DECODE, {"batch_size": b}) for b in batches]
        plan = search.plan(known, entry, workloads, None)
        settings = search.Settings("cupti", gpus=gpus, machine=BOTH)
        work = search.begin(plan, settings, lambda *line: None, lambda line: None)
        race.run(work)
        evidence.write(work)
        return work

    run.evidence = tmp_path / "own" / "gdn_decode" / "slow" / "tuning.json"
    return run


def sizes_on(workers: Workers) -> dict[int, set[int]]:
    """GPU -> the batch sizes that were timed there."""
    found: dict[int, set[int]] = {}
    for job in workers.jobs:
        if job.command == "compare":
            found.setdefault(job.gpu.index, set()).update(
                w.axes["batch_size"] for w in job.workloads
            )
    return found


def test_tune_times_each_size_on_one_gpu_and_all_gpus_at_once(tune):
    workers = Workers(gpus=2)
    work = tune(workers, (G0, G1), 1, 4, 16, 64)
    assert sizes_on(workers) == {0: {1, 16}, 1: {4, 64}}
    assert {job.gpu for job in workers.jobs if job.command == "check"} == {G0, G1}
    assert [c.chosen for c in work.choices] == ["slow[tile=2]"] * 4
    rows = json.loads(tune.evidence.read_text())["gpus"]["NVIDIA H200"]["workloads"]
    assert [row["gpu"] for row in rows] == [gpu.to_json() for gpu in (G0, G1, G0, G1)]


def test_tune_goes_on_where_each_size_was(tune):
    tune(Workers(gpus=2), (G0, G1), 1, 4)
    again, more, moved = Workers(), Workers(), Workers()
    tune(again, (G0, G1), 1, 4)
    assert again.jobs == []
    tune(more, (G0, G1), 1, 2, 4)
    assert sizes_on(more) == {0: {2}}
    tune(moved, (G0,), 1, 2, 4)  # the other GPU's measurements no longer count
    assert sizes_on(moved) == {0: {4}}


def test_tune_refuses_gpus_of_different_kinds(tune):
    workers = Workers()
    with pytest.raises(UsageError, match="tune takes GPUs of one kind"):
        tune(workers, (G0, SMALL), 1, 4)
    assert workers.jobs == [] and not tune.evidence.exists()


# --- the command, with workers that run on the CPU


def command(*args) -> list[str]:
    return [sys.executable, str(helpers.TESTS / "two_gpus.py"), *map(str, args)]


def visible() -> dict[str, str]:
    return {
        k: v for k, v in helpers.environment().items() if k != "CUDA_VISIBLE_DEVICES"
    }


def pretended(*args) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*args),
        env=visible(),
        capture_output=True,
        text=True,
        timeout=helpers.PATIENCE_S,
        check=False,
    )


BODY = f"""import os, signal
from .right import run as right

def run({helpers.DECODE_ARGS}):
    {{}}
    return right({helpers.DECODE_ARGS})
"""


@pytest.mark.slow
def test_gdn_run_on_two_gpus_one_of_which_loses_its_worker(tmp_path, write_algo):
    for name, does in (("good", "pass"), ("bad", "os.abort()"), ("fine", "pass")):
        write_algo(tmp_path, name, BODY.format(does), devices=["cuda"])
    algos = "--algos", tmp_path, "--algo", "good,bad,fine"
    done = pretended("run", *algos, "--gpus", "all", "-w", "0-1", "--json")
    assert done.returncode == errors.FAILED and helpers.complaints(done.stderr) == ""
    found = json.loads(done.stdout)
    fates = [(r["algo"], r["gpu"]["index"], r["status"]) for r in found["records"]]
    good, fine = ("good", 0, "passed"), ("fine", 0, "passed")
    assert fates == [good, good, ("bad", 1, "crashed"), fine, fine]
    uuids = {place: e["gpu_uuid"] for place, e in found["environments"].items()}
    assert uuids == {"cuda:0": G0.uuid, "cuda:1": G1.uuid}
    assert found["options"]["gpus"] == "all"
