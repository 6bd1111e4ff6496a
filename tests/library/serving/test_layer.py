"""layer_post_conv against float64, on a CPU (cpp-v1) and on a GPU: every number of tokens, both
gates, weights of both dtypes, and every size of a head's cluster.
"""

from __future__ import annotations

import pytest
import serving_steps as steps
import torch
from library.serving.test_verify import DEVICES
from library.serving.test_verify import call as verify_call
from serving_steps import STATE, D, apart, error, same

from gdn import serving

everywhere = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
LIMIT = 4e-3  # of outputs: two roundings to bfloat16


def call(slots, lengths, accepted, P, H, HV, device, dtype=torch.float32, **changed):
    """vLLM's call, of test_verify.py's tokens."""
    x = verify_call(slots, lengths, accepted, P, H, HV, device, dtype)
    draw = torch.Generator().manual_seed(len(slots) + HV)
    z = torch.randn(sum(lengths), HV, D, generator=draw).bfloat16()
    weight = (1 + 0.5 * torch.randn(D, generator=draw)).bfloat16()
    given = {name: x[name] for name in ("a", "b", "A_log", "dt_bias", "cu_seqlens")}
    return given | dict(
        mixed_qkv=torch.cat([x[name][0].flatten(1) for name in "qkv"], dim=1),
        state_indices=x["ssm_state_indices"],
        num_accepted_tokens=x["num_accepted_tokens"],
        state=x["initial_state"],
        output_gate=z.to(device),
        norm_weight=weight.to(device),
        scale=0.1,
    ) | changed  # fmt: skip


def right(x: dict) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """(outputs, slot -> the state that is to be there) in float64, of whole sequences."""
    HV = x["state"].shape[1]
    H = (x["mixed_qkv"].shape[1] // D - HV) // 2
    parts = x["mixed_qkv"].split([H * D, H * D, HV * D], dim=1)
    q, k, v = (part.unflatten(1, (-1, D)) for part in parts)
    outputs = torch.zeros(v.shape, dtype=torch.float64)
    states: dict[int, torch.Tensor] = {}
    gates = x["A_log"], x["dt_bias"], x["scale"]
    ends = x["cu_seqlens"].tolist()
    for n, slots in enumerate(x["state_indices"].tolist()):
        count = int(x["num_accepted_tokens"][n])
        start = slots[count - 1] if 1 <= count <= len(slots) else 0
        if start <= 0:
            continue
        rows = slice(ends[n], ends[n + 1])
        tokens = [y[rows] for y in (q, k, v, x["a"], x["b"])]
        outputs[rows], after = steps.walk(x["state"][start], *tokens, *gates)
        kept = zip(slots, after, strict=False)
        states |= {slot: state for slot, state in kept if slot > 0}
    sigmoid = x.get("output_gate_activation") == "sigmoid"
    gate = x["output_gate"], x["norm_weight"], sigmoid, x.get("norm_eps", 1e-6)
    return steps.gated_norm(outputs, *gate), states


def faults(x: dict, **changed: object) -> list[str]:
    """What is wrong with a call, which is done here; changed: what is as right(x) has it, said in
    another way."""
    outputs, states = right(x)
    before = x["state"].clone()
    out, pool = serving.layer_post_conv(**x | changed)
    found = []
    if not (off := error(out, outputs)) <= LIMIT:
        found.append(f"output: {off:.2g}")
    if steps.bits(out)[(outputs == 0).all((1, 2)).to(out.device)].any():
        found.append("padding has an output")
    for slot, state in states.items():
        if not (off := error(pool[slot], state)) <= STATE[pool.dtype]:
            found.append(f"slot {slot}: {off:.2g}")
    others = [slot for slot in range(len(pool)) if slot not in states]
    if not same(pool[others], before[others]):
        found.append("a slot that is not to be written has changed")
    return found


def rows_of(N: int, T: int) -> list[list[int]]:
    return [[n * T + t + 1 for t in range(T)] for n in range(N)]


@everywhere
@pytest.mark.parametrize(("H", "HV"), [(4, 8), (2, 6), (1, 4)])
@pytest.mark.parametrize("T", [1, 3, 4, 8])
def test_values_and_untouched_slots(device, T, H, HV):
    x = call(rows_of(3, T), [T] * 3, [1, T, (T + 1) // 2], 3 * T + 2, H, HV, device)
    assert faults(x) == []


@everywhere
def test_a_sigmoid_a_float_weight_and_another_epsilon(device):
    x = call(rows_of(3, 4), [4] * 3, [1, 4, 2], 14, 2, 4, device, torch.bfloat16)
    x["norm_weight"] = x["norm_weight"].float()
    assert faults(x | dict(output_gate_activation="sigmoid", norm_eps=0.05)) == []


@everywhere
def test_sequences_of_other_lengths_and_padding(device):
    slots = [*rows_of(3, 4), [0] * 4, [0, -1, 0, 0], [13, 0, 14, 15]]
    lengths, accepted = [1, 4, 3, 0, 2, 4], [2, 5, 4, 1, 1, 1]
    assert faults(call(slots, lengths, accepted, 17, 2, 6, device)) == []


@everywhere
def test_without_cu_seqlens_all_have_as_many_tokens(device):
    x = call(rows_of(2, 3), [3, 3], [1, 2], 8, 2, 4, device)
    other = x | dict(cu_seqlens=None, state=x["state"].clone())
    (out, pool), (got, after) = (serving.layer_post_conv(**y) for y in (x, other))
    assert same(out, got) and same(pool[1:], after[1:])


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("B", [1, 8, 40, 100, 150])  # by B a GPU has other constants
def test_one_token_of_each(device, B, dtype):
    slots = [[n + 1] if n % 7 != 3 else [0] for n in range(B)]
    accepted = [
        1 if n % 5 != 4 else 2 for n in range(B)
    ]  # more than there are: padding
    x = call(slots, [1] * B, accepted, B + 2, 2, 8, device, dtype)
    assert faults(x, cu_seqlens=None) == []


@everywhere
def test_what_lies_apart_gives_the_same_bits(device):
    def made():
        return call(rows_of(2, 2), [2, 2], [1, 2], 6, 2, 6, device)

    dense, x = made(), made()
    x |= {name: apart(x[name], 16) for name in ("mixed_qkv", "output_gate")}
    x |= {name: apart(x[name], 5) for name in "ab"}
    x["state"] = apart(x["state"], 64)
    (out, pool), (got, after) = (serving.layer_post_conv(**y) for y in (dense, x))
    assert same(out, got) and same(pool[1:], after[1:])


@everywhere
def test_what_does_not_fit_is_one_line(device):
    def refused(says, **changed):
        x = call(rows_of(2, 2), [2, 2], [1, 2], 6, 2, 6, device)
        with pytest.raises((ValueError, TypeError), match=f"^{says}"):
            serving.layer_post_conv(**x | changed)

    half = torch.ones(D, dtype=torch.float16, device=device)
    refused("output_gate_activation: expected 'silu' or 'sigmoid', got 'gelu'",
            output_gate_activation="gelu")  # fmt: skip
    refused("norm_weight: expected float32 ?.*, got float16", norm_weight=half)
    short = torch.zeros(3, 6, D, dtype=torch.bfloat16, device=device)
    refused("output: expected", output_gate=short)
    out = torch.zeros(4, 6, D, dtype=torch.bfloat16, device=device)
    refused("z: expected", output_gate=short, out=out)
    refused("norm_epsilon: expected 0 or more, got -1", norm_eps=-1.0)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 4, 7])
@pytest.mark.parametrize("N", [1, 12, 40, 70])
def test_every_row_of_constants(device, N, T, dtype):
    x = call(rows_of(N, T), [T] * N, [T] * N, N * T + 1, 4, 8, device, dtype)
    assert faults(x) == []


@on_a_gpu
def test_a_cuda_graph_replays_the_layer(device):
    x = call(rows_of(5, 4), [4] * 5, [1] * 5, 21, 4, 8, device)
    before = x["state"].clone()
    x["out"] = torch.empty_like(x["output_gate"])
    serving.layer_post_conv(**x)
    eager = x["out"].clone(), x["state"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serving.layer_post_conv(**x)
    x["state"].copy_(before)
    x["out"].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same(x["out"], eager[0]) and same(x["state"][1:], eager[1][1:])
