"""flash-linear-attention's chunk_gated_delta_rule on the definition's inputs.

Packed sequences are one batch entry with cu_seqlens. With `use_gate_in_kernel` the decay is computed in the kernel that
sums it along a chunk, the sigmoid of beta is a separate kernel, the kernels map value heads to key heads,
and `state_v_first` is the definition's [V, K] layout: nothing is repeated or transposed. Gates in the
kernel also keep the call on FLA's Triton kernels: if the flash_qla package is installed, FLA hands calls with
prepared gates to it.

FLA remembers the chunk table of the last few cu_seqlens *objects*. Calls that pass the same tensor again skip some ten
small kernels and a wait for the GPU; calls that pass a copy pay for them each time; and a tensor whose values were
changed in place would get the old table, so make a new cu_seqlens instead.
"""

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """Return the outputs of all tokens and each sequence's last state. The first call compiles and tunes.

    q, k        [T, H, K]      bfloat16
    v           [T, HV, V]     bfloat16; HV is a multiple of H
    state       [N, HV, V, K]  float32, k-last
    A_log       [HV]           float32
    a, b        [T, HV]        bfloat16
    dt_bias     [HV]           float32
    cu_seqlens  [N + 1]        int64
    scale       float; None or 0 means 1 / sqrt(K)

    output     [T, HV, V]     bfloat16
    new_state  [N, HV, V, K]  float32
    """
    if q.shape[0] == 0:  # without chunks it would launch an empty grid
        return torch.empty_like(v), state.clone()
    output, new_state = chunk_gated_delta_rule(
        q[None],
        k[None],
        v[None],
        a[None],
        b[None],
        scale=float(scale or q.shape[-1] ** -0.5),
        initial_state=state,
        output_final_state=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
    )
    return output[0], new_state
