"""gdn_prefill_packed: the algos against a step in float64 that is written here; slots, padding, fresh sequences."""

from __future__ import annotations

import math

import helpers
import pytest
import torch

from gdn_cli.catalog.workloads import embedded, select, stressed, twin
from gdn_cli.errors import UsageError
from gdn_cli.worker import dataset, trace_set_writer

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_prefill_packed"]
D = 128


def inputs(lengths, slots, P: int, H: int, HV: int, device: str = "cpu", fresh=(), scale=None, decay=-1.0) -> list:
    """The op's inputs. Slot 0, slots of fresh sequences and all that no sequence names hold NaN: whoever reads them is
    found out. q and k have any length, as a convolution leaves them."""
    g, T = torch.Generator().manual_seed(sum(lengths) * 10 + HV), sum(lengths)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    pool = randn(P, HV, D, D)
    read = [slot for i, slot in enumerate(slots) if slot > 0 and i not in fresh]
    pool[[i for i in range(P) if i not in read]] = math.nan
    q, k = randn(T, H * D) * 3, randn(T, H * D) * 0.2
    k[1:2] *= 0.005  # what is added below the root shows
    k[2:3] *= 1e4  # its square is beyond float16
    made = [
        torch.cat([q, k, randn(T, HV * D)], dim=1).bfloat16(),
        randn(T, HV).bfloat16(),
        randn(T, HV).bfloat16(),
        randn(HV) + decay,
        randn(HV) * 0.25,
        pool,
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor([i not in fresh for i in range(len(slots))]),
        torch.tensor([0, *lengths]).cumsum(0).int(),
    ]
    return [*(x.to(device) for x in made), scale]


def exact(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, has_initial_state, cu_seqlens, scale):
    """(output, {slot: new state}) in float64, one token at a time."""
    x, a, b, A_log, dt_bias = (t.double().cpu() for t in (mixed_qkv, a, b, A_log, dt_bias))
    HV = pool.shape[1]
    H, T = (x.shape[1] // D - HV) // 2, len(x)
    q, k, v = (t.reshape(T, -1, D) for t in x.split([H * D, H * D, HV * D], dim=1))
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6) ** -0.5 for t in (q, k))
    q, k = (t.repeat_interleave(HV // H, dim=1) for t in (q, k))
    g = torch.exp(-torch.exp(A_log) * torch.nn.functional.softplus(a + dt_bias, threshold=1e9))
    beta, out, states = 1 / (1 + torch.exp(-b)), torch.zeros(T, HV, D, dtype=torch.float64), {}
    for n, slot in enumerate(state_indices.tolist()):
        if slot <= 0:
            continue
        S = pool[slot].double().cpu() if has_initial_state[n] else torch.zeros(HV, D, D, dtype=torch.float64)
        for t in range(int(cu_seqlens[n]), int(cu_seqlens[n + 1])):
            S = S * g[t, :, None, None]
            d = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
            S = S + d[:, :, None] * k[t, :, None, :]
            out[t] = (scale or D**-0.5) * torch.einsum("hvk,hk->hv", S, q[t])
        states[slot] = S
    return out, states


def off(x, right) -> float:
    return float((x.double().cpu() - right).norm() / (right.norm() or 1))


def faults(kernel, args: list, output: float = 5e-3, state: float = 5e-3) -> list[str]:
    """What is wrong with a call. An output that nothing wrote is NaN."""
    right_output, right = exact(*args)
    old = args[5].clone()
    if kernel.destination_passing:
        found, pool = args[0].new_full(right_output.shape, math.nan), args[5]
        kernel(args, [found, pool])
    else:
        found, pool = kernel.returns(args)
    wrong = [f"slot {i}" for i in range(len(pool)) if i not in right
             and not torch.equal(pool[i].view(torch.int32), old[i].view(torch.int32))]  # fmt: skip
    cu = args[8].tolist()
    padding = [i for i, slot in enumerate(args[6].tolist()) if slot <= 0]
    wrong += [f"padding {i}" for i in padding if found[cu[i] : cu[i + 1]].view(torch.int16).any()]
    wrong += [f"output {off(found, right_output):.2g}"] if not off(found, right_output) < output else []
    return wrong + [f"state {i}: {off(pool[i], x):.2g}" for i, x in right.items() if not off(pool[i], x) < state]


# lengths, slots, slots of the pool, sequences that start from zeros
CASES = {
    "one": ([5], [1], 2, ()),
    "padding around": ([3, 70, 1, 4, 0], [0, 3, -1, 1, 0], 5, ()),
    "fresh ones": ([5, 0, 64, 0], [4, 2, 1, 3], 5, (1, 2)),
    "the last slot": ([17, 65], [6, 1], 7, (0,)),
    "padding alone": ([3, 2], [0, -1], 3, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_on_a_cpu(case):
    lengths, slots, P, fresh = CASES[case]
    kernel = helpers.built(f"{OP.name}/pt-reference", "cpu")[1]
    for H, HV, scale in ((2, 6, None), (1, 1, 0.3)):
        assert faults(kernel, inputs(lengths, slots, P, H, HV, fresh=fresh, scale=scale), 3e-3, 1e-5) == []


def test_twins_have_room_in_their_pool_and_every_fourth_sequence_is_fresh():
    (w,) = select(OP, embedded(OP), chosen=["seq_lens=3x2+5"])
    assert w.axes == {"total_seq_len": 11, "num_seqs": 4, "len_cu_seqlens": 5, "pool_size": 9}
    x = dict(zip(OP.inputs, dataset.load_inputs(OP, w), strict=True))
    assert x["has_initial_state"].tolist() == [True, True, True, False] and x["cu_seqlens"].tolist() == [0, 2, 4, 6, 11]
    assert len(set(x["state_indices"].tolist())) == 4 and x["cu_seqlens"].dtype == torch.int32
    with pytest.raises(UsageError, match="pool_size=2 with num_seqs=2; .*give num_seqs \\+ 1 or more"):
        twin(OP, {"total_seq_len": 9, "num_seqs": 2, "pool_size": 2})
    (hard,) = stressed(OP, ["padding"])
    slots = dict(zip(OP.inputs, dataset.load_inputs(OP, hard), strict=True))["state_indices"].tolist()
    assert slots[0] == slots[4] == 0 and slots[-1] == -1


def test_a_data_set_holds_what_is_true_or_false(tmp_path):
    w, specs = twin(OP, {"total_seq_len": 4, "num_seqs": 4}), trace_set_writer._specs
    assert specs(OP, w)["has_initial_state"] == ("BOOL", (4,))
    path = tmp_path / "blob.safetensors"
    trace_set_writer._write_blob(OP, w, path, tmp_path)
    assert trace_set_writer._whole(OP, w, path)
