"""Our backend in flash-linear-attention's own registry (with fla-core 0.6 on PYTHONPATH), against
its naive recurrence.
"""

from __future__ import annotations

import warnings

import pytest
import serving_steps as steps
import torch

from gdn import serving
from gdn.serving import fla as on_gdn
from gdn_cli.machine import inventory

H, HV, D = 2, 4, 128


@pytest.fixture(scope="module")
def fla():
    """fla's chunk_gated_delta_rule and a module with its own recurrence in torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        pytest.importorskip("fla.backends", reason="no fla-core 0.6 here")
        from fla.ops.gated_delta_rule import chunk, naive
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    on_gdn.install()
    yield chunk.chunk_gated_delta_rule, naive.naive_recurrent_gated_delta_rule
    on_gdn.uninstall()


def call(B: int = 2, T: int = 5, **changed) -> dict:
    x = steps.tokens(B * T, H, HV, "cpu")
    tokens = {name: x[name].unflatten(0, (B, T)) for name in "qkv"}
    g = -torch.nn.functional.softplus(x["a"].float()).view(B, T, HV)
    beta = x["b"].float().sigmoid().view(B, T, HV)
    states = {"initial_state": steps.pool(B, HV, "cpu"), "output_final_state": True}
    norm = {"use_qk_l2norm_in_kernel": True}
    return tokens | {"g": g, "beta": beta} | states | norm | changed


def right(naive, x: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """fla's recurrence, whose states are [N, HV, K, V], with normalised keys of all heads."""
    q, k = (x[name].double() for name in "qk")
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    q, k = (y.float().repeat_interleave(HV // H, 2) for y in (q, k))
    tokens = q, k, x["v"].float(), x["beta"].float(), x["g"].float()
    return naive(*tokens, initial_state=x["initial_state"], output_final_state=True)


def test_what_is_checked_is_the_installed_version(fla, capsys):
    assert on_gdn.check() == {"chunk_gated_delta_rule": None}
    assert on_gdn.CLIENT.main() == 0
    assert "chunk_gated_delta_rule can be replaced" in capsys.readouterr().out


@pytest.mark.parametrize("v_first", [False, True])
def test_states_are_in_the_layout_that_is_asked_for(fla, v_first):
    """K = V: a state in the other layout has the same shape, and another value."""
    chunk, naive = fla
    x = call()
    out, state = right(naive, x)
    before = x["initial_state"].clone()
    if v_first:
        x |= {"initial_state": before.mT.contiguous(), "state_v_first": True}
        before, state = before.mT, state.mT
    got_out, got_state = chunk(**x)
    assert steps.error(got_out, out.double()) < steps.OUTPUT
    assert steps.error(got_state, state.double()) < 1e-5
    assert steps.error(got_state, state.mT.double()) > 0.1
    assert got_state.is_contiguous() and torch.equal(x["initial_state"], before)
    assert not on_gdn.fallbacks


def test_packed_sequences_without_a_state(fla):
    chunk, naive = fla
    x = call(1, 7, initial_state=None)
    got, state = chunk(**x, cu_seqlens=torch.tensor([0, 3, 7]))
    for n, rows in enumerate((slice(0, 3), slice(3, 7))):
        part = {name: x[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        out, last = right(naive, x | part)
        assert steps.error(got[:, rows], out.double()) < steps.OUTPUT
        assert steps.error(state[n : n + 1], last.double()) < 1e-5


def test_tokens_in_float16(fla):
    chunk, naive = fla
    x = call(T=70)
    x |= {name: (x[name].float() * 1.003).half() for name in "qkv"}
    out, state = right(naive, x)
    got_out, got_state = chunk(**x)
    assert got_out.dtype == torch.float16
    assert steps.error(got_out, out.double()) < steps.OUTPUT / 4
    assert steps.error(got_state, state.double()) < 1e-5


def test_gates_in_the_kernel(fla):
    chunk, _ = fla
    x, raw = call(), steps.tokens(10, H, HV, "cpu")
    A_log, dt_bias = raw["A_log"], raw["dt_bias"]
    a, b = (raw[name].view(2, 5, HV) for name in "ab")
    x["g"] = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    out, state = chunk(**x)
    inside = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    gates = {"g": a, "beta": b, "A_log": A_log, "dt_bias": dt_bias}
    got_out, got_state = chunk(**x | gates | inside)
    assert steps.error(got_out, out.double()) < steps.OUTPUT
    assert steps.error(got_state, state.double()) < 1e-5


REFUSED = {
    "a gradient": (lambda x: {"q": x["q"].float().requires_grad_()}, "requires grad"),
    "float32": (lambda x: {"v": x["v"].float()}, "expected bfloat16 or float16"),
    "heads of 64": (lambda x: {"v": x["v"][..., :64]}, "got K = 128, V = 64"),
    "one gate in the kernel": (lambda x: {"use_gate_in_kernel": True}, "both gates"),
    "context parallelism": (lambda x: {"cp_context": object()}, "cp_context"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_for_us_goes_on_and_is_counted(fla, what, monkeypatch):
    """fla asks its next backend, and at last runs its own, which wants a GPU."""
    from fla.backends import _operation_registries

    change, says = REFUSED[what]
    x = call()
    backend = _operation_registries["gated_delta_rule"]._backends["gdn"]
    monkeypatch.setattr(on_gdn.CLIENT, "fallbacks", on_gdn.CLIENT.fallbacks.copy())
    accepted, why = backend.verify("chunk_gated_delta_rule", **x | change(x))
    assert not accepted and says in why
    assert on_gdn.CLIENT.fallbacks == {"chunk_gated_delta_rule": 1}


def test_it_is_off_until_it_is_installed_and_where_the_variable_says_so(
    fla, monkeypatch
):
    from fla.backends import _operation_registries

    registry = _operation_registries["gated_delta_rule"]
    assert registry.get_active().backend_type == "gdn"
    monkeypatch.setenv("FLA_GDN", "0")
    assert registry.get_active() is None
    monkeypatch.delenv("FLA_GDN")
    on_gdn.uninstall()
    assert registry.get_active() is None
    on_gdn.install()
    assert serving.fallbacks()["fla"] == on_gdn.fallbacks
