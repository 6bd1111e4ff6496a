"""mtp_verify and SGLang's update against float64, on a CPU (cpp-v1) and on a GPU."""

from __future__ import annotations

import helpers
import pytest
import serving_steps as steps
import torch
from serving_steps import STATE, D, apart, between, error, same

from gdn import serving
from gdn.serving import sglang
from gdn_cli.machine import inventory

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler here"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture
def device(request):
    if request.param == "cuda" and not any(
        a.full_name == serving._verify.cuda for a in helpers.REGISTRY.algos
    ):
        pytest.skip(f"no {serving._verify.cuda} yet")
    return request.param


everywhere = pytest.mark.parametrize("device", DEVICES, indirect=True)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:], indirect=True)


def call(
    slots,
    lengths,
    accepted,
    P: int,
    H: int,
    HV: int,
    device: str,
    dtype=torch.float32,
    **changed,
) -> dict:
    """vLLM's call: sequences of these lengths. Slots that no row names, and slot 0, hold NaN."""
    x = steps.tokens(sum(lengths), H, HV, device)
    x |= {name: x[name][None] for name in "qkv"}
    named = {s for row in slots for s in row}
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return x | dict(
        scale=0.1, initial_state=steps.pool(P, HV, device, dtype, tuple({0, *range(P)} - (named - {0}))),
        cu_seqlens=ends.to(device), ssm_state_indices=torch.tensor(slots, dtype=torch.int32, device=device),
        num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32, device=device), use_qk_l2norm_in_kernel=True,
    ) | changed  # fmt: skip


def faults(x: dict, first_slot: int = 1) -> list[str]:
    """What is wrong with vLLM's call, which is done here."""
    before, ends = x["initial_state"].clone(), x["cu_seqlens"].tolist()
    out, pool = serving.mtp_verify(**x, first_slot=first_slot)
    sequences = []
    for n, row in enumerate(x["ssm_state_indices"].tolist()):
        count = int(x["num_accepted_tokens"][n])
        start = row[count - 1] if 1 <= count <= len(row) else -1
        sequences.append(steps.Sequence(start, slice(ends[n], ends[n + 1]), row))
    tokens = x | {name: x[name][0] for name in "qkv"}
    tokens["norm"] = x["use_qk_l2norm_in_kernel"]
    return steps.faults(sequences, tokens, before, pool, out[0], first_slot)


@everywhere
@pytest.mark.parametrize("H, HV", [(4, 8), (2, 6), (1, 1)])
@pytest.mark.parametrize("T", [2, 4, 8])
def test_values_and_untouched_slots(device, T, H, HV):
    slots = [[3 * T - i for i in range(n * T, n * T + T)] for n in range(3)]
    assert faults(call(slots, [T] * 3, [1, T, T // 2], 3 * T + 2, H, HV, device)) == []


@everywhere
def test_accepted_counts_out_of_range_and_padding_anywhere(device):
    slots = [
        [0, 0, 0],
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
        [-1, 10, 11],
        [12, 13, 14],
        [0, 15, 0],
    ]
    accepted = [1, 0, 4, -1, 1, 3, 2]
    assert faults(call(slots, [3] * 7, accepted, 17, 2, 6, device)) == []


@everywhere
def test_sequences_of_fewer_tokens_and_of_none(device):
    """Of none: what a CUDA graph's padding has, with slots 0, and what a sequence has
    that was preempted.
    """
    slots = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert faults(call(slots, [1, 4, 3, 0, 0], [2, 1, 4, 1, 1], 14, 2, 6, device)) == []


@everywhere
def test_first_slot_0(device):
    x = call([[0, 2], [-1, 3]], [2, 2], [1, 1], 5, 2, 6, device)
    x["initial_state"][0] = x["initial_state"][2]
    assert faults(x, first_slot=0) == []


@everywhere
@pytest.mark.parametrize("name", ["initial_state", "qkv", "gates"])
def test_what_lies_apart_gives_the_same_bits(device, name):
    def made() -> dict:
        return call([[1, 2], [3, 4]], [2, 2], [1, 2], 6, 2, 6, device)

    dense, x = made(), made()
    if name == "initial_state":
        x[name] = apart(x[name], 64, 64)
    elif name == "qkv":
        packed = torch.cat([x[n][0].flatten(1) for n in name], dim=1)
        parts = packed.split([2 * D, 2 * D, 6 * D], dim=1)
        x |= {n: p.view(1, 4, -1, D) for n, p in zip(name, parts, strict=True)}
    else:
        x |= {n: apart(x[n], 5, 3) for n in "ab"}
    (out, pool), (got, gaps) = serving.mtp_verify(**dense), serving.mtp_verify(**x)
    assert same(got, out) and same(gaps, pool)
    if name == "initial_state":
        assert between(x[name]).isnan().all()


@everywhere
def test_single_tokens(device):
    """Slots [N], a column of a table: vLLM's decode rows in a batch with prompts."""
    x = call([[3], [0], [1]], [1, 1, 1], [1, 1, 1], 5, 2, 6, device)
    alone = x | {
        "initial_state": x["initial_state"].clone(),
        "ssm_state_indices": x["ssm_state_indices"][:, 0].contiguous(),
        "num_accepted_tokens": None,
    }
    assert faults(x) == []
    out, pool = serving.mtp_verify(**alone)
    states = x["initial_state"][[1, 3]].cpu().double()
    assert error(pool[[1, 3]], states) <= STATE[torch.float32]
    assert not out[0, 1].any()


def laid_out(x: dict, N: int, T: int, layout: str) -> dict:
    """q, k, v, a, b as SGLang has them: tokens of all sequences, views of packed rows
    among them, or [N, T, ...].
    """
    if layout == "batch":
        return {name: x[name].unflatten(0, (N, T)) for name in "qkvab"}
    if layout == "flat":
        return {name: x[name][None] for name in "qkv"}
    widths = [x[name].shape[1] * D for name in "qkv"]
    rows = torch.cat([x[name].flatten(1) for name in "qkv"], dim=1)
    views = {
        n: p.view(1, N * T, -1, D)
        for n, p in zip("qkv", rows.split(widths, dim=1), strict=True)
    }
    return views | {name: apart(x[name], 5, 3)[None] for name in "ab"}


@everywhere
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("mode", ["outputs", "last", "buffer"])
@pytest.mark.parametrize("layout", ["flat", "views", "batch"])
def test_sglang_s_update(device, T, mode, layout):
    """The slots keep their states and the buffer gets one after each token; or nothing
    is stored; or the last state.
    """
    N, H, HV, slots = 3, 2, 6, [0, 4, -1]
    x = steps.tokens(N * T, H, HV, device)
    x |= laid_out(x, N, T, layout)
    x |= dict(
        softplus_beta=1.0, softplus_threshold=20.0, scale=0.1, use_qk_l2norm_in_kernel=True,
        initial_state_source=steps.pool(6, HV, device, nan=(1, 2, 3, 5)),
        initial_state_indices=torch.tensor(slots, dtype=torch.int32, device=device),
        cu_seqlens=torch.arange(0, N * T + 1, T, dtype=torch.int32, device=device), disable_state_update=mode != "last",
    )  # fmt: skip
    rows = [2, 0, 1]
    buffer = torch.full((4, T + 1, HV, D, D), torch.nan, device=device)
    if mode == "buffer":
        x["intermediate_states_buffer"] = buffer
        x["intermediate_state_indices"] = torch.tensor(rows).int().to(device)
    pool = x["initial_state_source"]
    before = pool.clone()
    out = sglang.update(**x)
    assert out.shape == x["v"].shape and out.is_contiguous()
    x |= {name: x[name].reshape(N * T, -1, D) for name in "qkv"}
    x |= {name: x[name].reshape(N * T, HV) for name in "ab"}
    tokens = [slice(n * T, n * T + T) for n in range(N)]
    to = None if mode == "last" else [-1]
    sequences = [steps.Sequence(s, t, to) for s, t in zip(slots, tokens, strict=True)]
    out = out.view(N * T, HV, D)
    assert steps.faults(sequences, x | {"norm": True}, before, pool, out, 0) == []
    if mode == "buffer":
        for n in range(2):
            parts = [x[name][tokens[n]] for name in "qkvab"]
            gates = x["A_log"], x["dt_bias"]
            _, states = steps.walk(before[slots[n]], *parts, *gates, 0.1)
            assert error(buffer[rows[n], :T], states) <= STATE[torch.float32]
        assert buffer[[1, 3]].isnan().all() and buffer[:, T].isnan().all()


@everywhere
def test_tokens_that_do_not_fit_the_sequences_are_refused(device):
    x = steps.tokens(5, 2, 6, device)
    x |= {name: x[name][None] for name in "qkv"}
    pool = steps.pool(3, 6, device)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=device)
    before = pool.clone()
    with pytest.raises(ValueError):
        sglang.update(
            **x,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            initial_state_source=pool,
            initial_state_indices=slots,
        )
    with pytest.raises(ValueError):
        serving.mtp_verify(
            **x, initial_state=pool, ssm_state_indices=slots[:, None].repeat(1, 3)
        )
    assert same(pool, before)


# --- on a GPU


@on_a_gpu
@pytest.mark.parametrize("N", [1, 2, 4, 8, 16])
def test_a_graph_is_replayed_with_fewer_sequences(device, N):
    """As vLLM does: after the last sequence there are some of no tokens, with slots 0
    and one accepted token.
    """
    T, used = 4, max(1, N // 2 + N % 2)
    slots = [[n * T + t + 1 for t in range(T)] for n in range(N)]
    x = call(
        slots,
        [T] * N,
        [1] * N,
        N * T + 1,
        4,
        8,
        device,
        out=torch.empty(1, N * T, 8, D).bfloat16().to(device),
    )
    start = x["initial_state"].clone()
    serving.mtp_verify(**x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serving.mtp_verify(**x)
    x["ssm_state_indices"][used:] = 0
    x["cu_seqlens"][used:] = used * T
    # 0 and T + 1 are out of range
    x["num_accepted_tokens"][:used] = torch.arange(used, device=device) % (T + 2)
    x["initial_state"].copy_(start)
    x["out"].fill_(torch.nan)
    graph.replay()
    eager = x | {
        "initial_state": start.clone(),
        "out": torch.full_like(x["out"], torch.nan),
    }
    serving.mtp_verify(**eager)
    assert same(x["initial_state"], eager["initial_state"])
    assert same(x["out"][:, : used * T], eager["out"][:, : used * T])
    assert not x["out"][:, : used * T].isnan().any()


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_that_lie_apart_give_the_same_bits(device, dtype):
    slots = [[1, 2, 3], [4, 5, 6]]
    dense, x = (call(slots, [3, 2], [1, 3], 8, 2, 6, device, dtype) for _ in range(2))
    x["initial_state"] = steps.heads_apart(x["initial_state"], 96)
    (out, pool), (got, gaps) = serving.mtp_verify(**dense), serving.mtp_verify(**x)
    assert same(got, out) and same(gaps, pool)
    assert steps.between_heads(x["initial_state"]).isnan().all()


@on_a_gpu
def test_what_is_no_slot_of_the_pool_is_padding(device):
    many = len(steps.NO_SLOTS)
    x = call(
        [[0, 0]] * many + [[2, 3]], [2] * (many + 1), [1] * (many + 1), 5, 2, 6, device
    )
    x["ssm_state_indices"] = x["ssm_state_indices"].long()
    x["ssm_state_indices"][:many, 0] = torch.tensor(steps.NO_SLOTS).cuda()
    before = x["initial_state"].clone()
    out, pool = serving.mtp_verify(**x)
    assert (
        not steps.bits(out[0, : 2 * many]).any() and out[0, 2 * many :].isfinite().all()
    )
    assert same(pool[[0, 1, 4]], before[[0, 1, 4]]) and not same(pool[2], before[2])
