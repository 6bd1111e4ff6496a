"""Decode beyond the definition's shape: odd batches, other heads, gates at their ends,
states zero, large, in place.

Every algo of gdn_decode that is written here, as the registry has it: on the CPU and
below Triton's interpreter what a few seconds allow, on a GPU all of it. A state as
large as these sizes make it wants a float64 step that is quick, so there is one here;
it is held against the oracle first.
"""

from __future__ import annotations

import functools
import math

import helpers
import oracle
import pytest
import torch

from gdn_cli.catalog import tuned_table
from gdn_cli.machine import inventory

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode"]
TOLERANCE = {"output": 5e-3, "new_state": 1e-5}

# torch.compile compiles again for each shape, which takes many seconds: see kernels/test_algos.py
OURS = [
    a
    for a in REGISTRY.of(OP.name)
    if not a.packages
    and not any("torch.compile(" in p.read_text() for p in a.folder.glob("*.py"))
]
KERNELS = [a for a in OURS if a.destination_passing]
TRITON = [a for a in OURS if a.language == "triton"]

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


def case(
    B: int = 1,
    H: int = 4,
    HV: int = 8,
    gates: str = "usual",
    state: str = "usual",
    scale=None,
    in_place=False,
):
    return dict(
        B=B, H=H, HV=HV, gates=gates, state=state, scale=scale, in_place=in_place
    )


EDGES = {
    **{f"gates {gates}": case(2, 1, 2, gates=gates, scale=0.3) for gates in GATES},
    **{f"state {state}": case(1, 1, 2, state=state) for state in STATES},
    "scale 0": case(1, 1, 2, scale=0.0),
    "in place": case(3, 1, 2, in_place=True),
}
SMALL = EDGES | {
    "one head": case(5, 1, 1),
    "four to a group": case(1, 2, 8),
    "three to a group": case(1, 1, 3),
}


def inputs(
    B, H, HV, gates="usual", state="usual", scale=None, device="cpu", seed=0, **_
) -> list:
    """Tensors (and the scale) in the definition's order and dtypes: q, k, v, state,
    A_log, a, dt_bias, b, scale.
    """
    g = torch.Generator(device).manual_seed(seed)

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


def exact(
    q, k, v, state, A_log, a, dt_bias, b, scale
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, new_state) of one step in float64, on the inputs' device; held against
    oracle.gdn_decode below.
    """
    q, k, v, A_log, a, dt_bias, b = (
        x.double() for x in (q, k, v, A_log, a, dt_bias, b)
    )
    group = v.shape[2] // q.shape[2]
    # [B, HV, K, 1]
    q, k = (x[:, 0].repeat_interleave(group, dim=1)[..., None] for x in (q, k))
    x = a[:, 0] + dt_bias
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    S = state.double() * torch.exp(-torch.exp(A_log) * softplus)[..., None, None]
    d = torch.sigmoid(b[:, 0])[..., None] * (v[:, 0] - (S @ k)[..., 0])
    S += d[..., None] * k.mT
    return (scale or 128**-0.5) * (S @ q)[..., 0][:, None], S


def error(x: torch.Tensor, right: torch.Tensor) -> float:
    """Relative Frobenius error, as oracle.error has it, on the device."""
    norm, distance = float(right.norm()), float((x.double() - right).norm())
    return distance / norm if norm else distance


def step(kernel, args: list, in_place: bool = False) -> list:
    """[output, new_state] of one call; in place, the state that came in is the one that
    comes out.
    """
    if not kernel.destination_passing:
        return kernel.returns(args)
    new_state = args[3] if in_place else torch.full_like(args[3], math.nan)
    results = [torch.full_like(args[2], math.nan), new_state]
    kernel(args, results)
    return results


def judge(kernel, work: dict, device: str = "cpu") -> dict[str, float]:
    """Output -> error of one case; NaN where anything is."""
    args = inputs(**work, device=device)
    right = exact(*args)
    results = step(kernel, args, work["in_place"])
    return {
        name: error(x, y) for name, x, y in zip(TOLERANCE, results, right, strict=True)
    }


def wrong(errors: dict[str, dict[str, float]]) -> dict:
    """Outputs beyond the tolerance, or NaN."""
    return {
        c: e
        for c, e in errors.items()
        if not all(e[name] <= limit for name, limit in TOLERANCE.items())
    }


def covering(algo) -> list[dict[str, int]]:
    """A few candidates of `gdn tune` that have every value of every constant among them."""
    seen, chosen = set(), []
    for constants in reversed(tuned_table.candidates(algo)[0]):
        if not seen.issuperset(constants.items()):
            seen.update(constants.items())
            chosen.append(constants)
    return chosen


def skip_old_interpreters(algo) -> None:
    import numpy
    import triton

    versions = (
        tuple(int(n) for n in triton.__version__.split(".")[:2]),
        tuple(map(int, numpy.__version__.split(".")[:2])),
    )
    if (
        "interpreter" not in algo.modes
        and versions[0] < (3, 9)
        and versions[1] >= (2, 4)
    ):
        pytest.skip(
            f"triton {triton.__version__}'s interpreter has no such loops with numpy"
            f" {numpy.__version__}"
        )


def interpreted(name: str, work: dict, constants: list[dict] | None = None) -> dict:
    """For the process of the fixture `interpreter`: case -> errors."""
    algo = REGISTRY.find(name)
    if constants is None:
        kernel = helpers.build(algo, "interpreter")
        return {c: judge(kernel, one) for c, one in work.items()}
    found = {}
    for chosen in constants:
        kernel = helpers.build(
            algo, "interpreter", tuned_table.candidate(algo, OP, chosen).solution
        )
        found |= {
            f"{c}, {tuned_table.label(chosen)}": judge(kernel, one)
            for c, one in work.items()
        }
    return found


def named(algos: list) -> list:
    return [pytest.param(a, id=a.name) for a in algos]


# --- without a GPU


@pytest.mark.parametrize("name", SMALL)
def test_the_quick_step_is_the_oracle(name):
    args = inputs(**SMALL[name])
    for quick, slow in zip(exact(*args), oracle.gdn_decode(*args), strict=True):
        assert oracle.error(quick, slow) < 1e-12


def test_the_gates_reach_their_ends():
    def gates(name):
        _, _, _, _, A_log, a, dt_bias, b, _ = inputs(64, 1, 8, gates=name)
        x = a.double() + dt_bias.double()
        return (
            torch.exp(
                -A_log.double().exp() * torch.nn.functional.softplus(x, threshold=1e9)
            ),
            b.double().sigmoid(),
        )

    g, beta = gates("keep")
    assert g.float().min() == 1 and beta.float().min() == 1
    assert gates("forget")[0].float().max() == 0
    assert 0 < gates("deaf")[1].max() < torch.finfo(torch.float32).tiny
    g, _ = gates("slow")
    assert 0.99 < g.median() < 1 - 1e-5


@pytest.mark.parametrize("algo", named([a for a in OURS if "cpu" in a.modes]))
def test_at_the_edges_on_the_cpu(algo):
    if algo.language == "cpp" and not inventory.cxx():
        pytest.skip("no C++ compiler here")
    kernel = helpers.build(algo, "cpu")
    assert wrong({name: judge(kernel, work) for name, work in SMALL.items()}) == {}


@pytest.mark.parametrize("algo", named(TRITON))
@pytest.mark.slow
def test_at_the_edges_below_the_interpreter(algo, interpreter):
    skip_old_interpreters(algo)
    work = {name: one | {"B": min(one["B"], 2)} for name, one in SMALL.items()}
    found = interpreter(interpreted, algo.full_name, work)
    assert wrong(found) == {} and set(found) == set(SMALL)


@pytest.mark.parametrize("algo", named([a for a in TRITON if a.tune]))
@pytest.mark.slow
def test_every_constant_that_can_be_tuned_is_right(algo, interpreter):
    skip_old_interpreters(algo)
    chosen = covering(algo)
    found = interpreter(
        interpreted, algo.full_name, {"in place": case(1, 1, 2, in_place=True)}, chosen
    )
    assert wrong(found) == {} and len(found) == len(chosen) > 1


# --- on a GPU


@functools.lru_cache(maxsize=1)
def on_gpu(name: str):
    """The kernel, built once for all tests of one algo in a row."""
    algo = REGISTRY.find(name)
    if (place := inventory.HERE.place(algo, "cuda")).mode is None:
        pytest.skip(f"{name}: {place.reason}")
    return helpers.build(algo, "cuda")


GPU = named([a for a in OURS if "cuda" in a.modes])
GPU_KERNELS = named([a for a in KERNELS if "cuda" in a.modes])


@pytest.mark.gpu
@pytest.mark.parametrize("algo", GPU)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}-{heads[1]}")
def test_every_batch_and_head_count(algo, heads):
    kernel = on_gpu(algo.full_name)
    assert (
        wrong({f"B={B}": judge(kernel, case(B, *heads), "cuda") for B in BATCHES}) == {}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("algo", GPU)
def test_at_the_edges_on_the_gpu(algo):
    kernel = on_gpu(algo.full_name)
    large = {
        f"{name}, B=65": work | {"B": 65, "H": 4, "HV": 8}
        for name, work in EDGES.items()
    }
    assert (
        wrong(
            {
                name: judge(kernel, work, "cuda")
                for name, work in (SMALL | large).items()
            }
        )
        == {}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("algo", GPU_KERNELS)
def test_in_place_gives_the_same_bits(algo):
    kernel = on_gpu(algo.full_name)
    for B in (1, 12, 100):
        apart = step(kernel, inputs(B, 4, 8, device="cuda"))
        same = step(kernel, inputs(B, 4, 8, device="cuda"), in_place=True)
        assert all(torch.equal(x, y) for x, y in zip(apart, same, strict=True)), B


@pytest.mark.gpu
@pytest.mark.parametrize("algo", GPU_KERNELS)
def test_a_graph_of_steps_in_place_advances_the_state(algo):
    """Three replays are three tokens: every launch of a graph reads the output of the
    previous one.
    """
    if algo.language == "python":
        pytest.skip("eager torch allocates and asks the host")
    kernel = on_gpu(algo.full_name)
    args = inputs(31, 4, 8, device="cuda")
    start, output = args[3].clone(), torch.empty_like(args[2])
    # a new stream does not wait for the one that makes the inputs
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        kernel(args, [output, args[3]])  # the first call compiles and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(args, [output, args[3]])
    args[3].copy_(start)
    right = start.double()
    for _ in range(3):
        graph.replay()
        right_output, right = exact(*args[:3], right, *args[4:])
    torch.cuda.synchronize()
    assert (
        error(args[3], right) < TOLERANCE["new_state"]
        and error(output, right_output) < TOLERANCE["output"]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("algo", GPU_KERNELS)
def test_a_state_beyond_what_32_bits_count(algo):
    """2^31 elements and more: an int32 offset wraps around. In place; the first and the
    last sequences are judged.
    """
    if algo.language == "python":
        pytest.skip("eager torch: no offsets of ours, and several copies of the state")
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of GPU memory free")
    kernel = on_gpu(algo.full_name)
    args = inputs(2049, 16, 64, device="cuda")
    assert args[3].numel() > 2**31
    ends = torch.tensor([0, 1, 2047, 2048], device="cuda")
    right = exact(*(x[ends] if i not in (4, 6, 8) else x for i, x in enumerate(args)))
    results = step(kernel, args, in_place=True)
    for x, y, limit in zip(results, right, TOLERANCE.values(), strict=True):
        assert error(x[ends], y) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("algo", named([a for a in TRITON if a.tune]))
def test_every_constant_that_can_be_tuned_is_right_on_the_gpu(algo):
    on_gpu(algo.full_name)  # skips where it cannot run
    found = {}
    for constants in covering(algo):
        kernel = helpers.build(
            algo, "cuda", tuned_table.candidate(algo, OP, constants).solution
        )
        found |= {
            f"B={B}, {tuned_table.label(constants)}": judge(
                kernel, case(B, 4, 8), "cuda"
            )
            for B in (1, 31)
        }
    assert wrong(found) == {}
