"""Sequences on a GPU for the serving functions, and their results in float64, computed there."""

import torch
from oracle import error
from rungs import edges

from gdn import serving

D = 128


class Prompt:
    """Tensors of packed sequences with states in slots 1 to N of a pool; keys and
    queries of any length. `stored` is the pool in the layout of the calls.
    """

    def __init__(
        self,
        H,
        HV,
        lengths,
        dtype,
        device="cuda",
        layout="VK",
        tokens=torch.bfloat16,
    ):
        g = torch.Generator(device).manual_seed(1)

        def randn(*shape):
            return torch.randn(*shape, device=device, generator=g)

        T, N = sum(lengths), len(lengths)
        self.lengths = lengths
        self.q, self.k = (randn(T, H, D).to(tokens) for _ in range(2))
        self.v = randn(T, HV, D).to(tokens)
        self.a, self.b = (randn(T, HV).to(tokens) for _ in range(2))
        self.A_log, self.dt_bias = (randn(HV) * 0.1 for _ in range(2))
        self.pool = (randn(N + 1, HV, D, D) * 0.1).to(dtype)
        self.layout = layout
        self.stored = self.pool if layout == "VK" else self.pool.mT.contiguous()
        self.slots = torch.arange(1, N + 1, device=device, dtype=torch.int32)
        self.cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
        self.row = torch.cat([x.flatten(1) for x in (self.q, self.k, self.v)], dim=1)

    # The serving functions' calls: each writes new states into the pool.

    def prefill(self, pool, out=None):
        tokens = self.q, self.k, self.v, self.a, self.b
        where = pool, self.slots, self.cu_seqlens
        how = {"out": out, "state_layout": self.layout}
        return serving.chunk_prefill(*tokens, self.A_log, self.dt_bias, *where, **how)

    def decode(self, pool, out=None):
        gates = self.a, self.b, self.A_log, self.dt_bias
        where = None, pool, out, self.slots, True
        return serving.packed_decode(self.row, *gates, *where, state_layout=self.layout)

    def verify(self, pool, slots, out=None):
        gates = self.A_log, self.a, self.b, self.dt_bias
        return serving.mtp_verify(
            *gates,
            self.q[None],
            self.k[None],
            self.v[None],
            initial_state=pool,
            cu_seqlens=self.cu_seqlens.int(),
            ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
            out=out,
            state_layout=self.layout,
        )

    def exact(self, sequence):
        """(outputs, state) of one sequence in float64."""
        first, end = self.cu_seqlens[sequence : sequence + 2].tolist()
        rows = slice(first, end)
        q, k = (x[rows].double() for x in (self.q, self.k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6) ** -0.5 for x in (q, k))
        state = self.pool[sequence + 1][None]
        gates = self.A_log, self.a[rows], self.dt_bias, self.b[rows]
        ends = self.cu_seqlens.new_tensor([0, end - first])
        outputs, (S,) = edges.exact(q, k, self.v[rows], state, *gates, ends, None)
        return outputs, S

    def check(self, sequence, output, state):
        """Assert that these are a sequence's outputs and its last state, as stored."""
        exact_output, exact_state = self.exact(sequence)
        if self.layout == "KV":
            state = state.mT
        assert error(output, exact_output) < 1e-2, f"output of {sequence}"
        assert error(state, exact_state) < 1e-2, f"state of {sequence}"
