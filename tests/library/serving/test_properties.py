"""What the tests of FlashInfer, flash-linear-attention, vLLM, SGLang and Attention Gym hold of their
functions with gates that are given, of ours: on a CPU and on a GPU, against float64.
"""

from __future__ import annotations

import pytest
import serving_steps as steps
import torch
from serving_steps import D, Sequence, apart, between, error, faults, same

from gdn import serving

pytestmark = steps.ON_BOTH
tokens_of = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
RAGGED = [63, 1, 65, 0, 130, 64]
# a GPU's chunks round to bfloat16 within
LIMITS = 1e-2, dict.fromkeys(steps.STATE, 1e-2)
BOTH = 2e-2  # between two results that each have that error


def numbers(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ends_of(lengths) -> list[int]:
    return [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]


def given(n: int, H: int, HV: int, device, dtype=torch.bfloat16) -> dict:
    """Tokens with a decay alpha in [0, 1], both ends among them, and beta."""
    draw = torch.Generator().manual_seed(n + HV)
    x = steps.tokens(n, H, HV, device)
    x |= {name: x[name].to(dtype) for name in "qkv"}
    alpha = torch.rand(n, HV, generator=draw) ** 0.3
    alpha[::7, 0], alpha[1::5, -1] = 0.0, 1.0
    beta = torch.rand(n, HV, generator=draw)
    gates = {"a": alpha.log().to(device), "b": beta.to(device)}
    return x | gates | {"A_log": None, "dt_bias": None, "scale": 0.1, "norm": True}


def prefilled(x: dict, pool, slots, ends, **how) -> torch.Tensor:
    gates = x["a"], x["b"], x["A_log"], x["dt_bias"]
    vectors = [x[name] for name in "qkv"]
    out, after = serving.chunk_prefill(
        *vectors, *gates, pool, slots, ends, scale=x["scale"], **how
    )
    assert after is pool
    return out


def decoded(x: dict, pool, slots) -> torch.Tensor:
    rows = torch.cat([x[name].flatten(1) for name in "qkv"], dim=1)
    gates = x["a"], x["b"], x["A_log"], x["dt_bias"]
    return serving.packed_decode(rows, *gates, x["scale"], pool, None, slots, True)[0][
        :, 0
    ]


def verified(x: dict, pool, slots, ends) -> torch.Tensor:
    out, _ = serving.mtp_verify(
        **{name: x[name] for name in ("A_log", "a", "b", "dt_bias", "scale")},
        **{name: x[name][None] for name in "qkv"},
        initial_state=pool,
        cu_seqlens=ends,
        ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0]


def part(x: dict, rows: slice) -> dict:
    return x | {name: x[name][rows] for name in "qkvab"}


@tokens_of
@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (1, 3), (4, 4)], ids=str)
def test_ragged_prompts_in_any_slots(device, heads, dtype):
    """One of no tokens, padding, and slots that nobody names, which keep their bits."""
    slots, ends = [5, 2, 7, 1, 3, 0], ends_of(RAGGED)
    x = given(ends[-1], *heads, device, dtype)
    pool = steps.pool(8, heads[1], device, nan=(0, 4, 6))
    before = pool.clone()
    out = prefilled(x, pool, numbers(slots, device), numbers(ends, device))
    sequences = [Sequence(s, slice(*ends[n : n + 2])) for n, s in enumerate(slots)]
    assert faults(sequences, x, before, pool, out, limits=LIMITS) == []


@tokens_of
@pytest.mark.parametrize("gap", [0, 64])
def test_slots_of_a_pool_have_the_bits_of_states_side_by_side(device, dtype, gap):
    """Also the checkpoints, and also where a cache has something between its slots."""
    lengths, slots = [128, 70, 200], [6, 1, 4]
    ends = numbers(ends_of(lengths), device)
    x = given(sum(lengths), 1, 2, device, dtype)
    packed = steps.pool(3, 2, device)
    pool = packed.new_full((7, 2, D, D), 3.0)
    pool[slots] = packed
    pool = apart(pool, gap) if gap else pool
    results = []
    for states, places in ((packed, [0, 1, 2]), (pool, slots)):
        kept = packed.new_zeros(6, 2, D, D)
        how = {
            "checkpoints_every": 64,
            "checkpoints": kept,
            "checkpoint_starts": numbers([0, 2, 3], device),
            "first_slot": 0,
        }
        out = prefilled(x, states, numbers(places, device), ends, **how)
        results.append((out.float(), states[places].clone(), kept))
    for one, other in zip(*results, strict=True):
        assert same(one, other)
    assert (pool[[0, 2, 3, 5]] == 3.0).all()
    assert not gap or between(pool).isnan().all()


def test_prompts_of_no_tokens_alone(device):
    """Nothing but states: kept, or zeros where there was none."""
    x, pool = given(0, 1, 2, device), steps.pool(4, 2, device)
    before, has = pool.clone(), torch.tensor([True, False], device=device)
    ends = numbers([0, 0, 0], device)
    out = prefilled(x, pool, numbers([1, 3], device), ends, has_initial_state=has)
    assert out.shape == (0, 2, D)
    assert same(pool[:3], before[:3]) and not pool[3].any()


@pytest.mark.parametrize("function", ["decode", "verify", "prefill"])
@pytest.mark.parametrize("raw", [False, True])
def test_gates_that_are_slices_of_one_projection(device, function, raw):
    """a and b side by side in a row, as a layer's projection leaves them."""
    dense = given(4, 1, 2, device)
    if raw:
        dense |= steps.tokens(4, 1, 2, device)
    both = torch.cat([dense["b"], dense["a"], dense["a"][:, :1]], dim=1)
    b, a, _ = both.split([2, 2, 1], dim=1)
    results = []
    for x in (dense, dense | {"a": a, "b": b}):
        pool, slots = steps.pool(5, 2, device), numbers([3, 1, 2, 4], device)
        if function == "decode":
            out = decoded(x, pool, slots)
        elif function == "verify":
            ends = numbers([0, 2, 4], device)
            out = verified(x, pool, slots.view(2, 2), ends)
        else:
            out = prefilled(x, pool, slots[:2], numbers([0, 3, 4], device))
        results.append((out, pool))
    (right, states), (out, pool) = results
    assert same(out, right) and same(pool, states) and a.stride(0) == 5


@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_a_prompt_in_two_parts_is_one(device, cut):
    """The state goes on in its slot."""
    x, slots = given(150, 1, 2, device), numbers([2], device)
    whole, parts = (steps.pool(3, 2, device) for _ in range(2))
    before = whole.clone()
    expected = prefilled(x, whole, slots, numbers([0, 150], device))
    outs = [
        prefilled(
            part(x, rows), parts, slots, numbers([0, rows.stop - rows.start], device)
        )
        for rows in (slice(0, cut), slice(cut, 150))
    ]
    assert error(torch.cat(outs), expected.cpu().double()) < BOTH
    assert error(parts[2], whole[2].cpu().double()) < BOTH
    assert (
        faults(
            [Sequence(2, slice(150))], x, before, parts, torch.cat(outs), limits=LIMITS
        )
        == []
    )


@tokens_of
def test_prompts_then_decodes_then_drafts(device, dtype):
    """All three functions on one pool: the same sequence token by token in float64."""
    x = given(80, 2, 4, device, dtype)
    pool = steps.pool(5, 4, device)
    before = pool.clone()
    slot = numbers([3], device)
    outs = [prefilled(part(x, slice(0, 70)), pool, slot, numbers([0, 70], device))]
    for t in range(70, 74):
        outs.append(decoded(part(x, slice(t, t + 1)), pool, slot))
    columns = numbers([[3, 1, 2, 4, 0, 0]], device)
    outs.append(
        verified(part(x, slice(74, 80)), pool, columns, numbers([0, 6], device))
    )
    tokens = [x[name] for name in (*"qkvab", "A_log", "dt_bias", "scale")]
    right, states = steps.walk(before[3], *tokens)
    assert error(torch.cat(outs), right) < 1e-2
    for place, t in zip((3, 1, 2, 4), range(74, 78), strict=True):
        assert error(pool[place], states[t]) < 1e-2
    assert same(pool[0], before[0])


def test_drafts_are_decodes_one_after_another(device):
    x = given(4, 1, 2, device)
    pool, own = (steps.pool(6, 2, device) for _ in range(2))
    columns = numbers([[2, 3, 4, 5]], device)
    out = verified(x, pool, columns, numbers([0, 4], device))
    for t in range(4):
        one = decoded(part(x, slice(t, t + 1)), own, numbers([2], device))
        assert error(out[t : t + 1], one.cpu().double()) < steps.OUTPUT
        assert error(pool[2 + t], own[2].cpu().double()) < 2e-5


def test_a_prompt_alone_is_as_in_a_batch(device):
    lengths = [70, 5, 130]
    ends, x = ends_of(lengths), given(205, 1, 2, device)
    pool, own = (steps.pool(4, 2, device) for _ in range(2))
    out = prefilled(x, pool, numbers([3, 1, 2], device), numbers(ends, device))
    for n, slot in enumerate([3, 1, 2]):
        rows = slice(*ends[n : n + 2])
        alone = numbers([0, lengths[n]], device)
        one = prefilled(part(x, rows), own, numbers([slot], device), alone)
        assert error(one, out[rows].cpu().double()) < BOTH
    assert error(own, pool.cpu().double()) < BOTH


def test_the_order_of_prompts_does_not_matter(device):
    lengths, slots = [70, 5, 64], [3, 1, 2]
    ends, x = ends_of(lengths), given(139, 1, 2, device)
    pool, turned = (steps.pool(4, 2, device) for _ in range(2))
    out = prefilled(x, pool, numbers(slots, device), numbers(ends, device))
    back = torch.cat([torch.arange(ends[n], ends[n + 1]) for n in (2, 1, 0)])
    other = part(x, back.to(device))
    others = numbers(ends_of(lengths[::-1]), device)
    found = prefilled(other, turned, numbers(slots[::-1], device), others)
    assert error(found, out[back.to(device)].cpu().double()) < BOTH
    assert error(turned, pool.cpu().double()) < BOTH


@pytest.mark.parametrize("length", [8, 64, 100])
def test_what_was_written_is_read_again(device, length):
    """No decay, beta 1, keys at right angles: the state has all pairs, and a query finds its
    value. Sixty-four and more tokens are more than a chunk.
    """
    x = given(length, 1, 1, device)
    keys = torch.eye(D, device=device)[:length, None]
    x |= {"q": keys.bfloat16(), "k": keys.bfloat16(), "scale": 1.0}
    x |= {"a": torch.zeros_like(x["a"]), "b": torch.ones_like(x["b"])}
    pool = torch.zeros(2, 1, D, D, device=device)
    how = {"use_qk_l2norm_in_kernel": False}
    out = prefilled(x, pool, numbers([1], device), numbers([0, length], device), **how)
    assert error(out, x["v"].cpu().double()) < 5e-3
    values = x["v"][:, 0].T.cpu().double()
    assert error(pool[1, 0, :, :length], values) < 5e-3
    assert not pool[1, 0, :, length:].any()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_with_beta_0_a_state_only_decays(device, alpha):
    """By alpha each token, which may be 0: then nothing is left, and no NaN."""
    x = given(3, 1, 2, device)
    log = torch.full_like(x["a"], alpha).log()
    x |= {"a": log, "b": torch.zeros_like(x["b"])}
    pool = steps.pool(3, 2, device)
    before = pool.clone()
    out = prefilled(x, pool, numbers([2], device), numbers([0, 3], device))
    close = {"rtol": 1e-5, "atol": 1e-15}  # a GPU's least decay is 2^-64
    torch.testing.assert_close(pool[2], before[2] * alpha**3, **close)
    assert out.isfinite().all() and (out.abs().max() > 1e-15) == (alpha > 0)
    decoded(part(x, slice(0, 1)), pool, numbers([2], device))
    torch.testing.assert_close(pool[2], before[2] * alpha**4, **close)


def test_heads_of_q_and_k_are_shared_by_groups(device):
    """Two heads for six values: as six heads, each three times."""
    x = given(70, 2, 6, device)
    wide = x | {name: x[name].repeat_interleave(3, 1) for name in "qk"}
    pools = [steps.pool(3, 6, device) for _ in range(2)]
    slots, ends = numbers([1], device), numbers([0, 70], device)
    outs = [
        prefilled(y, pool, slots, ends)
        for y, pool in zip((x, wide), pools, strict=True)
    ]
    assert error(outs[1], outs[0].cpu().double()) < 5e-3
    assert error(pools[1], pools[0].cpu().double()) < 5e-3


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_scale_is_a_factor_of_outputs_alone(device, scale):
    x, y = (given(70, 1, 2, device) | {"scale": s} for s in (scale, None))
    pools = [steps.pool(3, 2, device) for _ in range(2)]
    slots, ends = numbers([1], device), numbers([0, 70], device)
    one, default = (
        prefilled(z, pool, slots, ends) for z, pool in zip((x, y), pools, strict=True)
    )
    factor = scale * D**0.5
    assert error(one, default.cpu().double() * factor) < steps.OUTPUT
    assert same(*pools)
