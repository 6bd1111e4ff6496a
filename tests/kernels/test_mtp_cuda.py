"""What `mtp_verify` of the CUDA rungs takes beyond test_mtp.py: bfloat16, 1 to 8
tokens, every row of constants.
"""

from __future__ import annotations

import pytest
import torch

D, H, HV = 128, 2, 6
NAMES = [
    f"{op}/cuda-v1"
    for op in ("gdn_mtp", "gdn_mtp_packed", "gdn_mtp_bf16", "gdn_mtp_packed_bf16")
]
# of a state: 2e-3 is one rounding to bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-3}

pytestmark = pytest.mark.gpu


def verify_of(name: str):
    import tvm_ffi
    from kernels.test_mtp import kernel_of

    return tvm_ffi.load_module(
        str(kernel_of(name, "cuda").runnable.metadata.misc["binary"])
    ).get_function("mtp_verify")


def arguments(B: int, T: int, dtype: torch.dtype) -> dict:
    g = torch.Generator("cuda").manual_seed(B * 10 + T)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    pool = (randn(B * T + 1, HV, D, D) * 0.3).to(dtype)
    slots = (torch.randperm(B * T, generator=g, device="cuda") + 1).int().view(B, T)
    return dict(
        q=randn(B, T, H, D).bfloat16(), k=randn(B, T, H, D).bfloat16(), v=randn(B, T, HV, D).bfloat16(),
        a=randn(B, T, HV).bfloat16(), b=randn(B, T, HV).bfloat16(), A_log=randn(HV), dt_bias=randn(HV), pool=pool,
        state_indices=slots, num_accepted_tokens=torch.randint(1, T + 1, (B,), generator=g, device="cuda").int(),
        cu_seqlens=None, scale=None, output=torch.full((B, T, HV, D), torch.nan, device="cuda").bfloat16(),
        states=None, states_rows=None,
    )  # fmt: skip


def exact(x: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [B, T, HV, V], states [B, T, HV, V, K]) in float64."""
    q, k, v, a, b = (x[name].double() for name in ("q", "k", "v", "a", "b"))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(HV // H, dim=2) for y in (q, k))
    z = a + x["dt_bias"].double()
    g = torch.exp(-x["A_log"].double().exp() * torch.logaddexp(z, torch.zeros_like(z)))
    rows = torch.arange(len(a), device="cuda")
    S = x["pool"][
        x["state_indices"][rows, x["num_accepted_tokens"].long() - 1].long()
    ].double()
    outputs, states = [], []
    for t in range(a.shape[1]):
        S = S * g[:, t, :, None, None]
        d = torch.sigmoid(b[:, t])[..., None] * (
            v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t])
        )
        S = S + torch.einsum("bhv,bhk->bhvk", d, k[:, t])
        outputs.append(D**-0.5 * torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
        states.append(S)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y).norm() / y.norm())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_tokens_and_size(name, dtype):
    verify, found = verify_of(name), []
    for B, T in [
        *((2, T) for T in range(1, 9)),
        *((B, T) for B in (1, 8, 30, 100) for T in (4, 8)),
    ]:
        for mode in (0, 2) if "packed" in name else (0,):
            x = arguments(B, T, dtype)
            output, states = exact(x)
            before = x["pool"].clone()
            verify(*x.values(), mode, 1, 1e-6)
            if not far(x["output"], output) <= 5e-3:
                found.append((B, T, mode, "output"))
            if mode == 0 and not torch.equal(x["pool"], before):
                found.append((B, T, mode, "pool changed"))
            if (
                mode == 2
                and not far(x["pool"][x["state_indices"].long()], states)
                <= TOLERANCE[dtype]
            ):
                found.append((B, T, mode, "states"))
    assert found == []


def test_what_it_cannot_do_is_refused_in_one_line():
    verify = verify_of("gdn_mtp_packed/cuda-v1")

    def refused(says: str, mode: int = 2, **changed) -> None:
        with pytest.raises(ValueError, match=says):
            verify(*(arguments(2, 4, torch.float32) | changed).values(), mode, 1, 1e-6)

    nine = arguments(2, 4, torch.float32)["q"].repeat(1, 3, 1, 1)[:, :9]
    refused("expected 1 to 8 tokens a sequence, got 9", q=nine)
    refused("mode: expected 0 to 3, got 4", mode=4)
    refused("states: expected a buffer, in mode 3", mode=3)
    refused(
        "pool: expected float32 or bfloat16, got float16",
        pool=arguments(2, 4, torch.float16)["pool"],
    )
    refused(
        "state_indices: expected a column for each token",
        state_indices=torch.ones(2, dtype=torch.int32).cuda(),
    )
    with pytest.raises(
        ValueError, match="expected 0, as this library writes no states, got 2"
    ):
        verify_of("gdn_mtp/cuda-v1")(
            *arguments(2, 4, torch.float32).values(), 2, 1, 1e-6
        )
