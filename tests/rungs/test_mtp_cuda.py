"""What `mtp_verify` of the CUDA rungs takes beyond test_mtp.py: bfloat16, 1 to 8
tokens, every row of constants.
"""

import helpers
import pytest
import torch
from oracle import error
from rungs.edges import exact_step

D, H, HV = 128, 2, 6
NAMES = [
    f"{op}/cuda-v1"
    for op in ("gdn_mtp", "gdn_mtp_packed", "gdn_mtp_bf16", "gdn_mtp_packed_bf16")
]
# of a state: 2e-3 is one rounding to bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-3}

pytestmark = pytest.mark.gpu


def verify_of(name):
    import tvm_ffi

    binary = helpers.kernel(name).runnable.metadata.misc["binary"]
    return tvm_ffi.load_module(str(binary)).get_function("mtp_verify")


def arguments(B, T, dtype):
    g = torch.Generator("cuda").manual_seed(B * 10 + T)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    pool = (randn(B * T + 1, HV, D, D) * 0.3).to(dtype)
    slots = (torch.randperm(B * T, generator=g, device="cuda") + 1).int().view(B, T)
    q, k = (randn(B, T, H, D).bfloat16() for _ in range(2))
    v = randn(B, T, HV, D).bfloat16()
    a, b = (randn(B, T, HV).bfloat16() for _ in range(2))
    A_log, dt_bias = randn(HV), randn(HV)
    accepted = torch.randint(1, T + 1, (B,), generator=g, device="cuda").int()
    output = torch.full((B, T, HV, D), torch.nan, device="cuda").bfloat16()
    return dict(
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        pool=pool,
        state_indices=slots,
        num_accepted_tokens=accepted,
        cu_seqlens=None,
        scale=None,
        output=output,
        states=None,
        states_rows=None,
    )


def exact(x):
    """(output [B, T, HV, V], states [B, T, HV, V, K]) in float64."""
    q, k = (x[name].double() for name in ("q", "k"))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    rows = torch.arange(len(q), device="cuda")
    starts = x["state_indices"][rows, x["num_accepted_tokens"].long() - 1]
    S = x["pool"][starts.long()]
    outputs, states = [], []
    for t in range(q.shape[1]):
        q_t, k_t, v, a, b = (y[:, t : t + 1] for y in (q, k, x["v"], x["a"], x["b"]))
        output, S = exact_step(q_t, k_t, v, S, x["A_log"], a, x["dt_bias"], b, None)
        outputs.append(output)
        states.append(S)
    return torch.cat(outputs, 1), torch.stack(states, 1)


SIZES = [(2, T) for T in range(1, 9)]
SIZES += [(B, T) for B in (1, 8, 30, 100) for T in (4, 8)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_tokens_and_size(name, dtype):
    verify = verify_of(name)
    for B, T in SIZES:
        for mode in (0, 2) if "packed" in name else (0,):
            x = arguments(B, T, dtype)
            output, states = exact(x)
            before = x["pool"].clone()
            verify(*x.values(), mode, 1, 1e-6)
            assert error(x["output"], output) <= 5e-3, (B, T, mode)
            if mode == 0:
                assert torch.equal(x["pool"], before), (B, T)
            else:
                written = x["pool"][x["state_indices"].long()]
                assert error(written, states) <= TOLERANCE[dtype], (B, T)


def test_what_it_cannot_do_is_refused_in_one_line():
    verify = verify_of("gdn_mtp_packed/cuda-v1")

    def refused(says, mode=2, verify=verify, **changed):
        args = arguments(2, 4, torch.float32) | changed
        with pytest.raises(ValueError, match=says):
            verify(*args.values(), mode, 1, 1e-6)

    nine = arguments(2, 9, torch.float32)["q"]
    half = arguments(2, 4, torch.float16)["pool"]
    column = torch.ones(2, dtype=torch.int32).cuda()
    refused("expected 1 to 8 tokens a sequence, got 9", q=nine)
    refused("mode: expected 0 to 3, got 4", mode=4)
    refused("states: expected a buffer, in mode 3", mode=3)
    refused("pool: expected float32 or bfloat16, got float16", pool=half)
    refused("state_indices: expected a column for each token", state_indices=column)
    said = "expected 0, as this library writes no states, got 2"
    refused(said, verify=verify_of("gdn_mtp/cuda-v1"))
