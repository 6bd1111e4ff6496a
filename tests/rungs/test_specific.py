"""`specific = true` in algo.toml: built for all features of its GPU (sm_90a), and kept
apart from a judge's build.
"""

import os
from types import SimpleNamespace

import helpers
import pytest
import torch

from gdn_cli.catalog import pack, registry
from gdn_cli.machine import inventory
from gdn_cli.run import jobs
from gdn_cli.worker.executor import build
from gdn_cli.worker.profilers import Ask, sass

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode"]
ALGO = REGISTRY.find("gdn_decode/cuda-v1")


@pytest.fixture
def built(monkeypatch):
    """built(specific): (name, hash, TVM_FFI_CUDA_ARCH_LIST) as the builder sees them on
    a GPU of `built.capability`.
    """
    from flashinfer_bench.compile import BuilderRegistry

    seen = []

    def compiled(definition, solution):
        seen.append(
            (solution.name, solution.hash(), os.environ.get(inventory.ARCHITECTURES))
        )
        metadata = SimpleNamespace(destination_passing_style=True, misc={})
        return SimpleNamespace(_callable=None, metadata=metadata)

    def run(specific):
        solution = pack.pack(ALGO, OP)
        build.build(pack.definition(OP, REGISTRY), solution, specific=specific)
        return seen[-1]

    monkeypatch.setattr(
        BuilderRegistry, "get_instance", lambda: SimpleNamespace(build=compiled)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: run.capability)
    monkeypatch.delenv(inventory.ARCHITECTURES, raising=False)
    run.capability = (9, 0)
    return run


def test_it_is_compiled_for_its_gpu_and_shares_no_cache_with_a_judges_build(built):
    plain, own = built(False), built(True)
    assert plain[2] is None
    assert own[2] == "9.0a" and own[0] == f"{plain[0]}-sm_90a" and own[1] != plain[1]
    assert inventory.ARCHITECTURES not in os.environ  # for the build only
    built.capability = (10, 0)
    assert built(True)[2] == "10.0a"


def test_before_hopper_there_is_nothing_to_ask_for(built):
    built.capability = (8, 9)
    assert built(True) == built(False)


def test_who_has_set_the_architectures_has_chosen(built, monkeypatch):
    monkeypatch.setenv(inventory.ARCHITECTURES, "9.0")
    assert built(True) == built(False) and built(True)[2] == "9.0"
    assert os.environ[inventory.ARCHITECTURES] == "9.0"


def test_a_failed_build_leaves_the_environment_as_it_was(built, monkeypatch):
    from flashinfer_bench.compile import BuilderRegistry

    def fails(definition, solution):
        raise RuntimeError("no")

    monkeypatch.setattr(
        BuilderRegistry, "get_instance", lambda: SimpleNamespace(build=fails)
    )
    with pytest.raises(build.BuildFailedError):
        built(True)
    assert inventory.ARCHITECTURES not in os.environ


def test_the_worker_is_told_but_for_a_proof(tmp_path, write_algo):
    keys = dict(language="cuda", entry_point="kernel.cu::run", devices=["cuda"])
    write_algo(tmp_path, "own", {"kernel.cu": "//"}, specific=True, **keys)
    own = registry.load(str(tmp_path)).find("own")
    assert own.specific and not ALGO.specific

    def request(command, *algos):
        packed = [(algo, {}) for algo in algos]
        return jobs.Job.of(command, OP, {}, "cuda", (), packed).request

    assert request("bench", own).specific and not request("bench", ALGO).specific
    assert not request("floor").specific
    assert request("prove", own).specific is False  # a proof is of what a judge does
    rivals = request("compare", own, ALGO).rivals
    assert [rival.specific for rival in rivals] == [True, False]


def test_sass_compiles_what_runs_here():
    machine = inventory.Machine(gpus=lambda: (inventory.Gpu("a GPU", "9.0", "580"),))
    assert [sass.here("cuda", specific, machine) for specific in (False, True)] == [
        "sm_90",
        "sm_90a",
    ]
    assert sass.here("triton", True, machine) == "sm_90"
    assert Ask({}).specific is False
