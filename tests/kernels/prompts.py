"""Sequences on a GPU for the serving functions, and their results in float64, computed there."""

from __future__ import annotations

import torch
from kernels import edges

D = 128


class Prompt:
    """Tensors of packed sequences with states in slots 1 to N of a pool; keys and
    queries of any length.
    """

    def __init__(
        self, H: int, HV: int, lengths: tuple, dtype: torch.dtype, device="cuda"
    ) -> None:
        g = torch.Generator(device).manual_seed(1)

        def randn(*shape):
            return torch.randn(*shape, device=device, generator=g)

        T, N = sum(lengths), len(lengths)
        self.lengths = lengths
        self.q, self.k = (randn(T, H, D).bfloat16() for _ in range(2))
        self.v = randn(T, HV, D).bfloat16()
        self.a, self.b = (randn(T, HV).bfloat16() for _ in range(2))
        self.A_log, self.dt_bias = (randn(HV) * 0.1 for _ in range(2))
        self.pool = (randn(N + 1, HV, D, D) * 0.1).to(dtype)
        self.slots = torch.arange(1, N + 1, device=device, dtype=torch.int32)
        self.cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)

    def exact(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
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
