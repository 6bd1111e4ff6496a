"""What engines' own tests hold of packed decode, on a CPU (cpp-v1) and on a GPU,
against float64.
"""

from __future__ import annotations

import pytest
import serving_steps as steps
import torch
from serving_steps import D, apart, between, same

from gdn import serving
from gdn_cli.machine import inventory

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler here"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(4, 8), (2, 6), (4, 4)]


def call(
    slots: list[int],
    P: int,
    H: int,
    HV: int,
    device: str,
    dtype=torch.float32,
    **changed,
) -> dict:
    """The arguments of a call. Slot 0 and those that no row names hold NaN."""
    x = steps.tokens(len(slots), H, HV, device)
    mixed_qkv = torch.cat([x.pop(name).flatten(1) for name in "qkv"], dim=1)
    unused = tuple(i for i in range(P) if i == 0 or i not in slots)
    made = dict(
        x, mixed_qkv=mixed_qkv, scale=0.1, initial_state=steps.pool(P, HV, device, dtype, unused),
        out=torch.full((len(slots), 1, HV, D), torch.nan, dtype=torch.bfloat16, device=device),
        ssm_state_indices=torch.tensor(slots, dtype=torch.int32, device=device), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return made | changed


def faults(x: dict, first_slot: int = 1) -> list[str]:
    """What is wrong with a call, which is done here."""
    before, slots = x["initial_state"].clone(), x["ssm_state_indices"].tolist()
    out, after = serving.packed_decode(**x, first_slot=first_slot)
    assert out is x["out"] and after is x["initial_state"]
    HV = x["a"].shape[1]
    heads = x["mixed_qkv"].view(len(slots), -1, D)
    H = (heads.shape[1] - HV) // 2
    q, k, v = heads.split([H, H, HV], dim=1)
    tokens = x | {"q": q, "k": k, "v": v, "norm": x["use_qk_l2norm_in_kernel"]}
    rows = [steps.Sequence(slot, slice(n, n + 1)) for n, slot in enumerate(slots)]
    return steps.faults(rows, tokens, before, after, out[:, 0], first_slot)


# --- both


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("H, HV", HEADS)
def test_values_and_untouched_slots(device, H, HV):
    assert faults(call([4, 2, 7], 9, H, HV, device)) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [[0, 3, -1, 1, -7, 0], [0, -1], [0, 2], [3, 0]])
def test_padding_anywhere(device, slots):
    assert faults(call(slots, 5, 2, 6, device)) == []


@pytest.mark.parametrize("device", DEVICES)
def test_slot_8191(device):
    """2^31 elements lie before it, of memory that nobody touches but for three slots."""
    H, HV, P = 16, 32, 8192
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 1.1 * P * HV * D * D * 4:
        pytest.skip("less than 19 GB of GPU memory are free")
    try:
        pool = torch.empty(P, HV, D, D, device=device)
    except RuntimeError:
        pytest.skip("no 17 GB of address space")
    pool[8190:] = steps.pool(2, HV, device)
    x = call([8191], 1, H, HV, device, initial_state=pool)
    small = x | {
        "initial_state": pool[8190:].clone(),
        "ssm_state_indices": x["ssm_state_indices"] - 8190,
    }
    neighbour = pool[8190].clone()
    out, _ = serving.packed_decode(**x)
    expected, states = serving.packed_decode(**small | {"out": None})
    assert same(out, expected) and same(pool[8191], states[1])
    assert same(pool[8190], neighbour)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["initial_state", "mixed_qkv", "a", "b", "all"])
def test_what_lies_apart_gives_the_same_bits(device, name):
    """Slots with the rest of a page between them, rows and gates that are views of a
    projection's.
    """
    dense, x = call([2, 0, 4], 6, 2, 6, device), call([2, 0, 4], 6, 2, 6, device)
    for each in ("initial_state", "mixed_qkv", "a", "b"):
        if name in (each, "all"):  # rows of 16 bytes, slots of 32; gates of any
            gap, before = (5, 3) if each in "ab" else (64, 64)
            x[each] = apart(x[each], gap, before)
    out, pool = serving.packed_decode(**dense)
    got, gaps = serving.packed_decode(**x)
    assert same(got, out) and same(gaps, pool)
    if name in ("initial_state", "all"):
        assert between(x["initial_state"]).isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_no_row(device):
    x = call([], 2, 2, 6, device)
    before = x["initial_state"].clone()
    assert serving.packed_decode(**x)[0].shape == (0, 1, 6, D) and same(
        x["initial_state"], before
    )


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [1, 2, 4, 8, 16, 32, 64])
def test_a_graph_is_replayed_with_fewer_rows(dtype, B):
    """Captured at a power of two, replayed with fewer rows and padding, as engines do:
    the bits of an eager call.
    """
    rows, P = max(1, B // 2 + B % 2), 2 * B + 3
    x = call(list(range(1, B + 1)), P, 4, 8, "cuda", dtype)
    x["initial_state"].copy_(steps.pool(P, 8, "cuda", dtype))
    start = x["initial_state"].clone()
    serving.packed_decode(**x)  # loads the library
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serving.packed_decode(**x)
    fewer = (
        torch.randperm(P - 1, generator=torch.Generator().manual_seed(B))[:B].int() + 1
    )
    fewer[rows:] = torch.tensor([0, -1]).repeat(B)[: B - rows]
    x["ssm_state_indices"].copy_(fewer)
    x["initial_state"].copy_(start)
    x["out"].fill_(torch.nan)
    graph.replay()
    eager = x | {
        "initial_state": start.clone(),
        "out": torch.full_like(x["out"], torch.nan),
    }
    serving.packed_decode(**eager)
    assert same(x["out"], eager["out"]) and same(
        x["initial_state"], eager["initial_state"]
    )
    assert not x["out"][rows:].any() and not x["out"].isnan().any()
    assert not same(x["initial_state"], start)


@pytest.mark.gpu
def test_it_runs_on_the_current_stream():
    x, alone = (call([1, 2], 3, 4, 8, "cuda") for _ in range(2))
    serving.packed_decode(**x)
    late, stream = alone["mixed_qkv"].clone(), torch.cuda.Stream()
    alone["mixed_qkv"].zero_()  # what a call on another stream would find
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        alone["mixed_qkv"].copy_(late)
        serving.packed_decode(**alone)
    stream.synchronize()
    assert same(alone["out"], x["out"])


@pytest.mark.gpu
def test_nothing_is_allocated():
    x = call([1, 2], 3, 4, 8, "cuda")
    serving.packed_decode(**x)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    serving.packed_decode(**x)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_lie_apart_give_the_same_bits(dtype):
    dense, x = (call([2, 0, 4], 6, 2, 6, "cuda", dtype) for _ in range(2))
    x["initial_state"] = steps.heads_apart(x["initial_state"], 96)
    (out, pool), (got, gaps) = (
        serving.packed_decode(**dense),
        serving.packed_decode(**x),
    )
    assert same(got, out) and same(gaps, pool)
    assert steps.between_heads(x["initial_state"]).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("first_slot", [0, 1, -5])
def test_what_is_no_slot_of_the_pool_is_padding(first_slot):
    x = call([2] + [0] * len(steps.NO_SLOTS), 6, 2, 6, "cuda")
    x["ssm_state_indices"] = torch.tensor([2, *steps.NO_SLOTS]).cuda()
    before = x["initial_state"].clone()
    out, pool = serving.packed_decode(**x, first_slot=first_slot)
    assert not steps.bits(out[1:]).any() and out[0].isfinite().all()
    others = [0, 1, 3, 4, 5]
    assert same(pool[others], before[others]) and not same(pool[2], before[2])
