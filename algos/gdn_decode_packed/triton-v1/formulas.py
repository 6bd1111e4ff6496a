"""What the Triton kernels of packed decode and of MTP compute alike, in float32."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)); log1p(e) = log(u) e / (u - 1), u = 1 + e, gives back what rounding took from u."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def normalised(x):
    """x / sqrt(x.x + 1e-6) of a vector [K]."""
    return x / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6)
