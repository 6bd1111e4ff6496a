"""FlashQLA's chunk_gated_delta_rule on the definition's inputs.

It takes the logarithm of the decay and the write strength, both float32, so one small Triton kernel computes them from a,
b, A_log and dt_bias first; that launch is timed too. FlashQLA does the rest: packed sequences are one
batch entry with cu_seqlens, its kernels map value heads to key heads, `state_v_first` is the definition's [V, K]
layout, and it splits sequences over CTAs by its own cost model (`auto_cp`, its default).

That model needs the lengths: FlashQLA copies cu_seqlens to the host, which waits until the GPU is idle. It
remembers the plans for the last four cu_seqlens *objects*. Calls that pass the same tensor again do not wait;
calls that pass a copy wait each time, and cannot be captured in a CUDA graph; and a tensor whose values were changed in
place would get the old plan, so make a new cu_seqlens instead.

It refuses empty sequences, before it launches anything. In that case they are removed here, and keep their states.
"""

import torch
from flash_qla import chunk_gated_delta_rule

from .gates import gates


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """Return the outputs of all tokens and each sequence's last state. The first call compiles, for some ten seconds.

    q, k        [T, H, K]      bfloat16, K = 128
    v           [T, HV, V]     bfloat16; HV is a multiple of H
    state       [N, HV, V, K]  float32, k-last
    A_log       [HV]           float32
    a, b        [T, HV]        bfloat16
    dt_bias     [HV]           float32
    cu_seqlens  [N + 1]        int64, read on the host
    scale       float; None or 0 means 1 / sqrt(K)

    output     [T, HV, V]     bfloat16
    new_state  [N, HV, V, K]  float32
    """
    if q.shape[0] == 0:  # without chunks it would launch an empty grid
        return torch.empty_like(v), state.clone()
    log_g, beta = gates(a, b, A_log, dt_bias, log=True)

    def call(state, cu_seqlens):
        output, new_state = chunk_gated_delta_rule(
            q=q[None],
            k=k[None],
            v=v[None],
            g=log_g[None],
            beta=beta[None],
            scale=float(scale or q.shape[-1] ** -0.5),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=False,  # the definition's keys are already normalised
            cu_seqlens=cu_seqlens,
            state_v_first=True,
        )
        return output[0], new_state

    try:
        return call(state, cu_seqlens)
    except ValueError as e:
        if "invalid sequence lengths" not in str(e):
            raise
    some = cu_seqlens.diff() > 0
    new_state = state.clone()
    output, new_state[some] = call(state[some], torch.cat((cu_seqlens[:1], cu_seqlens[1:][some])))
    return output, new_state
