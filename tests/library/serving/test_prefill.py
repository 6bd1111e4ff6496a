"""chunk_prefill against float64, on a GPU: slots, sequences without a state, padding,
what lies apart.
"""

from __future__ import annotations

import helpers
import pytest
import serving_steps as steps
import torch
from serving_steps import D, error, same

from gdn import serving

HERE = any(
    algo.full_name == serving._prefill_bf16.function.cuda
    for algo in helpers.REGISTRY.algos
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HERE, reason=f"no {serving._prefill_bf16.function.cuda} yet"
    ),
]

# relative error of a state, that of configs/gdn_prefill.toml
STATE = 1e-2
OUTPUT = 1e-2


def call(
    lengths, slots, P: int, H: int, HV: int, dtype=torch.float32, has=None, **changed
) -> dict:
    """Sequences of these lengths, packed rows of q, k and v. Slots that no sequence
    reads hold NaN.
    """
    x = steps.tokens(sum(lengths), H, HV, "cuda")
    rows = torch.cat([x[name].flatten(1) for name in "qkv"], dim=1)
    widths = [x[name].shape[1] * D for name in "qkv"]
    x |= {
        n: p.view(len(rows), -1, D)
        for n, p in zip("qkv", rows.split(widths, dim=1), strict=True)
    }
    has = has or [True] * len(slots)
    read = {slot for slot, there in zip(slots, has, strict=True) if there}
    return x | dict(
        scale=0.1, initial_state=steps.pool(P, HV, "cuda", dtype, tuple({0, *range(P)} - (read - {0}))),
        ssm_state_indices=torch.tensor(slots, dtype=torch.int32).cuda(), has_initial_state=torch.tensor(has).cuda(),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().cuda(),
    ) | changed  # fmt: skip


def faults(x: dict) -> list[str]:
    """What is wrong with a call, which is done here."""
    before, ends = x["initial_state"].clone(), x["cu_seqlens"].tolist()
    out, pool = serving.chunk_prefill(**x)
    slots = zip(x["ssm_state_indices"].tolist(), x["has_initial_state"], strict=True)
    sequences = [
        steps.Sequence(slot, slice(ends[n], ends[n + 1]), fresh=not has)
        for n, (slot, has) in enumerate(slots)
    ]
    limits = OUTPUT, dict.fromkeys(steps.STATE, STATE)
    return steps.faults(sequences, x | {"norm": True}, before, pool, out, 1, limits)


@pytest.mark.parametrize("H, HV", [(4, 8), (2, 6), (4, 4)])
@pytest.mark.parametrize("lengths", [[1], [64], [70, 1, 200], [300, 64]])
def test_values_and_untouched_slots(lengths, H, HV):
    assert faults(call(lengths, list(range(len(lengths), 0, -1)), 5, H, HV)) == []


def test_sequences_without_a_state_and_padding():
    assert (
        faults(
            call(
                [5, 70, 3, 130, 9],
                [4, 0, 2, 3, -1],
                6,
                2,
                6,
                has=[False, True, True, False, False],
            )
        )
        == []
    )


# Token by token, in one launch, in segments, in order of length: dispatch_rule.h.
EACH_PATH = [[300, 5], [1100], [3000], [130] * 40]


@pytest.mark.parametrize("lengths", EACH_PATH, ids=len)
@pytest.mark.parametrize(("before", "after"), [(0, 50), (70, 0), (5, 130)])
def test_rows_outside_of_the_sequences_enter_no_state(lengths, before, after):
    """Engines pad their rows. The outputs there keep what they held."""
    slots = list(range(1, len(lengths) + 1))
    dense, x = (call(lengths, slots, len(slots) + 1, 2, 4) for _ in range(2))
    T = sum(lengths)
    for name in "qkvab":
        wide = x[name].new_full((before + T + after, *x[name].shape[1:]), torch.nan)
        x[name] = wide.index_copy_(
            0, torch.arange(before, before + T).cuda(), x[name].contiguous()
        )
    x["cu_seqlens"] = x["cu_seqlens"] + before
    x["out"] = torch.full_like(x["v"], 7)
    expected, states = serving.chunk_prefill(**dense)
    out, pool = serving.chunk_prefill(**x)
    assert error(out[before : before + T], expected.cpu().double()) < OUTPUT
    assert (out[:before] == 7).all() and (out[before + T :] == 7).all()
    for slot in slots:
        assert error(pool[slot], states[slot].cpu().double()) < STATE


@pytest.mark.parametrize("lengths", EACH_PATH, ids=len)
def test_a_gate_of_nan_is_not_forgotten(lengths):
    clean, x = (
        call(lengths, list(range(1, len(lengths) + 1)), 50, 2, 4) for _ in range(2)
    )
    x["a"][200, 1] = torch.nan
    (expected, states), (out, pool) = (
        serving.chunk_prefill(**clean),
        serving.chunk_prefill(**x),
    )
    n = next(n for n in range(len(lengths)) if sum(lengths[: n + 1]) > 200)
    end = sum(lengths[: n + 1])
    assert out[200:end, 1].isnan().all() and pool[n + 1, 1].isnan().all()
    assert same(out[:, [0, 2, 3]], expected[:, [0, 2, 3]]) and same(
        out[end:], expected[end:]
    )
    assert same(pool[n + 1][[0, 2, 3]], states[n + 1][[0, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", EACH_PATH, ids=len)
def test_a_column_of_slots_and_heads_that_lie_apart_give_the_same_bits(lengths, dtype):
    slots = list(range(len(lengths), 0, -1))
    dense, x = (call(lengths, slots, len(slots) + 1, 2, 4, dtype) for _ in range(2))
    x["initial_state"] = steps.heads_apart(x["initial_state"], 2 * D)
    table = torch.full((len(slots), 3), 99, dtype=torch.int64, device="cuda")
    table[:, 1] = x["ssm_state_indices"]
    x["ssm_state_indices"] = table[:, 1]
    (out, pool), (got, gaps) = (
        serving.chunk_prefill(**dense),
        serving.chunk_prefill(**x),
    )
    assert same(got, out) and same(gaps, pool)
    assert steps.between_heads(x["initial_state"]).isnan().all()


def test_rows_of_one_batch_with_any_first_stride_and_no_others():
    x = call([70, 3], [2, 1], 4, 2, 6)
    expected = serving.chunk_prefill(
        **(x | {"initial_state": x["initial_state"].clone()})
    )[0]
    wide = {
        name: torch.zeros(3, 80, *x[name].shape[1:]).bfloat16().cuda() for name in "qkv"
    }
    for name in "qkv":
        wide[name][1, :73] = x[name]
    views = {name: wide[name][1:2, :73] for name in "qkv"}
    out, _ = serving.chunk_prefill(**(x | views))
    assert same(out.reshape(expected.shape), expected)
    with pytest.raises(ValueError, match="^q: "):
        serving.chunk_prefill(
            **(x | {"q": x["q"][:1].expand(73, 2, D), "k": x["k"][:1].expand(73, 2, D)})
        )
