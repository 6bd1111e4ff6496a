"""What the edges of decode and of prefill share: a quick recurrence in float64, and an
algo's faults in many cases.
"""

from __future__ import annotations

import functools
import math

import helpers
import pytest
import torch
from oracle import error

from gdn_cli.catalog import tuned_table


def gates(A_log, a, dt_bias, b):
    """(g, beta) in float64."""
    x = a.double() + dt_bias.double()
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return torch.exp(-A_log.double().exp() * softplus), b.double().sigmoid()


def exact(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """(output, new_state) of prefill in float64 on the inputs' device, one token of
    every sequence at a time.
    """
    group = v.shape[1] // q.shape[1]
    g, beta = gates(A_log, a, dt_bias, b)
    # those that have a t-th token come first
    lengths, order = cu_seqlens.diff().sort(descending=True)
    steps = torch.arange(int(lengths.max()), device=v.device)
    counts = (lengths[:, None] > steps).sum(0).tolist()
    first = cu_seqlens[order]
    S = state.double()[order]
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    for t, n in enumerate(counts):
        now = first[:n] + t
        key, query = (
            x[now].double().repeat_interleave(group, dim=1)[..., None] for x in (k, q)
        )
        S[:n] *= g[now][..., None, None]
        d = beta[now][..., None] * (v[now].double() - (S[:n] @ key)[..., 0])
        S[:n] += d[..., None] * key.mT
        out[now] = (scale or 128**-0.5) * (S[:n] @ query)[..., 0]
    new_state = torch.empty_like(S)
    new_state[order] = S
    return out, new_state


def exact_step(q, k, v, state, A_log, a, dt_bias, b, scale):
    """The same of decode, whose rows are sequences of one token."""
    q, k, v, a, b = (x[:, 0] for x in (q, k, v, a, b))
    ends = torch.arange(len(q) + 1, device=q.device)
    output, S = exact(q, k, v, state, A_log, a, dt_bias, b, ends, scale)
    return output[:, None], S


def call(kernel, args, in_place=False):
    """[output, new_state] of one call, from memory full of NaN; in place, the state
    that came in is the one that comes out.
    """
    if not kernel.destination_passing:
        return kernel.returns(args)
    new_state = args[3] if in_place else torch.full_like(args[3], math.nan)
    results = [torch.full_like(args[2], math.nan), new_state]
    kernel(args, results)
    return results


def covering(algo):
    """A few candidates of `gdn tune` that have every value of every constant among them."""
    seen: set = set()
    chosen = []
    for constants in reversed(tuned_table.candidates(algo)[0]):
        if not seen.issuperset(constants.items()):
            seen.update(constants.items())
            chosen.append(constants)
    assert len(chosen) > 1
    return chosen


class Edges:
    """An op's cases: their inputs, the right results, and how far off an algo may be."""

    def __init__(
        self,
        op,
        inputs,
        exact,
        tolerance,
        loose,
    ):
        """loose: case -> a limit in place of `tolerance`."""
        self.op = op
        self.inputs = inputs
        self.tolerance = tolerance
        self.loose = loose

        # one case for one algo after the other: 65536 tokens take many seconds
        @functools.lru_cache(maxsize=1)
        def right(device, **case):
            return exact(*inputs(**case, device=device))

        self.right = right

    def right_enough(self, results, right, limit=0.0):
        """Whether both outputs are within the tolerance, or this limit; NaN is not."""
        pairs = zip(results, right, self.tolerance.values(), strict=True)
        return all(error(x, y) <= (limit or bound) for x, y, bound in pairs)

    def faults(self, kernel, cases, device="cpu"):
        """Case -> the errors of its outputs, where one is beyond the tolerance, or NaN."""
        found = {}
        for name, case in cases.items():
            args = self.inputs(**case, device=device)
            results = call(kernel, args, case.get("in_place", False))
            right = self.right(device, **case)
            if not self.right_enough(results, right, self.loose.get(name, 0.0)):
                found[name] = [*map(error, results, right)]
        return found

    def judge(self, name, mode, cases, tuned=False):
        """The faults of an algo as it ships; `tuned`: with constants that have among
        them all values which `gdn tune` tries.
        """
        device = "cuda" if mode == "cuda" else "cpu"
        if not tuned:
            return self.faults(helpers.kernel(name, mode), cases, device)
        algo = helpers.REGISTRY.find(name)
        found = {}
        for constants in covering(algo):
            kernel = self.candidate(algo, constants, mode)
            if faults := self.faults(kernel, cases, device):
                found[tuned_table.label(constants)] = faults
        return found

    def candidate(self, algo, constants, mode="cuda", **how):
        """The kernel with these constants for all sizes."""
        solution = tuned_table.candidate(algo, self.op, constants).solution
        return helpers.build(algo, mode, solution, **how)


def named(algos, mode=None):
    """Parametrizes `algo`: those of a mode; with cuda the test needs a GPU."""
    marks = [pytest.mark.gpu] if mode == "cuda" else []
    if mode:
        algos = [algo for algo in algos if mode in algo.modes]
    params = [pytest.param(algo, id=algo.name, marks=marks) for algo in algos]
    return pytest.mark.parametrize("algo", params)
