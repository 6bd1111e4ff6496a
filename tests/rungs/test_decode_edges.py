"""Decode beyond the definition's shape: odd batches, other heads, gates at their ends,
states zero, large, in place.

Every algo of gdn_decode that is written here, as the registry has it: on the CPU and
below Triton's interpreter what a few seconds allow, on a GPU all of it. A state as
large as these sizes make it wants a float64 step that is quick (edges.py); it is held
against the oracle first.
"""

import helpers
import oracle
import pytest
import torch
from rungs import edges
from rungs.edges import Edges, exact_step, named

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode"]
TOLERANCE = {"output": 5e-3, "new_state": 1e-5}

# torch.compile compiles again for each shape, which takes many seconds: see rungs/test_algos.py
OURS = [
    a
    for a in REGISTRY.algos_of(OP.name)
    if not a.packages
    and not any("torch.compile(" in p.read_text() for p in a.folder.glob("*.py"))
]
KERNELS = [a for a in OURS if a.destination_passing]
TRITON = [a for a in OURS if a.language == "triton"]
TUNED = [a for a in TRITON if a.tune]

BATCHES = (1, 2, 3, 5, 7, 12, 24, 31, 65, 100, 257)
HEADS = ((4, 8), (2, 8), (16, 32), (16, 64), (1, 1))
# What A_log, a and b are drawn around: g to 1, 0 or just below 1 in float32, beta to 1 or 0.
GATES = {
    "usual": (-1.0, -1.0, 0.0),
    # softplus underflows; no decay, every value is written in full
    "keep": (-9.0, -30.0, 30.0),
    "forget": (4.0, 60.0, 0.0),  # only the current update is left
    # exp(95) overflows float32: beta must be 0 and not NaN
    "deaf": (-1.0, -1.0, -95.0),
    # log1p(e) where 1 + e has lost most of e, times a large exp(A_log)
    "slow": (4.0, -12.0, 0.0),
}
STATES = {"usual": 1.0, "zero": 0.0, "large": 1e6}


ENDS = {
    **{f"gates {gates}": dict(B=2, gates=gates, scale=0.3) for gates in GATES},
    **{f"state {state}": dict(state=state) for state in STATES},
    "scale 0": dict(scale=0.0),
    "in place": dict(B=3, in_place=True),
}
SMALL = ENDS | {
    "one head": dict(B=5, HV=1),
    "four to a group": dict(H=2, HV=8),
    "three to a group": dict(HV=3),
}


def inputs(B=1, H=1, HV=2, gates="usual", state="usual", scale=None, device="cpu", **_):
    """Tensors (and the scale) in the definition's order and dtypes: q, k, v, state,
    A_log, a, dt_bias, b, scale.
    """
    g = torch.Generator(device).manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device=device)

    A_mean, a_mean, b_mean = GATES[gates]
    return [
        randn(B, 1, H, 128).bfloat16(),
        torch.nn.functional.normalize(randn(B, 1, H, 128), dim=-1).bfloat16(),
        randn(B, 1, HV, 128).bfloat16(),
        randn(B, HV, 128, 128).mul_(STATES[state]),
        A_mean + 0.25 * randn(HV),
        (a_mean + randn(B, 1, HV)).bfloat16(),
        0.25 * randn(HV),
        (b_mean + randn(B, 1, HV)).bfloat16(),
        scale,
    ]


EDGES = Edges(OP, inputs, exact_step, TOLERANCE, loose={})


def interpreted(name, cases, tuned=False):
    """For the process of the fixture `interpreter`."""
    return EDGES.judge(name, "interpreter", cases, tuned)


@pytest.fixture
def below_the_interpreter(interpreter, algo):
    """below_the_interpreter(cases, tuned) -> the faults of `algo`."""
    import numpy
    import triton

    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    new_numpy = tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)
    if "interpreter" not in algo.modes and old and new_numpy:
        pytest.skip(
            f"triton {triton.__version__}'s interpreter has no such loops with numpy"
            f" {numpy.__version__}"
        )
    return lambda *how: interpreter(interpreted, algo.full_name, *how)


# --- without a GPU


@pytest.mark.parametrize("name", SMALL)
def test_the_quick_step_is_the_oracle(name):
    args = inputs(**SMALL[name])
    for quick, slow in zip(exact_step(*args), oracle.gdn_decode(*args), strict=True):
        assert oracle.error(quick, slow) < 1e-12


@named(OURS, "cpu")
def test_at_the_edges_on_the_cpu(algo):
    assert EDGES.judge(algo.full_name, "cpu", SMALL) == {}


@named(TRITON)
@pytest.mark.slow
def test_at_the_edges_below_the_interpreter(algo, below_the_interpreter):
    cases = {
        name: case | {"B": min(case.get("B", 1), 2)} for name, case in SMALL.items()
    }
    assert below_the_interpreter(cases) == {}


@named(TUNED)
@pytest.mark.slow
def test_every_constant_that_can_be_tuned_is_right(algo, below_the_interpreter):
    assert below_the_interpreter({"in place": dict(in_place=True)}, True) == {}


# --- on a GPU

ON_GPU = named(OURS, "cuda")
ON_GPU_IN_PLACE = named(KERNELS, "cuda")


@ON_GPU
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}-{heads[1]}")
def test_every_batch_and_head_count(algo, heads):
    H, HV = heads
    cases = {f"B={B}": dict(B=B, H=H, HV=HV) for B in BATCHES}
    assert EDGES.judge(algo.full_name, "cuda", cases) == {}


@ON_GPU
def test_at_the_edges_on_the_gpu(algo):
    size = dict(B=65, H=4, HV=8)
    large = {f"{name}, B=65": case | size for name, case in ENDS.items()}
    assert EDGES.judge(algo.full_name, "cuda", SMALL | large) == {}


@ON_GPU_IN_PLACE
def test_in_place_gives_the_same_bits(algo):
    kernel = helpers.kernel(algo.full_name)
    for B in (1, 12, 100):
        apart, same = (
            edges.call(kernel, inputs(B, 4, 8, device="cuda"), in_place)
            for in_place in (False, True)
        )
        assert all(map(torch.equal, apart, same)), B


@ON_GPU_IN_PLACE
def test_a_graph_of_steps_in_place_advances_the_state(algo):
    """Three replays are three tokens: every launch of a graph reads the output of the
    previous one.
    """
    if algo.language == "python":
        pytest.skip("eager torch allocates and asks the host")
    kernel = helpers.kernel(algo.full_name)
    args = inputs(31, 4, 8, device="cuda")
    start = args[3].clone()
    output = torch.empty_like(args[2])
    graph = helpers.captured(lambda: kernel(args, [output, args[3]]))
    args[3].copy_(start)
    right = start.double()
    for _ in range(3):
        graph.replay()
        right_output, right = exact_step(*args[:3], right, *args[4:])
    torch.cuda.synchronize()
    assert EDGES.right_enough([output, args[3]], [right_output, right])


@ON_GPU_IN_PLACE
def test_a_state_beyond_what_32_bits_count(algo):
    """2^31 elements and more: an int32 offset wraps around. In place; the first and the
    last sequences are judged.
    """
    if algo.language == "python":
        pytest.skip("eager torch: no offsets of ours, and several copies of the state")
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of GPU memory free")
    kernel = helpers.kernel(algo.full_name)
    args = inputs(2049, 16, 64, device="cuda")
    assert args[3].numel() > 2**31
    ends = torch.tensor([0, 1, 2047, 2048], device="cuda")
    few = [x if i in (4, 6, 8) else x[ends] for i, x in enumerate(args)]
    right = exact_step(*few)
    results = edges.call(kernel, args, in_place=True)
    assert EDGES.right_enough([x[ends] for x in results], right)


@named(TUNED, "cuda")
def test_every_constant_that_can_be_tuned_is_right_on_the_gpu(algo):
    cases = {f"B={B}": dict(B=B, H=4, HV=8) for B in (1, 31)}
    assert EDGES.judge(algo.full_name, "cuda", cases, tuned=True) == {}
