"""Both gates in one launch; eager PyTorch would need eight."""

import torch
import triton
import triton.language as tl


@triton.jit
def gdn_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, decay_ptr, beta_ptr, n, HV, LOG: tl.constexpr, BLOCK: tl.constexpr):
    """log g = -exp(A_log) softplus(a + dt_bias), or g itself, and beta = sigmoid(b), one lane per token and head."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    h = i % HV
    x = tl.load(a_ptr + i, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + h)
    e = tl.exp(-tl.abs(x))  # softplus(x) = max(x, 0) + log1p(exp(-|x|))
    u = 1.0 + e  # log1p(e) = log(u) e / (u - 1) gives back what rounding took from u; Triton has no log1p
    log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    decay = -tl.exp(tl.load(A_log_ptr + h)) * (tl.maximum(x, 0.0) + log1p)
    if not LOG:
        decay = tl.exp(decay)
    beta = tl.sigmoid(tl.load(b_ptr + i, mask=inside, other=0.0).to(tl.float32))
    tl.store(decay_ptr + i, decay, mask=inside)
    tl.store(beta_ptr + i, beta, mask=inside)


def gates(a, b, A_log, dt_bias, log=False):
    """(g, or log g, and beta), both [T, HV] float32 and contiguous, of a, b [T, HV] bf16 and A_log, dt_bias [HV] f32."""
    decay, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    block = 256
    gdn_gates[(triton.cdiv(a.numel(), block),)](
        a.contiguous(), b.contiguous(), A_log, dt_bias, decay, beta, a.numel(), a.shape[1], LOG=log, BLOCK=block,
        num_warps=2,
    )  # fmt: skip
    return decay, beta
