"""PyTorch's scaled_dot_product_attention: with the backend that it picks, or pinned to one."""

import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def sdpa(backend=None, causal=False):
    """Return (run, backend), the two functions of an algo's main.py.

    backend  a name of torch.nn.attention.SDPBackend (FLASH_ATTENTION, CUDNN_ATTENTION, EFFICIENT_ATTENTION, MATH);
             None: whichever PyTorch picks
    causal   query i sees keys 0 to i
    """
    only = None if backend is None else SDPBackend.__members__[backend]

    def call(q, k, v):
        if only is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        with sdpa_kernel(only):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    @torch.no_grad()
    def run(q, k, v):
        """Return softmax(q k^T / sqrt(D)) v. q, k, v and the output are [B, heads, S, D] float16.

        Raises RuntimeError, one line with PyTorch's reason, if the backend does not take these tensors here.
        """
        try:
            return call(q, k, v)
        except RuntimeError as e:
            if only is None or isinstance(e, torch.OutOfMemoryError):
                raise
            why = _why(lambda: call(q, k, v), e)
        raise RuntimeError(f"PyTorch's {only.name.lower()} does not run here: {why}")

    @torch.no_grad()
    def named(q, k, v) -> str:
        """The backend that `run` takes for these tensors: flash_attention, cudnn_attention, efficient_attention or math.

        If PyTorch picks, this asks the function by which scaled_dot_product_attention itself decides, so it follows
        the device, the dtype, the shapes and whatever sdpa_kernel allows around the call.
        """
        chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=causal)) if only is None else only
        return chosen.name.lower()

    return run, named


def _why(call, error) -> str:
    """PyTorch gives its reasons as warnings, the most specific last; without any, use the error's first line."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError:
            pass
    lines = [str(w.message).split(" (Triggered internally")[0].strip() for w in told]
    return " ".join((lines or [str(error)])[-1].splitlines()[0].split())
