"""The two gates in one launch. Eager PyTorch would take eight."""

import torch
import triton
import triton.language as tl


@triton.jit
def gdn_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, alpha_ptr, beta_ptr, n, HV, BLOCK: tl.constexpr):
    """alpha = exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b), one lane per token and head."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    h = i % HV
    x = tl.load(a_ptr + i, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + h)
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    alpha = tl.exp(-tl.exp(tl.load(A_log_ptr + h)) * softplus)
    beta = tl.sigmoid(tl.load(b_ptr + i, mask=inside, other=0.0).to(tl.float32))
    tl.store(alpha_ptr + i, alpha, mask=inside)
    tl.store(beta_ptr + i, beta, mask=inside)


def gates(a, b, A_log, dt_bias):
    """(alpha, beta), both [T, HV] float32 and contiguous, of a, b [T, HV] bfloat16 and A_log, dt_bias [HV] float32."""
    alpha, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    block = 256
    gdn_gates[(triton.cdiv(a.numel(), block),)](
        a.contiguous(), b.contiguous(), A_log, dt_bias, alpha, beta, a.numel(), a.shape[1], BLOCK=block, num_warps=2
    )
    return alpha, beta
