"""On a CUDA device (`make test-gpu`): every algo that runs there is right, timed by
each tier, and well-behaved.

Skipped, with the reason, where there is no device. New folders under algos/ are picked
up by themselves.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import helpers
import msgspec
import pytest
import torch
from kernels.test_algos import CASES, cases_of

from gdn_cli import errors
from gdn_cli.catalog import pack
from gdn_cli.catalog.workloads import embedded, select
from gdn_cli.machine import inventory
from gdn_cli.run import jobs
from gdn_cli.worker.judge import check
from gdn_cli.worker.request import Timing

pytestmark = pytest.mark.gpu

REGISTRY = helpers.REGISTRY
MODE = "cuda"
ON_GPU = [pytest.param(a, id=a.full_name) for a in REGISTRY.algos if MODE in a.modes]
# PyTorch's backends one by one: each has shapes that it does not take, and says so
PINNED = re.compile(r"sdpa-\w+")
# our own algos, which can be built and called in this process without crashing it
OURS = [
    pytest.param(a, id=a.full_name)
    for a in REGISTRY.algos
    if MODE in a.modes
    and not a.packages
    and not PINNED.fullmatch(a.name.removesuffix("-causal"))
]
# one launch or a few, nothing that asks the host: these must live in CUDA graphs and on any stream
KERNELS = [p for p in OURS if p.values[0].language in ("cuda", "triton")]

# B below and above a warp, an SM count's fraction, a power of two and its neighbours
WORKLOADS = {
    "gdn_decode": [f"batch_size={n}" for n in (1, 2, 3, 4, 5, 7, 64, 65)],
    "gdn_decode_bf16": [f"batch_size={n}" for n in (1, 2, 3, 4, 5, 7, 64, 65)],
    "gdn_decode_packed": [f"batch_size={n}" for n in (1, 2, 3, 4, 5, 7, 64, 65)],
    "gdn_decode_packed_bf16": [f"batch_size={n}" for n in (1, 2, 3, 4, 5, 7, 64, 65)],
    "gdn_mtp": ["seq_len=2", "seq_len=3", "batch_size=3", "batch_size=7,seq_len=8", "batch_size=64,seq_len=4"],
    "gdn_mtp_bf16": ["seq_len=2", "batch_size=3", "batch_size=7,seq_len=8", "batch_size=64,seq_len=4"],
    "gdn_mtp_packed": ["seq_len=2", "seq_len=3", "batch_size=3", "batch_size=7,seq_len=8", "batch_size=64,seq_len=4"],
    "gdn_mtp_packed_bf16": ["seq_len=2", "batch_size=3", "batch_size=7,seq_len=8", "batch_size=64,seq_len=4"],
    "gdn_prefill": [
        "total_seq_len=6,num_seqs=1", "total_seq_len=16,num_seqs=1", "total_seq_len=139,num_seqs=3",
        "total_seq_len=525,num_seqs=1", "seq_lens=1+64+65", "seq_lens=3x100", "seq_lens=1x63",
    ],
    "gdn_prefill_packed": [
        "total_seq_len=16,num_seqs=1", "total_seq_len=139,num_seqs=3", "total_seq_len=2048,num_seqs=1",
        "seq_lens=1+64+65", "seq_lens=3x100", "seq_lens=40x70",
    ],
    "gdn_prefill_packed_bf16": ["total_seq_len=16,num_seqs=1", "seq_lens=1+64+65", "seq_lens=40x70"],
    "attention_fwd": ["seq_len=128", "seq_len=512", "batch_size=2,seq_len=67", "batch_size=3,seq_len=1"],
    "attention_fwd_causal": ["seq_len=128", "seq_len=512", "batch_size=2,seq_len=67", "batch_size=3,seq_len=1"],
}  # fmt: skip


def work(op, chosen: list[str]) -> tuple:
    """One workload for each axis filter: of the contest's with these axes the first,
    else a twin.
    """
    return tuple(select(op, embedded(op), chosen=[text])[0] for text in chosen)


def job(algo, command: str, chosen: list[str], **more) -> jobs.Job:
    place = inventory.HERE.place(algo, MODE)
    if place.mode is None:
        pytest.skip(f"{algo.full_name}: {place.reason}")
    op = REGISTRY.ops[algo.op]
    return jobs.Job.of(
        command,
        op,
        pack.definition(op, REGISTRY),
        place.mode,
        work(op, chosen),
        [(algo, pack.pack(algo, op))],
        timeout_s=600,
        **more,
    )


def done(outcome: jobs.Outcome) -> list[dict]:
    assert outcome.status == "done", f"{outcome.reason}\n" + "\n".join(outcome.tail)
    return [msgspec.to_builtins(record) for record in outcome.records]


@pytest.mark.parametrize("algo", ON_GPU)
def test_every_algo_is_right_on_small_odd_and_usual_sizes(algo):
    records = done(jobs.execute(job(algo, "check", WORKLOADS[algo.op])))
    records = [
        r for r in records if "does not run here" not in (r["reason"] or "")
    ] or pytest.skip("no size runs here")
    wrong = {
        str(r["workload"]["axes"]): r["reason"]
        for r in records
        if r["status"] != "passed"
    }
    assert wrong == {}
    assert len(records) == len(WORKLOADS[algo.op]) or PINNED.fullmatch(
        algo.name.removesuffix("-causal")
    )
    for r in records:
        assert r["check"]["official"] and set(r["check"]["errors"]) == set(
            REGISTRY.ops[algo.op].outputs
        )


@functools.cache
def verdicts(algo_name: str) -> dict[str, dict]:
    names = cases_of(REGISTRY.find(algo_name), "cuda")
    op_name = algo_name.split("/")[0]
    return dict(
        zip(
            names,
            helpers.judge(algo_name, [CASES[op_name][n] for n in names], MODE),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("algo", "case"),
    [
        pytest.param(p.values[0], case, id=f"{p.id}-{case}")
        for p in OURS
        for case in cases_of(p.values[0], "cuda")
    ],
)
def test_ours_agree_with_the_oracle_at_the_edges(algo, case):
    """Scales, extreme gates and empty sequences, as test_algos has them for the CPU."""
    if (place := inventory.HERE.place(algo, MODE)).mode is None:
        pytest.skip(f"{algo.full_name}: {place.reason}")
    verdict = verdicts(algo.full_name)[case]
    assert verdict["wrong"] == []
    for name, error in verdict["errors"].items():
        assert error <= REGISTRY.ops[algo.op].tolerance[name], name  # NaN is not


# --- times


TIERS = ("cupti", "events", "graph")  # nvbench and fib: timing/test_tiers.py


@pytest.mark.parametrize("l2", ["cold", "warm"])
@pytest.mark.parametrize("algo", [p for p in KERNELS if p.values[0].op == "gdn_decode"])
def test_every_tier_times_a_small_decode(algo, l2):
    timing = Timing(TIERS, {"seconds": 0.1, "l2": l2})
    records = done(jobs.execute(job(algo, "bench", ["batch_size=1"], timing=timing)))
    assert [(r["tier"], r["status"], r["reason"]) for r in records] == [
        (tier, "passed", None) for tier in TIERS
    ]
    seen = {r["tier"]: r["timing"] for r in records}
    for tier, t in seen.items():
        assert (
            t["tier"] == tier
            and t["l2"] == l2
            and t["note"] is None
            and t["samples"] >= 3
        )
        assert (
            0 < t["low_us"] <= t["median_us"] <= t["high_us"]
            and t["ci_low_us"] <= t["median_us"] <= t["ci_high_us"]
        )
    assert seen["cupti"]["kernels"] >= 1 and seen["cupti"]["span_us"] > 0
    # events pay for themselves on top of the kernel: 3 to 4 us of a kernel's 3
    assert seen["cupti"]["median_us"] < seen["events"]["median_us"]


def test_the_floors_of_this_gpu():
    op = REGISTRY.ops["gdn_decode"]
    if not inventory.gpus():
        pytest.skip("no GPU here")
    found = done(
        jobs.execute(
            jobs.Job.of(
                "floor",
                op,
                pack.definition(op, REGISTRY),
                MODE,
                work(op, ["batch_size=8"]),
                timing=Timing(TIERS),
            )
        )
    )
    assert [(r["algo"], r["tier"]) for r in found] == [
        *(("copy", tier) for tier in TIERS), *(("empty", tier) for tier in TIERS), ("copy-rate", "cupti")
    ]  # fmt: skip
    times = {(r["algo"], r["tier"]): r["timing"]["median_us"] for r in found}
    for tier in TIERS:
        assert 0 < times["empty", tier] < times["copy", tier]
    state = found[0]["gpu_state"]
    assert (
        state["after"]["sm_mhz"] > 0
        and state["after"]["temperature_c"] > 0
        and "throttle" in state["after"]
    )


def test_an_algo_is_compared_with_itself_on_the_same_buffers():
    algo = REGISTRY.find("cuda-v4")
    if (place := inventory.HERE.place(algo, MODE)).mode is None:
        pytest.skip(place.reason)
    result = helpers.gdn(
        "compare",
        "cuda-v4",
        "cuda-v4",
        "-w",
        "batch_size=4",
        "-n",
        "1",
        "--json",
        gpu=True,
    )
    assert result.code == errors.OK, result.err + result.out
    (compared,), (overall,) = result.json["comparisons"], result.json["overall"]
    assert (compared["baseline"], compared["algo"], compared["tier"]) == (
        "cuda-v4",
        "cuda-v4@2",
        "cupti",
    )
    assert (
        compared["low"] <= compared["ratio"] <= compared["high"]
        and compared["rounds"] >= 40
    )
    assert compared["ratio"] == pytest.approx(
        compared["baseline_us"] / compared["us"], rel=1e-6
    )
    assert overall["ratio"] == pytest.approx(compared["ratio"])


def test_gdn_bench_with_its_floor_and_its_origin():
    algo = REGISTRY.find("cuda-v4")
    if (place := inventory.HERE.place(algo, MODE)).mode is None:
        pytest.skip(place.reason)
    result = helpers.gdn(
        "bench",
        "--algo",
        algo.name,
        "-w",
        "batch_size=4",
        "-n",
        "1",
        "--seconds",
        "0.1",
        "--json",
        gpu=True,
    )
    assert result.code == errors.OK, result.err + result.out
    document = result.json
    assert [(r["algo"], r["mode"], r["status"]) for r in document["records"]] == [
        (name, "cuda", "passed")
        for name in ("copy", "empty", "copy-rate", "pt-reference", "cuda-v4")
    ]
    assert all(
        r["timing"]["tier"] == "cupti" and r["timing"]["median_us"] > 0
        for r in document["records"]
    )
    env = document["environments"]["cuda"]
    assert (
        env["gpu"] == torch.cuda.get_device_name()
        and env["driver"]
        and env["cuda"] == torch.version.cuda
    )
    assert env["capability"] == ".".join(map(str, torch.cuda.get_device_capability()))


# --- graphs and streams


class Call:
    """A built kernel with its own inputs and outputs at fixed addresses."""

    def __init__(self, algo, chosen: str) -> None:
        if (place := inventory.HERE.place(algo, MODE)).mode is None:
            pytest.skip(f"{algo.full_name}: {place.reason}")
        from gdn_cli.worker.judge import dataset

        self.op, self.kernel = helpers.built(algo.full_name, MODE)
        (self.workload,) = work(self.op, [chosen])
        self.inputs = dataset.load_inputs(self.op, self.workload, MODE)
        self.outputs = check.allocate(self.op, self.workload.axes, MODE)
        assert self.kernel.destination_passing, (
            "a kernel that allocates needs a test of its own"
        )

    def __call__(self) -> None:
        self.kernel(self.inputs, self.outputs)

    def results(self) -> list:
        torch.cuda.synchronize()
        return [x.clone() for x in self.outputs]

    def spoil(self) -> None:
        for x in self.outputs:
            x.fill_(float("nan"))

    def tensors(self) -> list:
        return [x for x in self.inputs if isinstance(x, torch.Tensor)]


SMALL = {
    "gdn_decode": "batch_size=3",
    "attention_fwd": "batch_size=3,seq_len=67",
    "attention_fwd_causal": "batch_size=3,seq_len=67",
}
SMALL_ONES = [p for p in KERNELS if p.values[0].op in SMALL]


@pytest.mark.parametrize("algo", SMALL_ONES)
def test_a_cuda_graph_replays_to_the_same_result(algo):
    call = Call(algo, SMALL[algo.op])
    call()
    eager = call.results()
    # a new stream does not wait for the one that makes the inputs
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    call.spoil()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(call.results(), eager, strict=True))

    # other inputs in the same place: a replay computes, it does not remember
    v = call.inputs[2]
    v.neg_()
    call.spoil()
    graph.replay()
    replayed = call.results()
    call.spoil()
    call()
    assert all(torch.equal(a, b) for a, b in zip(replayed, call.results(), strict=True))
    assert not torch.equal(replayed[0], eager[0])


@pytest.mark.parametrize("algo", SMALL_ONES)
def test_a_kernel_runs_on_the_current_stream(algo):
    """Inputs become right only late on that stream: a kernel on any other stream reads
    them too early.
    """
    call = Call(algo, SMALL[algo.op])
    call()
    eager = call.results()
    right = [x.clone() for x in call.tensors()]
    for x in call.tensors():
        x.zero_()
    call.spoil()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles: about 50 ms
        for x, value in zip(call.tensors(), right, strict=True):
            x.copy_(value)
        call()
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(call.outputs, eager, strict=True))


# --- two GPUs of one host


@pytest.fixture
def both():
    """UUID -> number of the first two GPUs, as gdn names them."""
    # in a new process: this one may have initialised CUDA while an earlier test made
    # only one GPU visible
    ask = (
        "import torch; print(*(torch.cuda.get_device_properties(i).uuid for i in"
        " range(torch.cuda.device_count())))"
    )
    visible = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.split()
    if len(visible) < 2:
        pytest.skip(f"needs two GPUs, {len(visible)} visible here")
    found = inventory.gpus()[:2]
    # what CUDA puts at 0 and 1 is what gdn takes for 0 and 1
    assert [
        g.uuid.endswith(uuid) for g, uuid in zip(found, visible[:2], strict=True)
    ] == [True] * 2
    return {g.uuid: g.index for g in found}


ON_BOTH = f"""import os
from .right import run as right

def run({helpers.DECODE_ARGS}):
    {{}}
    return right({helpers.DECODE_ARGS})
"""


def test_two_algos_on_two_gpus_each_with_its_own_floors(both):
    result = helpers.gdn(
        "bench", "--algo", "cuda-v4,cuda-v1", "--gpus", "0,1", "-w", "batch_size=4", "-n", "1", "--seconds", "0.1",
        "--json", gpu=True,
    )  # fmt: skip
    assert result.code == errors.OK, result.err + result.out
    document, on = result.json, {}
    for r in document["records"]:
        on.setdefault(r["algo"], set()).add((r["gpu"]["uuid"], r["gpu"]["index"]))
        assert r["timing"]["tier"] == "cupti" and r["timing"]["median_us"] > 0
        # the worker's own word, from what CUDA gave it
        assert (
            document["environments"][f"cuda:{r['gpu']['index']}"]["gpu_uuid"]
            == r["gpu"]["uuid"]
        )
        # they do not share a GPU
        assert not any("other process" in text for text in r["doubts"])
    everywhere = set(both.items())
    assert (
        on["copy"] == on["empty"] == on["copy-rate"] == on["pt-reference"] == everywhere
    )
    assert (
        len(on["cuda-v4"]) == len(on["cuda-v1"]) == 1
        and on["cuda-v4"] | on["cuda-v1"] == everywhere
    )
    cpus = [set(_numbers(env["affinity"])) for env in document["environments"].values()]
    assert len(cpus) == 2 and not cpus[0] & cpus[1]


def _numbers(text: str) -> list[int]:
    ends = [run.split("-") for run in text.split(",")]
    return [n for run in ends for n in range(int(run[0]), int(run[-1]) + 1)]


def test_one_algo_has_its_workloads_on_two_gpus(both):
    args = "--gpus", "0,1", "-w", "batch_size=4", "-w", "batch_size=8", "--json"
    result = helpers.gdn("run", "--algo", "cuda-v4", *args, gpu=True)
    assert result.code == errors.OK, result.err + result.out
    on = {}
    for r in result.json["records"]:
        on.setdefault(r["workload"]["axes"]["batch_size"], set()).add(r["gpu"]["uuid"])
    assert len(on[4]) == len(on[8]) == 1 and on[4] | on[8] == set(both)


def test_a_worker_that_dies_on_one_gpu_does_not_stop_the_other(
    both, tmp_path, write_algo
):
    for name, does in (("bad", "os.abort()"), ("good", "pass")):
        write_algo(tmp_path, name, ON_BOTH.format(does), devices=["cuda"])
    args = (
        "--algos",
        tmp_path,
        "--algo",
        "bad,good",
        "--gpus",
        "0,1",
        "-w",
        "0-1",
        "--json",
    )
    result = helpers.gdn("run", *args, gpu=True)
    assert result.code == errors.FAILED, result.err + result.out
    found = {(r["algo"], r["status"], r["gpu"]["uuid"]) for r in result.json["records"]}
    first, second = both
    assert found == {("bad", "crashed", first), ("good", "passed", second)}


def test_tune_on_two_gpus(both, tmp_path, write_algo):
    """A constant that changes nothing: what counts is where each size was timed."""
    toml = '[tune]\nfile = "tuned.py"\nsize = ["batch_size"]\n[tune.constants]\ntile = [1, 2]\n'
    guess = (
        'TUNED = [\n    {"gpu": "untuned", "sms": 0, "up_to": 9223372036854775807, "tile":'
        " 1},\n]\n"
    )
    source = "from .tuned import TUNED\n" + ON_BOTH.format("assert TUNED")
    folder = write_algo(
        tmp_path,
        "mine",
        {"main.py": source, "tuned.py": guess},
        extra=toml,
        devices=["cuda"],
    )
    result = helpers.gdn(
        "tune", "--algos", tmp_path, "--algo", "mine", "--gpus", "0,1", "-w", "batch_size=3", "-w", "batch_size=5",
        "--seconds", "0.2", "--json", gpu=True, env={"GDN_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert result.code == errors.OK, result.err + result.out
    rows = result.json["result"]["workloads"]
    assert [(row["axes"]["batch_size"], row["gpu"]["uuid"]) for row in rows] == list(
        zip((3, 5), both, strict=True)
    )
    assert (folder / "tuning.json").is_file() and "untuned" not in (
        folder / "tuned.py"
    ).read_text()
