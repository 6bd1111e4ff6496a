"""GDN decode in Triton with tensor descriptors: persistent programs, the state through shared memory by TMA.

    g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
    x = S k,  y = S q                                   both on the old state, so one pass over it
    d = beta * (v - g x),  S' = g S + d k^T,  o = scale * (g y + d (k.q))

Changed from fla-recurrent:
  - a grid of at most `per_sm` programs per SM; a program takes every grid-th tile of `rows` rows.
  - the state is read and written through tensor descriptors, by TMA and past the registers. TMA is the producer: the
    loop is pipelined, so that loads are `stages` - 1 tiles ahead of the arithmetic, and the stores of a tile overlap
    with the next one's sums. Triton's own warp_specialize is not used: on sm_90 it turns the pipelining off, and triton
    3.6 fails to compile it for sm_100.
  - the descriptors are made by the host and passed as launch parameters: no scratch memory is needed, and a CUDA graph
    or another stream has its own copies. Descriptors made on the device would need scratch memory and ordering.

Grid: (min(tiles, per_sm * SMs),). Rows are counted in int32: 2^31 of them are 1 TiB of state,
and TMA computes the byte offsets.
Provenance: as fla-recurrent. Written here.
"""

from __future__ import annotations

import functools
import threading

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .tensors import check
from .tuned import TUNED


@triton.jit
def gdn_decode_kernel(
    q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state, tiles,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_k = tl.arange(0, K)
    for i_t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        i_bh = i_t // (V // BV)  # batch * HV + value head
        i_hv = i_bh % HV
        i_h = i_bh // (HV // H)  # batch * H + query/key head
        o_v = i_t * BV + tl.arange(0, BV)
        b_s = state.load([i_t * BV, 0])  # [BV, K] f32

        b_k = tl.load(k + i_h * K + o_k).to(tl.float32)  # [K]
        b_q = tl.load(q + i_h * K + o_k).to(tl.float32)  # [K]
        b_v = tl.load(v + o_v).to(tl.float32)  # [BV]
        b_a = tl.load(a + i_bh).to(tl.float32) + tl.load(dt_bias + i_hv)
        b_e = tl.exp(-tl.abs(b_a))  # softplus(x) = max(x, 0) + log1p(exp(-|x|))
        b_u = 1.0 + b_e  # log1p(e) = log(u) e / (u - 1) gives back what rounding took from u; Triton has no log1p
        b_l = tl.where(b_u == 1.0, b_e, tl.log(b_u) * b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0))
        b_g = tl.exp(-tl.exp(tl.load(A_log + i_hv)) * (tl.maximum(b_a, 0.0) + b_l))
        b_beta = 1.0 / (1.0 + tl.exp(-tl.load(b + i_bh).to(tl.float32)))

        b_kq = tl.sum(b_k * b_q, axis=0)
        b_x = tl.sum(b_s * b_k[None, :], axis=1)  # [BV]
        b_y = tl.sum(b_s * b_q[None, :], axis=1)  # [BV]
        b_d = b_beta * (b_v - b_g * b_x)  # [BV]
        new_state.store([i_t * BV, 0], b_g * b_s + b_d[:, None] * b_k[None, :])
        tl.store(output + o_v, (scale * (b_g * b_y + b_d * b_kq)).to(output.dtype.element_ty))


@functools.lru_cache
def _sms(device: torch.device) -> int:
    """Number of SMs of the device; 0 under Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@functools.lru_cache
def _constants(size: int, sms: int) -> dict:
    """The row of TUNED for this size (batch * value heads), of the GPU whose number of SMs is nearest."""
    gpu = min(TUNED, key=lambda row: abs(row["sms"] - sms))
    return next(r for r in TUNED if (r["gpu"], r["sms"]) == (gpu["gpu"], gpu["sms"]) and size <= r["up_to"])


_this_thread = threading.local()


def _bind(device: torch.device) -> None:
    """Make the device's context current in this thread, which the driver needs to make descriptors.

    A new thread has no context before its first launch, but Triton makes the descriptors before that. torch.cuda.set_device
    does nothing if the device is already the thread's; a call of CUDA's runtime that needs a context, such as this, does.
    """
    if device.type == "cuda" and not getattr(_this_thread, "bound", False):
        torch.cuda.mem_get_info(device)
        _this_thread.bound = True


def run(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    """One decode step.

    q, k: [B, 1, H, 128] bf16; v: [B, 1, HV, 128] bf16; state: [B, HV, V=128, K=128] f32, k-last; A_log, dt_bias: [HV]
    f32; a, b: [B, 1, HV] bf16; scale: float, None or 0 for 1/sqrt(128). Writes output:
    [B, 1, HV, 128] bf16 and new_state like state; new_state may be state.
    """
    B, HV, V, K = state.shape
    H = q.shape[2]
    if (V, K) != (128, 128) or HV % H:
        raise ValueError(f"expected K = V = 128 and HV a multiple of H, got K={K}, V={V}, HV={HV}, H={H}")
    check(q=q, k=k, v=v, state=state, A_log=A_log, a=a, dt_bias=dt_bias, b=b, output=output, new_state=new_state)
    for name, x in (("state", state), ("new_state", new_state)):
        if x.dtype != torch.float32:
            raise ValueError(f"{name}: expected float32, got {x.dtype}")
    if B == 0:
        return
    _bind(state.device)
    sms = _sms(state.device)
    c = _constants(B * HV, sms)
    tiles = B * HV * V // c["rows"]
    grid = min(tiles, c["per_sm"] * max(sms, 1))
    old, new = (TensorDescriptor(x, [B * HV * V, K], [K, 1], [c["rows"], K]) for x in (state, new_state))
    gdn_decode_kernel[(grid,)](
        q, k, v, old, A_log, a, dt_bias, b, float(scale or K**-0.5), output, new, tiles,
        H=H, HV=HV, K=K, V=V, BV=c["rows"], STAGES=c["stages"], num_warps=c["num_warps"],
    )  # fmt: skip
