"""The contest's harness as a task: the folder that it gets, its verdicts as records,
what it leaves out. A stand-in for flashinfer-bench answers; the real one says no more
on a CPU than that it needs a GPU.
"""

from __future__ import annotations

import json
import textwrap

import helpers
import pytest
from msgspec.structs import replace

from gdn_cli.catalog import official as harnesses
from gdn_cli.catalog import pack, trace_set
from gdn_cli.catalog.workloads import embedded
from gdn_cli.errors import MissingError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.schema.record_types import Blame
from gdn_cli.worker import trace_set_writer
from gdn_cli.worker.executor import client
from gdn_cli.worker.judge import tasks
from gdn_cli.worker.messages import Reply
from gdn_cli.worker.request import Serving, Timing

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode"]
PLAN = {"warmup": 10, "iterations": 50, "trials": 3}

# A TraceSet and a Benchmark with the names that judge.py uses. What a workload gets is
# in verdicts.json, by its uuid.
STAND_IN = {
    "bench/__init__.py": (
        """
        import json, logging, os, pathlib
        from types import SimpleNamespace
        from safetensors import safe_open

        class BenchmarkConfig:
            def __init__(self, **config):
                self.config = config

        class Benchmark:
            def __init__(self, data, config):
                print("not an answer")
                self.data, self.config = data, config.config
                self.verdicts = json.loads(pathlib.Path(__file__).with_name("verdicts.json").read_text())

            def run_all(self, dump_traces):
                ((name, (row,)),) = self.data.workloads.items()
                inputs = row.workload.inputs
                for key, spec in inputs.items():
                    if spec["type"] == "safetensors":
                        with safe_open(self.data.root / spec["path"], "np") as file:
                            shape = file.get_slice(spec["tensor_key"]).get_shape()
                blobs = [str(p) for p in (self.data.root / "blob").rglob("*.safetensors")]
                verdict = self.verdicts[row.workload.uuid]
                if verdict == "die":
                    os._exit(7)
                if verdict is None:
                    logging.getLogger("flashinfer_bench").error("baseline failed: no kernel image")
                    return SimpleNamespace(traces={})
                log = json.dumps([self.config, self.data.solutions, len(blobs), os.environ["FIB_CACHE_PATH"]])
                found = {"evaluation": verdict | {"log": log}}
                return SimpleNamespace(traces={name: [SimpleNamespace(model_dump=lambda mode: found)]})

            def close(self):
                pass
    """
    ),
    "data/__init__.py": (
        """
        import json, pathlib
        from types import SimpleNamespace as Thing

        class TraceSet:
            @classmethod
            def from_path(cls, path):
                found = cls()
                found.root = pathlib.Path(path)
                (definition,) = found.root.glob("definitions/*/*.json")
                assert json.loads(definition.read_text())["name"] == definition.stem
                found.solutions = [p.stem for p in found.root.glob("solutions/*/*/*/*.json")]
                found.workloads = {}
                for file in found.root.glob("workloads/*/*.jsonl"):
                    for line in file.read_text().splitlines():
                        row = json.loads(line)
                        thing = Thing(definition=row["definition"], workload=Thing(**row["workload"]))
                        found.workloads.setdefault(row["definition"], []).append(thing)
                return found
    """
    ),
    "__init__.py": "",
}


def verdict(status, ms=None):
    performance = (
        {"latency_ms": ms, "reference_latency_ms": 1.0, "speedup_factor": 1.0 / ms}
        if ms
        else None
    )
    return {"status": status, "performance": performance, "correctness": None}


def asked(folder, workloads, dataset=None):
    algo = REGISTRY.find("cpp-v1", "gdn_decode")
    harness = harnesses.Harness(
        name="main",
        needs="x @ https://y/archive/40e6ca7.tar.gz",
        how="as told",
        folder=folder,
    )
    return Serving(
        command="official", op=OP, name=algo.name, definition=pack.definition(OP, REGISTRY),
        solution=pack.pack(algo, OP), mode="cpu", workloads=tuple(workloads), dataset=dataset,
        timing=Timing(("official",), PLAN), official=harness,
    )  # fmt: skip


def stand_in(root, verdicts):
    for name, text in STAND_IN.items():
        path = root / "flashinfer_bench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (root / "flashinfer_bench" / "bench" / "verdicts.json").write_text(
        json.dumps(verdicts)
    )
    return str(root)


def test_the_harness_verdicts_become_records(tmp_path, monkeypatch):
    """Each with its evaluation; one that it leaves out is not the algo's failure."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    few = embedded(OP)[:4]
    said = [
        verdict("PASSED", 0.0025),
        verdict("INCORRECT_NUMERICAL"),
        None,
        verdict("COMPILE_ERROR"),
    ]
    folder = stand_in(
        tmp_path / "harness", {w.uuid: v for w, v in zip(few, said, strict=True)}
    )
    reply = Reply(status="done")
    right, wrong, gone, unbuilt = tasks.official(asked(folder, few), reply)
    assert [r.uuid for r in (right, wrong, gone, unbuilt)] == [w.uuid for w in few]
    assert (
        right.timing.median_us == pytest.approx(2.5)
        and right.tier == right.timing.tier == "official"
    )
    assert (
        right.timing.how == "flashinfer-bench main (40e6ca7): as told"
        and right.bytes_moved > 1_000_000
    )
    assert right.official["performance"]["speedup_factor"] == 400
    config, solutions, blobs, cache = json.loads(right.official["log"])
    assert config == {
        "use_isolated_runner": False, "timeout_seconds": 300, "warmup_runs": 10, "iterations": 50, "num_trials": 3
    }  # fmt: skip
    assert (
        solutions == ["gdn_decode-cpp-v1"] and blobs == 4 and "gdn-official-" in cache
    )
    assert (wrong.status, unbuilt.status) == ("wrong", "build_failed")
    assert (
        wrong.reason.startswith("flashinfer-bench main (40e6ca7): INCORRECT_NUMERICAL")
        and wrong.timing is None
    )
    assert wrong.blame is unbuilt.blame is Blame.ALGO and gone.blame is Blame.MACHINE
    assert (
        gone.reason
        == "flashinfer-bench main (40e6ca7) left no trace: baseline failed: no kernel image"
    )
    assert gone.official is None


def test_a_harness_that_ends_keeps_what_it_has_judged(tmp_path):
    few = embedded(OP)[:2]
    folder = stand_in(
        tmp_path, {few[0].uuid: verdict("PASSED", 0.001), few[1].uuid: "die"}
    )
    judged = tasks.official(asked(folder, few), Reply(status="done"))
    assert next(judged).status == "passed"
    with pytest.raises(
        client.DiedError,
        match=r"flashinfer-bench main \(40e6ca7\) ended before it was done",
    ) as caught:
        next(judged)
    assert caught.value.exit_code == 7


def test_a_data_set_is_judged_as_it_lies(tmp_path):
    """Its own definition and tensors, without a copy of these."""
    few = embedded(OP)[:1]
    described = pack.definition(OP, REGISTRY) | {"description": "theirs"}
    trace_set_writer.build(tmp_path / "data", [OP], {OP.name: few}, [], [described])
    folder = stand_in(
        tmp_path / "harness", {w.uuid: verdict("PASSED", 0.001) for w in few}
    )
    (record,) = tasks.official(
        asked(
            folder, trace_set.from_folder(OP, tmp_path / "data"), str(tmp_path / "data")
        ),
        Reply(status="done"),
    )
    assert record.status == "passed" and record.workload.origin == "dataset"


def test_which_harness_and_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_HOME", str(tmp_path))
    main = harnesses.harness(None, True)
    assert main.words == "flashinfer-bench main (40e6ca7)" and main.isolated
    with pytest.raises(UsageError, match="unknown harness 'nosuch'"):
        harnesses.harness("nosuch", False)
    with pytest.raises(
        MissingError, match="is not installed here.*pip install --no-deps --target"
    ) as caught:
        harnesses.installed(main)
    folder = tmp_path / "harness" / "main"
    info = folder / "flashinfer_bench-0.0.0.dev0.dist-info"
    info.mkdir(parents=True)
    (info / "direct_url.json").write_text(
        '{"url": "https://example.invalid/other.tar.gz"}'
    )
    with pytest.raises(MissingError):  # another commit
        harnesses.installed(main)
    (info / "direct_url.json").write_text(
        json.dumps({"url": main.needs.partition(" @ ")[2]})
    )
    assert (
        harnesses.installed(main) == replace(main, folder=str(folder))
        and str(folder) in caught.value.hint
    )
    own = harnesses.harness("0.1.2", False)
    monkeypatch.setattr(harnesses.metadata, "version", lambda name: "0.1.2")
    assert harnesses.installed(own) == own
    pins = ["torch==2.11.0", "flashinfer-bench==0.1.2"]
    assert (
        harnesses.in_container(own, pins) == own
        and harnesses.in_container(main, pins).folder == "/opt/gdn/harness/main"
    )


@pytest.mark.slow
def test_the_real_harness_reads_the_folder_and_asks_for_a_gpu(capfd):
    if inventory.gpus():
        pytest.skip("there is a GPU here")
    with pytest.raises(client.DiedError):
        list(tasks.official(asked(None, embedded(OP)[:1]), Reply(status="done")))
    assert "No CUDA devices available" in capfd.readouterr().err


@pytest.mark.gpu
def test_the_real_harness_passes_an_algo_of_ours():
    algo = REGISTRY.find("cuda-v5", "gdn_decode")
    request = replace(
        asked(None, embedded(OP)[:2]),
        name=algo.name,
        solution=pack.pack(algo, OP),
        mode="cuda",
    )
    records = list(tasks.official(request, Reply(status="done")))
    assert [r.status for r in records] == ["passed"] * 2, [r.reason for r in records]
    assert all(1 < r.timing.median_us < 100 for r in records)
