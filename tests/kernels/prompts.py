"""Sequences on a GPU for the serving functions, and their results in float64, computed there."""

from __future__ import annotations

import torch

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
        self.q, self.k = randn(T, H, D).bfloat16(), randn(T, H, D).bfloat16()
        self.v = randn(T, HV, D).bfloat16()
        self.a, self.b = randn(T, HV).bfloat16(), randn(T, HV).bfloat16()
        self.A_log, self.dt_bias = randn(HV) * 0.1, randn(HV) * 0.1
        self.pool = (randn(N + 1, HV, D, D) * 0.1).to(dtype)
        self.slots = torch.arange(1, N + 1, device=device, dtype=torch.int32)
        self.cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)

    def exact(self, sequence: int) -> tuple:
        """(outputs, state) of one sequence in float64."""
        first, end = self.cu_seqlens[sequence : sequence + 2].tolist()
        each = self.v.shape[1] // self.q.shape[1]
        q, k = (
            x[first:end].double().repeat_interleave(each, dim=1)
            for x in (self.q, self.k)
        )
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6) ** -0.5 for x in (q, k))
        v, a, b = (x[first:end].double() for x in (self.v, self.a, self.b))
        speed = torch.exp(self.A_log.double())
        g = torch.exp(
            -speed * torch.nn.functional.softplus(a + self.dt_bias, threshold=1e9)
        )
        beta, S, outputs = torch.sigmoid(b), self.pool[sequence + 1].double(), []
        for t in range(end - first):
            S = S * g[t, :, None, None]
            d = beta[t, :, None] * (v[t] - (S @ k[t, :, :, None])[..., 0])
            S = S + d[:, :, None] * k[t, :, None, :]
            outputs.append((S @ q[t, :, :, None])[..., 0])
        return torch.stack(outputs) * D**-0.5, S


def error(x, exact) -> float:
    return float((x.double() - exact).norm() / exact.norm())
