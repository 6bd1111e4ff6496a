"""On a CUDA device (`make test-gpu`): every algo that runs there is right, timed by
each tier, and well-behaved.

Skipped, with the reason, where there is no device. New folders under algos/ are picked
up by themselves.
"""

import functools
import re
import subprocess
import sys
from collections import defaultdict

import helpers
import msgspec
import pytest
import torch
from rungs.test_algos import CASES, agrees, cases_of

from gdn_cli import errors
from gdn_cli.catalog import pack
from gdn_cli.catalog.workloads import embedded, select
from gdn_cli.machine import inventory
from gdn_cli.run import jobs
from gdn_cli.worker.judge import check, dataset
from gdn_cli.worker.request import Timing

pytestmark = pytest.mark.gpu

REGISTRY = helpers.REGISTRY
MODE = "cuda"
ON_GPU = [pytest.param(a, id=a.full_name) for a in REGISTRY.algos if MODE in a.modes]


def pinned(algo):
    """One of PyTorch's backends, which has shapes that it does not take, and says so."""
    return re.fullmatch(r"sdpa-\w+", algo.name.removesuffix("-causal")) is not None


# our own algos, which can be built and called in this process without crashing it
OURS = [p for p in ON_GPU if not (p.values[0].packages or pinned(p.values[0]))]
# one launch or a few, nothing that asks the host: these must live in CUDA graphs and on any stream
KERNELS = [p for p in OURS if p.values[0].language in ("cuda", "triton")]

# B below and above a warp, an SM count's fraction, a power of two and its neighbours
DECODE = [f"batch_size={n}" for n in (1, 2, 3, 4, 5, 7, 64, 65)]
VERIFY = ["batch_size=3", "batch_size=7,seq_len=8", "batch_size=64,seq_len=4"]
ATTENTION = ["seq_len=128", "seq_len=512"]
ATTENTION += ["batch_size=2,seq_len=67", "batch_size=3,seq_len=1"]
WORKLOADS = helpers.of_each_op(
    {
        "gdn_decode": DECODE,
        "gdn_layer_post_conv": [*DECODE, "seq_len=2", "seq_len=3", *VERIFY],
        "gdn_layer": DECODE,
        "gdn_mtp_bf16": ["seq_len=2", *VERIFY],
        "gdn_mtp_packed_bf16": ["seq_len=2", *VERIFY],
        "gdn_mtp": ["seq_len=2", "seq_len=3", *VERIFY],
        "gdn_prefill_packed_f16": [
            "total_seq_len=16,num_seqs=1",
            "seq_lens=1+64+65",
            "seq_lens=40x70",
        ],
        "gdn_prefill_packed_bf16": [
            "total_seq_len=16,num_seqs=1",
            "seq_lens=1+64+65",
            "seq_lens=40x70",
        ],
        "gdn_prefill_packed": [
            "total_seq_len=16,num_seqs=1",
            "total_seq_len=139,num_seqs=3",
            "total_seq_len=2048,num_seqs=1",
            "seq_lens=1+64+65",
            "seq_lens=3x100",
            "seq_lens=40x70",
        ],
        "gdn_prefill": [
            "total_seq_len=6,num_seqs=1",
            "total_seq_len=16,num_seqs=1",
            "total_seq_len=139,num_seqs=3",
            "total_seq_len=525,num_seqs=1",
            "seq_lens=1+64+65",
            "seq_lens=3x100",
            "seq_lens=1x63",
        ],
        "attention_fwd": ATTENTION,
    }
)


def work(op, chosen):
    """One workload for each axis filter: of the contest's with these axes the first,
    else a twin.
    """
    return tuple(select(op, embedded(op), chosen=[text])[0] for text in chosen)


def job(algo, command, chosen, **more):
    helpers.needs(algo)
    op = REGISTRY.ops[algo.op]
    return jobs.Job.of(
        command,
        op,
        pack.definition(op, REGISTRY),
        MODE,
        work(op, chosen),
        [(algo, pack.pack(algo, op))],
        timeout_s=600,
        **more,
    )


def done(outcome):
    assert outcome.status == "done", f"{outcome.reason}\n" + "\n".join(outcome.tail)
    return [msgspec.to_builtins(record) for record in outcome.records]


@pytest.mark.parametrize("algo", ON_GPU)
def test_every_algo_is_right_on_small_odd_and_usual_sizes(algo):
    records = done(jobs.execute(job(algo, "check", WORKLOADS[algo.op])))
    ran = [r for r in records if "does not run here" not in (r["reason"] or "")]
    if not ran:
        pytest.skip("no size runs here")
    assert pinned(algo) or len(ran) == len(WORKLOADS[algo.op])
    for r in ran:
        assert r["status"] == "passed", (r["workload"]["axes"], r["reason"])
        assert r["check"]["official"]
        assert set(r["check"]["errors"]) == set(REGISTRY.ops[algo.op].outputs)


@functools.cache
def verdicts(name):
    algo = REGISTRY.find(name)
    names = cases_of(algo, MODE)
    cases = [CASES[algo.op][case] for case in names]
    return dict(zip(names, helpers.judge(name, cases, MODE), strict=True))


@pytest.mark.parametrize(
    ("algo", "case"),
    [
        pytest.param(p.values[0], case, id=f"{p.id}-{case}")
        for p in OURS
        for case in cases_of(p.values[0], MODE)
    ],
)
def test_ours_agree_with_the_oracle_at_the_edges(algo, case):
    """Scales, extreme gates and empty sequences, as test_algos has them for the CPU."""
    agrees(algo, verdicts(algo.full_name)[case])


# --- times


TIERS = ("cupti", "events", "graph")  # nvbench and fib: timing/test_tiers.py


@pytest.mark.parametrize("l2", ["cold", "warm"])
@pytest.mark.parametrize("algo", [p for p in KERNELS if p.values[0].op == "gdn_decode"])
def test_every_tier_times_a_small_decode(algo, l2):
    timing = Timing(TIERS, {"seconds": 0.1, "l2": l2})
    records = done(jobs.execute(job(algo, "bench", ["batch_size=1"], timing=timing)))
    passed = [(tier, "passed", None) for tier in TIERS]
    assert [(r["tier"], r["status"], r["reason"]) for r in records] == passed
    seen = {r["tier"]: r["timing"] for r in records}
    for tier, t in seen.items():
        assert (t["tier"], t["l2"], t["note"]) == (tier, l2, None)
        assert t["samples"] >= 3
        assert 0 < t["low_us"] <= t["median_us"] <= t["high_us"]
        assert t["ci_low_us"] <= t["median_us"] <= t["ci_high_us"]
    assert seen["cupti"]["kernels"] >= 1
    assert seen["cupti"]["span_us"] > 0
    # events pay for themselves on top of the kernel: 3 to 4 us of a kernel's 3
    assert seen["cupti"]["median_us"] < seen["events"]["median_us"]


def test_the_floors_of_this_gpu():
    op = REGISTRY.ops["gdn_decode"]
    if not inventory.gpus():
        pytest.skip("no GPU here")
    what = op, pack.definition(op, REGISTRY), MODE, work(op, ["batch_size=8"])
    asked = jobs.Job.of("floor", *what, timing=Timing(TIERS))
    found = done(jobs.execute(asked))
    floors = [(name, tier) for name in ("copy", "empty") for tier in TIERS]
    floors.append(("copy-rate", "cupti"))
    assert [(r["algo"], r["tier"]) for r in found] == floors
    times = {(r["algo"], r["tier"]): r["timing"]["median_us"] for r in found}
    for tier in TIERS:
        assert 0 < times["empty", tier] < times["copy", tier]
    after = found[0]["gpu_state"]["after"]
    assert after["sm_mhz"] > 0
    assert after["temperature_c"] > 0
    assert "throttle" in after


def gdn(command, *args, code=errors.OK, **how):
    """The document of `gdn COMMAND --json` on the GPU."""
    result = helpers.gdn(command, *args, "--json", gpu=True, **how)
    assert result.code == code, result.err + result.out
    return result.json


SHORT = "-w", "batch_size=4", "-n", "1"


def test_an_algo_is_compared_with_itself_on_the_same_buffers():
    helpers.needs(REGISTRY.find("cuda-v4"))
    document = gdn("compare", "cuda-v4", "cuda-v4", *SHORT)
    (compared,), (overall,) = document["comparisons"], document["overall"]
    pair = compared["baseline"], compared["algo"], compared["tier"]
    assert pair == ("cuda-v4", "cuda-v4@2", "cupti")
    assert compared["low"] <= compared["ratio"] <= compared["high"]
    assert compared["rounds"] >= 40
    ratio = compared["baseline_us"] / compared["us"]
    assert compared["ratio"] == pytest.approx(ratio, rel=1e-6)
    assert overall["ratio"] == pytest.approx(compared["ratio"])


def test_gdn_bench_with_its_floor_and_its_origin():
    helpers.needs(REGISTRY.find("cuda-v4"))
    document = gdn("bench", "--algo", "cuda-v4", *SHORT, "--seconds", "0.1")
    records = document["records"]
    names = ["copy", "empty", "copy-rate", "pt-reference", "cuda-v4"]
    assert [r["algo"] for r in records] == names
    for r in records:
        assert (r["mode"], r["status"]) == ("cuda", "passed")
        assert r["timing"]["tier"] == "cupti"
        assert r["timing"]["median_us"] > 0
    env = document["environments"]["cuda"]
    assert env["gpu"] == torch.cuda.get_device_name()
    assert env["driver"]
    assert env["cuda"] == torch.version.cuda
    assert env["capability"] == ".".join(map(str, torch.cuda.get_device_capability()))


# --- graphs and streams


class Call:
    """A built kernel with its own inputs and outputs at fixed addresses."""

    def __init__(self, algo, chosen):
        self.op, self.kernel = helpers.built(algo.full_name, MODE)
        (self.workload,) = work(self.op, [chosen])
        self.inputs = dataset.load_inputs(self.op, self.workload, MODE)
        self.outputs = check.allocate(self.op, self.workload.axes, MODE)
        assert self.kernel.destination_passing, (
            "a kernel that allocates needs a test of its own"
        )

    def __call__(self):
        self.kernel(self.inputs, self.outputs)

    def results(self):
        torch.cuda.synchronize()
        return [x.clone() for x in self.outputs]

    def spoil(self):
        for x in self.outputs:
            x.fill_(float("nan"))

    def tensors(self):
        return [x for x in self.inputs if isinstance(x, torch.Tensor)]


def same(some, others):
    return all(map(torch.equal, some, others))


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
    graph = helpers.captured(call)
    call.spoil()
    graph.replay()
    assert same(call.results(), eager)

    # other inputs in the same place: a replay computes, it does not remember
    call.inputs[2].neg_()
    call.spoil()
    graph.replay()
    replayed = call.results()
    call.spoil()
    call()
    assert same(replayed, call.results())
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
    assert same(call.outputs, eager)


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
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    visible = asked.stdout.split()
    if len(visible) < 2:
        pytest.skip(f"needs two GPUs, {len(visible)} visible here")
    found = inventory.gpus()[:2]
    # what CUDA puts at 0 and 1 is what gdn takes for 0 and 1
    for gpu, uuid in zip(found, visible[:2], strict=True):
        assert gpu.uuid.endswith(uuid)
    return {gpu.uuid: gpu.index for gpu in found}


ON_BOTH = f"""import os
from .right import run as right

def run({helpers.DECODE_ARGS}):
    {{}}
    return right({helpers.DECODE_ARGS})
"""
TWO = "--gpus", "0,1"


def test_two_algos_on_two_gpus_each_with_its_own_floors(both):
    how = *TWO, *SHORT, "--seconds", "0.1"
    document = gdn("bench", "--algo", "cuda-v4,cuda-v1", *how)
    environments = document["environments"]
    on = defaultdict(set)
    for r in document["records"]:
        gpu = r["gpu"]
        on[r["algo"]].add((gpu["uuid"], gpu["index"]))
        assert r["timing"]["tier"] == "cupti"
        assert r["timing"]["median_us"] > 0
        # the worker's own word, from what CUDA gave it
        assert environments[f"cuda:{gpu['index']}"]["gpu_uuid"] == gpu["uuid"]
        # they do not share a GPU
        assert not any("other process" in text for text in r["doubts"])
    everywhere = set(both.items())
    for name in ("copy", "empty", "copy-rate", "pt-reference"):
        assert on[name] == everywhere
    assert len(on["cuda-v4"]) == len(on["cuda-v1"]) == 1
    assert on["cuda-v4"] | on["cuda-v1"] == everywhere
    cpus = [_numbers(env["affinity"]) for env in environments.values()]
    assert len(cpus) == 2
    assert not cpus[0] & cpus[1]


def _numbers(text):
    ends = [run.split("-") for run in text.split(",")]
    return {n for run in ends for n in range(int(run[0]), int(run[-1]) + 1)}


def test_one_algo_has_its_workloads_on_two_gpus(both):
    sizes = "-w", "batch_size=4", "-w", "batch_size=8"
    on = defaultdict(set)
    for r in gdn("run", "--algo", "cuda-v4", *TWO, *sizes)["records"]:
        on[r["workload"]["axes"]["batch_size"]].add(r["gpu"]["uuid"])
    assert len(on[4]) == len(on[8]) == 1
    assert on[4] | on[8] == set(both)


def test_a_worker_that_dies_on_one_gpu_does_not_stop_the_other(
    both, tmp_path, write_algo
):
    for name, does in (("bad", "os.abort()"), ("good", "pass")):
        write_algo(tmp_path, name, ON_BOTH.format(does), devices=["cuda"])
    args = "--algos", tmp_path, "--algo", "bad,good", *TWO, "-w", "0-1"
    document = gdn("run", *args, code=errors.FAILED)
    found = {(r["algo"], r["status"], r["gpu"]["uuid"]) for r in document["records"]}
    first, second = both
    assert found == {("bad", "crashed", first), ("good", "passed", second)}


TUNE = """
[tune]
file = "tuned.py"
size = ["batch_size"]
[tune.constants]
tile = [1, 2]
"""
UNTUNED = """\
TUNED = [
    {"gpu": "untuned", "sms": 0, "up_to": 9223372036854775807, "tile": 1},
]
"""


def test_tune_on_two_gpus(both, tmp_path, write_algo):
    """A constant that changes nothing: what counts is where each size was timed."""
    main = "from .tuned import TUNED\n" + ON_BOTH.format("assert TUNED")
    sources = {"main.py": main, "tuned.py": UNTUNED}
    folder = write_algo(tmp_path, "mine", sources, extra=TUNE, devices=["cuda"])
    args = "--algos", tmp_path, "--algo", "mine", *TWO, "--seconds", "0.2"
    sizes = "-w", "batch_size=3", "-w", "batch_size=5"
    home = {"GDN_HOME": str(tmp_path / "home")}
    rows = gdn("tune", *args, *sizes, env=home)["result"]["workloads"]
    found = {row["axes"]["batch_size"]: row["gpu"]["uuid"] for row in rows}
    assert found == dict(zip((3, 5), both, strict=True))
    assert (folder / "tuning.json").is_file()
    assert "untuned" not in (folder / "tuned.py").read_text()
