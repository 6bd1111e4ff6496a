"""One decode step of the gated delta rule, written so that torch.compile can fuse it.

The maths is pt-reference's, with both products against the old state (arXiv 2412.06464, the step rearranged):

    delta = beta (v - g (S k))
    S'    = g S + delta k^T
    o     = scale (g (S q) + delta (k . q))

S k and S q are then sums along the same rows, and each new row depends only on them: inductor can do
everything in one pass over the state, while the textbook order needs the new state before it can form o. The products
are sums of elementwise products on purpose: a matmul would be a library call, which cannot be fused.
"""

import functools

import torch


def _step(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    heads_per_key = v.shape[2] // q.shape[2]
    q_, k_ = (x[:, 0].float().repeat_interleave(heads_per_key, dim=1)[:, :, None, :] for x in (q, k))  # [B, HV, 1, K]
    v_ = v[:, 0].float()[..., None]  # [B, HV, V, 1]
    x = a[:, 0].float() + dt_bias
    softplus = torch.clamp(x, min=0) + torch.log1p(torch.exp(-x.abs()))
    g = torch.exp(-torch.exp(A_log) * softplus)[..., None, None]  # [B, HV, 1, 1]
    beta = torch.sigmoid(b[:, 0].float())[..., None, None]

    S_k = (state * k_).sum(-1, keepdim=True)  # [B, HV, V, 1]
    S_q = (state * q_).sum(-1, keepdim=True)
    delta = beta * (v_ - g * S_k)
    o = scale * (g * S_q + delta * (k_ * q_).sum(-1, keepdim=True))
    new_state.copy_(g * state + delta * k_)
    output.copy_(o[:, None, ..., 0])


@functools.cache
def _compiled():
    # Not at import time: importing the compiler takes seconds. dynamic=True makes the batch a symbol from the start, so
    # there are two compilations, B = 1 (torch always specialises 0 and 1) and every other B, instead of one for each B.
    return torch.compile(_step, dynamic=True, fullgraph=True)


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    """Write the step's output and the state after it. The first call compiles.

    It writes into given buffers because allocating new ones costs more: on a CPU, a fresh 32 MiB state takes
    longer to be mapped than to be computed.

    q, k     [B, 1, H, K]    bfloat16
    v        [B, 1, HV, V]   bfloat16; HV is a multiple of H
    state    [B, HV, V, K]   float32, k-last
    A_log    [HV]            float32
    a, b     [B, 1, HV]      bfloat16
    dt_bias  [HV]            float32
    scale    float; None or 0 means 1 / sqrt(K)

    output     [B, 1, HV, V]  bfloat16, written
    new_state  [B, HV, V, K]  float32, written
    """
    _compiled()(q, k, v, state, A_log, a, dt_bias, b, float(scale or q.shape[-1] ** -0.5), output, new_state)
