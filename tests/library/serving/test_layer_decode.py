"""layer_decode against float64, on a CPU (cpp-v1) and on a GPU: both layouts of the
convolution's pool, every row of constants, and what is not to be touched.
"""

from __future__ import annotations

import pytest
import serving_steps as steps
import torch
from library.serving.test_verify import DEVICES
from serving_steps import STATE, D, apart, error, same

from gdn import serving

everywhere = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
# q, k and v rounded to bfloat16 on a CPU
OUTPUT = {"cpu": 6e-3, "cuda": 4e-3}
OF_STATE = {"cpu": 2e-3, "cuda": 1e-5}


def call(slots, H, HV, device, dtype=torch.float32, taps_inner=False, **changed):
    """A call of these slots, of pools with two slots more than the greatest."""
    B, P, C = len(slots), max(slots) + 3, (2 * H + HV) * D
    x = steps.tokens(B, H, HV, "cpu")
    draw = torch.Generator().manual_seed(B + HV)

    def randn(*shape):
        return torch.randn(*shape, generator=draw)

    conv = randn(P, C, 3) if taps_inner else randn(P, 3, C).transpose(1, 2)
    made = {name: x[name] for name in ("a", "b", "A_log", "dt_bias")} | dict(
        mixed_qkv=torch.cat([x[name].flatten(1) for name in "qkv"], dim=1),
        conv_state=conv.to(torch.bfloat16),
        conv_weight=randn(C, 4).bfloat16(),
        state=steps.pool(P, HV, "cpu", dtype),
        state_indices=torch.tensor(slots, dtype=torch.int32),
        output_gate=randn(B, HV, D).bfloat16(),
        norm_weight=(1 + 0.5 * randn(D)).bfloat16(),
    )
    made = {name: y.to(device) for name, y in made.items()}
    return made | dict(conv_bias=None, scale=0.1) | changed


def faults(x: dict) -> list[str]:
    """What is wrong with a call, which is done here."""
    device = x["state"].device.type
    sigmoid = x.get("output_gate_activation") == "sigmoid"
    norm = x["output_gate"], x["norm_weight"], sigmoid, x.get("norm_eps", 1e-6)
    before = x["state"].clone(), x["conv_state"].clone()
    gates = x["a"], x["b"], x["A_log"], x["dt_bias"]
    conv = x["conv_weight"], x["conv_bias"]
    right = steps.layer(
        x["mixed_qkv"], *gates, *before, x["state_indices"], x["scale"], *conv, norm
    )
    out, state, conv_state = serving.layer_decode(**x)
    found = []
    if not (off := error(out, right.output)) <= OUTPUT[device]:
        found.append(f"output: {off:.2g}")
    if steps.bits(out)[(right.output == 0).all((1, 2)).to(out.device)].any():
        found.append("padding has an output")
    limit = max(STATE[state.dtype], OF_STATE[device])
    for slot, after in right.states.items():
        if not (off := error(state[slot], after)) <= limit:
            found.append(f"slot {slot}: {off:.2g}")
        if not torch.equal(conv_state[slot].cpu(), right.windows[slot]):
            found.append(f"slot {slot}: not shifted")
    others = [slot for slot in range(len(state)) if slot not in right.states]
    for now, then in zip((state, conv_state), before, strict=True):
        if not same(now[others], then[others]):
            found.append("a slot that is not to be written has changed")
    return found


@everywhere
@pytest.mark.parametrize(("H", "HV"), [(4, 8), (2, 6), (1, 4), (3, 3), (1, 8)])
@pytest.mark.parametrize("taps_inner", [False, True])
def test_values_and_untouched_slots(device, H, HV, taps_inner):
    x = call([3, 0, 1, -1], H, HV, device, taps_inner=taps_inner)
    assert faults(x) == []


@everywhere
def test_a_bias_a_sigmoid_a_float_weight_and_another_epsilon(device):
    x = call([2, 1], 2, 4, device, torch.bfloat16)
    x["conv_bias"] = torch.randn(x["conv_weight"].shape[0]).bfloat16().to(device)
    x["norm_weight"] = x["norm_weight"].float()
    x["dt_bias"] = x["dt_bias"].bfloat16()
    assert faults(x | dict(output_gate_activation="sigmoid", norm_eps=0.05)) == []


@everywhere
@pytest.mark.parametrize(("B", "H", "HV"), [(1, 4, 8), (3, 1, 4), (70, 4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_of_eight_bits(device, dtype, B, H, HV):
    """A head's largest one is 448; all are within half a step, 2^-4 of a value, of those in
    bfloat16, which other tests hold to float64."""
    slots = [0 if n == 1 else n + 1 for n in range(B)]
    wide, x = (call(slots, H, HV, device, dtype) for _ in "12")
    exact = serving.layer_decode(**wide)[0].double()
    scale = torch.full((HV, B), torch.nan, device=device).T
    out, *pools = serving.layer_decode(**x, out_scale=scale)
    assert out.dtype == torch.float8_e4m3fn and out.shape == exact.shape
    live = x["state_indices"] > 0
    assert (out.double()[live].abs().amax(-1) == 448).all()
    assert not out.view(torch.uint8)[~live].any()
    largest = exact.abs().amax(-1).clamp(min=1e-10).float()
    torch.testing.assert_close(scale * 448, largest, rtol=5e-3, atol=0)
    off_by = (out.double() * scale[..., None] - exact).abs()
    assert (off_by <= 0.067 * exact.abs() + scale[..., None] * 2**-9).all()
    for got, right in zip(pools, (wide["state"], wide["conv_state"]), strict=True):
        assert same(got, right)


@everywhere
@pytest.mark.parametrize("taps_inner", [False, True])
def test_what_lies_apart_gives_the_same_bits(device, taps_inner):
    dense, x = (call([2, 4, 1], 2, 4, device, taps_inner=taps_inner) for _ in "12")
    x |= {name: apart(x[name], 16) for name in ("mixed_qkv", "output_gate")}
    x |= {name: apart(x[name], 5) for name in "ab"}
    x["state"], x["conv_state"] = apart(x["state"], 64), apart(x["conv_state"], 10)
    x["state_indices"] = x["state_indices"].long()
    for got, right in zip(
        *(serving.layer_decode(**y) for y in (x, dense)), strict=True
    ):
        assert same(got, right)


@everywhere
def test_what_does_not_fit_is_one_line(device):
    def refused(says, **changed):
        x = call([2, 1], 2, 4, device) | changed
        pools = x["state"].clone(), x["conv_state"].clone()
        with pytest.raises((ValueError, TypeError), match=f"^{says}"):
            serving.layer_decode(**x)
        assert same(x["state"], pools[0]) and same(x["conv_state"], pools[1])

    C = 8 * D

    def zeros(*shape):
        return torch.zeros(*shape, dtype=torch.bfloat16, device=device)

    refused("output_gate_activation: expected", output_gate_activation="gelu")
    refused("conv_state: expected", conv_state=zeros(5, C, 4))
    refused("conv_state: expected", conv_state=zeros(4, C, 3))
    refused("conv_weight: expected", conv_weight=zeros(C, 3))
    refused("conv_bias: expected", conv_bias=zeros(C - 1))
    refused("mixed_qkv: ", mixed_qkv=zeros(2, C - 128))
    out = zeros(2, 4, D)
    refused("z: expected", output_gate=zeros(3, 4, D), out=out)
    rows = torch.zeros(2, 4, device=device)
    refused("out: expected float8_e4m3fn", out=out, out_scale=rows)
    refused("output_scale: expected", out_scale=rows[:1])
    refused("norm_epsilon: expected 0 or more, got -1", norm_eps=-1.0)


@on_a_gpu
def test_a_layout_that_is_neither_is_refused(device):
    x = call([1], 2, 4, device)
    wide = torch.zeros(4, 8 * D, 4, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="^conv_state: expected slots that are dense"):
        serving.layer_decode(**x | dict(conv_state=wide[:, :, :3]))
    many = call([1], 1, 9, device)
    with pytest.raises(ValueError, match="^pool: expected at most 8 heads for one"):
        serving.layer_decode(**many)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("B", [1, 3, 12, 40, 70])
def test_every_row_of_constants(device, B, dtype):
    assert faults(call(list(range(1, B + 1)), 4, 8, device, dtype)) == []


@on_a_gpu
def test_a_cuda_graph_replays_the_layer(device):
    x = call([3, 1, 2], 4, 8, device)
    before = x["state"].clone(), x["conv_state"].clone()
    x["out"] = torch.empty_like(x["output_gate"])
    eager = [y.clone() for y in serving.layer_decode(**x)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serving.layer_decode(**x)
    x["state"].copy_(before[0])
    x["conv_state"].copy_(before[1])
    x["out"].zero_()
    graph.replay()
    torch.cuda.synchronize()
    for got, right in zip((x["out"], x["state"], x["conv_state"]), eager, strict=True):
        assert same(got, right)
