"""`--gpus`: what goes to which GPU, workers side by side, and numbers that never cross
from one GPU to another.

No GPU is needed: workers are faked, or run on the CPU (two_gpus.py). On a host that has
two: the end of this file.
"""

from __future__ import annotations

import inspect
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
from gdn_cli.records import score, store
from gdn_cli.records.history import documents
from gdn_cli.report import merge, terminal
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
        ("2", "--gpus 2: no GPU 2 here; there are GPUs 0 to 1"),
        ("0,9", "--gpus 0,9: no GPU 9 here; there are"),
        (
            "x",
            "--gpus x: 'x' names no GPU; --gpus all, or numbers or UUIDs such as --gpus 0,1",
        ),
        ("", "--gpus '': names no GPU; "),
        ("0,", "--gpus 0,: names no GPU; "),
        ("-1", "--gpus -1: '-1' names no GPU; "),
        ("all,0", "--gpus all,0: 'all' names no GPU; "),
        ("0,0", "--gpus 0,0 names a GPU twice; name each once"),
        ("0,GPU-aa", "--gpus 0,GPU-aa names a GPU twice"),
        ("GPU-f", "--gpus GPU-f: no GPU GPU-f here"),
    ],
)
def test_an_unknown_gpu_is_one_line(text, says):
    with pytest.raises(UsageError) as e:
        BOTH.chosen(text)
    assert str(e.value).startswith(says) and "\n" not in e.value.message


def test_numbers_are_those_of_the_visible_ones(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert having(G2).chosen("0") == (G2,)
    with pytest.raises(
        UsageError,
        match="no GPU 1 here; there is only GPU 0, by CUDA_VISIBLE_DEVICES=2",
    ):
        having(G2).chosen("1")


def test_two_uuids_that_begin_so():
    machine = having(replace(G0, uuid="GPU-a1"), replace(G1, uuid="GPU-a2"))
    with pytest.raises(UsageError, match="--gpus GPU-a: 2 GPUs have this beginning"):
        machine.chosen("GPU-a")


def test_no_gpu_is_missing_and_nonsense_is_nonsense_all_the_same():
    with pytest.raises(MissingError, match="--gpus all: no GPU here"):
        having().chosen("all")
    with pytest.raises(UsageError):
        having().chosen("x")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (
            ("run", "--gpus", "9"),
            2,
            "gdn: --gpus 9: no GPU 9 here\n  there are GPUs 0 to 1\n",
        ),
        (
            ("bench", "--gpus", "0", "--device", "cpu"),
            2,
            "gdn: --gpus and --device cpu exclude each other\n",
        ),
        (
            ("tune", "--algo", "cuda-v5", "--gpus", ""),
            2,
            "gdn: --gpus '': names no GPU\n",
        ),
    ],
)
def test_the_commands_say_so(args, code, says):
    done = pretended(*args)
    assert (
        done.returncode == code and done.stdout == "" and done.stderr.startswith(says)
    )


def test_one_of_several_gpus_will_do():
    algo = Algo(
        op="gdn_decode",
        name="x",
        summary="",
        language="python",
        entry_point="m.py::run",
        destination_passing=True,
        modes=("cuda",),
        capability="9.0",
    )
    assert BOTH.place(algo, "cuda", (SMALL, G0)).mode == "cuda"
    old = replace(SMALL, capability="7.5")
    assert (
        BOTH.place(algo, "cuda", (SMALL, old)).reason
        == "needs compute capability 9.0, these GPUs have 6.1, 7.5"
    )
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
    found = work(plan)
    assert (
        [name for name, _, _ in found[0]]
        == [name for name, _, _ in found[1]]
        == ["copy", "pt-reference", "a"]
    )
    first, second = ({tuple(sizes) for _, _, sizes in found[gpu]} for gpu in (0, 1))
    # everything that a GPU measures, on the same workloads
    assert len(first) == len(second) == 1
    assert sorted([*first.pop(), *second.pop()]) == [1, 4, 8, 16, 32, 48, 64]
    counts = [
        len(job.workloads) for job in plan.jobs if job.algo and job.algo.name == "a"
    ]
    assert sum(counts) == 54 and max(counts) <= 30


def test_no_more_gpus_than_there_is_work_for():
    assert list(work(plan_of(named("a"), (G0, G1), ["batch_size=4"]))) == [0]


def test_an_algo_goes_to_a_gpu_that_has_its_capability():
    algos = [*named("any", "other"), *named("hopper", "late", capability="9.0")]
    found = work(plan_of(algos, (SMALL, G0), ["0"], "check"))
    assert {gpu: [name for name, *_ in jobs] for gpu, jobs in found.items()} == {
        3: ["any", "other"], 0: ["hopper", "late"],
    }  # fmt: skip


def test_workloads_are_not_spread_over_gpus_of_different_kinds():
    found = work(
        plan_of(
            named("a"),
            (G0, replace(SMALL, capability="9.0")),
            ["batch_size=1", "batch_size=4"],
        )
    )
    assert list(found) == [0] and found[0][-1] == ("a", False, [1, 4])


def test_one_gpu_by_name_gets_all():
    plan = plan_of(named("a", "b"), (G1,), ["0"])
    assert [name for name, *_ in work(plan)[1]] == ["copy", "pt-reference", "a", "b"]
    assert all(job.cpus == frozenset() for job in plan.jobs)
    assert [job.gpu for job in plan_of(named("a"), (), ["0"]).jobs] == [
        None,
        None,
        None,
    ]


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
    sides = {0: range(0, 8), 1: range(0, 8), 2: range(8, 16)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(gpu_sharing, "_siblings", lambda cpu: {cpu % 16, cpu % 16 + 16})
    machine = having(
        near=lambda g: frozenset(c + h for c in sides[g.index] for h in (0, 16))
    )
    assert gpu_sharing.cpus((G0, G1, G2), machine) == {
        G0: {*range(0, 4), *range(16, 20)}, G1: {*range(4, 8), *range(20, 24)}, G2: {*range(8, 16), *range(24, 32)},
    }  # fmt: skip
    machine = having(near=lambda g: frozenset() if g == G2 else frozenset(range(8)))
    # one of them does not tell: then all share all
    apart = gpu_sharing.cpus((G0, G1, G2), machine)
    assert sorted(len(cpus) for cpus in apart.values()) == [10, 10, 12]
    assert frozenset().union(*apart.values()) == set(range(32)) and all(
        len(c) % 2 == 0 for c in apart.values()
    )


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


def test_its_functions_are_pynvml_s():
    pynvml = pytest.importorskip("pynvml")
    assert list(inspect.signature(pynvml.nvmlDeviceGetCpuAffinity).parameters)[1:] == [
        "cpuSetSize"
    ]
    assert pynvml.nvmlDeviceGetHandleByUUID


def test_the_worker_finds_its_gpu_by_the_uuid_that_torch_has():
    assert environment._which("bbbbbbbb", (G0, G1)) == G1
    assert environment._which("another", (G0, G1)) is None
    # a slice, which torch may call by its GPU
    assert environment._which("another", (G2,)) == G2
    assert environment._which("another", ()) is None


def test_this_host_tells_its_cores():
    mine = frozenset(os.sched_getaffinity(0))
    cores = gpu_sharing._cores(mine)
    assert sum(map(len, cores)) == len(mine) and frozenset().union(*cores) == mine


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
    monkeypatch.setattr(complete, "source_hash", lambda solution: "0" * 12)
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

    def execute(job, on_record, given_up, worker):
        if job.algo.name in ("a", "b"):
            # neither ends unless both are there
            together.wait(timeout=helpers.PATIENCE_S)
        held[job.algo.name] = {path.name for path in locks._held}
        if job.algo.name == "a":
            together.wait(timeout=helpers.PATIENCE_S)  # b has measured before a has
            return passed(job, on_record)
        done = passed(job, on_record)
        if job.algo.name == "b":
            together.wait(timeout=helpers.PATIENCE_S)
        return done

    work = job_on(G0, "a"), job_on(G1, "b"), job_on(G0, "c")
    keys = [("gdn_decode", "cuda", f"gdn_decode/{name}") for name in "abc"]
    keys += [("gdn_decode", w.uuid) for w in work[0].workloads]
    order = {key: i for i, key in enumerate(keys)}
    document = run(monkeypatch, tmp_path, execute, *work, order=order)
    assert [(r.algo, r.workload.axes["batch_size"], r.gpu.index) for r in document.records] == [
        ("a", 1, 0), ("a", 2, 0), ("b", 1, 1), ("b", 2, 1), ("c", 1, 0), ("c", 2, 0),
    ]  # fmt: skip
    assert (
        f"gdn-{G0.uuid}.lock" in held["a"]
        and f"gdn-{G1.uuid}.lock" in held["b"]
        and not locks._held
    )
    assert document.records[2].gpu == GpuName(index=1, uuid=G1.uuid, name="NVIDIA H200")
    assert {place: env.gpu_uuid for place, env in document.environments.items()} == {
        "cuda:0": G0.uuid, "cuda:1": G1.uuid,
    }  # fmt: skip
    assert {line[0] for line in run.shown} == {
        f"GPU {g}: gdn_decode/{a}" for g, a in ("0a", "1b", "0c")
    }
    assert (
        run.shown[-1][1:] == (6, 6, True)
        and sum(True in line[3:] for line in run.shown) == 3
    )
    assert store.load(tmp_path / "records.json").records == document.records


def test_a_dead_worker_stops_no_other_and_names_its_gpu(monkeypatch, tmp_path):
    def execute(job, on_record, given_up, worker):
        return (
            jobs.Outcome(Status.CRASHED, "crashed with SIGSEGV")
            if job.gpu == G1
            else passed(job, on_record)
        )

    document = run(
        monkeypatch,
        tmp_path,
        execute,
        job_on(G0, "a"),
        job_on(G1, "b"),
        job_on(G0, "c"),
    )
    fates = sorted((r.algo, r.gpu.index, r.status) for r in document.records)
    assert fates == [
        *[("a", 0, "passed")] * 2,
        ("b", 1, "crashed"),
        *[("c", 0, "passed")] * 2,
    ]
    assert document.environments["cuda:1"] == Environment(
        gpu="NVIDIA H200", gpu_index=1, gpu_uuid=G1.uuid
    )


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


def record(algo: str, gpu: int, us: float | None, size: int = 1, **more) -> dict:
    """GPU 1 is three times as fast here: a ratio across GPUs would show."""
    g = two_gpus.GPUS[gpu]
    workload = {
        "uuid": f"{size:032x}",
        "index": None,
        "axes": {"batch_size": size},
        "origin": "twin",
    }
    timing = {
        "tier": "cupti", "median_us": us, "low_us": us, "high_us": us, "spread": 0.0, "samples": 9, "l2": "cold",
        "kernels": 1, "span_us": us, "note": None, "how": None,
    }  # fmt: skip
    found = {
        "op": "gdn_decode",
        "algo": algo,
        "source_hash": "0" * 12,
        "mode": "cuda",
        "tier": "cupti",
    }
    found |= {
        "gpu": g.to_json(),
        "workload": workload,
        "status": "passed",
        "reason": None,
        "bytes_moved": 10**6,
    }
    return (
        found
        | ({"timing": timing} if us else {"status": "crashed", "reason": "crashed"})
        | more
    )


def bench(*found: dict) -> dict:
    gpus = {f"cuda:{r['gpu']['index']}": r["gpu"] for r in found}
    envs = {
        place: {
            "gpu": g["name"],
            "gpu_index": g["index"],
            "gpu_uuid": g["uuid"],
            "driver": "580.1",
            "versions": {},
        }
        for place, g in gpus.items()
    }
    return {
        "schema": 2, "command": "bench", "time": "2026-11-21T14:12:11Z", "options": {"l2": "cold"}, "commit": "c" * 12,
        "dirty": False, "interrupted": False, "environments": envs, "missing": [], "records": list(found),
    }  # fmt: skip


APART = bench(
    record("copy", 0, 3.0), record("copy", 1, 1.0), record("pt-reference", 0, 30.0), record("pt-reference", 1, 10.0),
    record("a", 0, 6.0), record("b", 1, 5.0),
)  # fmt: skip


def test_ratios_in_the_table_are_to_the_rows_own_gpu(capsys):
    terminal.show(reports.typed(APART), REGISTRY, False, Path("x.json"))
    lines = capsys.readouterr().out.splitlines()
    cells = {
        line.removeprefix("B=1").split()[0]: line.removeprefix("B=1").split()
        for line in lines[2:6]
    }
    assert lines[0] == "gdn_decode | NVIDIA H200 (GPU 0, 1) | tier cupti, L2 cold"
    assert lines[1].split()[:3] == ["workload", "algo", "GPU"] and lines[6] == ""
    assert [cells[name][1] for name in ("copy", "pt-reference", "a", "b")] == [
        "0",
        "0",
        "0",
        "1",
    ]
    assert (cells["a"][5], cells["a"][7]) == ("5.00x", "2.00")  # 30 / 6 and 6 / 3
    # 10 / 5 and 5 / 1; by GPU 0's they would be 6x and 1.67
    assert (cells["b"][5], cells["b"][7]) == ("2.00x", "5.00")
    assert "*" not in "".join(lines[2:6])
    text = " ".join(" ".join(lines).split())
    assert (
        "not ranked; `gdn compare` runs them on one" in text
        and "time differs by up to 200.0% between" in text
    )


def test_where_a_row_is_of_one_gpu_the_fastest_is_marked(capsys):
    found = [
        record(name, 0, us)
        for name, us in (("copy", 3.0), ("pt-reference", 30.0), ("a", 6.0))
    ]
    found += [
        record(name, 1, us, 4)
        for name, us in (("copy", 1.0), ("pt-reference", 10.0), ("a", 11.0))
    ]
    terminal.show(reports.typed(bench(*found)), REGISTRY, False, Path("x.json"))
    out = capsys.readouterr().out
    assert (
        "a *" in out
        and "pt-reference *" in out
        and "not ranked" not in out
        and "differs by" not in out
    )


def test_a_failure_on_one_gpu_is_shown_next_to_the_others_results(capsys):
    found = record("copy", 0, 3.0), record("copy", 1, None), record("a", 1, 5.0)
    terminal.show(reports.typed(bench(*found)), REGISTRY, False, Path())
    out = capsys.readouterr().out
    assert "failed copy at B=1 (00000000) on GPU 1: crashed, crashed" in out
    # GB/s, and nothing x floor
    assert [line.split()[-1] for line in out.splitlines() if "  a  " in line] == ["200"]


def test_one_gpu_by_name_is_in_the_title_and_needs_no_column(capsys):
    unpackable = record("b", 1, None) | {"status": "unpackable", "workload": None}
    document = bench(record("copy", 1, 1.0), record("a", 1, 5.0))
    document["records"].append({k: v for k, v in unpackable.items() if k != "gpu"})
    terminal.show(reports.typed(document), REGISTRY, False, Path("x.json"))
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("gdn_decode | NVIDIA H200 (GPU 1) | ")
        and "GPU" not in lines[1]
    )
    assert not any("GPU:" in line for line in lines)


@pytest.mark.parametrize(
    ("uuids", "marked"), [(("GPU-1", "GPU-1"), True), (("GPU-1", "GPU-2"), False)]
)
def test_of_rented_gpus_none_is_the_fastest_where_there_were_several(
    uuids, marked, capsys
):
    """Those have no number here: they share a place, and their times a table without a
    column for the GPU.
    """
    found = [record("pt-reference", 0, 30.0), record("a", 0, 6.0)]
    found = [
        r | {"gpu": {"uuid": uuid, "name": "NVIDIA B200"}}
        for r, uuid in zip(found, uuids, strict=True)
    ]
    document = bench() | {
        "records": found,
        "environments": {"cuda": {"gpu": "NVIDIA B200", "where": "modal"}},
    }
    terminal.show(reports.typed(document), REGISTRY, False, Path("x.json"))
    out = capsys.readouterr().out
    assert (
        out.startswith("gdn_decode | NVIDIA B200 (modal) | tier cupti, L2 cold\n")
        and "GPU " not in out
    )
    assert re.search(
        rf"^ +a{' [*]' if marked else ''} +6\.00 us .* 5\.00x", out, re.M
    ), out
    assert {s.device for s in score.scores(document_of(document), DECODE)} == {
        "NVIDIA B200 (modal)"
    }


def test_tiers_that_the_host_takes_part_in_say_so(capsys):
    found = [r | {"tier": "events"} for r in APART["records"]]
    terminal.show(reports.typed(bench(*found)), REGISTRY, False, Path("x.json"))
    assert "events: these times include the host's work" in capsys.readouterr().out
    terminal.show(reports.typed(APART), REGISTRY, False, Path("x.json"))
    assert "the host's work" not in capsys.readouterr().out


def test_scores_divide_times_of_one_gpu():
    spread = [record("a", 1, 2.0, 4), record("pt-reference", 1, 8.0, 4)]
    found = {
        s.algo: s
        for s in score.scores(document_of(bench(*APART["records"], *spread)), DECODE)
        if s.rule == "reference"
    }
    assert {share.label: share.speedup for share in found["a"].shares} == {
        "B=1": 5.0,
        "B=4": 4.0,
    }
    assert {share.label: share.speedup for share in found["b"].shares} == {"B=1": 2.0}
    assert found["a"].value == 4.5 and found["a"].device == "NVIDIA H200"
    alone = score.scores(
        document_of(bench(record("a", 0, 6.0), record("pt-reference", 1, 10.0))), DECODE
    )[0]
    assert alone.value is None and [gap.kind for gap in alone.missing] == [
        score.UNCOMPARED
    ]


def test_the_page_keeps_gpus_of_one_run_apart():
    groups = merge.gather([reports.source("x.json", APART)], REGISTRY).groups
    assert [(g.device, g.algos) for g in groups] == [
        ("NVIDIA H200, GPU 0", ["copy", "pt-reference", "a"]), ("NVIDIA H200, GPU 1", ["copy", "pt-reference", "b"]),
    ]  # fmt: skip
    assert [g.over_floor(g.algos[-1], "B=1") for g in groups] == [2.0, 5.0]
    one = bench(*(r for r in APART["records"] if r["gpu"]["index"] == 1))
    assert [
        g.device for g in merge.gather([reports.source("x.json", one)], REGISTRY).groups
    ] == ["NVIDIA H200"]


def places(document: dict) -> list[tuple[str, tuple[str, ...], int]]:
    return sorted(
        (
            p.records[0].algo,
            tuple(dict.fromkeys(r.place for r in p.records)),
            len(p.records),
        )
        for p in documents.parts(document_of(document))
        if p.records[0].algo != "copy"
    )


def test_the_history_keeps_what_two_gpus_measured_alike_apart():
    assert places(APART) == [
        ("a", ("cuda:0",), 1), ("b", ("cuda:1",), 1),
        ("pt-reference", ("cuda:0",), 1), ("pt-reference", ("cuda:1",), 1),
    ]  # fmt: skip


def test_the_history_joins_the_workloads_that_gpus_of_a_kind_shared():
    """A mean over a GPU's share of the workloads would compare with no other run."""
    shared = bench(record("a", 0, 6.0), record("a", 1, 5.0, 4))
    assert places(shared) == [("a", ("cuda:0", "cuda:1"), 2)]
    (part,) = documents.parts(document_of(shared))
    common = part.environment(document_of(shared))
    # neither's number and UUID
    assert common == Environment(gpu="NVIDIA H200", driver="580.1")
    shared["environments"]["cuda:1"]["gpu"] = "NVIDIA B200"
    assert places(shared) == [("a", ("cuda:0",), 1), ("a", ("cuda:1",), 1)]


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
        env, found = (
            Environment(
                gpu="NVIDIA H200", sms=132, driver="580.1", versions={"torch": "2"}
            ),
            [],
        )
        for w in job.workloads:
            for name in (
                job.request.turns[w.uuid]
                if job.command == "compare"
                else (job.algo.name,)
            ):
                us = 90.0 if "tile=2" in name else 100.0
                found.append(
                    building.record(
                        name,
                        None,
                        w.uuid,
                        rounds_us=[us * (1 + i % 3 / 1e3) for i in range(60)],
                    )
                )
                on_record(found[-1], env)
        return jobs.Outcome(Status.DONE, None, found, env)


@pytest.fixture
def tune(tmp_path, monkeypatch, write_algo):
    """tune(workers, gpus, *batch sizes) -> the State after its run: tile = 1, 2, 3."""
    toml = '[tune]\nfile = "tuned.py"\nsize = ["batch_size"]\n[tune.constants]\ntile = [1, 2, 3]\n'
    guess = (
        'TUNED = [\n    {"gpu": "untuned", "sms": 0, "up_to": 9223372036854775807, "tile":'
        " 1},\n]\n"
    )
    write_algo(
        tmp_path / "own",
        "slow",
        {"main.py": "run = None", "tuned.py": guess},
        extra=toml,
        devices=["cuda"],
    )
    known = registry.load(str(tmp_path / "own"))
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "home"))

    def run(workers: Workers, gpus: tuple[Gpu, ...], *batches: int):
        monkeypatch.setattr(race, "execute", workers)
        entry = planning.Entry(known.find("slow"), inventory.Place("cuda"))
        plan = search.plan(
            known, entry, [twin(DECODE, {"batch_size": b}) for b in batches], None
        )
        work = search.begin(
            plan,
            search.Settings("cupti", gpus=gpus, machine=BOTH),
            lambda *line: None,
            lambda line: None,
        )
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


def test_tune_times_each_size_on_one_gpu_and_all_gpus_at_once(tune, capsys):
    workers = Workers(gpus=2)
    work = tune(workers, (G0, G1), 1, 4, 16, 64)
    assert sizes_on(workers) == {0: {1, 16}, 1: {4, 64}}
    assert {job.gpu for job in workers.jobs if job.command == "check"} == {G0, G1}
    assert [c.chosen for c in work.choices] == ["slow[tile=2]"] * 4
    rows = json.loads(tune.evidence.read_text())["gpus"]["NVIDIA H200"]["workloads"]
    assert [row["gpu"] for row in rows] == [gpu.to_json() for gpu in (G0, G1, G0, G1)]
    from gdn_cli.report import tune as shown

    shown.show_tuning(work.plan, work, False)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("gdn_decode/slow | NVIDIA H200 (GPU 0, 1) | ") and out[
        1
    ].split()[:2] == [
        "workload",
        "GPU",
    ]
    assert [line.split()[:2] for line in out[2:6]] == [
        ["B=1", "0"],
        ["B=4", "1"],
        ["B=16", "0"],
        ["B=64", "1"],
    ]


def test_tune_goes_on_where_each_size_was(tune):
    tune(Workers(gpus=2), (G0, G1), 1, 4)
    again, more, moved = Workers(), Workers(), Workers()
    tune(again, (G0, G1), 1, 4)
    assert again.jobs == []
    tune(more, (G0, G1), 1, 2, 4)
    assert sizes_on(more) == {0: {2}}
    tune(moved, (G0,), 1, 2, 4)  # the other GPU's measurements no longer count
    assert sizes_on(moved) == {0: {4}}


def test_tune_without_gpus_takes_the_first(tune):
    workers = Workers()
    tune(workers, (), 1, 4)
    assert sizes_on(workers) == {0: {1, 4}} and {job.cpus for job in workers.jobs} == {
        frozenset()
    }


def test_tune_refuses_gpus_of_different_kinds(tune):
    workers = Workers()
    with pytest.raises(
        UsageError,
        match="tune takes GPUs of one kind, not GPU 0 NVIDIA H200, GPU 3 GT 1030; --gpus",
    ):
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
    done = pretended(
        "run",
        "--algos",
        tmp_path,
        "--algo",
        "good,bad,fine",
        "--gpus",
        "all",
        "-w",
        "0-1",
        "--json",
    )
    assert done.returncode == errors.FAILED and helpers.complaints(done.stderr) == ""
    found = json.loads(done.stdout)
    assert [(r["algo"], r["gpu"]["index"], r["status"]) for r in found["records"]] == [
        ("good", 0, "passed"), ("good", 0, "passed"), ("bad", 1, "crashed"), ("fine", 0, "passed"),
        ("fine", 0, "passed"),
    ]  # fmt: skip
    uuids = {r["gpu"]["index"]: r["gpu"]["uuid"] for r in found["records"]}
    assert uuids == {0: G0.uuid, 1: G1.uuid} and found["options"]["gpus"] == "all"
    assert {place: env["gpu_uuid"] for place, env in found["environments"].items()} == {
        "cuda:0": G0.uuid, "cuda:1": G1.uuid,
    }  # fmt: skip


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_of_all_gpus(tmp_path, write_algo):
    out = tmp_path / "records.json"
    for name in ("one", "two"):
        hang = (
            f"if q.shape[0] == 2:\n        open({str(tmp_path / name)!r},"
            " 'w').write(str(os.getpid()))\n"
        )
        write_algo(
            tmp_path,
            name,
            BODY.format(hang + "        while True: signal.pause()"),
            devices=["cuda"],
        )
    process = subprocess.Popen(
        command("run", "--algos", tmp_path, "--algo", "one,two", "--gpus", "0,1", "--json", "--out", out,
                "-w", "0", "-w", "batch_size=2"),
        env=visible(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell's `&` has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    marks = [tmp_path / name for name in ("one", "two")]
    try:
        deadline = time.monotonic() + helpers.PATIENCE_S
        while not (all(m.exists() and m.read_text() for m in marks) and out.exists()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        while len(json.loads(out.read_text())["records"]) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=helpers.PATIENCE_S)
        left = [pid for m in marks if helpers.alive(pid := int(m.read_text()))]
    finally:
        process.kill()
        for m in marks:
            if (
                m.exists()
                and m.read_text()
                and helpers.alive(pid := int(m.read_text()))
            ):
                os.kill(pid, signal.SIGKILL)
    assert (
        left == []
        and process.returncode == errors.INTERRUPTED
        and "Traceback" not in stderr
    )
    document = json.loads(stdout)
    assert document["interrupted"] and document == json.loads(out.read_text())
    assert [(r["algo"], r["gpu"]["index"], r["status"]) for r in document["records"]] == [
        ("one", 0, "passed"), ("two", 1, "passed"),
    ]  # fmt: skip
