"""Tokens in float16, and the gates alone: against float64, on a CPU and on a GPU."""

from __future__ import annotations

import pytest
import serving_steps as steps
import torch
from serving_steps import D, Sequence, apart, error, faults, same

from gdn import serving

pytestmark = steps.ON_BOTH
H, HV = 2, 6
HALF = torch.float16
# half a unit in the last place is 2.4e-4 of a value; bfloat16's is 2e-3
LIMITS = 4e-4, steps.STATE
# of chunks, whose operands are rounded
CHUNKS = 8e-4, steps.STATE | {torch.float32: 8e-4}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
biases = pytest.mark.parametrize("bias", [torch.float32, HALF], ids=str)


def numbers(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def tokens(n: int, device, bias=torch.float32) -> dict:
    """Tokens that bfloat16 does not hold: of 11 bits, and subnormal ones."""
    draw = torch.Generator().manual_seed(n)
    x = steps.tokens(n, H, HV, device)
    for name in "qkvab":
        shape = x[name].shape
        noise = torch.rand(shape, generator=draw).to(device) * 4e-3
        x[name] = (x[name].float() * (1 + noise)).half()
    x["v"][:, :, :9] *= 1e-5
    x["q"][:, :, 1] = 3e-7
    return x | {"dt_bias": x["dt_bias"].to(bias), "scale": 0.1, "norm": True}


def given(x: dict, beta) -> dict:
    """The same tokens with gates instead of what they are computed with."""
    b = x["b"].float().sigmoid().to(beta)
    log_g = -x["a"].float().square()
    return x | {"a": log_g, "b": b, "A_log": None, "dt_bias": None}


def decoded(x: dict, pool, slots) -> torch.Tensor:
    rows = torch.cat([x[name].flatten(1) for name in "qkv"], dim=1)
    gates = x["a"], x["b"], x["A_log"], x["dt_bias"]
    out, _ = serving.packed_decode(rows, *gates, x["scale"], pool, None, slots, True)
    assert out.dtype == rows.dtype
    return out[:, 0]


def singles(slots) -> list[Sequence]:
    return [Sequence(slot, slice(n, n + 1)) for n, slot in enumerate(slots)]


@biases
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_decode(device, dtype, bias):
    slots = [3, 0, 1, 5, 2]
    x = tokens(len(slots), device, bias)
    x |= {"a": apart(x["a"], 5), "b": apart(x["b"], 3)}
    pool = steps.pool(6, HV, device, dtype)
    before = pool.clone()
    out = decoded(x, pool, numbers(slots, device))
    assert faults(singles(slots), x, before, pool, out, limits=LIMITS) == []


@pytest.mark.parametrize("beta", [torch.float32, HALF], ids=str)
def test_decode_with_gates_that_are_given(device, beta):
    slots = [3, 0, 1]
    x = given(tokens(len(slots), device), beta)
    pool = steps.heads_apart(steps.pool(6, HV, device), 64)
    before = pool.clone()
    out = decoded(x, pool, numbers(slots, device).long())
    assert faults(singles(slots), x, before, pool, out, limits=LIMITS) == []


@biases
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("beta", [None, torch.float32, HALF], ids=str)
def test_verify(device, dtype, bias, beta):
    slots, accepted = [[1, 2, 3], [4, 5, 6], [0, 7, 8]], [2, 1, 1]
    x = tokens(7, device, bias)
    if beta is not None:
        x = given(x, beta)
    pool = steps.pool(9, HV, device, dtype)
    before = pool.clone()
    out, _ = serving.mtp_verify(
        **{name: x[name] for name in ("A_log", "a", "b", "dt_bias", "scale")},
        **{name: x[name][None] for name in "qkv"},
        initial_state=pool,
        cu_seqlens=numbers([0, 3, 5, 7], device),
        ssm_state_indices=numbers(slots, device),
        num_accepted_tokens=numbers(accepted, device),
        use_qk_l2norm_in_kernel=True,
    )
    assert out.dtype == HALF
    sequences = [
        Sequence(2, slice(0, 3), slots[0]),
        Sequence(4, slice(3, 5), slots[1]),
        Sequence(0, slice(5, 7)),
    ]
    assert faults(sequences, x, before, pool, out[0], limits=LIMITS) == []


def test_verify_without_states(device):
    """SGLang's way: outputs alone."""
    x = tokens(8, device)
    pool = steps.pool(4, HV, device)
    before, out = pool.clone(), torch.full_like(x["v"], torch.nan)
    parts = [x[name] for name in (*"qkvab", "A_log", "dt_bias")]
    slots, ends = numbers([3, 1], device), numbers([0, 4, 8], device)
    where = pool, slots, None, ends, x["scale"], out, None, None
    serving.run_verify(*parts, *where, serving.OUTPUTS, 1, 1e-6)
    for n, slot in enumerate([3, 1]):
        rows = slice(4 * n, 4 * n + 4)
        of = [x[name][rows] for name in "qkvab"]
        right, _ = steps.walk(before[slot], *of, x["A_log"], x["dt_bias"], x["scale"])
        assert error(out[rows], right) < LIMITS[0]
    assert same(pool, before)


def prefilled(x: dict, pool, slots, ends, **how):
    gates = x["a"], x["b"], x["A_log"], x["dt_bias"]
    slots, ends = numbers(slots, pool.device), numbers(ends, pool.device)
    vectors = [x[name] for name in "qkv"]
    return serving.chunk_prefill(*vectors, *gates, pool, slots, ends, scale=0.1, **how)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("beta", [None, torch.float32, HALF], ids=str)
def test_prefill(device, dtype, beta):
    """Half as much as bfloat16's rounding of tokens alone would be too much."""
    x = tokens(150, device, HALF)
    if beta is not None:
        x = given(x, beta)
    ends, slots = [0, 70, 75, 150], [2, 0, 1]
    pool = steps.pool(4, HV, device, dtype)
    before = pool.clone()
    out, after = prefilled(x, pool, slots, ends)
    assert out.dtype == HALF and after is pool
    sequences = [Sequence(s, slice(*ends[n : n + 2])) for n, s in enumerate(slots)]
    assert faults(sequences, x, before, pool, out, limits=CHUNKS) == []


def test_prefill_into_a_given_output(device):
    x, places = tokens(70, device), []
    pool = steps.pool(3, HV, device)
    expected, _ = prefilled(x, pool.clone(), [1], [0, 70])
    for shape in ((70, HV, D), (1, 70, HV, D)):
        out = torch.full(shape, torch.nan, dtype=HALF, device=device)
        got, _ = prefilled(x, pool.clone(), [1], [0, 70], out=out)
        places.append(got is out and same(got.flatten(0, -3), expected))
    assert places == [True, True]
    with pytest.raises((ValueError, TypeError), match="out.*: expected float16"):
        prefilled(x, pool, [1], [0, 70], out=expected.bfloat16())


def test_prepare_loads_what_float16_needs(device):
    kind = torch.bfloat16, device == "cuda"
    for exported in (
        serving._prefill_f16.function,
        serving._prefill_f16.checkpoints,
        serving._prefill_bf16.function,
    ):
        exported.pop(kind, None)
    where = {"dtype": torch.bfloat16, "device": device}
    serving.prepare(serving.chunk_prefill, tokens=HALF, **where)
    assert (
        kind in serving._prefill_f16.function
        and kind in serving._prefill_f16.checkpoints
    )
    assert kind not in serving._prefill_bf16.function


def test_prefill_keeps_states_within_prompts(device):
    x = tokens(150, device)
    pool = steps.pool(3, HV, device)
    before = pool.clone()
    kept = torch.full((2, HV, D, D), torch.nan, device=device)
    how = {"checkpoints_every": 64, "checkpoints": kept}
    prefilled(x, pool, [1], [0, 150], checkpoint_starts=numbers([0], device), **how)
    parts = [x[name][:128] for name in "qkvab"]
    _, states = steps.walk(before[1], *parts, x["A_log"], x["dt_bias"], 0.1)
    for found, right in zip(kept, (states[63], states[127]), strict=True):
        assert error(found, right) < CHUNKS[1][torch.float32]


@pytest.mark.parametrize("name", ["k", "a", "b"])
def test_a_mix_of_both_is_refused(device, name):
    x = tokens(2, device)
    x[name] = x[name].bfloat16()
    pool = steps.pool(3, HV, device)
    before = pool.clone()
    with pytest.raises((ValueError, TypeError), match=f"^{name}: expected float16"):
        serving.mtp_verify(
            **{key: x[key] for key in ("A_log", "dt_bias", "scale")},
            **{key: x[key][:, None] for key in "qkvab"},
            initial_state=pool,
            ssm_state_indices=numbers([1, 2], device),
        )
    assert same(pool, before)


# --- the gates alone


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 8), (1, 5, 8), (2, 3, 8), (8,), (0, 8), (300, 8)]
)
def test_gates(device, dtype, shape):
    """At both ends as well, where softplus and sigmoid are 0, or x."""
    draw = torch.Generator().manual_seed(len(shape))
    a, b = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    a[..., 0], a[..., 1], b[..., 2], b[..., 3] = -90.0, 90.0, -40.0, 40.0
    A_log, dt_bias = torch.linspace(-4, 2, 8), torch.linspace(-5, 5, 8)
    right = steps.gates(a, b, A_log, dt_bias)
    moved = [x.to(device) for x in (a, b, A_log, dt_bias)]
    for found, expected in zip(serving.gates(*moved), right, strict=True):
        assert found.dtype == torch.float32 and found.is_contiguous()
        assert found.shape == shape
        close = {"rtol": 5e-6, "atol": 1e-12}
        torch.testing.assert_close(found.cpu().double(), expected, **close)


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16], ids=str)
def test_gates_of_a_projection_that_has_both(device, bias):
    """a and b side by side in one row, with more behind them."""
    projected = torch.randn(4, 21, generator=torch.Generator().manual_seed(2))
    b, a, _ = projected.to(device, torch.bfloat16).split([8, 8, 5], dim=1)
    A_log = torch.linspace(-2, 1, 8, device=device)
    dt_bias = torch.linspace(-1, 1, 8, device=device).to(bias)
    found = serving.gates(a, b, A_log, dt_bias)
    for x, right in zip(found, steps.gates(a, b, A_log, dt_bias), strict=True):
        torch.testing.assert_close(x.cpu().double(), right, rtol=5e-6, atol=1e-12)


def test_what_gates_returns_is_what_the_others_take(device):
    """The same step with gates computed before it and within it."""
    x = tokens(3, device)
    a, b = serving.gates(x["a"], x["b"], x["A_log"], x["dt_bias"])
    slots, pools = numbers([1, 2, 3], device), [steps.pool(4, HV, device) for _ in "12"]
    within = decoded(x, pools[0], slots)
    prepared = {"a": a, "b": b, "A_log": None, "dt_bias": None}
    before = decoded(x | prepared, pools[1], slots)
    assert error(before, within.cpu().double()) < LIMITS[0]
    assert error(pools[1], pools[0].cpu().double()) < 1e-6


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("b", lambda x: x[:, 1:]),
        ("b", lambda x: x.half()),
        ("A_log", lambda x: x[1:]),
        ("A_log", lambda x: x.bfloat16()),
        ("dt_bias", lambda x: x.half()),
        ("a", lambda x: x.double()),
        ("a", lambda x: 1.0),
    ],
)
def test_gates_that_do_not_fit_are_refused(device, name, change):
    x = steps.tokens(3, H, HV, device)
    x |= {name: change(x[name])}
    with pytest.raises((ValueError, TypeError), match=f"^{name}: expected"):
        serving.gates(*[x[key] for key in ("a", "b", "A_log", "dt_bias")])


def test_gates_in_a_compiled_graph(device):
    x = steps.tokens(3, H, HV, device)
    args = [x[key] for key in ("a", "b", "A_log", "dt_bias")]
    expected = serving.gates(*args)
    torch._dynamo.reset()
    run = torch.compile(serving.gates, fullgraph=True, backend="aot_eager")
    for found, right in zip(run(*args), expected, strict=True):
        assert same(found, right)
