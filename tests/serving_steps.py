"""The gated delta rule in float64, a token at a time, and inputs as an engine has them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from gdn_cli.machine import inventory

D = 128
EPSILON = 1e-6
# of tests that take `device`
ON_BOTH = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler"),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(bits(x), bits(y))


def error(x: torch.Tensor, right: torch.Tensor) -> float:
    return float((x.cpu().double() - right).norm() / right.norm().clamp(min=1e-30))


def off(x: torch.Tensor, right: torch.Tensor) -> float:
    """The relative Frobenius error; the absolute one where all is to be 0."""
    return float((x.cpu().double() - right).norm() / (right.norm() or 1))


def gates(a, b, A_log, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
    """(log g, beta) in float64 on the CPU, of a and b [..., HV]."""
    a, b, A_log, dt_bias = (x.detach().cpu().double() for x in (a, b, A_log, dt_bias))
    softplus = torch.nn.functional.softplus(a + dt_bias, threshold=1e3)
    return -torch.exp(A_log) * softplus, torch.sigmoid(b)


def walk(S, q, k, v, a, b, A_log, dt_bias, scale, norm: bool = True):
    """Tokens of one sequence: S [HV, V, K], q and k [T, H, K], v [T, HV, V], a and b
    [T, HV], all of any dtype. Returns outputs [T, HV, V] and the state after each token
    [T, HV, V, K], in float64 on the CPU. Without A_log the gates are given: a is log g,
    b is beta.
    """
    S, q, k, v, log_g, beta = (x.detach().cpu().double() for x in (S, q, k, v, a, b))
    if A_log is not None:
        A_log, dt_bias = (x.detach().cpu().double() for x in (A_log, dt_bias))
        log_g = -torch.exp(A_log) * torch.log1p(torch.exp(log_g + dt_bias))
        beta = torch.sigmoid(beta)
    if norm:
        q, k = (
            x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (q, k)
        )
    q, k = (x.repeat_interleave(S.shape[0] // x.shape[1], 1) for x in (q, k))
    outputs, states = torch.zeros_like(v), S.new_zeros(len(v), *S.shape)
    for t in range(len(v)):
        S = S * torch.exp(log_g[t])[:, None, None]
        d = beta[t][:, None] * (v[t] - (S @ k[t, :, :, None])[..., 0])
        S = S + d[:, :, None] * k[t, :, None, :]
        outputs[t], states[t] = scale * (S @ q[t, :, :, None])[..., 0], S
    return outputs, states


def gated_norm(o, z, weight, sigmoid: bool = False, epsilon: float = EPSILON):
    """RMSNorm of outputs [.., V] with the gate silu(z), or sigmoid(z), in float64."""
    o, z, weight = (x.detach().cpu().double() for x in (o, z, weight))
    gate = torch.sigmoid(z) * (1 if sigmoid else z)
    scale = (o.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return o * scale * weight * gate


class Layer(NamedTuple):
    """What a decode layer leaves: outputs [B, HV, V]; by slot, its state [HV, V, K] in float64,
    and the last three tokens [channels, 3], copies.
    """

    output: torch.Tensor
    states: dict[int, torch.Tensor]
    windows: dict[int, torch.Tensor]


def layer(
    qkv, a, b, A_log, dt_bias, pool, conv_state, slots, scale, weight, bias, norm
) -> Layer:
    """A token of each row through convolution, step and norm, in float64. conv_state
    [slots, channels, 3], weight [channels, 4], norm: gated_norm's arguments after o.
    """
    HV = pool.shape[1]
    H = (qkv.shape[1] // D - HV) // 2
    z, *of_norm = norm
    done = Layer(torch.zeros(len(qkv), HV, D, dtype=torch.float64), {}, {})
    for n, slot in enumerate(slots.tolist()):
        if slot <= 0:
            continue
        window = torch.cat([conv_state[slot], qkv[n][:, None]], 1).cpu()
        c = (window.double() * weight.cpu().double()).sum(1)
        c = c if bias is None else c + bias.cpu().double()
        c = c * torch.sigmoid(c)
        q, k, v = c.view(-1, D).split([H, H, HV])
        token = q[None], k[None], v[None], a[n][None], b[n][None]
        o, states = walk(pool[slot], *token, A_log, dt_bias, scale)
        done.output[n] = gated_norm(o[0], z[n], *of_norm)
        done.states[slot], done.windows[slot] = states[0], window[:, 1:]
    return done


OUTPUT = 5e-3  # bfloat16's rounding
# relative error of a state: float32's is of the sums; the others' is of the rounding,
# half a unit in the last place
STATE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}


class Sequence(NamedTuple):
    slot: int  # of its state at the start
    rows: slice  # its tokens
    # the slots of the states after each token; None: the last one goes back to `slot`
    to: list[int] | None = None
    fresh: bool = False  # starts from zeros


def faults(sequences, x, before, after, out, first_slot=1, limits=(OUTPUT, STATE)):
    """What is wrong with a call. x: its tokens, scale and norm; before, after: the pool."""
    found, written = [], {}
    slots = range(max(first_slot, 0), len(before))
    for n, (start, rows, to, fresh) in enumerate(sequences):
        if start not in slots:
            if bits(out[rows]).any():
                found.append(f"{n}: padding has an output")
            continue
        S = torch.zeros_like(before[0]) if fresh else before[start]
        parts = [x[name][rows] for name in "qkvab"]
        gates = x["A_log"], x["dt_bias"]
        right, states = walk(S, *parts, *gates, x["scale"], x["norm"])
        if len(right) and not error(out[rows], right) <= limits[0]:
            found.append(f"{n}: output {error(out[rows], right):.2g}")
        last = [*states[-1:], S.cpu().double()][0]
        for slot, state in zip(to or [start], states if to else [last], strict=False):
            if slot in slots:
                written[slot] = state
    for slot, state in written.items():
        if not error(after[slot], state) <= limits[1][after.dtype]:
            found.append(f"slot {slot}: {error(after[slot], state):.2g}")
    others = [slot for slot in range(len(before)) if slot not in written]
    if not same(after[others], before[others]):
        found.append("another slot has changed")
    return found


def apart(x: torch.Tensor, gap: int, before: int = 0) -> torch.Tensor:
    """The same values in rows (first axis) that lie `gap` elements apart, after
    `before` others; NaN between.
    """
    row = x[0].numel()
    wide = x.new_full((before + len(x) * (row + gap),), torch.nan)
    return wide.as_strided(x.shape, (row + gap, *x.stride()[1:]), before).copy_(x)


def between(x: torch.Tensor) -> torch.Tensor:
    """What lies between the rows of `apart`."""
    row = x[0].numel()
    return x.as_strided(
        (len(x) - 1, x.stride(0) - row), (x.stride(0), 1), x.storage_offset() + row
    )


def heads_apart(pool: torch.Tensor, gap: int) -> torch.Tensor:
    """The same slots, whose heads lie `gap` elements apart; NaN between."""
    slots, HV = pool.shape[:2]
    wide = pool.new_full((slots, HV, D * D + gap), torch.nan)
    return wide[:, :, : D * D].unflatten(2, (D, D)).copy_(pool)


def between_heads(pool: torch.Tensor) -> torch.Tensor:
    """What lies between the heads of `heads_apart`."""
    size = (*pool.shape[:2], pool.stride(1) - D * D)
    return pool.as_strided(size, (*pool.stride()[:2], 1), pool.storage_offset() + D * D)


# Numbers of int64 that name a slot by their low words, and slots beyond any pool.
NO_SLOTS = (2**31, 2**32 + 1, -(2**32) + 2, -(2**63) + 3, 2**63 - 1, 1000)


def tokens(
    n: int, H: int, HV: int, device: str, seed: int = 0
) -> dict[str, torch.Tensor]:
    """q, k, v, a, b of n tokens (bfloat16), A_log and dt_bias (float32); one key is as
    short as what the norm adds.
    """
    g = torch.Generator().manual_seed(seed * 1000 + n * 100 + HV)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    k = randn(n, H, D) * 0.2
    k[1:2] *= 0.005
    made = {
        "q": randn(n, H, D) * 3,
        "k": k,
        "v": randn(n, HV, D),
        "a": randn(n, HV),
        "b": randn(n, HV),
    }
    made = {name: x.bfloat16() for name, x in made.items()} | {
        "A_log": randn(HV) - 1,
        "dt_bias": randn(HV) / 4,
    }
    return {name: x.to(device) for name, x in made.items()}


def pool(
    slots: int,
    HV: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    nan: tuple[int, ...] = (),
) -> torch.Tensor:
    """[slots, HV, V, K]; whoever reads one of the slots `nan` is found out."""
    made = torch.randn(slots, HV, D, D, generator=torch.Generator().manual_seed(slots))
    made[list(nan)] = torch.nan
    return made.to(device, dtype)
