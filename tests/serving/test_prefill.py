"""chunk_prefill against float64, on a GPU: slots, sequences without a state, padding, what lies apart."""

from __future__ import annotations

import helpers
import pytest
import serving_steps as steps
import torch
from serving_steps import D, apart, between, error, same

from gdn_cli import serving

HERE = any(algo.full_name == serving._prefill.cuda for algo in helpers.REGISTRY.algos)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason=f"no {serving._prefill.cuda} yet")]

# relative error of a state, that of configs/gdn_prefill.toml
STATE = 1e-2
OUTPUT = 1e-2


def call(lengths, slots, P: int, H: int, HV: int, dtype=torch.float32, has=None, **changed) -> dict:
    """Sequences of these lengths, packed rows of q, k and v. Slots that no sequence reads hold NaN."""
    x = steps.tokens(sum(lengths), H, HV, "cuda")
    rows = torch.cat([x[name].flatten(1) for name in "qkv"], dim=1)
    widths = [x[name].shape[1] * D for name in "qkv"]
    x |= {n: p.view(len(rows), -1, D) for n, p in zip("qkv", rows.split(widths, dim=1), strict=True)}
    has = has or [True] * len(slots)
    read = {slot for slot, there in zip(slots, has, strict=True) if there}
    return x | dict(
        scale=0.1, initial_state=steps.pool(P, HV, "cuda", dtype, tuple({0, *range(P)} - (read - {0}))),
        ssm_state_indices=torch.tensor(slots, dtype=torch.int32).cuda(), has_initial_state=torch.tensor(has).cuda(),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().cuda(),
    ) | changed  # fmt: skip


def faults(x: dict) -> list[str]:
    """What is wrong with a call, which is done here."""
    before, slots, ends = x["initial_state"].clone(), x["ssm_state_indices"].tolist(), x["cu_seqlens"].tolist()
    out, pool = serving.chunk_prefill(**x)
    found, written = [], set()
    for n, (slot, there) in enumerate(zip(slots, x["has_initial_state"].tolist(), strict=True)):
        of = slice(ends[n], ends[n + 1])
        if slot <= 0:
            if steps.bits(out[of]).any():
                found.append(f"{n}: padding has an output")
            continue
        written.add(slot)
        start = before[slot] if there else torch.zeros_like(before[slot])
        right, states = steps.walk(start, *(x[name][of] for name in "qkvab"), x["A_log"], x["dt_bias"], x["scale"])
        if not (e := error(out[of], right)) <= OUTPUT:
            found.append(f"{n}: output {e:.2g}")
        if not (e := error(pool[slot], states[-1])) <= STATE:
            found.append(f"{n}: state {e:.2g}")
    others = [s for s in range(len(pool)) if s not in written]
    if not same(pool[others], before[others]):
        found.append("another slot has changed")
    return found


@pytest.mark.parametrize("H, HV", [(4, 8), (2, 6), (4, 4)])
@pytest.mark.parametrize("lengths", [[1], [64], [70, 1, 200], [300, 64]])
def test_values_and_untouched_slots(lengths, H, HV):
    assert faults(call(lengths, list(range(len(lengths), 0, -1)), 5, H, HV)) == []


def test_sequences_without_a_state_and_padding():
    assert faults(call([5, 70, 3, 130, 9], [4, 0, 2, 3, -1], 6, 2, 6, has=[False, True, True, False, False])) == []


def test_a_bfloat16_pool():
    assert faults(call([70, 3], [2, 1], 4, 4, 8, torch.bfloat16)) == []


def test_slots_that_lie_apart_give_the_same_bits():
    def made() -> dict:
        return call([70, 3], [2, 1], 4, 2, 6)

    dense, x = made(), made()
    x["initial_state"] = apart(x["initial_state"], 64, 64)
    (out, pool), (got, gaps) = serving.chunk_prefill(**dense), serving.chunk_prefill(**x)
    assert same(got, out) and same(gaps, pool) and between(x["initial_state"]).isnan().all()
