"""flash-linear-attention 0.6 on our kernels, by its registry of backends:

    from gdn.serving import fla as on_gdn
    on_gdn.install()

`chunk_gated_delta_rule` without a gradient is ours then, for whoever calls it: transformers with
fla, Megatron, trainers' rollouts. FLA_GDN=0 turns it off. `python -m gdn.serving.fla` checks the
version here.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from gdn_cli.errors import GdnError

from . import prefill_library
from .batched import prefill
from .client import Client, Hook
from .operator import TOKENS

__all__ = ["check", "fallbacks", "install", "uninstall"]

_NAME = "chunk_gated_delta_rule"
_CHUNK = f"fla.ops.gated_delta_rule.chunk:{_NAME}"


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's chunk_gated_delta_rule. Its initial state stays as it is.

    q, k           [B, T, H, 128] bfloat16 or float16; with cu_seqlens B = 1
    v              [B, T, HV, 128] like q
    g, beta        [B, T, HV]: the decay's log and beta; or what they are computed from, like q,
      with A_log, dt_bias, use_gate_in_kernel and use_beta_sigmoid_in_kernel
    initial_state  [N, HV, K, V], with state_v_first [N, HV, V, K]; so is the final one
    """
    if initial_state is None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = v.new_zeros(N, *v.shape[2:], q.shape[-1], dtype=torch.float32)
    else:
        state = initial_state.to(torch.float32, copy=True).contiguous()
    if not state_v_first:
        state = state.mT
    gates: dict[str, Any] = {"A_log": None, "dt_bias": None}
    if use_beta_sigmoid_in_kernel:
        gates = {"A_log": kwargs["A_log"].float(), "dt_bias": kwargs["dt_bias"]}
    else:
        g = g.float()
        beta = beta if beta.dtype == q.dtype else beta.float()
    norm = use_qk_l2norm_in_kernel
    gates |= {"cu_seqlens": cu_seqlens, "scale": scale}
    out, state = prefill(q, k, v, g, beta, state=state, norm=norm, **gates)
    if not output_final_state:
        return out, None
    return out, state if state_v_first else state.mT


def refusal(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **named: Any
) -> str:
    """Why a call is not for us; "" if it is."""
    tensors = [x for x in (q, k, v, g, beta, *named.values()) if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "an input requires grad, and there is no backward"
    if q.shape[-1] != 128 or v.shape[-1] != 128:
        return f"heads: expected K = V = 128, got K = {q.shape[-1]}, V = {v.shape[-1]}"
    if q.dtype not in TOKENS or {k.dtype, v.dtype} != {q.dtype}:
        dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
        return f"q, k, v: expected bfloat16 or float16, got {dtypes}"
    raw = bool(named.get("use_gate_in_kernel"))
    if raw != bool(named.get("use_beta_sigmoid_in_kernel")):
        return "expected both gates or neither of them in the kernel"
    if raw and (named.get("dt_bias") is None or g.dtype != q.dtype):
        return "gates in the kernel: expected dt_bias, and g of q's dtype"
    for name in (
        "allow_neg_eigval",
        "cp_context",
        "transpose_state_layout",
        "head_first",
    ):
        if named.get(name):
            return f"{name} is not for us"
    try:
        prefill_library(q.dtype)[torch.float32, q.is_cuda]
    except GdnError as e:
        return str(e)
    return ""


def _put() -> None:
    backends = importlib.import_module("fla.backends")
    own = inspect.unwrap(CLIENT.own(_CHUNK))  # without the registry
    bind = inspect.signature(own).bind
    call = CLIENT.guarded(_NAME, chunk)

    def chunk_verifier(self: Any, *args: Any, **named: Any) -> tuple[bool, str | None]:
        given = bind(*args, **named).arguments
        reason = refusal(**given, **given.pop("kwargs", {}))
        if reason:
            CLIENT.fell_back(_NAME, reason)
        return not reason, reason or None

    def chunk_backend(self: Any, *args: Any, **named: Any) -> Any:
        return call(own, *args, **named)

    def is_enabled(self: Any) -> bool:
        return CLIENT.active and bool(backends.BaseBackend.is_enabled(self))

    members = {
        "backend_type": "gdn",
        "package_name": "gdn",
        "env_var": "FLA_GDN",
        "priority": 2,  # before FlashQLA, which has 3
        "is_enabled": is_enabled,
        f"{_NAME}_verifier": chunk_verifier,
        _NAME: chunk_backend,
    }
    register = backends.register("gated_delta_rule")
    register(type("GdnBackend", (backends.BaseBackend,), members))


CLIENT = Client(
    "fla",
    "fla-core",
    ("0.6.",),
    [
        Hook(
            _NAME,
            {_CHUNK: (chunk,)},
            _put,
            "gradients, heads other than K = V = 128, tokens in float32, one gate in"
            " the kernel, negative eigenvalues, context parallelism",
        )
    ],
)
check = CLIENT.check
install = CLIENT.install
uninstall = CLIENT.uninstall
fallbacks = CLIENT.fallbacks

if __name__ == "__main__":
    raise SystemExit(CLIENT.main())
