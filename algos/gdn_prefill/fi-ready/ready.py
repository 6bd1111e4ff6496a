"""Inputs that the peers need prepared: gates in float32, the state in their layout. Made once, not timed."""

from .gates import gates


def decay(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """For FlashInfer: the decay itself [T, HV], k-last states; the None at the end selects the fused kernel."""
    g, beta = gates(a, b, A_log, dt_bias)
    return q, k, v, state, g, beta, cu_seqlens, float(scale or q.shape[-1] ** -0.5), None


def decay_cp(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """The same, with the length of the longest sequence at the end, for context parallelism."""
    *given, _ = decay(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale)
    return *given, int(cu_seqlens.diff().max())


def log_decay(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """For flash-linear-attention and FlashQLA: one batch entry, the logarithm of the decay [1, T, HV], states [K, V]."""
    log_g, beta = gates(a, b, A_log, dt_bias, log=True)
    q, k, v, log_g, beta = (x[None] for x in (q, k, v, log_g, beta))
    return q, k, v, log_g, beta, state.mT.contiguous(), cu_seqlens, float(scale or q.shape[-1] ** -0.5)
