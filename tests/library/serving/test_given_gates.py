"""Gates that the caller has computed: log g in float32, beta in float32 or bfloat16, against
float64, on a CPU and on a GPU.
"""

from __future__ import annotations

import pytest
import serving_steps as steps
import torch
from serving_steps import D, Sequence, faults

from gdn import serving

pytestmark = steps.ON_BOTH
betas = pytest.mark.parametrize("beta", [torch.float32, torch.bfloat16], ids=str)
pools = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# chunks round T and R to bfloat16 on a GPU; a CPU goes token by token
CHUNKS = 1e-2, dict.fromkeys(steps.STATE, 1e-2)


def given(n: int, H: int, HV: int, device: str, beta=torch.float32, gap: int = 0):
    """Tokens with gates instead of what they are computed with: a decay of 0, one of 1, and
    others; in rows that lie `gap` elements apart.
    """
    x = steps.tokens(n, H, HV, "cpu")
    log_g = -(torch.rand(n, HV, generator=torch.Generator().manual_seed(n)) ** 4) * 8
    log_g[::7, 0], log_g[1::5, -1] = -torch.inf, 0.0
    x |= {"a": steps.apart(log_g, gap), "b": x["b"].float().sigmoid().to(beta)}
    x["b"] = steps.apart(x["b"], 3 * gap)
    x |= {"A_log": None, "dt_bias": None}
    moved = {name: y.to(device) for name, y in x.items() if y is not None}
    return x | moved | {"scale": 0.1, "norm": True}


def numbers(values, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def decoded(x: dict, pool, slots) -> torch.Tensor:
    rows = torch.cat([x[name].flatten(1) for name in "qkv"], dim=1)
    gates = x["a"], x["b"], x["A_log"], x["dt_bias"]
    out, _ = serving.packed_decode(rows, *gates, x["scale"], pool, None, slots, True)
    return out[:, 0]


@betas
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_decode(device, beta, dtype):
    slots = [3, 0, 1, 5, 2]
    x = given(len(slots), 2, 4, device, beta, gap=5)
    sequences = [Sequence(slot, slice(n, n + 1)) for n, slot in enumerate(slots)]
    pool = steps.pool(6, 4, device, dtype)
    before = pool.clone()
    out = decoded(x, pool, numbers(slots, device))
    assert faults(sequences, x, before, pool, out) == []


def test_decode_where_slots_are_int64_and_heads_lie_apart(device):
    x = given(3, 2, 4, device)
    pool = steps.heads_apart(steps.pool(6, 4, device), 64)
    before = pool.clone()
    out = decoded(x, pool, numbers([3, 1, 2], device).long())
    sequences = [Sequence(slot, slice(n, n + 1)) for n, slot in enumerate([3, 1, 2])]
    assert faults(sequences, x, before, pool, out) == []


@betas
@pools
def test_verify(device, beta, dtype):
    slots, lengths, accepted = [[1, 2, 3], [4, 5, 6]], [3, 2], [2, 1]
    x = given(sum(lengths), 2, 6, device, beta)
    pool = steps.pool(7, 6, device, dtype)
    before = pool.clone()
    ends = numbers([0, 3, 5], device)
    out, _ = serving.mtp_verify(
        **{name: x[name] for name in ("A_log", "a", "b", "dt_bias", "scale")},
        **{name: x[name][None] for name in "qkv"},
        initial_state=pool,
        cu_seqlens=ends,
        ssm_state_indices=numbers(slots, device),
        num_accepted_tokens=numbers(accepted, device),
        use_qk_l2norm_in_kernel=True,
    )
    sequences = [
        Sequence(2, slice(0, 3), to=slots[0]),
        Sequence(4, slice(3, 5), to=slots[1]),
    ]
    assert faults(sequences, x, before, pool, out[0]) == []


# token by token; chunks in one launch, in segments, in two launches: dispatch_rule.h
@betas
@pools
@pytest.mark.parametrize("lengths", [[70, 1, 20], [300, 5], [1100], [3000], [130] * 40])
def test_prefill(device, beta, dtype, lengths):
    if device == "cpu" and sum(lengths) > 100:
        pytest.skip("a CPU has one path")
    x = given(sum(lengths), 2, 4, device, beta, gap=1)
    slots = list(range(len(lengths), 0, -1))
    pool = steps.pool(len(slots) + 1, 4, device, dtype)
    before = pool.clone()
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    gates = x["a"], x["b"], x["A_log"], x["dt_bias"]
    out, _ = serving.chunk_prefill(
        *[x[name] for name in "qkv"],
        *gates,
        pool,
        numbers(slots, device),
        numbers(ends, device),
        scale=x["scale"],
    )
    sequences = [
        Sequence(slot, slice(*ends[n : n + 2])) for n, slot in enumerate(slots)
    ]
    assert faults(sequences, x, before, pool, out, limits=CHUNKS) == []


def test_gates_of_another_kind_are_refused(device):
    """No silent mix: what is left out, or of another dtype, is said."""
    x = given(2, 2, 4, device)
    raw = steps.tokens(2, 2, 4, device)
    pool, slots = steps.pool(3, 4, device), numbers([1, 2], device)
    before = pool.clone()
    for changed in (
        {"a": raw["a"]},
        {"b": x["b"].half()},
        {"A_log": raw["A_log"]},
        {"dt_bias": raw["dt_bias"]},
        {"A_log": raw["A_log"], "dt_bias": raw["dt_bias"]},
    ):
        with pytest.raises((ValueError, TypeError), match=r"^(a|b|A_log)( and |: exp)"):
            decoded(x | changed, pool, slots)
    assert torch.equal(pool, before) and pool.shape[-1] == D
