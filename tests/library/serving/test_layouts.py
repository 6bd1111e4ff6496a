"""Pools whose states are [K, V], against float64, on a CPU and on a GPU: `state_layout`."""

from __future__ import annotations

import pytest
import serving_steps as steps
import torch
from serving_steps import D, Sequence, error, faults, same

from gdn import serving

pytestmark = steps.ON_BOTH
H, HV = 2, 6
LIMITS = 1e-2, dict.fromkeys(steps.STATE, 1e-2)  # of chunks
POOLS = [torch.float32, torch.bfloat16, torch.float16]


def numbers(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def tokens(n: int, device) -> dict:
    return steps.tokens(n, H, HV, device) | {"scale": 0.1, "norm": True}


def k_first(pool: torch.Tensor) -> torch.Tensor:
    return pool.mT.contiguous()


def decoded(x: dict, pool, slots, **how) -> torch.Tensor:
    rows = torch.cat([x[name].flatten(1) for name in "qkv"], dim=1)
    gates = x["a"], x["b"], x["A_log"], x["dt_bias"]
    out, after = serving.packed_decode(
        rows, *gates, x["scale"], pool, None, slots, True, **how
    )
    assert after is pool
    return out[:, 0]


@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("first_slot", [0, 1])
def test_decode(device, dtype, first_slot):
    """Padding and a slot that the pool does not have beside rows with a state."""
    slots = [3, 0, -1, 5, 99, 2]
    x = tokens(len(slots), device)
    before = steps.pool(6, HV, device, dtype)
    pool = k_first(before)
    how = {"state_layout": "KV", "first_slot": first_slot}
    out = decoded(x, pool, numbers(slots, device), **how)
    sequences = [Sequence(slot, slice(n, n + 1)) for n, slot in enumerate(slots)]
    assert faults(sequences, x, before, pool.mT, out, first_slot) == []


@pytest.mark.parametrize("slots", [[0, -1], [99, 0, 0]])
def test_padding_alone_leaves_all_bits(device, slots):
    before = steps.pool(4, HV, device)
    before[0] = torch.nan
    pool = k_first(before)
    x = tokens(len(slots), device)
    out = decoded(x, pool, numbers(slots, device), state_layout="KV")
    assert not steps.bits(out).any() and same(pool, k_first(before))


@pytest.mark.parametrize("slots", [0, 1])
def test_a_pool_of_no_slots_and_a_call_of_no_rows(device, slots):
    pool = steps.pool(3, HV, device)[:0]
    out = decoded(
        tokens(slots, device), pool, numbers([2] * slots, device), state_layout="KV"
    )
    assert out.shape == (slots, HV, D) and not out.any()


def test_slots_and_heads_that_lie_apart_and_a_column_of_slots(device):
    before = steps.pool(6, HV, device)
    pool = steps.heads_apart(k_first(before), 64)
    table = numbers([[9, 4], [9, 0], [9, 2]], device).long()
    x = tokens(3, device)
    out = decoded(x, pool, table[:, 1], state_layout="KV")
    sequences = [Sequence(slot, slice(n, n + 1)) for n, slot in enumerate([4, 0, 2])]
    assert faults(sequences, x, before, pool.mT, out) == []
    assert steps.between_heads(pool).isnan().all()


@pytest.mark.parametrize("dtype", POOLS[:2], ids=str)
def test_verify(device, dtype):
    """A sequence with fewer tokens, one of none, one whose count is out of range, padding, and a
    column that names another sequence's slot but has no token.
    """
    slots = [[1, 2, 3], [4, 5, 3], [6, 7, 8], [9, 10, 11], [0, 12, 13]]
    lengths, accepted = [3, 2, 0, 3, 2], [2, 1, 3, 4, 1]
    x = tokens(sum(lengths), device)
    before = steps.pool(14, HV, device, dtype)
    pool = k_first(before)
    ends = [0, 3, 5, 5, 8, 10]
    out, after = serving.mtp_verify(
        **{name: x[name] for name in ("A_log", "a", "b", "dt_bias", "scale")},
        **{name: x[name][None] for name in "qkv"},
        initial_state=pool,
        cu_seqlens=numbers(ends, device),
        ssm_state_indices=numbers(slots, device),
        num_accepted_tokens=numbers(accepted, device),
        use_qk_l2norm_in_kernel=True,
        state_layout="KV",
    )
    assert after is pool
    starts = [2, 4, 8, -1, -1]
    sequences = [
        Sequence(start, slice(*ends[n : n + 2]), row[: lengths[n]] or [-1])
        for n, (start, row) in enumerate(zip(starts, slots, strict=True))
    ]
    assert faults(sequences, x, before, pool.mT, out[0]) == []


def test_verify_of_one_token_for_each_sequence_of_a_batch(device):
    x = tokens(3, device)
    before = steps.pool(4, HV, device)
    pool = k_first(before)
    out, _ = serving.mtp_verify(
        **{name: x[name] for name in ("A_log", "dt_bias", "scale")},
        **{name: x[name][:, None] for name in "qkvab"},
        initial_state=pool,
        ssm_state_indices=numbers([3, 0, 1], device),
        use_qk_l2norm_in_kernel=True,
        state_layout="KV",
    )
    sequences = [Sequence(slot, slice(n, n + 1)) for n, slot in enumerate([3, 0, 1])]
    assert faults(sequences, x, before, pool.mT, out[:, 0]) == []


def prefilled(x: dict, pool, slots, ends, **how) -> torch.Tensor:
    gates = x["a"], x["b"], x["A_log"], x["dt_bias"]
    vectors = [x[name] for name in "qkv"]
    ends = numbers(ends, device=pool.device)
    slots = numbers(slots, pool.device)
    return serving.chunk_prefill(*vectors, *gates, pool, slots, ends, scale=0.1, **how)[
        0
    ]


@pytest.mark.parametrize("dtype", POOLS[:2], ids=str)
def test_prefill(device, dtype):
    slots, ends = [4, 0, 2, 1], [0, 70, 75, 80, 80]
    has = torch.tensor([True, True, False, False], device=device)
    x = tokens(80, device)
    before = steps.pool(6, HV, device, dtype)
    pool = k_first(before)
    how = {"state_layout": "KV", "has_initial_state": has}
    out = prefilled(x, pool, slots, ends, **how)
    sequences = [
        Sequence(slot, slice(*ends[n : n + 2]), fresh=not has[n])
        for n, slot in enumerate(slots)
    ]
    assert faults(sequences, x, before, pool.mT, out, limits=LIMITS) == []


def test_checkpoints_have_the_layout_of_the_pool(device):
    x, ends = tokens(200, device), [0, 130, 200]
    v_first = steps.pool(3, HV, device)
    pool = k_first(v_first)
    places = v_first.new_full((4, HV, D, D), torch.nan)
    kept, starts = places.clone(), numbers([0, 2], device)
    how = {"checkpoints_every": 64, "checkpoint_starts": starts}
    prefilled(x, v_first, [2, 1], ends, checkpoints=places, **how)
    prefilled(x, pool, [2, 1], ends, checkpoints=kept, state_layout="KV", **how)
    assert same(kept[:3].mT, places[:3]) and kept[3].isnan().all()
    assert same(pool.mT, v_first)


@pytest.mark.parametrize("layout", ["VK", "KV"])
def test_a_pool_of_the_other_layout_is_wrong_without_an_error(device, layout):
    """Why the argument is there: the shapes are the same. Each call is right in its own layout."""
    x, slots = tokens(2, device), numbers([2, 1], device)
    start = steps.pool(3, HV, device)
    own = start if layout == "VK" else k_first(start)
    right, _ = steps.walk(
        start[2], *(x[name][:1] for name in "qkvab"), x["A_log"], x["dt_bias"], 0.1
    )
    other = own.mT.contiguous()
    out = decoded(x, own, slots, state_layout=layout)
    mixed = decoded(x, other, slots, state_layout=layout)
    assert error(out[:1], right) < steps.OUTPUT
    assert mixed.isfinite().all() and error(mixed[:1], right) > 0.3


@pytest.mark.parametrize("layout", ["kv", "", None, "K V"])
def test_another_name_is_refused(device, layout):
    x, pool = tokens(2, device), steps.pool(3, HV, device)
    before = pool.clone()
    says = "^state_layout: expected 'VK' or 'KV', got"
    slots = numbers([2, 1], device)
    with pytest.raises(ValueError, match=says):
        decoded(x, pool, slots, state_layout=layout)
    with pytest.raises(ValueError, match=says):
        prefilled(x, pool, [2, 1], [0, 1, 2], state_layout=layout)
    with pytest.raises(ValueError, match=says):
        serving.mtp_verify(
            **{name: x[name] for name in ("A_log", "dt_bias")},
            **{name: x[name][:, None] for name in "qkvab"},
            initial_state=pool,
            ssm_state_indices=slots,
            state_layout=layout,
        )
    assert same(pool, before)


def test_what_the_kernels_refuse_is_refused_before_a_state_is_stored(device):
    x, pool = tokens(2, device), steps.pool(3, HV, device)
    before, slots = pool.clone(), numbers([2, 1], device)
    for changed, says in (
        ({"a": x["a"].double()}, "^a: expected bfloat16"),
        ({"A_log": x["A_log"][:1]}, "^A_log: expected"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            decoded(x | changed, pool, slots, state_layout="KV")
    with pytest.raises(ValueError, match="^state_indices: expected int32"):
        decoded(x, pool, slots.float(), state_layout="KV")
    with pytest.raises(ValueError, match="^initial_state: expected 4 dimensions"):
        decoded(x, pool.flatten(1), slots, state_layout="KV")
    assert same(pool, before)


def test_it_compiles_in_one_graph(device):
    x, slots = tokens(2, device), numbers([2, 1], device)
    pools = [steps.pool(3, HV, device) for _ in range(2)]
    expected = decoded(x, pools[0], slots, state_layout="KV")
    torch._dynamo.reset()
    run = torch.compile(decoded, fullgraph=True, backend="eager")
    assert same(run(x, pools[1], slots, state_layout="KV"), expected)
    assert same(pools[0], pools[1])
